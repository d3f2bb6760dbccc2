"""`--resume` names a run, lets limits change, and refuses whatever would make it another run."""

from __future__ import annotations

import dataclasses

import pytest

from apex.config import Config, ConfigError, EnvironmentConfig, ReplayConfig, RunConfig
from apex.environment import describe
from apex.resume import reopen, take_resume
from apex.run_folder import RunFolder
from apex.store_layout import Ownership, store_path


@pytest.fixture
def folder(tmp_path):
    config = dataclasses.replace(
        Config(),
        environment=EnvironmentConfig(id="CartPole-v1"),
        replay=ReplayConfig(num_shards=2),
        run=RunConfig(folder=str(tmp_path), name="mine", max_minutes=1.0),
    )
    return RunFolder.create(config, describe(config.environment, config.actor.n_step))


@pytest.mark.parametrize(
    ("arguments", "name", "rest"),
    [
        (["--resume", "one", "--seed", "2"], "one", ["--seed", "2"]),
        (["--seed", "2", "--resume=one"], "one", ["--seed", "2"]),
        (["--seed", "2"], None, ["--seed", "2"]),
    ],
)
def test_the_run_is_told_from_the_other_arguments(arguments, name, rest):
    assert take_resume(arguments) == (name, rest)


@pytest.mark.parametrize("arguments", [["--resume"], ["--resume="], ["--resume", "--seed", "2"]])
def test_a_run_must_be_named(arguments):
    with pytest.raises(ConfigError, match="--resume needs a run folder"):
        take_resume(arguments)


def test_without_more_nothing_changes(folder):
    found, config = reopen(str(folder.path), [])
    assert found.run_id == folder.run_id
    assert config == folder.config


def test_limits_may_change_and_are_kept(folder):
    found, config = reopen(str(folder.path), ["--max-minutes", "7", "--max-steps", "9", "--run.no-tensorboard"])
    found.go_on(config, argv=["--max-minutes", "7"])
    again = RunFolder.open(folder.path)
    assert again.config == config
    assert (config.run.max_minutes, config.run.max_steps, config.run.tensorboard) == (7.0, 9, False)
    assert [life["argv"] for life in again.manifest["resumed"]] == [["--max-minutes", "7"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "5", "--batch-size", "64"], ["seed 1 -> 5", "learner.batch_size 512 -> 64"]),
        (["--env", "LunarLander-v3"], ["environment.id 'CartPole-v1' -> 'LunarLander-v3'"]),
        (["--name", "other"], ["run.name"]),
        (["--replay.num-shards", "4"], ["replay.num_shards 2 -> 4"]),
        (["--no-such-knob", "1"], ["no-such-knob"]),
    ],
)
def test_what_would_make_it_another_run_is_refused_by_name(folder, arguments, words):
    with pytest.raises(ConfigError) as refused:
        reopen(str(folder.path), arguments)
    assert all(word in str(refused.value) for word in words)


def test_an_environment_that_has_changed_is_refused(folder):
    text = (folder.path / "manifest.json").read_text()
    (folder.path / "manifest.json").write_text(text.replace('"num_actions": 2', '"num_actions": 3'))
    with pytest.raises(ConfigError, match="CartPole-v1 is not what it was"):
        reopen(str(folder.path), [])


def test_a_run_that_still_goes_is_refused(folder):
    path = store_path(folder.run_id, 1)  # One shard is enough.
    path.touch()
    owner = Ownership(path)
    try:
        with pytest.raises(ConfigError, match="still going"):
            reopen(str(folder.path), [])
    finally:
        owner.release()
        path.unlink()


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        reopen(str(tmp_path / "nowhere"), [])
