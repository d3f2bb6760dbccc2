"""`--resume` opens a run, lets limits change, refuses other changes, and verifies the saved files."""

import dataclasses
import json
import mmap
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from msgspec import structs
from support.users import STRANGER, needs_root

from apex.config import Config, EnvironmentConfig, ReplayConfig, RunConfig
from apex.environments.factory import describe
from apex.environments.inspection import Inspector
from apex.facts import EndReason, Missing, OtherVersion, Restored
from apex.launch.continuing import read_continue
from apex.launch.resume import (
    find_missing,
    find_other_version,
    find_saved,
    reopen,
    report_losses,
    resume_parser,
)
from apex.learning.run_save import snapshot_folder
from apex.runs.folder import RunFolder
from apex.runs.lock import hold
from apex.version import VERSION
from apexreplay.errors import DataError, UsageError
from apexreplay.files.atomic_files import replace_file, seal
from apexreplay.files.file_lock import FileLock
from apexreplay.store.location import MEMORY, beside, has_owner, store_path
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


def test_the_run_is_separated_from_the_other_arguments():
    for arguments in (["--resume", "one", "--seed", "2"], ["--seed", "2", "--resume=one"]):
        options, rest = resume_parser("apex train").parse_known_args(arguments)
        assert (options.resume, rest) == ("one", ["--seed", "2"])


@pytest.mark.parametrize("arguments", [["--resume"], ["--resume", "--seed", "2"]])
def test_a_run_must_be_named(arguments):
    with pytest.raises(UsageError, match="--resume"):
        resume_parser("apex train").parse_known_args(arguments)


def test_without_arguments_no_setting_changes(folder):
    found, config = reopen(str(folder.path), [])
    assert found.run_id == folder.run_id
    assert config == folder.config


def test_limits_may_change_and_are_recorded(folder):
    found, config = reopen(str(folder.path), ["--max-minutes", "7", "--max-steps", "9", "--run.no-tensorboard"])
    found.record_resume(config, argv=["--max-minutes", "7"])
    again = RunFolder.open(folder.path)
    assert again.config == config
    assert (config.run.max_minutes, config.run.max_steps, config.run.tensorboard) == (7.0, 9, False)
    assert [start["argv"] for start in again.manifest["resumed"]] == [["--max-minutes", "7"]]


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--seed", "5", "--batch-size", "64"], ["seed 1 -> 5", "learner.batch_size 512 -> 64"]),
        (["--env", "LunarLander-v3"], ["environment.id 'CartPole-v1' -> 'LunarLander-v3'"]),
        (["--name", "other"], ["run.name"]),
        (["--replay.num-shards", "4"], ["replay.num_shards 2 -> 4"]),
        (["--no-such-setting", "1"], ["no-such-setting"]),
        (["--preset", "lunarlander"], ["--preset"]),
        (["--preset=cartpole"], ["--preset"]),
    ],
)
def test_other_changes_are_refused_by_name(folder, arguments, changes):
    with pytest.raises(UsageError) as refused:
        reopen(str(folder.path), arguments)
    assert all(change in str(refused.value) for change in changes)


def test_a_flag_accepts_changes_that_the_saved_files_allow(folder):
    _, config = reopen(str(folder.path), ["--learner.learning-rate", "1e-5"], accept=True)
    assert config.learner.learning_rate == 1e-5


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
        ["--environment.frame-stack", "2"],
        ["--environment.image-size", "40"],
    ],
)
def test_no_flag_accepts_changes_that_the_saved_files_would_not_fit(folder, arguments):
    with pytest.raises(UsageError) as refused:
        reopen(str(folder.path), arguments, accept=True)
    setting = {"--env": "environment.id"}.get(arguments[0], arguments[0][2:].replace("-", "_"))
    assert setting in refused.value.problem
    assert "--accept-changes" not in refused.value.remedy


@pytest.mark.parametrize(
    ("end", "kept", "raised"),
    [
        (EndReason("minutes", 1.0), [], ["--max-minutes", "2"]),
        (EndReason("minutes", 1.0), ["--max-minutes", "0.5"], ["--max-minutes", "0"]),
        (EndReason("updates", 40), ["--max-updates", "40"], ["--max-updates", "41"]),
        (EndReason("steps", 900), ["--max-steps", "900"], []),
        (EndReason("score", 475.0), ["--stop-score", "475"], ["--stop-score", "480"]),
        (EndReason("score", -1.0), ["--stop-score", "-2"], ["--stop-score", "0"]),
    ],
)
def test_a_run_at_its_limit_needs_a_higher_one(folder, end, kept, raised):
    folder.end = end
    with pytest.raises(UsageError) as error:
        reopen(str(folder.path), kept)
    option = (kept or raised)[0]
    assert f"{option} {end.value:g}" in error.value.problem
    assert option in error.value.remedy
    assert reopen(str(folder.path), raised)[0].run_id == folder.run_id


@pytest.mark.parametrize("end", [None, EndReason("interrupted"), EndReason("failed")])
def test_a_run_that_stopped_before_its_limit_continues(folder, end):
    folder.end = end
    assert reopen(str(folder.path), [])[0].run_id == folder.run_id


def again(folder, *, accept=False, **run):
    """The command that made the run is typed again, perhaps with other limits."""
    config = dataclasses.replace(folder.asked, run=dataclasses.replace(folder.asked.run, **run))
    return read_continue(config, ["again"], accept=accept, inspector=Inspector())


def test_the_first_start_with_continue_is_a_new_run(tmp_path):
    config = Config(run=RunConfig(folder=str(tmp_path), name="new"))
    start = read_continue(config, [], accept=False, inspector=Inspector())
    assert (start.config, start.folder, start.is_over) == (config, None, False)


def test_a_repeated_command_continues_with_the_chosen_sizes(tmp_path):
    asked = Config(
        environment=EnvironmentConfig(id="CartPole-v1"), run=RunConfig(folder=str(tmp_path), name="mine", max_steps=9)
    )
    sized = dataclasses.replace(asked, learner=dataclasses.replace(asked.learner, batch_size=128))
    schema = describe(asked.environment, asked.actor.n_step)
    folder = RunFolder.create(sized, schema, asked=asked)
    start = again(folder)
    assert (start.config, start.folder, start.is_over, start.asks) == (sized, folder.path, False, False)
    raised = again(folder, max_steps=10)
    assert raised.config == dataclasses.replace(sized, run=dataclasses.replace(sized.run, max_steps=10))


def test_a_repeated_command_with_other_settings_needs_consent(folder):
    asked = folder.asked
    other = dataclasses.replace(asked, learner=dataclasses.replace(asked.learner, learning_rate=1e-5))
    with pytest.raises(UsageError) as refused:
        read_continue(other, [], accept=False, inspector=Inspector())
    assert "learner.learning_rate" in refused.value.problem
    assert read_continue(other, [], accept=True, inspector=Inspector()).config.learner.learning_rate == 1e-5


def test_a_command_means_the_preset_of_the_host_that_began_the_run(folder):
    def with_width(width, **learner):
        asked = folder.asked
        return dataclasses.replace(
            asked,
            network=dataclasses.replace(asked.network, width=width),
            learner=dataclasses.replace(asked.learner, **learner),
        )

    def repeat(here, *elsewhere):
        return read_continue(here, [], accept=False, inspector=Inspector(), elsewhere=lambda: elsewhere)

    first, here = folder.asked, with_width(0.25)
    assert repeat(here, here, first).repeated == first
    with pytest.raises(UsageError, match=r"network\.width"):
        repeat(here, here)
    with pytest.raises(UsageError, match=r"change learner\.learning_rate"):
        repeat(with_width(0.25, learning_rate=1e-5), with_width(folder.asked.network.width, learning_rate=1e-5))


def test_settings_that_a_resume_changed_stay_when_the_command_is_repeated(folder):
    changed = dataclasses.replace(folder.config, learner=dataclasses.replace(folder.config.learner, learning_rate=1e-5))
    folder.record_resume(changed, argv=[])
    assert again(RunFolder.open(folder.path)).config == changed


def test_a_run_at_its_limit_is_over_until_the_limit_is_raised(folder):
    folder.end = EndReason("minutes", 1.0)
    (folder.checkpoints / "000000007").mkdir()
    (folder.checkpoints / "000000007/manifest.json").touch()
    assert again(folder).is_over
    assert not again(folder, max_minutes=2.0).is_over
    assert not again(folder, max_minutes=0.0).is_over


def test_a_run_at_its_limit_is_not_the_success_of_another_command(folder):
    folder.end = EndReason("updates", 40)
    asked = dataclasses.replace(folder.asked, run=dataclasses.replace(folder.asked.run, max_updates=40))
    assert read_continue(asked, [], accept=False, inspector=Inspector()).is_over
    other = dataclasses.replace(asked, environment=EnvironmentConfig(id="Acrobot-v1"))
    with pytest.raises(UsageError, match=r"environment\.id"):
        read_continue(other, [], accept=False, inspector=Inspector())


def test_a_run_that_ended_without_an_update_is_no_success(folder):
    folder.end = EndReason("minutes", 1.0)
    with pytest.raises(UsageError) as refused:
        again(folder)
    assert "without an update" in refused.value.problem
    assert "--max-minutes" in refused.value.remedy


def test_the_last_command_with_continue_is_the_one_to_compare_with(folder):
    asked = folder.asked
    other = dataclasses.replace(asked, learner=dataclasses.replace(asked.learner, learning_rate=1e-5))
    start = read_continue(other, [], accept=True, inspector=Inspector())
    folder.record_resume(start.config, argv=[], asked=start.repeated)
    folder = RunFolder.open(folder.path)
    assert again(folder).config.learner.learning_rate == 1e-5
    with pytest.raises(UsageError, match="learning_rate"):
        read_continue(asked, [], accept=False, inspector=Inspector())


def test_a_running_run_is_not_continued(folder):
    folder.end = EndReason("updates", 40)  # The learner records the end before the final policy is evaluated.
    with hold(folder.path), pytest.raises(UsageError, match="still running"):
        again(folder, max_updates=40)


def test_a_run_in_one_process_is_not_continued(tmp_path):
    config = Config(run=RunConfig(folder=str(tmp_path), name="new", single_process=True))
    with pytest.raises(UsageError, match="--single-process"):
        read_continue(config, [], accept=False, inspector=Inspector())


def test_a_run_to_continue_needs_a_name(tmp_path):
    with pytest.raises(UsageError, match="--name"):
        read_continue(Config(), [], accept=False, inspector=Inspector())


def test_a_changed_environment_is_refused(folder):
    manifest = {**folder.manifest, "schema": {**folder.manifest["schema"], "num_actions": 3}}
    replace_file(folder.path / "manifest.json", seal(manifest))
    with pytest.raises(UsageError, match="CartPole-v1") as refused:
        reopen(str(folder.path), [])
    assert refused.value.remedy


@pytest.mark.parametrize("place", [lambda path: path, beside])
def test_a_running_run_is_refused(folder, place):
    path = place(store_path(folder.run_id, 1))  # One shard is enough, even while its memory is being created.
    path.touch()
    owner = FileLock(path)
    try:
        with pytest.raises(UsageError, match="running"):
            reopen(str(folder.path), [])
    finally:
        owner.release()
        path.unlink()


def test_a_missing_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nowhere", ""):
        with pytest.raises(DataError) as refused:
            reopen(name, [])
        assert name in refused.value.problem


@pytest.fixture
def saved(tmp_path):
    """A run of four saves, whose replay memory is lost."""
    run = make_run(tmp_path)
    saver = Saver(run, tmp_path / "memory")
    for _ in range(4):
        saver.save()
    saver.store.close()
    return run


@pytest.fixture
def memory(saved, tmp_path):
    """The replay memory after the fourth save, still in tmpfs."""
    path = store_path(saved.run_id)
    shutil.copy(tmp_path / "memory", path)
    yield path
    path.unlink(missing_ok=True)


def find(run, *, accept=False, **sizes):
    """Returns from what the run would start. `sizes`: changes of the sizes with which `Saver` creates the memory."""
    made = {"capacity": SETTINGS.capacity, "max_bytes": SETTINGS.max_bytes, "min_size_to_sample": 550}
    config = dataclasses.replace(run.config, replay=dataclasses.replace(run.config.replay, **made | sizes))
    return find_saved(run, config, accept=accept)


LEARNER = Restored(part="learner", source="checkpoint", number=40, size=600)
SNAPSHOT = Restored(part="replay", source="snapshot", number=4, size=600, count=600, causes=("memory_gone",))


def test_the_newest_checkpoint_and_snapshot_are_found(saved):
    assert find(saved) == [LEARNER, SNAPSHOT]


def test_a_remaining_memory_precedes_its_snapshots_even_newer_ones(saved, memory):
    in_memory = Restored(part="replay", source="memory", size=600, count=600, path=str(memory))
    assert find(saved) == [LEARNER, in_memory]
    snapshots = snapshot_folder(saved.checkpoints, 1, 0)
    newest = snapshots.newest()
    snapshots.commit(newest._replace(number=newest.number + 1, end_key=newest.end_key + 150))
    more = structs.replace(in_memory, other_number=5, other_size=150, causes=("memory_older",))
    assert find(saved)[1] == more


@pytest.mark.parametrize("sizes", [{"capacity": 5_000}, {"max_bytes": 500_000}])
def test_a_remaining_memory_of_other_sizes_is_refused(saved, memory, sizes):
    with pytest.raises(UsageError, match=r"\b4000\b.*\b400000\b") as refused:
        find(saved, accept=True, **sizes)
    assert refused.value.remedy


@pytest.mark.parametrize("sizes", [{"capacity": 599}, {"max_bytes": 9_000}])
def test_sizes_that_the_snapshot_does_not_fit_are_refused(saved, sizes):
    ((name, value),) = sizes.items()
    with pytest.raises(UsageError, match=rf"\b{name}\b.*\b{value}\b"):
        find(saved, accept=True, **sizes)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def write_noise(path):
    """Overwrites everything but the header, as a broken memory module might."""
    with path.open("r+b") as file:
        file.seek(mmap.PAGESIZE)
        file.write(np.random.default_rng(1).bytes(path.stat().st_size - mmap.PAGESIZE))


@pytest.mark.parametrize("damage", [truncate, write_noise])
def test_a_damaged_memory_is_skipped_only_if_there_is_a_snapshot(saved, memory, damage, caplog):
    damage(memory)
    assert find(saved) == [LEARNER, structs.replace(SNAPSHOT, causes=("memory_damaged",))]
    assert str(memory) in caplog.records[0].getMessage()
    shutil.rmtree(saved.checkpoints / "replay")
    with pytest.raises(UsageError, match=str(memory)):
        find(saved)


@pytest.mark.parametrize("num_bytes", [0, 8_192])
def test_an_incomplete_memory_is_skipped(saved, num_bytes, caplog):
    path = store_path(saved.run_id)
    path.write_bytes(bytes(num_bytes))
    try:
        assert find(saved) == [LEARNER, structs.replace(SNAPSHOT, causes=("memory_incomplete",))]
    finally:
        path.unlink()
    assert str(path) in caplog.records[0].getMessage()


def test_damaged_files_are_logged_and_older_ones_used(saved, caplog):
    checkpoint = saved.checkpoints / "000000040" / "learner.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    state = saved.checkpoints / "replay" / "000000004.state"
    state.unlink()
    assert find(saved) == [
        Restored(part="learner", source="checkpoint", number=30, size=450),
        structs.replace(SNAPSHOT, number=3, size=450, count=450, causes=("memory_gone", "snapshot_older")),
    ]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert str(checkpoint) in messages[0]
    assert str(state) in messages[1]


def test_a_snapshot_that_is_older_than_the_checkpoint_is_reported(saved):
    for name in ("000000004.json", "000000004.state"):
        (saved.checkpoints / "replay" / name).unlink()
    found = find(saved)[1]
    assert (found.number, found.count, found.other_number, found.other_size) == (3, 450, 4, 600)
    assert found.causes == ("memory_gone", "snapshot_older")


def test_the_loss_of_the_replay_memory_must_be_accepted(saved):
    shutil.rmtree(saved.checkpoints / "replay")
    with pytest.raises(UsageError, match="replay") as refused:
        find(saved)
    assert "--accept-changes" in refused.value.remedy
    path = str(saved.checkpoints / "replay")
    causes = ("memory_gone", "snapshot_gone")
    found = Restored(part="replay", source="nothing", path=path, causes=causes, other_number=4, other_size=600)
    assert find(saved, accept=True) == [LEARNER, found]


def test_the_loss_of_all_checkpoints_must_be_accepted(saved):
    saved.note_saved()
    shutil.rmtree(saved.checkpoints)
    with pytest.raises(UsageError, match=str(saved.checkpoints)) as refused:
        find(saved)
    assert "--accept-changes" in refused.value.remedy
    learner, replay = find(saved, accept=True)
    assert learner == Restored(part="learner", source="nothing", path=str(saved.checkpoints))
    assert (replay.source, replay.causes) == ("nothing", ("memory_gone", "snapshot_gone"))


def test_a_run_that_has_saved_nothing_starts_from_nothing(tmp_path):
    run = make_run(tmp_path)
    found = find(run)
    assert [(part.part, part.source, part.path) for part in found] == [
        (p, "nothing", "") for p in ("learner", "replay")
    ]
    assert find_missing(run, found) is None


# --- what is missing --------------------------------------------------------------------------------------------------


def write_row(run, *, stored, held):
    """Writes the last row of the curves of a run that was killed, and half of the next row."""
    row = {"steps": stored, "time": 0.0, "scalars": {"replay/num_inserted": stored, "replay/size": held}}
    (run.curves / "replay.jsonl").write_text(f'{{"steps": 1}}\n{json.dumps(row)}\n{{"steps"')


def lose_memory(saved, memory):
    memory.unlink()


def lose_all(saved, memory):
    memory.unlink()
    shutil.rmtree(saved.checkpoints / "replay")


def lose_newest_snapshot(saved, memory):
    memory.unlink()
    (saved.checkpoints / "replay" / "000000004.state").unlink()


def damage_memory(saved, memory):
    write_noise(memory)


def interrupt_creation(saved, memory):
    memory.write_bytes(bytes(8_192))


LOSSES = [
    (lose_memory, 100, ("memory_gone",)),
    (lose_all, 650, ("memory_gone", "snapshot_gone")),
    (lose_newest_snapshot, 250, ("memory_gone", "snapshot_older")),
    (damage_memory, 100, ("memory_damaged",)),
    (interrupt_creation, 100, ("memory_incomplete",)),
]


@pytest.mark.parametrize(("lose", "missing", "causes"), LOSSES, ids=[lose.__name__ for lose, *_ in LOSSES])
def test_missing_transitions_are_counted_with_their_cause(saved, memory, lose, missing, causes, caplog):
    write_row(saved, stored=700, held=650)  # The memory was killed with 700, and its last snapshot has 600.
    lose(saved, memory)
    found = find(saved, accept=True)
    assert find_missing(saved, found) == Missing(transitions=missing, of=650, causes=causes)
    caplog.clear()
    report_losses(saved, found, ask=False)
    (line,) = caplog.messages
    assert f"{missing:,}" in line
    with pytest.raises(UsageError, match=f"{missing}") as refused:
        report_losses(saved, found, ask=True)
    assert "--accept-changes" in refused.value.remedy


def test_updates_after_the_checkpoint_are_counted_as_lost(saved):
    row = {"steps": 700, "time": 0.0, "scalars": {"learner/updates": 47}}
    (saved.curves / "learner.jsonl").write_text(f'{json.dumps(row)}\n{{"steps"')
    assert find(saved)[0] == structs.replace(LEARNER, lost=7)
    shutil.rmtree(saved.checkpoints)
    assert find(saved, accept=True)[0].lost == 47


@pytest.mark.parametrize(
    ("counts", "missing"),
    [
        ((100, 0), 80),  # Shard 1 held only its newest 80.
        ((120, 70), 30),  # Shard 0 has grown since the row.
        ((60, 90), 50),
        ((110, 100), 0),
    ],
)
def test_missing_transitions_of_each_shard_are_counted(saved, counts, missing):
    figures = {"num_inserted": 100, "size": 80}
    row = {f"replay/{name}/shard-{shard}": value for name, value in figures.items() for shard in (0, 1)}
    row |= {f"replay/{name}": 2 * value for name, value in figures.items()}
    (saved.curves / "replay.jsonl").write_text(json.dumps({"steps": 200, "time": 0.0, "scalars": row}))
    parts = [Restored(part=f"replay {shard}", source="memory", count=count) for shard, count in enumerate(counts)]
    found = find_missing(saved, [LEARNER, *parts])
    assert found == (Missing(transitions=missing, of=160, causes=()) if missing else None)


def test_nothing_is_missing_while_the_memory_is_there(saved, memory, caplog):
    write_row(saved, stored=599, held=599)  # The row is older than the last insert.
    report_losses(saved, find(saved), ask=True)
    assert caplog.messages == []


def test_without_curves_the_checkpoint_says_what_was_stored(saved):
    (saved.checkpoints / "replay" / "000000004.state").unlink()
    assert find_missing(saved, find(saved)) == Missing(
        transitions=150, of=600, causes=("memory_gone", "snapshot_older")
    )


def test_another_version_is_named_and_must_be_accepted(saved):
    found = find(saved)
    report_losses(saved, found, ask=True)
    present = saved.manifest["git"]
    saved.manifest["git"] = {"commit": "0" * 40, "dirty": False}
    if present is not None:
        assert find_other_version(saved) == OtherVersion("0" * 40, present["commit"])
        with pytest.raises(UsageError, match="0" * 40) as refused:
            report_losses(saved, found, ask=True)
        assert "--accept-changes" in refused.value.remedy
    saved.manifest["resumed"] = [{"git": None, "versions": {"apex": "0.0.1"}}]
    assert find_other_version(saved) == OtherVersion("0.0.1", VERSION)
    saved.manifest["resumed"] = [{"git": None, "versions": {"apex": VERSION}}]
    assert find_other_version(saved) is None


ASKS = "import sys; from apex.launch.train import read_start; print(read_start(sys.argv[1:]).asks)"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_person_at_a_terminal_is_asked(folder, is_terminal):
    command = [sys.executable, "-c", ASKS, "--resume", str(folder.path)]
    terminal, end = os.openpty()
    try:
        stdin = end if is_terminal else subprocess.DEVNULL
        assert subprocess.check_output(command, stdin=stdin, text=True, timeout=60) == f"{is_terminal}\n"
    finally:
        os.close(terminal)
        os.close(end)


@needs_root
def test_a_pipe_of_another_user_does_not_stop_a_resume(saved):
    pipe = MEMORY / f"apex-{saved.run_id:016x}-0.replay"  # where earlier versions looked
    os.mkfifo(pipe)
    os.chown(pipe, STRANGER, STRANGER)
    try:
        assert find(saved) == [LEARNER, SNAPSHOT]
        assert not has_owner(store_path(saved.run_id))
        assert pipe.exists()
    finally:
        pipe.unlink()
