"""A run folder records what was run, is never overwritten, and is refused if it is damaged."""

import os
import re
import shutil
import subprocess
import time
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from support.clocks import Clock

from apex.config import Config, EnvironmentConfig, RunConfig
from apex.runs.folder import RunFolder, list_runs
from apex.runtime.provenance import describe_checkout, describe_hardware
from apex.schema import Schema
from apex.types import RunTime
from apexreplay.errors import DataError, UsageError
from apexreplay.files.atomic_files import seal, unseal
from apexreplay.server.leases import LeaseTable

SCHEMA = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
NOON = datetime(2025, 1, 31, 12, 0, 5)


def make_config(folder, *, name="", game="ALE/Pong-v5"):
    return Config(seed=17, environment=EnvironmentConfig(id=game), run=RunConfig(name=name, folder=str(folder)))


def create(folder, *, started=NOON, **settings):
    return RunFolder.create(make_config(folder, **settings), SCHEMA, argv=["apex", "train"], started=started)


def test_a_new_run_has_its_folders_its_configuration_and_its_manifest(tmp_path):
    run = create(tmp_path / "runs")
    names = ["checkpoints", "config.toml", "curves", "logs", "manifest.json", "tensorboard"]
    assert sorted(path.name for path in run.path.iterdir()) == names
    assert run.config == make_config(tmp_path / "runs")
    assert all(path.is_dir() for path in (run.checkpoints, run.curves, run.logs, run.tensorboard))


def test_the_manifest_records_command_time_settings_and_versions(tmp_path):
    run = create(tmp_path)
    manifest = unseal((run.path / "manifest.json").read_bytes())
    assert manifest == run.manifest
    assert (manifest["seed"], manifest["argv"], manifest["environment"]) == (17, ["apex", "train"], "ALE/Pong-v5")
    assert datetime.fromisoformat(manifest["started"]) == NOON.astimezone()
    assert Schema.from_dict(manifest["schema"]) == run.schema == SCHEMA
    assert manifest["versions"]["numpy"] == np.__version__
    assert set(manifest) >= {"git", "hardware", "run_id", "format", "name"}


def test_every_run_has_another_64_bit_id_above_zero(tmp_path):
    ids = {create(tmp_path).run_id for _ in range(5)}
    assert len(ids) == 5
    assert all(0 < run_id < 2**64 for run_id in ids)


@pytest.mark.parametrize(
    ("game", "name"),
    [
        ("ALE/Pong-v5", "pong-20250131-120005"),
        ("ALE/MsPacman-v5", "mspacman-20250131-120005"),
        ("CartPole-v1", "cartpole-20250131-120005"),
        ("my_package.games:make_maze", "make-maze-20250131-120005"),
        ("::", "run-20250131-120005"),
    ],
)
def test_the_default_name_has_the_game_and_the_time(tmp_path, game, name):
    assert create(tmp_path, game=game).name == name


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    name = "pong-20250131-120005"
    assert [create(tmp_path).name for _ in range(3)] == [name, f"{name}-2", f"{name}-3"]


def test_a_given_name_is_never_used_twice(tmp_path):
    run = create(tmp_path, name="mine")
    (run.curves / "learner.jsonl").write_text("precious")
    with pytest.raises(UsageError, match=r"run\.name.*'mine'") as refused:
        create(tmp_path, name="mine")
    assert refused.value.remedy
    assert (run.curves / "learner.jsonl").read_text() == "precious"


def test_a_start_that_is_killed_leaves_nothing_of_its_name(tmp_path, monkeypatch):
    """The files of a folder come before its name; an empty folder, which older versions left, is replaced."""

    class Killed(BaseException):
        pass

    def kill(*path):
        raise Killed

    for leaves in (False, True):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", kill)
            if leaves:  # as SIGKILL does
                patched.setattr(shutil, "rmtree", lambda *path, **how: None)
            with pytest.raises(Killed):
                create(tmp_path, name="mine")
        assert len(list(tmp_path.glob(".new-*/manifest.json"))) == leaves
    (tmp_path / "mine").mkdir()
    assert list_runs(tmp_path) == []
    assert create(tmp_path, name="mine").name == "mine"
    assert list_runs(tmp_path) == [tmp_path / "mine"]
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700


def test_a_file_with_the_name_is_not_overwritten(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        create(tmp_path, name="mine")
    assert (tmp_path / "mine").read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_relative_folder_is_below_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = create("some/runs", name="mine")
    assert run.path == Path("some/runs/mine")
    assert (tmp_path / "some/runs/mine/manifest.json").exists()


@pytest.mark.parametrize("name", ["", "mine"])
def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path, name):
    (tmp_path / "runs").write_text("")
    for folder in (tmp_path / "runs", Path("/proc/runs")):
        with pytest.raises(UsageError, match=str(folder)) as refused:
            create(folder, name=name)
        assert "run.folder" in refused.value.remedy


def test_a_run_is_opened_by_its_path_or_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = create("runs", name="mine")
    for path in ("runs/mine", "runs/mine/", tmp_path / "runs/mine", "mine"):
        opened = RunFolder.open(path)
        assert (opened.run_id, opened.config, opened.schema) == (run.run_id, run.config, SCHEMA)


def test_a_folder_without_a_run_is_refused_with_the_newest_runs(tmp_path):
    create(tmp_path / "runs", name="other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty.*manifest\.json") as refused:
        RunFolder.open(tmp_path / "empty", tmp_path / "runs")
    assert refused.value.remedy.endswith(": other")
    with pytest.raises(DataError, match="absent"):
        RunFolder.open(tmp_path / "absent", tmp_path)
    (tmp_path / "notes").touch()
    with pytest.raises(DataError, match=r"notes.*\bfile\b"):
        RunFolder.open(tmp_path / "notes", tmp_path)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"{", "Expecting property name"),
        (b"[]", '"seal"'),
        (b'{"format": 3}', '"seal"'),
        (seal({"format": 3, "schema": {}}), "'run_id'"),
        (seal({"format": 3, "run_id": "x", "schema": {}}), "invalid literal"),
        (seal({"format": 3, "run_id": 1, "schema": {}}), "frame_shape"),
        (b"\xff", "can't decode byte"),
    ],
)
def test_a_damaged_manifest_is_refused_with_cause_and_remedy(tmp_path, data, cause):
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(DataError, match=rf"manifest\.json.*{cause}") as refused:
        RunFolder.open(tmp_path)
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("fields", "maker"),
    [
        ({"format": 2, "versions": {"apex": "1.2"}, "git": {"commit": "a" * 16}}, f"1.2 (commit {'a' * 12})"),
        ({"format": 2, "versions": {"apex": "1.2"}, "git": None}, "1.2"),
        ({"format": 4}, "of an unknown version"),
        ({"format": 4, "versions": [1], "git": {"commit": 5}}, "of an unknown version"),
    ],
)
def test_another_format_is_refused_with_the_version_that_made_it(tmp_path, fields, maker):
    (tmp_path / "manifest.json").write_bytes(seal(fields))
    with pytest.raises(DataError) as refused:
        RunFolder.open(tmp_path)
    problem = refused.value.problem
    assert all(part in problem for part in (str(tmp_path), f"apex {maker}", f"format {fields['format']}", "format 3"))
    assert f"apex evaluate {tmp_path}/checkpoints/best.safetensors" in refused.value.remedy


def test_a_home_folder_that_no_shell_has_replaced_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"run\.folder.*'~/runs'.*\./~/runs"):
        create("~/runs")
    assert not list(tmp_path.iterdir())
    assert create("./~/runs").path.exists()


def test_the_current_folder_has_the_name_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(create(tmp_path).path)
    assert RunFolder.open(".").path == RunFolder.open("checkpoints/..").path == Path.cwd()


def test_a_manifest_that_is_nested_too_deeply_is_no_run(tmp_path):
    good = create(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "manifest.json").write_text("[" * 200_000)
    assert list_runs(tmp_path) == [good.path]
    with pytest.raises(DataError, match="deep"):
        RunFolder.open(tmp_path / "deep")


def spoil(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_in_the_manifest_is_detected(tmp_path):
    run = create(tmp_path, name="mine")
    data = bytearray((run.path / "manifest.json").read_bytes())
    # The manifest stays valid JSON with valid values: only the seal shows the change.
    data[data.index(b'"seed": 17') + len('"seed": 1')] ^= 1
    assert b'"seed": 16' in data
    (run.path / "manifest.json").write_bytes(data)
    with pytest.raises(DataError, match=r"manifest\.json"):
        RunFolder.open(run.path)


def test_a_crash_during_its_replacement_keeps_the_old_manifest(tmp_path):
    run = create(tmp_path, name="mine")
    (run.path / ".manifest.json.partial").write_bytes(b"{")
    assert RunFolder.open(run.path).manifest == run.manifest
    run.record_resume(run.config)
    assert RunFolder.open(run.path).manifest == run.manifest


def test_a_config_file_that_differs_from_the_manifest_is_rewritten(tmp_path, caplog):
    run = create(tmp_path, name="mine")
    text = run.config_file.read_text()
    run.restore_config_file()
    assert caplog.text == ""
    run.config_file.write_text(text.replace("seed = 17", "seed = 19"))
    assert run.config.seed == 17
    run.restore_config_file()
    assert "config.toml" in caplog.text
    assert run.config_file.read_text() == text
    run.config_file.unlink()
    run.restore_config_file()
    assert run.config_file.read_text() == text


def test_the_latest_run_is_the_one_started_last(tmp_path):
    for i, name in enumerate(["b", "c", "a"]):
        create(tmp_path, name=name, started=NOON + timedelta(seconds=[1, 3, 2][i]))
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "manifest.json").write_text("{}")
    assert RunFolder.find_latest(tmp_path).name == "c"


def test_the_latest_run_with_a_policy_may_be_older(tmp_path):
    unfinished = "000000020/learner.safetensors"
    for i, file in enumerate(["000000010/manifest.json", "best.safetensors", unfinished]):
        path = create(tmp_path, name=str(i), started=NOON + timedelta(seconds=i)).checkpoints / file
        path.parent.mkdir(exist_ok=True)
        path.touch()
        assert RunFolder.find_latest(tmp_path, with_policy=True).name == str(min(i, 1))
    assert RunFolder.find_latest(tmp_path).name == "2"


def test_a_folder_without_runs_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(UsageError, match=str(tmp_path)) as refused:
        RunFolder.find_latest(tmp_path)
    assert "apex train" in refused.value.remedy


def git(folder, *arguments):
    author = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *author, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_and_uncommitted_changes_are_recorded(tmp_path):
    (tmp_path / "package").mkdir()
    module = tmp_path / "package" / "__init__.py"
    module.write_text("")
    assert describe_checkout(module.parent) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    assert describe_checkout(module.parent) is None  # There is no commit yet.
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert describe_checkout(module.parent) == {"commit": commit, "dirty": False}
    module.write_text("x = 1")
    assert describe_checkout(module.parent) == {"commit": commit, "dirty": True}
    installed = tmp_path / ".venv" / "package"  # It does not belong to the checkout around it.
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert describe_checkout(installed) is None


def test_the_hardware_is_that_of_this_process():
    hardware = describe_hardware()
    assert hardware["cores"] == len(os.sched_getaffinity(0))
    assert hardware["memory_bytes"] > 1 << 20
    assert isinstance(hardware["gpus"], list)
    assert hardware["cpu"]
    facts = dict(re.findall(r"^([^\t:]+)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    if {"model name", "cpu family", "model"} <= set(facts):
        assert hardware["cpu"] == "{model name} (family {cpu family}, model {model})".format(**facts)


def test_the_run_time_continues_over_all_starts(tmp_path):
    config = Config(run=RunConfig(folder=str(tmp_path), name="run"))
    folder = RunFolder.create(config, SCHEMA)
    assert folder.elapsed_seconds == 0
    folder.run_time = RunTime(12.34)
    assert RunFolder.open(tmp_path / "run").elapsed_seconds == 12.3
    folder.record_resume(config)
    again = RunFolder.open(tmp_path / "run")
    assert again.elapsed_seconds == 12.3


def test_a_damaged_or_missing_run_time_is_logged(tmp_path, caplog):
    folder = create(tmp_path)
    folder.run_time = RunTime(100.0)
    file = folder.path / "elapsed.json"
    for data in (b'{"seco', file.read_bytes().replace(b"100.0", b"900.0"), b'{"seconds": 9, "sea": "x"}'):
        file.write_bytes(data)
        assert folder.elapsed_seconds == 0
        assert "elapsed.json" in caplog.text
        caplog.clear()
    (folder.path / "elapsed.json").unlink()
    assert folder.elapsed_seconds == 0
    assert caplog.text == ""  # It may be a new run.
    (folder.checkpoints / "000000010").mkdir()  # It is not a new run.
    assert folder.elapsed_seconds == 0
    assert "elapsed.json" in caplog.text


def test_a_planted_link_leads_no_writer_to_another_file(tmp_path):
    folder, precious = create(tmp_path), tmp_path / "precious"
    precious.write_text("mine")
    for name in (".config.toml.partial", ".elapsed.json.partial"):
        (folder.path / name).symlink_to(precious)
    folder.config_file.unlink()
    folder.restore_config_file()
    folder.run_time = RunTime(3.0)
    assert precious.read_text() == "mine"
    assert folder.elapsed_seconds == 3
    assert not any(path.is_symlink() for path in folder.path.iterdir())


def make_clock(seconds):
    clock = Clock()
    clock.now = seconds
    return clock


@pytest.mark.parametrize("damage", [spoil, Path.unlink])
def test_each_start_of_the_learner_has_a_higher_epoch(tmp_path, damage, caplog):
    folder, clock = create(tmp_path), make_clock(1.8e9)
    first, second = folder.next_epoch(clock), folder.next_epoch(clock)
    clock.now -= 3_600.0  # The clock is set back.
    third = folder.next_epoch(clock)
    assert first < second < third
    damage(folder.path / "epoch.json")
    clock.now += 7_200.0
    assert folder.next_epoch(clock) > third
    assert ("epoch.json" in caplog.text) == (damage is spoil)


@pytest.mark.parametrize("resumed_first", ["original", "copy"])
def test_a_run_folder_and_its_copy_share_no_epoch(tmp_path, resumed_first):
    clock = make_clock(1.8e9)
    original = create(tmp_path)
    original.next_epoch(clock)
    shutil.copytree(original.path, tmp_path / "copy")
    folders = [original, RunFolder.open(tmp_path / "copy")]
    epochs = []
    for folder in folders if resumed_first == "original" else folders[::-1]:
        clock.now += 1.0
        epochs.append(folder.next_epoch(clock))
    assert epochs[0] < epochs[1]


@pytest.mark.parametrize("now", [1.8e9, 1.7e9])
def test_copies_resumed_in_one_second_share_no_incarnation(tmp_path, now):
    original = create(tmp_path)
    original.next_epoch(make_clock(1.8e9))
    shutil.copytree(original.path, tmp_path / "copy")
    epochs = [folder.next_epoch(make_clock(now)) for folder in (original, RunFolder.open(tmp_path / "copy"))]
    first, second = ({s.incarnation for s in LeaseTable(100, 10.0, epoch).claim(1, 100, 0.0)} for epoch in epochs)
    assert not first & second
    after = RunFolder.open(tmp_path / "copy").next_epoch(make_clock(now))
    assert LeaseTable(1, 10.0, after).claim(1, 1, 0.0)[0].incarnation > max(first | second)


def test_incarnations_fit_into_63_bits_for_60_years(tmp_path):
    epoch = create(tmp_path).next_epoch(make_clock(time.time() + 60 * 365.25 * 86_400))
    assert LeaseTable(1, 10.0, epoch).claim(1, 1, 0.0)[0].incarnation < 2**63
