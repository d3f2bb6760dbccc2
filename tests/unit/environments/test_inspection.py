"""Environments are described in a child process, which they can neither block nor outlive."""

import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace

import pytest
from support.environments import Pictures, here
from support.processes import is_running
from support.waiting import until

from apex.command_line import choose_preset
from apex.config import Config, EnvironmentConfig, RunConfig
from apex.environments.factory import describe, kind
from apex.environments.inspection import Inspector
from apex.errors import StoppedError
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop

pytestmark = pytest.mark.programs


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """Returns a function that makes a configuration whose environment runs a statement when it is created."""
    monkeypatch.chdir(tmp_path)
    source = """
        import os, pathlib, signal, subprocess, sys, threading, time
        from gymnasium.envs.classic_control import CartPoleEnv

        def note(pid):
            with open("pids", "a") as file:
                print(pid, file=file)

        class Env(CartPoleEnv):
            def __init__(self):
                super().__init__()
                note(os.getpid())
                {}
    """

    def write(statement, stuck_seconds=60.0):
        (tmp_path / "odd.py").write_text(textwrap.dedent(source).format(statement))
        return Config(environment=EnvironmentConfig(id="odd:Env"), run=RunConfig(stuck_seconds=stuck_seconds))

    return write


def processes(folder):
    """The environment's process of each creation, and the processes that it has started."""
    return [int(line) for line in (folder / "pids").read_text().split()]


@pytest.mark.parametrize(
    "statement",
    [
        "threading.Thread(target=time.sleep, args=(300,)).start()",
        "note(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']).pid)",
        "note(os.fork() or time.sleep(300))",
        "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]",
        "sys.stdout.close()",
        "os.chdir('/')",
    ],
)
def test_an_environment_leaves_nothing_behind(odd, statement, tmp_path):
    before = threading.enumerate(), signal.getsignal(signal.SIGTERM)
    schema = Inspector().schema(odd(statement))
    assert (schema.frame_shape, schema.num_actions) == ((4,), 2)
    assert (threading.enumerate(), signal.getsignal(signal.SIGTERM)) == before
    until(lambda: not any(map(is_running, processes(tmp_path))), "end of the environment's processes")


NOTEBOOK = """
import sys, torch
torch.set_num_threads(2)
(torch.rand(3_000_000) * 2).exp().sum()  # starts a thread
from apex.config import Config, EnvironmentConfig, RunConfig
from apex.environments.inspection import Inspector
from apex.runtime.trust import allow
allow("odd")
config = Config(environment=EnvironmentConfig(id="odd:Env"), run=RunConfig(stuck_seconds=float(sys.argv[1])))
print(Inspector().schema(config).num_actions)
"""


def test_an_environment_may_use_torch_after_its_caller(odd, tmp_path):
    odd("import torch; (torch.rand(3_000_000) * 2).exp().sum()")
    command = [sys.executable, "-c", NOTEBOOK, "30"]
    assert subprocess.check_output(command, cwd=tmp_path, text=True, timeout=100) == "2\n"


def test_an_environment_is_created_once_for_each_start(odd, tmp_path):
    config, inspector = odd("pass"), Inspector()
    assert inspector.schema(config).num_actions == 2
    changed = replace(config, environment=replace(config.environment, clip_rewards=False))  # as a preset may do
    assert inspector.schema(replace(changed, actor=replace(config.actor, n_step=7))).n_step == 7
    assert len(processes(tmp_path)) == 1
    assert choose_preset(config, Inspector()).learner.batch_size == 128
    assert len(processes(tmp_path)) == 2


def test_a_hanging_environment_is_refused_after_the_limit(odd, tmp_path):
    with pytest.raises(UsageError) as refused:
        Inspector().schema(odd("time.sleep(300)", stuck_seconds=2.0))
    assert all(part in refused.value.problem for part in ("'odd:Env'", " 2 s "))
    assert "--run.stuck-seconds" in refused.value.remedy
    assert not any(map(is_running, processes(tmp_path)))


def test_a_stop_ends_the_wait_for_a_hanging_environment(odd, tmp_path):
    stop = Stop(lambda: (tmp_path / "pids").exists() and stop.request())
    with pytest.raises(StoppedError, match="'odd:Env'"):
        Inspector(stop).schema(odd("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"))
    assert not any(map(is_running, processes(tmp_path)))


@pytest.mark.parametrize(
    ("statement", "cause"),
    [
        ("os._exit(7)", "status 7"),
        ("sys.exit(4)", "status"),  # 4; coverage makes it 1
        ("os.kill(os.getpid(), signal.SIGKILL)", "status -9"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})", "Mute"),
    ],
)
def test_an_environment_that_cannot_be_created_is_refused(odd, statement, cause):
    with pytest.raises(UsageError) as refused:
        Inspector().schema(odd(statement))
    assert "'odd:Env'" in refused.value.problem
    assert cause in refused.value.problem


@pytest.mark.parametrize("name", ["Pendulum-v1", "CartPole-v1", "ALE/Pong-v5", here(Pictures)])
def test_a_child_describes_an_environment_as_this_process_does(name):
    config, (own, childs) = Config(environment=EnvironmentConfig(id=name, image_size=40)), ([], [])
    schema = describe(config.environment, config.actor.n_step, own.append)
    assert Inspector().schema(config, childs.append) == schema
    assert childs == own
    assert kind(config.environment, schema) == kind(config.environment)
