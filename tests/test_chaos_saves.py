"""Whatever is killed or damaged in a save, the run goes on from what was whole, and says so. In full: by command."""

from __future__ import annotations

import json

from apex import chaos_saves
from apex.lifecycle import FAILED, FINISHED


def run(capsys, *arguments):
    status = chaos_saves.main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_kills_in_mid_save_and_damage_leave_a_run_that_goes_on(capsys):
    status, result = run(capsys, "--kills", "24", "--flips", "200", "--truncations", "50")
    assert (status, result["passed"]) == (FINISHED, True)
    assert result["kills"]["count"] == 24
    assert [result[name]["detected"] for name in ("flips", "truncations")] == [200, 50]
    assert result["removals"]["fallen_back"] == result["removals"]["count"] > 10
    assert {tally["unreadable"] for tally in result.values() if isinstance(tally, dict)} == {0}


def test_what_goes_unseen_fails_it(capsys, monkeypatch):
    """The best policy's check is taken out: a score with a flipped bit is believed then."""
    monkeypatch.setattr("apex.policies.check_seal", lambda data: None)
    status, result = run(capsys, "--kills", "0", "--flips", "100", "--truncations", "0", "--seed", "5")
    assert (status, result["passed"]) == (FAILED, False)
    assert result["flips"]["detected"] < 100
    assert "nothing was said" in " ".join(result["flips"]["examples"])


def test_a_table_is_for_people(capsys):
    chaos_saves.main(["--kills", "0", "--flips", "1", "--truncations", "0"])
    assert "unreadable" in capsys.readouterr().out.splitlines()[0]
