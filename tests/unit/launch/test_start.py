"""A run has failed without a step, an update or its last checkpoint, although no program ended it by a failure."""

from types import SimpleNamespace

import pytest
from support.messages import make_run_status

from apex.facts import INTERRUPTED, Ending, EndReason, Failure
from apex.launch.start import judge
from apexreplay.errors import FAILED, FINISHED


def verdict(folder, *, role="learner", saved=345, **status):
    """Returns the judged ending, and the end in the run folder. `saved`: update of the newest checkpoint; 0: none."""
    if saved:
        (folder / f"checkpoints/{saved:09d}").mkdir(parents=True)
        (folder / f"checkpoints/{saved:09d}/manifest.json").touch()
    run = SimpleNamespace(checkpoints=folder / "checkpoints", logs=folder / "logs", end=None)
    return judge(Ending(FINISHED, role), make_run_status(**{"updates": 345, **status}), run), run.end


@pytest.mark.parametrize("role", ["learner", ""])
@pytest.mark.parametrize("saved", [0, 300])
def test_a_run_without_its_last_checkpoint_has_failed(tmp_path, role, saved):
    ending, end = verdict(tmp_path, role=role, saved=saved)
    assert (ending.status, ending.role, end) == (FAILED, role, EndReason("failed"))
    log = str(tmp_path / "logs/learner.log")
    assert ending.failure == Failure(role="learner", kind="unsaved", value=saved, log=log)


def test_a_run_without_a_step_has_failed_unless_it_was_stopped(tmp_path):
    ending, end = verdict(tmp_path, steps=0)
    assert (ending.status, ending.failure.kind, end) == (FAILED, "no_steps", EndReason("failed"))
    assert ending.failure.log == str(tmp_path / "logs")  # The actors ran on other hosts.
    (tmp_path / "here/logs").mkdir(parents=True)
    (tmp_path / "here/logs/actor.log").touch()
    assert verdict(tmp_path / "here", steps=0)[0].failure.log == str(tmp_path / "here/logs/actor.log")
    assert verdict(tmp_path / "stopped", steps=0, role="") == (Ending(FINISHED), None)
    score = EndReason("score", 9.0)  # that of the policy from which the run started
    assert verdict(tmp_path / "confirmed", steps=0, saved=0, updates=0, end=score) == (
        Ending(FINISHED, "learner"),
        None,
    )
    assert verdict(tmp_path / "good") == (Ending(FINISHED, "learner"), None)


def test_a_limit_before_the_first_update_fails_and_stays_the_end(tmp_path):
    for kind in ("steps", "minutes"):
        ending, end = verdict(tmp_path / kind, saved=0, updates=0, end=EndReason(kind, 9.0))
        assert (ending.status, ending.failure.kind, ending.failure.value) == (FAILED, "no_updates", 20_000)
        assert end is None  # The end that the learner has written stays, so that --resume can name the limit.
    for end in (INTERRUPTED, EndReason("score", 9.0)):
        assert verdict(tmp_path / end.kind, saved=0, updates=0, end=end) == (Ending(FINISHED, "learner"), None)


def test_the_failure_of_a_program_stays_the_failure_of_the_run(tmp_path):
    run = SimpleNamespace(checkpoints=tmp_path, logs=tmp_path, end=None)
    ending = Ending(7, "replay", Failure(role="replay", kind="exit", value=7))
    assert judge(ending, make_run_status(updates=345, steps=0), run) == ending
    assert run.end == EndReason("failed")
    assert judge(Ending(FINISHED, "learner"), None, run).failure is None
