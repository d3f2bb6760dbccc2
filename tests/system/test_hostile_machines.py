"""Faulty machines: a file that cannot be written, read or found causes a message, and the run continues."""

import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.builders import VECTORS
from support.programs import TINY
from support.small_disks import needs_mounts

import apex
from apex.config import Config, EnvironmentConfig, RunConfig, dump_toml, load_toml
from apex.launch.preflight.checks import check_tmpfs
from apex.launch.preflight.leftovers import find_orphans
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import MetricRow, MetricsWriter, read_curve
from apex.runtime.hardware import has_bfloat16
from apex.runtime.logs import LogTail
from apex.runtime.supervisor import Program, supervise
from apexreplay.errors import FINISHED
from apexreplay.process.lifecycle import Stop
from apexreplay.process.limits import available_memory, core_limits, memory_limits, read_space

ODD = "Läufe mit Leerzeichen 😀"
FULL = Path("/dev/full")


def python(script, *, prefix=(), **options):
    """Runs a script with this checkout's package."""
    here = Path(apex.__file__).parent.parent
    environment = options.pop("env", {**os.environ, "PYTHONPATH": str(here)})
    command = [*prefix, sys.executable, "-u", "-c", textwrap.dedent(script)]
    return subprocess.run(command, env=environment, timeout=300, **options)


@pytest.mark.parametrize("level", ["info", "exception"])
def test_a_log_on_a_full_disk_ends_no_program(level):
    script = f"""
        import logging, sys
        from apexreplay.process.lifecycle import complain
        from apex.runtime.logs import configure_logging
        configure_logging("actor")
        for _ in range(3):
            logging.getLogger("apex").{level}("x" * 1_000)
        complain("last words")
        sys.exit(7)
    """
    with FULL.open("w") as full:
        assert python(script, stdout=full, stderr=full).returncode == 7


def test_a_terminal_on_a_full_disk_ends_no_run():
    script = """
        import sys
        from apex.launch.terminal.view import print_line
        for _ in range(3):
            print_line("a line")
        try:
            print("a line", flush=True)
        except OSError:
            sys.exit(7)
    """
    with FULL.open("w") as full:
        assert python(script, stdout=full).returncode == 7  # `print_line` has ignored the full disk.


def test_a_program_whose_log_cannot_be_created_runs_anyway(tmp_path, caplog):
    done = tmp_path / "done"
    program = Program(role="replay", command=("touch", str(done)), ends_run=True)
    assert supervise([program], Stop(), logs=tmp_path / "removed").status == FINISHED
    assert done.exists()
    assert f"{tmp_path}/removed/replay.log" in caplog.text


def test_a_log_that_is_removed_during_the_search_is_no_error(tmp_path):
    (tmp_path / "replay.log").symlink_to(tmp_path / "removed")
    assert LogTail(tmp_path).lines() == []


def test_without_descriptors_curves_wait(tmp_path):
    writer = MetricsWriter(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        writer.accept(MetricRow("learner", 1, {"a": 1}, 1.0))
        writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not (tmp_path / "curves/learner.jsonl").exists()
    writer.close()
    assert [line["steps"] for line in read_curve(tmp_path / "curves/learner.jsonl")] == [1]


@needs_mounts
@pytest.mark.parametrize("options", ["ro", "size=4k", "nr_inodes=2"])
def test_a_run_folder_that_cannot_be_written_is_refused_with_its_name(tmp_path, options):
    script = f"""
        from apex.config import Config, EnvironmentConfig, RunConfig
        from apexreplay.errors import UsageError
        from apex.runs.folder import RunFolder
        from apex.schema import Schema
        run = RunConfig(folder={str(tmp_path)!r}, name="x")
        config = Config(environment=EnvironmentConfig(id="CartPole-v1"), run=run)
        try:
            RunFolder.create(config, Schema(**{VECTORS.to_dict()!r}), argv=[])
        except UsageError as error:
            print(error)
    """
    mount = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs "$1"; shift; exec "$@"', "sh")
    output = python(script, prefix=(*mount, str(tmp_path)), capture_output=True, text=True)
    assert output.stderr == ""
    assert all(part in output.stdout for part in (f"{tmp_path}/x", "run.folder"))


@pytest.mark.parametrize("name", [ODD, os.fsdecode(b"\xff\xfe"), 'a"b\\c\n'])
def test_a_run_folder_may_have_any_name(tmp_path, name):
    config = Config(environment=EnvironmentConfig(id="CartPole-v1"), run=RunConfig(folder=str(tmp_path / name)))
    folder = RunFolder.create(config, VECTORS, argv=[name])
    assert RunFolder.open(folder.path).config == config


def test_a_configuration_reads_the_same_in_every_locale(tmp_path):
    config = Config(environment=EnvironmentConfig(id="CartPole-v1"), run=RunConfig(folder=ODD))
    (tmp_path / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    script = """
import pathlib, sys
from apex.config import load_toml
print(ascii(load_toml(pathlib.Path(sys.argv[1])).run.folder))
"""
    here = str(Path(apex.__file__).parent.parent)
    environment = {"PYTHONPATH": here, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", script, str(tmp_path / "config.toml")]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (output.stdout.strip(), output.stderr) == (ascii(ODD), "")
    assert load_toml(tmp_path / "config.toml") == config


def test_a_process_with_an_undecodable_name_is_listed(tmp_path):
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"\xff\0apex.replay")
    (folder / "status").write_bytes(b"Name:\t\xff\nPPid:\t1\n")
    assert find_orphans(tmp_path) == [(7, "apex.replay")]


@pytest.mark.parametrize("membership", ["", "\n", "garbage\n", "0:\n", "\xff:x\n"])
def test_unknown_control_groups_set_no_limit(membership, tmp_path):
    assert core_limits(membership, tmp_path) == []
    assert memory_limits(membership, tmp_path) == []
    assert available_memory(2**40, membership, tmp_path) == 2**40


def test_an_unknown_processor_has_no_bfloat16():
    assert not has_bfloat16("")
    assert not has_bfloat16("processor: 0\n")


def test_a_missing_or_read_only_tmpfs_is_short(tmp_path):
    missing = read_space(tmp_path / "shm")
    check = check_tmpfs(2**30, missing, tmp_path / "shm")
    assert (check.verdict, check.have, check.need) == ("short", 0, 2**30)
    assert str(tmp_path / "shm") in check.note
    assert f"{tmp_path}/shm" in check.remedy
    read_only = missing._replace(size=2**40, free=2**40, flaw="is not writable")
    assert check_tmpfs(2**30, read_only, tmp_path).verdict == "short"


@needs_mounts
def test_root_detects_a_read_only_file_system(tmp_path):
    script = f"""
        from pathlib import Path
        from apexreplay.process.limits import read_space
        print(read_space(Path({str(tmp_path)!r})).flaw)
    """
    mount = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro tmpfs "$1"; shift; exec "$@"', "sh")
    output = python(script, prefix=(*mount, str(tmp_path)), capture_output=True, text=True)
    assert output.stdout == "is not writable\n"


# All at once

WILD = """
import gymnasium, numpy as np
from gymnasium import spaces

class Wild(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2, start=1)
    num_steps = 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(3), {}

    def step(self, action):
        self.t, Wild.num_steps = self.t + 1, Wild.num_steps + 1
        if Wild.num_steps % 1_500 == 300:
            raise RuntimeError("unstable")
        if Wild.num_steps % 1_500 == 800:
            return np.full(3, np.nan), 1.0, False, False, {}
        return np.zeros(3), 1.0, self.t == 40, False, None
"""


def test_a_run_without_home_git_and_utf_8_survives_environment_faults(programs, monkeypatch):
    """A run succeeds without home folder, git and UTF-8, in a folder with an unusual name, and reports faults."""
    programs.folder = programs.folder / ODD
    programs.folder.mkdir()
    (programs.folder / "wild.py").write_text(WILD)
    for name in [*os.environ]:
        monkeypatch.delenv(name)
    surroundings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": "/nowhere"}
    for name, value in {**surroundings, "PYTHONPATH": str(Path(apex.__file__).parent.parent)}.items():
        monkeypatch.setenv(name, value)
    limits = ("--max-steps", "2500", "--run.no-tensorboard", "--name", "wild")
    programs.start("train", "train", *TINY, "--env", "wild:Wild", *limits, *programs.offset)
    assert programs.wait("train") == 0, programs.output("train")
    folder = RunFolder.open(programs.folder / "runs" / "wild")
    assert folder.manifest["git"] is None
    output = (folder.logs / "actor.log").read_text()
    assert all(
        part in output for part in ("unstable (wild.py, line 16), at step 75", "(fault 1 ", "not finite, at step 200")
    )
    assert 'raise RuntimeError("unstable")' in output
    assert "actor WARNING wild:Wild: environment " in programs.output("train")
    last = read_curve(folder.curves / "actor.jsonl")[-1]["scalars"]
    assert last["actors/environment_faults"] >= 2
    assert last["actors/mean_score"] == 40
