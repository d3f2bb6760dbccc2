"""A run's folder says what was run; none is ever overwritten, and none is taken for what it is not."""

from __future__ import annotations

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
from apex.errors import UsageError
from apex.learning.coordinator.leases import LeaseTable
from apex.runs.folder import RunFolder
from apex.runtime.atomic_files import seal, unseal
from apex.runtime.provenance import describe_checkout, describe_hardware, describe_versions
from apex.types import Schema

SCHEMA = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
NOON = datetime(2025, 1, 31, 12, 0, 5)


def make_config(folder, *, name="", game="ALE/Pong-v5"):
    return Config(seed=17, environment=EnvironmentConfig(id=game), run=RunConfig(name=name, folder=str(folder)))


def create(folder, *, started=NOON, **settings):
    return RunFolder.create(make_config(folder, **settings), SCHEMA, argv=["apex", "train"], started=started)


# --- create ---------------------------------------------------------------------------------------------------------


def test_a_new_run_has_its_folders_its_configuration_and_its_manifest(tmp_path):
    run = create(tmp_path / "runs")
    entries = sorted(path.name for path in run.path.iterdir())
    assert entries == [
        "checkpoints",
        "config.toml",
        "curves",
        "logs",
        "manifest.json",
        "tensorboard",
    ]
    assert run.config == make_config(tmp_path / "runs")
    assert all(path.is_dir() for path in (run.checkpoints, run.curves, run.logs, run.tensorboard))


def test_the_manifest_says_who_when_where_and_with_what(tmp_path):
    run = create(tmp_path)
    manifest = unseal((run.path / "manifest.json").read_bytes())
    assert manifest == run.manifest
    assert (manifest["seed"], manifest["argv"], manifest["environment"]) == (17, ["apex", "train"], "ALE/Pong-v5")
    assert datetime.fromisoformat(manifest["started"]) == NOON.astimezone()
    assert Schema.from_dict(manifest["schema"]) == run.schema == SCHEMA
    assert manifest["versions"]["numpy"] == np.__version__
    assert set(manifest) >= {"git", "hardware", "run_id", "format", "name"}


def test_every_run_has_another_id_of_64_bits_but_zero(tmp_path):
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
def test_a_run_without_a_name_is_called_by_its_game_and_the_time(tmp_path, game, name):
    assert create(tmp_path, game=game).name == name


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    assert [create(tmp_path).name for _ in range(3)] == [
        "pong-20250131-120005",
        "pong-20250131-120005-2",
        "pong-20250131-120005-3",
    ]


def test_a_name_that_was_given_is_kept_and_never_taken_twice(tmp_path):
    run = create(tmp_path, name="mine")
    (run.curves / "learner.jsonl").write_text("precious")
    with pytest.raises(UsageError, match=r"run.name 'mine': .*mine exists already, .* choose another name"):
        create(tmp_path, name="mine")
    assert (run.curves / "learner.jsonl").read_text() == "precious"


def test_a_relative_folder_is_below_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = create("some/runs", name="mine")
    assert run.path == Path("some/runs/mine")
    assert (tmp_path / "some/runs/mine/manifest.json").exists()


@pytest.mark.parametrize("name", ["", "mine"])
def test_a_file_in_the_way_of_the_folder_is_named(tmp_path, name):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UsageError, match=r"cannot make the run folder .*runs/.*: .*runs is not a folder"):
        create(tmp_path / "runs", name=name)


def test_a_folder_that_cannot_be_made_is_named_with_the_cause():
    with pytest.raises(UsageError, match=r"cannot make the run folder /proc/runs/mine: .*; set run.folder"):
        create("/proc/runs", name="mine")


# --- open -----------------------------------------------------------------------------------------------------------


def test_a_run_is_opened_by_its_path_or_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = create("runs", name="mine")
    for path in ("runs/mine", "runs/mine/", tmp_path / "runs/mine", "mine"):
        opened = RunFolder.open(path)
        assert (opened.run_id, opened.config, opened.schema) == (run.run_id, run.config, SCHEMA)


def test_what_is_no_run_is_refused_and_the_newest_runs_are_named(tmp_path):
    create(tmp_path / "runs", name="other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty is not a run folder: no manifest.json; the newest .*runs: other$"):
        RunFolder.open(tmp_path / "empty", tmp_path / "runs")
    with pytest.raises(UsageError, match=r"absent is not a run folder: no such folder$"):
        RunFolder.open(tmp_path / "absent", tmp_path)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"{", "Expecting property name"),
        (b"[]", 'it has no "seal" field'),
        (b'{"format": 3}', 'it has no "seal" field'),
        (seal({"format": 3, "schema": {}}), "the field 'run_id' is missing"),
        (seal({"format": 3, "run_id": "x", "schema": {}}), "invalid literal"),
        (seal({"format": 3, "run_id": 1, "schema": {}}), "the schema lacks frame_shape"),
        (b"\xff", "can't decode byte"),
    ],
)
def test_a_damaged_manifest_is_refused_with_the_cause_and_the_remedy(tmp_path, data, cause):
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(UsageError, match=f"manifest.json cannot be read: .*{cause}.*Restore it"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("fields", "maker"),
    [
        (
            {"format": 2, "versions": {"apex": "1.2"}, "git": {"commit": "0123456789abcdef"}},
            "1.2 (commit 0123456789ab)",
        ),
        ({"format": 2, "versions": {"apex": "1.2"}, "git": None}, "1.2"),
        ({"format": 4}, "of an unknown version"),
    ],
)
def test_a_run_of_another_format_is_refused_with_the_version_that_made_it(tmp_path, fields, maker):
    (tmp_path / "manifest.json").write_bytes(seal(fields))
    with pytest.raises(UsageError) as refusal:
        RunFolder.open(tmp_path)
    assert str(refusal.value) == (
        f"{tmp_path} was made by apex {maker} in format {fields['format']}, but this version reads only format 3. "
        "Use the version that made it, or only evaluate the policy: "
        f"apex evaluate {tmp_path}/checkpoints/best.safetensors"
    )


def spoil(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_of_the_manifest_is_seen(tmp_path):
    run = create(tmp_path, name="mine")
    spoil(run.path / "manifest.json")
    with pytest.raises(UsageError, match=r"manifest.json cannot be read: .*Restore it from a copy"):
        RunFolder.open(run.path)


def test_a_crash_while_the_manifest_is_replaced_leaves_the_old_one(tmp_path):
    run = create(tmp_path, name="mine")
    (run.path / ".manifest.json.partial").write_bytes(b"{")
    assert RunFolder.open(run.path).manifest == run.manifest
    run.record_resume(run.config)
    assert RunFolder.open(run.path).manifest == run.manifest


def test_the_manifest_counts_and_a_config_file_that_differs_is_written_again(tmp_path, caplog):
    run = create(tmp_path, name="mine")
    text = run.config_file.read_text()
    run.restore_config_file()
    assert caplog.text == ""
    run.config_file.write_text(text.replace("seed = 17", "seed = 19"))
    assert run.config.seed == 17
    run.restore_config_file()
    assert "config.toml differed from the settings in manifest.json" in caplog.text
    assert run.config_file.read_text() == text
    run.config_file.unlink()
    run.restore_config_file()
    assert run.config_file.read_text() == text


def test_the_latest_run_is_the_one_that_was_started_last(tmp_path):
    for i, name in enumerate(["b", "c", "a"]):
        create(tmp_path, name=name, started=NOON + timedelta(seconds=[1, 3, 2][i]))
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "manifest.json").write_text("{}")
    assert RunFolder.find_latest(tmp_path).name == "c"


def test_says_how_to_get_a_run_where_there_is_none(tmp_path):
    with pytest.raises(UsageError, match=r"no run in .*; start one with apex train"):
        RunFolder.find_latest(tmp_path)


# --- what it records ------------------------------------------------------------------------------------------------


def git(folder, *words):
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def make_checkout(folder):
    package = folder / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return package


def test_the_commit_is_recorded_and_whether_anything_was_changed_since(tmp_path):
    package = make_checkout(tmp_path)
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert describe_checkout(package) == {"commit": commit, "dirty": False}
    (package / "__init__.py").write_text("x = 1")
    assert describe_checkout(package) == {"commit": commit, "dirty": True}


def test_a_package_that_is_installed_below_a_checkout_is_not_of_its_commit(tmp_path):
    make_checkout(tmp_path)
    installed = tmp_path / ".venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert describe_checkout(installed) is None


def test_there_is_no_commit_without_a_repository_or_before_its_first_commit(tmp_path):
    (tmp_path / "__init__.py").write_text("")
    assert describe_checkout(tmp_path) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    assert describe_checkout(tmp_path) is None


def test_the_hardware_is_that_of_this_process():
    hardware = describe_hardware()
    assert hardware["cores"] == len(os.sched_getaffinity(0))
    assert hardware["memory_bytes"] > 1 << 20
    assert isinstance(hardware["gpus"], list)
    assert hardware["cpu"]
    facts = dict(re.findall(r"^([^\t:]+)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    if {"model name", "cpu family", "model"} <= set(facts):
        assert hardware["cpu"] == "{model name} (family {cpu family}, model {model})".format(**facts)


def test_the_versions_are_those_that_are_installed():
    versions = describe_versions()
    assert {"apex", "python", "torch", "numpy", "pyzmq", "gymnasium", "ale-py"} <= set(versions)
    assert all(isinstance(version, str) for version in versions.values())


def test_the_clock_goes_on_in_all_lives(tmp_path):
    config = Config(run=RunConfig(folder=str(tmp_path), name="run"))
    folder = RunFolder.create(config, SCHEMA)
    assert folder.elapsed_seconds == 0
    folder.elapsed_seconds = 12.34
    assert RunFolder.open(tmp_path / "run").elapsed_seconds == 12.3
    folder.record_resume(config)
    again = RunFolder.open(tmp_path / "run")
    assert again.elapsed_seconds == 12.3


def test_a_clock_that_is_damaged_or_gone_is_said_to_be(tmp_path, caplog):
    folder = create(tmp_path)
    folder.elapsed_seconds = 100.0
    (folder.path / "elapsed.json").write_bytes(b'{"seco')
    assert folder.elapsed_seconds == 0
    assert "elapsed.json cannot be read" in caplog.text
    caplog.clear()
    (folder.path / "elapsed.json").unlink()
    assert folder.elapsed_seconds == 0
    assert caplog.text == ""  # It may well be a new run ...
    (folder.checkpoints / "000000010").mkdir()
    assert folder.elapsed_seconds == 0
    assert "elapsed.json cannot be read" in caplog.text  # ... but not this one.


def make_clock(seconds):
    clock = Clock()
    clock.now = seconds
    return clock


@pytest.mark.parametrize("damage", [spoil, Path.unlink])
def test_each_start_of_the_learner_has_a_higher_epoch_even_if_the_last_one_is_lost(tmp_path, damage, caplog):
    folder, clock = create(tmp_path), make_clock(1.8e9)
    first, second = folder.next_epoch(clock), folder.next_epoch(clock)
    clock.now -= 3_600.0  # The clock is set back.
    third = folder.next_epoch(clock)
    assert first < second < third
    damage(folder.path / "epoch.json")
    clock.now += 7_200.0
    assert folder.next_epoch(clock) > third
    assert ("epoch.json cannot be read" in caplog.text) == (damage is spoil)


@pytest.mark.parametrize("resumed_first", ["original", "copy"])
def test_a_run_folder_and_its_copy_have_no_epoch_in_common(tmp_path, resumed_first):
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


def test_the_incarnations_of_a_start_fit_into_their_field_for_the_next_60_years(tmp_path):
    epoch = create(tmp_path).next_epoch(make_clock(time.time() + 60 * 365.25 * 86_400))
    assert LeaseTable(1, 10.0, epoch).claim(1, 1, 0.0)[0].incarnation < 2**63
