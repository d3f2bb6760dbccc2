"""Whole runs end, whatever their environment starts, ignores or waits for."""

import signal

import pytest
from support.programs import TINY, running_in
from support.waiting import until

from apex.facts import EndReason
from apex.runs.folder import RunFolder

ODD = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv

class Threads(CartPoleEnv):
    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        threading.Thread(target=time.sleep, args=(300,)).start()

    def step(self, action):
        time.sleep(0.002)
        return super().step(action)

class Leaves(Threads):
    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        os.fork() or time.sleep(300)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

class Breaks(CartPoleEnv):
    def step(self, action):
        if Path("runs").exists():  # The trial before the run passes.
            raise RuntimeError("boom")
        return super().step(action)

class Hangs(Leaves):
    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        Path("hangs").touch()
        time.sleep(300)
"""


@pytest.fixture
def start(programs):
    (programs.folder / "odd.py").write_text(ODD)
    return lambda *arguments: programs.start("odd", *arguments)


def end(programs):
    """Returns the exit status of the program, after all processes have ended."""
    status = programs.wait("odd")
    until(lambda: not running_in(programs.folder), "end of all processes", seconds=60.0)
    return status


def test_a_run_ends_whatever_its_environment_leaves_behind(programs, start):
    options = ["--run.no-tensorboard", "--max-steps", "600", "--evaluator.final-seconds", "5"]
    start("train", *TINY, "--env", "odd:Leaves", *options, *programs.offset)
    assert end(programs) == 0, programs.output("odd")


def test_a_run_whose_actors_make_no_step_fails_with_the_cause(programs, start):
    options = ["--run.no-tensorboard", "--run.stop-score", "none", "--evaluator.no-enabled", "--max-minutes", "0.1"]
    start("train", *TINY, "--env", "odd:Breaks", *options, *programs.offset)
    assert end(programs) == 1, programs.output("odd")
    assert "RuntimeError: boom (odd.py, line " in programs.output("odd")
    assert RunFolder.open(programs.folder / next((programs.folder / "runs").iterdir())).end == EndReason("failed")


@pytest.mark.parametrize(
    "command",
    [
        [
            "train",
            *TINY,
            "--single-process",
            "--max-steps",
            "400",
            "--evaluator.final-seconds",
            "0",
            "--env",
            "odd:Threads",
        ],
        ["evaluate", "--random", "--episodes", "1", "--envs", "1", "--env", "odd:Threads"],
    ],
)
def test_a_thread_of_an_environment_does_not_keep_a_command(programs, start, command):
    start(*command)
    assert end(programs) == 0, programs.output("odd")


@pytest.mark.parametrize("command", ["train", "learner", "doctor"])
def test_ctrl_c_ends_the_wait_for_an_environment(programs, start, command):
    start(command, "--env", "odd:Hangs")
    until((programs.folder / "hangs").exists, "environment", seconds=240.0)
    programs.running["odd"].send_signal(signal.SIGINT)
    assert end(programs) == 130, programs.output("odd")
