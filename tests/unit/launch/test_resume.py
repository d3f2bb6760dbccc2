"""`--resume` names a run, lets limits change, and refuses whatever would make it another run."""

from __future__ import annotations

import dataclasses
import mmap
import os
import shutil

import numpy as np
import pytest

from apex.config import Config, EnvironmentConfig, ReplayConfig, RunConfig
from apex.environments.factory import describe
from apex.errors import UsageError
from apex.launch.resume import reopen, resume_parser
from apex.launch.resume_check import check_resume
from apex.learning.run_save import snapshot_folder
from apex.replay_memory.store.location import beside, store_path
from apex.runs.folder import RunFolder
from apex.runtime.atomic_files import replace_file, seal
from apex.runtime.file_lock import FileLock
from chaos.saves.saver import SETTINGS, Saver, make_run

pytestmark = pytest.mark.programs


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
    options, others = resume_parser("apex train").parse_known_args(arguments)
    assert (options.resume, others) == (name, rest)


@pytest.mark.parametrize("arguments", [["--resume"], ["--resume", "--seed", "2"]])
def test_a_run_must_be_named(arguments):
    with pytest.raises(UsageError, match="argument --resume: expected one argument; run apex train --help"):
        resume_parser("apex train").parse_known_args(arguments)


def test_without_more_nothing_changes(folder):
    found, config = reopen(str(folder.path), [])
    assert found.run_id == folder.run_id
    assert config == folder.config


def test_limits_may_change_and_are_kept(folder):
    found, config = reopen(str(folder.path), ["--max-minutes", "7", "--max-steps", "9", "--run.no-tensorboard"])
    found.record_resume(config, argv=["--max-minutes", "7"])
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
        (["--no-such-setting", "1"], ["no-such-setting"]),
        (["--preset", "lunarlander"], ["keeps its own configuration", "--preset"]),
        (["--preset=cartpole"], ["keeps its own configuration", "--preset"]),
    ],
)
def test_what_would_make_it_another_run_is_refused_by_name(folder, arguments, words):
    with pytest.raises(UsageError) as refused:
        reopen(str(folder.path), arguments)
    assert all(word in str(refused.value) for word in words)


def test_a_flag_accepts_changes_that_what_is_saved_can_bear(folder):
    found, config = reopen(str(folder.path), ["--learner.learning-rate", "1e-5"], accept=True)
    assert config.learner.learning_rate == 1e-5
    found.record_resume(config, argv=[])
    assert RunFolder.open(folder.path).config == config


@pytest.mark.parametrize(
    "arguments",
    [
        ["--replay.num-shards", "4"],
        ["--env", "LunarLander-v3"],
        ["--actor.n-step", "5"],
        ["--learner.optimizer", "adam"],
        ["--algorithm", "somewhere:Else"],
        ["--dpg.num-critics", "2"],
        ["--network.hidden", "9"],
    ],
)
def test_no_flag_accepts_what_is_saved_would_not_fit(folder, arguments):
    with pytest.raises(UsageError, match="the saved files would not fit"):
        reopen(str(folder.path), arguments, accept=True)


def test_an_environment_that_has_changed_is_refused(folder):
    manifest = {**folder.manifest, "schema": {**folder.manifest["schema"], "num_actions": 3}}
    replace_file(folder.path / "manifest.json", seal(manifest))
    with pytest.raises(UsageError, match="CartPole-v1 has changed since"):
        reopen(str(folder.path), [])


@pytest.mark.parametrize("place", [lambda path: path, beside])
def test_a_run_that_still_goes_is_refused(folder, place):
    path = place(store_path(folder.run_id, 1))  # One shard is enough, and that its memory is being made.
    path.touch()
    owner = FileLock(path)
    try:
        with pytest.raises(UsageError, match="still running"):
            reopen(str(folder.path), [])
    finally:
        owner.release()
        path.unlink()


def test_what_is_no_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nowhere", ""):
        with pytest.raises(UsageError, match="not a run folder"):
            reopen(name, [])


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A run of four saves, whose memory went with its host."""
    run = make_run(tmp_path)
    saver = Saver(run, tmp_path / "memory")
    for _ in range(4):
        saver.save()
    saver.store.close()
    return run


def tell(run, *, accept=False):
    return check_resume(run, run.config, accept=accept)


def test_the_user_is_told_what_is_found(saved):
    assert tell(saved) == ["learner: resumes at update 40, 600 steps", "replay: 600 transitions of snapshot 4"]


@pytest.fixture
def memory(saved, tmp_path):
    """The memory of the run as it was after the fourth save, still there."""
    path = store_path(saved.run_id)
    shutil.copy(tmp_path / "memory", path)
    yield path
    path.unlink()


def with_sizes(run, **sizes):
    """Its configuration with a replay memory of the sizes that `Saver` has made it with, or of these."""
    made = {"capacity": SETTINGS.capacity, "max_bytes": SETTINGS.max_bytes, "min_size_to_sample": 550}
    return dataclasses.replace(run.config, replay=dataclasses.replace(run.config.replay, **made | sizes))


def test_a_memory_that_is_still_there_goes_before_its_snapshots(saved, memory):
    lines = check_resume(saved, with_sizes(saved), accept=False)
    assert lines[1] == f"replay: 600 transitions from {memory}"


def test_a_snapshot_that_is_newer_than_the_memory_that_is_still_there_is_said_to_be(saved, memory):
    snapshots = snapshot_folder(saved.checkpoints, 1, 0)
    newest = snapshots.newest()
    snapshots.commit(newest._replace(number=newest.number + 1, end_key=newest.end_key + 150))
    assert check_resume(saved, with_sizes(saved), accept=False)[1].endswith(
        "; snapshot 5 has 150 newer transitions, but is not used"
    )


@pytest.mark.parametrize("sizes", [{"capacity": 5_000}, {"max_bytes": 500_000}])
def test_a_memory_of_other_sizes_is_refused_before_anything_starts(saved, memory, sizes):
    with pytest.raises(UsageError, match=r"was created with replay.capacity 4000 and replay.max_bytes 400000, but"):
        check_resume(saved, with_sizes(saved, **sizes), accept=True)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"capacity": 599}, "replay.capacity 599 must be at least 600"),
        ({"max_bytes": 9_000}, "replay.max_bytes 9000 is too small for the snapshot"),
    ],
)
def test_a_memory_that_its_snapshot_would_not_fit_is_refused_before_anything_starts(saved, sizes, words):
    with pytest.raises(UsageError, match=words):
        check_resume(saved, with_sizes(saved, **sizes), accept=True)


@pytest.mark.parametrize("num_bytes", [0, 8_192])
def test_a_memory_whose_making_was_cut_short_is_passed_over(saved, num_bytes):
    path = store_path(saved.run_id)
    path.write_bytes(bytes(num_bytes))
    try:
        passed_over, _, replay = tell(saved)
    finally:
        path.unlink()
    assert passed_over.startswith(f"skipped: {path} is incomplete: its creation was interrupted")
    assert replay == "replay: 600 transitions of snapshot 4"


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def write_noise(path):
    """Over everything but the header, as a broken memory module might."""
    with path.open("r+b") as file:
        file.seek(mmap.PAGESIZE)
        file.write(np.random.default_rng(1).bytes(path.stat().st_size - mmap.PAGESIZE))


@pytest.mark.parametrize("damage", [truncate, write_noise])
def test_a_damaged_memory_is_passed_over_for_its_snapshot_and_for_nothing_less(saved, memory, damage):
    damage(memory)
    passed_over, _, replay = check_resume(saved, with_sizes(saved), accept=False)
    assert passed_over.startswith(f"skipped: {memory} is damaged: ")
    assert passed_over.endswith("; the replay server will remove this file")
    assert replay == "replay: 600 transitions of snapshot 4"
    shutil.rmtree(saved.checkpoints / "replay")
    with pytest.raises(UsageError, match=r"is damaged: .*, and there is no snapshot: remove the file to start"):
        check_resume(saved, with_sizes(saved), accept=False)


def test_the_user_is_told_what_was_passed_over_and_why(saved):
    checkpoint = saved.checkpoints / "000000040" / "learner.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    state = saved.checkpoints / "replay" / "000000004.state"
    state.unlink()
    *passed_over, learner, replay = tell(saved)
    assert len(passed_over) == 2
    assert f"{checkpoint} cannot be read: its SHA-256 differs" in passed_over[0]
    assert f"{state}: No such file" in passed_over[1]
    assert learner == "learner: resumes at update 30, 450 steps"
    assert replay == "replay: 450 transitions of snapshot 3"


def test_an_older_snapshot_than_the_checkpoints_is_said_to_be(saved):
    for name in ("000000004.json", "000000004.state"):
        (saved.checkpoints / "replay" / name).unlink()
    assert tell(saved)[-1] == (
        "replay: 450 transitions of snapshot 3; the checkpoint was saved with snapshot 4 (600 transitions)"
    )


def test_a_replay_memory_that_is_gone_must_be_accepted(saved):
    shutil.rmtree(saved.checkpoints / "replay")
    with pytest.raises(UsageError, match="no snapshot; the checkpoint was saved with a snapshot of 600 transitions"):
        tell(saved)
    assert tell(saved, accept=True)[1].startswith("replay: starts with an empty memory")


def test_checkpoints_that_are_all_gone_must_be_accepted(saved):
    saved.note_saved()
    shutil.rmtree(saved.checkpoints)
    with pytest.raises(
        UsageError, match=f"{saved.checkpoints} has no checkpoint, but the run had written one. Restore it"
    ):
        tell(saved)
    learner, replay = tell(saved, accept=True)
    assert learner == f"learner: starts at update 0; {saved.checkpoints} has no checkpoint, but the run had written one"
    assert replay.startswith("replay: no memory on this host")


def test_a_run_that_saved_nothing_begins_anew_and_says_so(tmp_path):
    assert tell(make_run(tmp_path)) == [
        "learner: starts at update 0; the run never finished a checkpoint",
        "replay: starts with an empty memory; the run never finished a snapshot",
    ]
