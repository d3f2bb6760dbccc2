"""Whatever is killed or damaged in a save, the run goes on from what was whole, and says so. In full: by command."""

from __future__ import annotations

import json
import time

import pytest

from apex.errors import FAILED, FINISHED
from apex.runs.folder import RunFolder
from chaos.saves import command
from chaos.saves.saver import Saver


def run(capsys, *arguments):
    status = command.main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_kills_in_mid_save_and_damage_leave_a_run_that_goes_on(capsys):
    status, result = run(capsys, "--kills", "24", "--flips", "200", "--truncations", "50")
    assert (status, result["passed"]) == (FINISHED, True)
    assert result["kills"]["count"] == 24
    assert [result[name]["detected"] for name in ("flips", "truncations")] == [200, 50]
    assert result["removals"]["fallen_back"] == result["removals"]["count"] >= 10
    assert {tally["unreadable"] for tally in result.values() if isinstance(tally, dict)} == {0}


def test_what_goes_unseen_fails_it(capsys, monkeypatch):
    """Without the check of the learner's file, a flipped bit in it goes unseen."""
    monkeypatch.setattr("apex.runs.checkpoints.checkpoint.check_digest", lambda data, expected: data)
    status, result = run(capsys, "--kills", "0", "--flips", "100", "--truncations", "0", "--seed", "5")
    assert (status, result["passed"]) == (FAILED, False)
    assert result["flips"]["detected"] < 100
    assert "nothing was said" in " ".join(result["flips"]["examples"])


def test_a_table_is_for_people(capsys):
    command.main(["--kills", "0", "--flips", "1", "--truncations", "0"])
    assert "unreadable" in capsys.readouterr().out.splitlines()[0]


def test_kills_wait_until_there_is_a_save_to_kill(tmp_path, monkeypatch):
    """However long a saver takes to go on from what is there; the second trial alone may find it at that."""

    class Slow(Saver):
        def __init__(self, *arguments):
            time.sleep(1.0)
            super().__init__(*arguments)

    monkeypatch.setattr(command, "Saver", Slow)
    tally = command.kill_saves(tmp_path, 4, 1, lambda sentence: None)
    assert (tally.count, tally.unreadable, tally.wrong) == (4, 0, 0)
    (run,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert RunFolder.open(run).next_epoch() >= 1 + 3 + 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kills", "-5"], "--kills: must be an integer of at least 0, got -5"),
        (["--kills", "0", "--flips", "0", "--truncations", "0"], "all 0"),
    ],
)
def test_an_order_of_nothing_is_refused(capsys, arguments, words):
    assert command.main(arguments) == 2
    assert words in capsys.readouterr().err
