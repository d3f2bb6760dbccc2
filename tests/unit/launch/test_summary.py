"""The summary of a run: its result, and the commands to try next."""

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.messages import make_run_status

from apex.config import Config, EnvironmentConfig, EvaluatorConfig, LearnerConfig, RunConfig
from apex.facts import INTERRUPTED, Ending, EndReason, Failure
from apex.launch.start import RunOutcome
from apex.launch.summary import command_name, summary
from apex.sentences import describe_end, describe_failure
from apex.transport.messages.run_status import EvaluatorSummary
from apexreplay.errors import FAILED, FINISHED

DONE = Ending(FINISHED, "learner")
STATUS = make_run_status(
    phase="finished",
    end=EndReason("score", 475.0),
    elapsed_seconds=61.0,
    evaluator={"score": 497.25, "best": 500.0},
    actors={"score": 12.0, "highest_id": 31},
)


def summarize(
    folder,
    ending=DONE,
    status=STATUS,
    *,
    saved=(),
    curves=False,
    driver_folder=None,
    games=None,
    env="CartPole-v1",
    init_from="",
    **run,
):
    """Returns the summary's lines by the word before the colon. `saved`: updates of the run's checkpoints.

    `games`: settings of the evaluator.
    """
    for name in (*(f"checkpoints/{update:09d}" for update in saved), "tensorboard", "logs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for update in saved:
        (folder / f"checkpoints/{update:09d}/manifest.json").touch()
    if curves:
        (folder / "tensorboard" / "events").touch()
    config = Config(
        environment=EnvironmentConfig(id=env),
        run=RunConfig(**run),
        evaluator=EvaluatorConfig(**games or {}),
        learner=LearnerConfig(init_from=init_from),
    )
    lines = summary(RunOutcome(config, folder, ending, status, driver_folder))
    return dict(line.partition(": ")[::2] for line in lines)


def test_a_finished_run_shows_its_result_and_the_next_commands(tmp_path):
    lines = summarize(tmp_path, saved=[345], curves=True)
    assert lines["finished"] == describe_end(STATUS.end)
    assert all(figure in lines["score"] for figure in ("497.2", " 5 ", "500", "update 300", " all "))
    assert list(lines)[-1] == "score"
    assert "123,456 steps, 345 updates in 0:01:01" in lines
    assert lines["run folder"] == str(tmp_path)
    assert lines["next"].startswith(f"{command_name('apex')} evaluate {tmp_path} ")
    assert lines["curves"] == f"{command_name('tensorboard')} --logdir {tmp_path}/tensorboard"
    assert "resume" not in lines  # A resumed run would end immediately.


@pytest.mark.parametrize(("env", "films"), [("CartPole-v1", True), ("ALE/Pong-v5", True), ("maze:Maze", False)])
def test_a_film_is_proposed_only_of_an_environment_that_draws_pictures(tmp_path, env, films):
    assert ("--video" in summarize(tmp_path, saved=[345], env=env)["next"]) == films


def test_the_score_of_a_policy_without_an_update_is_called_that(tmp_path):
    status = replace(STATUS, updates=0, evaluator=replace(STATUS.evaluator, updates=0))
    assert "of the untrained policy" in summarize(tmp_path, status=status)["score"]
    for updates in (0, 345):
        score = summarize(tmp_path, status=replace(status, updates=updates), init_from="runs/other")["score"]
        assert "the policy from which it started" in score


def test_without_an_evaluation_the_score_is_that_of_training(tmp_path):
    nothing = EvaluatorSummary(score=None, best=None, episodes=None, updates=None)
    lines = summarize(tmp_path, status=replace(STATUS, evaluator=nothing))
    assert lines["training score"].startswith("12, ")
    assert " 31," in lines["training score"]
    assert "score" not in lines
    resumed, quiet = replace(nothing, best=470.0), replace(STATUS.actors, score=None)
    assert "470" in summarize(tmp_path, status=replace(STATUS, evaluator=resumed))["training score"]
    assert "470" in summarize(tmp_path, status=replace(STATUS, evaluator=resumed, actors=quiet))["score"]


@pytest.mark.parametrize(
    ("games", "setting"),
    [
        ({"enabled": False}, "evaluator.enabled"),
        ({"final_seconds": 0}, "evaluator.final_seconds"),
        ({}, "final_seconds 120"),
    ],
)
def test_a_final_policy_without_a_score_is_named_with_the_cause(tmp_path, games, setting):
    ended = replace(STATUS, end=EndReason("minutes", 0.2))
    line = summarize(tmp_path, status=ended, games=games)["final policy"]
    assert (setting in line, line.endswith(f" evaluate {tmp_path} --checkpoint last")) == (True, True)
    for needless in (STATUS, replace(ended, updates=300), replace(ended, updates=0), replace(ended, end=INTERRUPTED)):
        assert "final policy" not in summarize(tmp_path, status=needless, games=games)


def test_faults_of_the_environment_are_counted_in_the_summary(tmp_path):
    assert "faults of the environment" not in summarize(tmp_path)
    lines = summarize(tmp_path, status=replace(STATUS, actors=replace(STATUS.actors, faults=1_234)))
    assert all(part in lines["faults of the environment"] for part in ("1,234", f"{tmp_path}/logs"))


def test_a_run_too_short_for_an_update_names_the_setting(tmp_path):
    enough = Config().replay.min_size_to_sample
    for steps, told in ((0, False), (enough - 1, True), (enough, False)):
        lines = summarize(tmp_path, status=replace(STATUS, steps=steps, updates=0))
        assert any("replay.min_size_to_sample" in text for text in lines.values()) == told


@pytest.mark.parametrize("count", [1, 3])
def test_the_score_of_the_final_policy_and_the_number_of_evaluations(tmp_path, count):
    (tmp_path / "curves").mkdir()
    for path, rows in (("evaluator.jsonl", 1), ("evaluator-0001.jsonl", count - 1)):
        (tmp_path / "curves" / path).write_text("{}\n" * rows)
    status = replace(STATUS, updates=300)
    score = summarize(tmp_path, status=status)["score"]
    assert "300" not in score  # It is that of the final policy.
    assert (f" {count} " in score, "500" in score) == ((True, True) if count > 1 else (False, False))


def test_an_interrupted_run_shows_how_to_resume_it(tmp_path):
    status = replace(STATUS, end=None)
    lines = summarize(tmp_path, Ending(FINISHED), status, saved=[345])
    assert lines["resume"].endswith(f"train --resume {tmp_path}")
    assert "finished" not in lines
    assert next(iter(lines)).endswith(" 345")  # the update that was saved
    assert "resume" not in summarize(tmp_path, Ending(FINISHED), status, saved=[345], single_process=True)
    on_ray = summarize(tmp_path, Ending(FINISHED), status, saved=[345], driver_folder=tmp_path / "a b")
    assert on_ray["resume"].endswith(f"train --engine ray --resume '{tmp_path}/a b'")
    assert "next" not in on_ray  # The run folder is on another host.
    assert list(on_ray)[-1] == "score"


def test_the_summary_offers_only_existing_files(tmp_path):
    status = make_run_status(updates=0, actors={"score": None}, evaluator={"score": None})
    lines = summarize(tmp_path, Ending(FINISHED), status)
    assert next(iter(lines)).startswith("interrupted; ")
    assert not {"finished", "next", "resume", "curves"} & set(lines)


def test_a_failed_run_shows_the_cause_and_the_end_of_the_log(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "replay.log").write_text("first\nValueError: bad\n")
    # Without a step, the learner ends the run, and the logs of the actors have the cause.
    for kind, ended in (("exit", "replay"), ("no_steps", "learner")):
        failure = Failure(role="replay", kind=kind, value=1, times=4)
        first, *context, _ = summary(RunOutcome(Config(), tmp_path, Ending(FAILED, ended, failure), None))
        assert first.endswith(describe_failure(failure))
        assert [line.strip() for line in context] == ["first", "ValueError: bad"]


@pytest.mark.parametrize("saved", [(), (0,), (0, 345)])
def test_only_a_policy_that_was_trained_is_offered(tmp_path, saved):
    ending = Ending(FAILED, "learner", Failure(role="actor", kind="no_steps"))
    lines = summarize(tmp_path, ending, replace(STATUS, end=None), saved=saved)
    assert ("next" in lines, "resume" in lines) == (345 in saved, bool(saved))


def test_a_command_that_is_not_on_the_path_is_shown_with_its_folder(monkeypatch):
    monkeypatch.chdir(Path(sys.executable).parent.parent)
    assert command_name("no-such-program") == str(Path(Path(sys.executable).parent.name) / "no-such-program")
    monkeypatch.chdir("/")
    assert command_name("no-such-program") == str(Path(sys.executable).parent / "no-such-program")[1:]
