"""Programs of a run, started as users start them; all end with their test."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from apex.config import Config, RunConfig
from apex.launch.status import ask
from apex.runtime.ports import choose_ports, is_free
from apex.transport.curve.key_store import Keys
from apexreplay.errors import UsageError
from apexreplay.store.location import memory_folder

DEADLINE = 240.0  # seconds; the evaluator yields the processor to other tests, which makes its last games slow
TINY = ["--preset", "cartpole", "--actors", "4", "--replay.min-size-to-sample", "300", "--learner.batch-size", "32"]
TINY += ["--replay.samples-per-insert", "0", "--replay.no-inserts-wait"]  # Do not wait after the learner has ended.
# The preset plays 100 games at once, all the time.
FEW_GAMES = ["--evaluator.episodes", "3", "--evaluator.num-envs", "3"]
# A score depends on chance and must not end a run. Without a limit, the evaluator would have a low CPU priority.
TINY += [*FEW_GAMES, "--run.stop-score", "501"]
UNSCORED = ["--evaluator.no-enabled", "--run.stop-score", "none"]  # An evaluator takes seconds to import torch.
# The same with a tenth of the load, for tests of the start, end and restart of programs.
CALM = [*TINY, "--env", "calm:Calm", "--replay.samples-per-insert", "8"]
CALM_FILE = """
import time
import gymnasium

class Calm(gymnasium.Wrapper):
    def __init__(self, render_mode=None):
        super().__init__(gymnasium.make("CartPole-v1", render_mode=render_mode))

    def step(self, action):
        time.sleep(0.002)
        return super().step(action)
"""


@pytest.fixture
def offset():
    """Returns an offset at which all ports are free."""
    return choose_ports(Config(run=RunConfig(tensorboard=False)), is_free, lambda sentence: None).transport.port_offset


class Programs:
    """The programs in a folder of their own; all end with the test."""

    def __init__(self, folder, offset):
        self.folder = folder
        self.endpoint = f"tcp://127.0.0.1:{22003 + offset}"
        self.learner = ["--learner", f"127.0.0.1:{22003 + offset}"]
        self.offset = ["--transport.port-offset", str(offset)]
        self.running = {}

    def start(self, name, *arguments):
        with open(self.folder / f"{name}.log", "w") as log:
            command = [sys.executable, "-m", "apex", *arguments]
            self.running[name] = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)

    def wait(self, name):
        try:
            return self.running[name].wait(DEADLINE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} does not end:\n{self.output(name)}")

    def output(self, name):
        return (self.folder / f"{name}.log").read_text()

    def status(self, wanted):
        """Waits until the run's status satisfies the condition."""

        def found():
            status = ask(self.endpoint, 1.0, self.observer())
            return status if status is not None and wanted(status) else None

        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if status := found():
                return status
            if all(process.poll() is not None for process in self.running.values()):
                break
            time.sleep(0.2)  # The learner, which answers, is busy.
        pytest.fail("".join(f"--- {name}\n{self.output(name)}" for name in self.running))

    def observer(self):
        """The observer's keys of the newest start of `apex train`; None for programs that use no keys."""
        with suppress(UsageError, OSError):  # The launcher has not written all of them yet, or removes them.
            found = sorted(self.folder.glob("runs/*/keys"), key=lambda keys: keys.stat().st_mtime_ns)
            return Keys(found[-1], "observer") if found else None

    def end(self):
        for process in self.running.values():
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture
def programs(tmp_path, offset):
    (tmp_path / "calm.py").write_text(CALM_FILE)
    programs = Programs(tmp_path, offset)
    yield programs
    programs.end()
    for path in memory_folder().iterdir():  # the files of this test's killed replay servers
        runs = list((tmp_path / "runs").glob("*/manifest.json"))
        if any(f"{json.loads(run.read_text())['run_id']:016x}" in path.name for run in runs):
            path.unlink()


def children_of(pid):
    """Returns the process ids of a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running_in(folder):
    """Returns the processes whose working directory is that of the test."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                cwd = os.readlink(entry / "cwd")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if cwd == str(folder) and state != "Z":
                found.append(int(entry.name))
    return found
