"""`python -m chaos saves`: a run continues from an intact save after kills and damage. The command runs more cases."""

import json
import time

import pytest

from apex.runs.folder import RunFolder
from apexreplay.errors import FAILED, FINISHED
from chaos.saves import command
from chaos.saves.saver import Saver


def run(capsys, *arguments):
    status = command.main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_run_continues_after_kills_during_saves_and_damage(capsys):
    status, result = run(capsys, "--kills", "24", "--flips", "200", "--truncations", "50")
    assert (status, result["passed"]) == (FINISHED, True)
    assert result["kills"]["count"] == 24
    assert [result[name]["detected"] for name in ("flips", "truncations")] == [200, 50]
    assert result["removals"]["fallen_back"] == result["removals"]["count"] >= 10
    assert {tally["unreadable"] for tally in result.values() if isinstance(tally, dict)} == {0}


def test_undetected_damage_is_a_failure(capsys, monkeypatch):
    """Without the digest of the learner's file, flipped bits in it are not detected."""
    monkeypatch.setattr("apexreplay.files.sealed_folder.digest", lambda *parts: "the same for all files")
    status, result = run(capsys, "--kills", "0", "--flips", "100", "--truncations", "0", "--seed", "5")
    assert (status, result["passed"]) == (FAILED, False)
    assert result["flips"]["detected"] < 100
    assert result["flips"]["examples"]


def test_kills_begin_only_while_a_save_is_running(tmp_path, monkeypatch):
    """The saver takes long to load; only the second trial may kill it while it loads."""

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
    "arguments", [["--kills", "-5"], ["--kills", "0", "--flips", "0", "--truncations", "0"]], ids=["negative", "zero"]
)
def test_an_order_of_no_trials_is_refused(capsys, arguments):
    assert command.main(arguments) == 2
    assert "--kills" in capsys.readouterr().err
