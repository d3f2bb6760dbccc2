"""`apex.train` in a program of the user. `sh -c` replaces the programs of the run."""

import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from support.launches import cartpole, stand_in
from support.waiting import until

from apex import Callback, TrainingError, UsageError, preset, resume, train
from apex.config import EnvironmentConfig
from apex.facts import EndReason
from apex.launch import local
from apex.launch.api import Run
from apex.runs.folder import RunFolder
from apex.sentences import describe_end

pytestmark = pytest.mark.programs


@pytest.fixture(autouse=True)
def play_learner(monkeypatch):
    """Sets the script that replaces the programs of each run; until then it sleeps."""

    def play(script):
        monkeypatch.setattr(local, "make_programs", lambda *_: [stand_in("learner", script, ends_run=True)])

    play("exec sleep 600")
    return play


def test_a_finished_run_is_returned_and_stands_for_its_folder(tmp_path, play_learner, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    play_learner(f'echo "$PYTHONPATH" > {tmp_path}/path')
    run = train(cartpole(tmp_path))
    assert isinstance(run, Run)
    assert os.fspath(run) == str(tmp_path / "mine")
    assert RunFolder.open(run.folder).config == run.config
    assert run.config.learner.num_threads > 0  # sized for this machine
    assert not run.interrupted
    assert (run.score, run.steps, run.updates) == (None, None, None)
    assert len(repr(run)) < 400
    assert str(run.folder) in capsys.readouterr().out
    assert str(tmp_path / "elsewhere") in (tmp_path / "path").read_text().split(":")  # as in sys.path


def test_the_folder_of_a_run_is_absolute(tmp_path, play_learner, monkeypatch):
    play_learner("exit 0")
    monkeypatch.chdir(tmp_path)
    assert train(cartpole(Path("runs")), quiet=True).folder == tmp_path / "runs" / "mine"


def test_a_run_is_resumed_with_other_limits(tmp_path, play_learner):
    play_learner("exit 0")
    run = train(cartpole(tmp_path), quiet=True)
    again = resume(run, quiet=True, run={"max_minutes": 9})
    assert (again.folder, again.config.run.max_minutes) == (run.folder, 9.0)
    assert RunFolder.open(run).manifest["resumed"][0]["argv"] == ["apex.resume"]
    for changes in ({"seed": 5}, {"learner": {"batch_size": 64}}):
        with pytest.raises(UsageError, match="accept-changes"):
            resume(run, **changes)
    assert resume(run, quiet=True, accept_changes=True, learner={"batch_size": 64}).config.learner.batch_size == 64
    assert resume(run, quiet=True, allow="mine", run={"max_minutes": 11}).config.run.max_minutes == 11
    with pytest.raises(UsageError, match="nowhere"):
        resume(tmp_path / "nowhere")


def test_quiet_prints_nothing_and_leaves_logging_as_it_was(tmp_path, play_learner, capfd):
    play_learner("exit 0")
    before = logging.raiseExceptions, logging.getLogger("apex").level
    train(cartpole(tmp_path), quiet=True)
    assert capfd.readouterr() == ("", "")
    assert (logging.raiseExceptions, logging.getLogger("apex").level) == before


@pytest.mark.parametrize(("status", "error"), [(3, TrainingError), (2, UsageError)])
def test_a_failed_run_raises_its_first_cause(tmp_path, play_learner, status, error):
    play_learner(f"echo no luck; exit {status}")
    with pytest.raises(error, match=r"learner.*no luck.*learner\.log") as raised:
        train(cartpole(tmp_path), quiet=True)
    assert getattr(raised.value, "folder", None) == (tmp_path / "mine" if error is TrainingError else None)


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_value_that_is_no_configuration_is_refused(engine):
    with pytest.raises(UsageError, match="'cartpole'") as error:
        train("cartpole", engine=engine)
    assert "apex.preset" in error.value.remedy


def test_an_unknown_engine_is_refused():
    with pytest.raises(UsageError, match=r"engine.*\b7\b"):
        train(preset("cartpole"), engine=7)


def test_ctrl_c_ends_the_run_in_order_and_returns_it(tmp_path):
    folder, calls = tmp_path / "mine" / "logs", []

    def interrupt():
        if folder.exists() and not calls:
            calls.append(os.kill(os.getpid(), signal.SIGINT))
        return False

    before = signal.getsignal(signal.SIGINT)
    run = train(cartpole(tmp_path), quiet=True, stop=interrupt)
    assert (run.interrupted, run.reason) == (True, "interrupted")
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_ends_the_run_and_then_has_its_usual_effect(tmp_path):
    folder, seen = tmp_path / "mine" / "logs", []

    def terminate():
        if folder.exists() and not seen:
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(signal.getsignal(signal.SIGTERM)))
    own = signal.getsignal(signal.SIGTERM)
    try:
        train(cartpole(tmp_path), quiet=True, stop=terminate)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [own]


def test_another_thread_can_train_and_is_stopped_by_its_function(tmp_path):
    """No signal reaches it, and it cannot have signal handlers."""
    logs, runs = tmp_path / "mine" / "logs", []
    thread = threading.Thread(target=lambda: runs.append(train(cartpole(tmp_path), quiet=True, stop=logs.exists)))
    thread.start()
    thread.join(60)
    assert [run.interrupted for run in runs] == [True]


def test_a_run_that_is_stopped_before_it_begins_leaves_no_folder(tmp_path):
    config = cartpole(tmp_path / "runs")
    with pytest.raises(TrainingError) as error:
        train(config, quiet=True, stop=lambda: True)
    assert error.value.folder is None
    with pytest.raises(KeyboardInterrupt):
        train(config, quiet=True, stop=lambda: bool(os.kill(os.getpid(), signal.SIGINT)))
    assert not (tmp_path / "runs").exists()


SELFISH = """
import apex, gymnasium

def make(**options):
    return gymnasium.make("CartPole-v1", **options)

apex.train(apex.preset("cartpole", environment={"id": "selfish:make"}))
"""


def test_a_module_that_trains_when_a_run_imports_it_is_refused(tmp_path, monkeypatch):
    (tmp_path / "selfish.py").write_text(SELFISH)
    monkeypatch.syspath_prepend(tmp_path)
    config = replace(cartpole(tmp_path / "runs"), environment=EnvironmentConfig(id="selfish:make"))
    with pytest.raises(UsageError, match="__main__"):
        train(config, quiet=True, stop=(tmp_path / "runs").exists)
    assert not (tmp_path / "runs").exists()


def test_a_program_of_a_run_cannot_train(tmp_path, monkeypatch):
    program = ModuleType("__main__")
    program.__spec__ = ModuleSpec("apex.actor", None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    with pytest.raises(UsageError, match="__main__"):
        train(cartpole(tmp_path), quiet=True, stop=lambda: True)


class Recorder(Callback):
    """Records its calls, and asks for the end in one of them."""

    def __init__(self, asks_in=""):
        self.calls, self._asks_in = [], asks_in

    def take(self, name, run, *facts):
        self.calls.append((name, run.folder.name, *facts))
        if name == self._asks_in:
            run.stop("enough")

    def on_start(self, run):
        self.take("start", run)

    def on_end(self, run, end):
        self.take("end", run, end)


def test_a_callback_is_called_and_ends_the_run_with_its_reason(tmp_path):
    recorder = Recorder(asks_in="start")
    run = train(cartpole(tmp_path), quiet=True, callbacks=[recorder])
    assert run.end == EndReason("callback", detail="enough")
    assert (run.interrupted, run.reason) == (False, describe_end(run.end))
    assert recorder.calls == [("start", "mine"), ("end", "mine", run.end)]


def test_callbacks_end_with_a_run_that_fails_or_is_killed(tmp_path, play_learner):
    failed, killed = Recorder(), Recorder()
    play_learner("exit 3")
    with pytest.raises(TrainingError):
        train(cartpole(tmp_path / "failed"), quiet=True, callbacks=[failed])
    play_learner("exec sleep 600")

    def kill():
        if killed.calls:
            raise KeyboardInterrupt("interrupted twice")

    with pytest.raises(KeyboardInterrupt):
        train(cartpole(tmp_path / "killed"), quiet=True, callbacks=[killed], stop=kill)
    until(lambda: len(killed.calls) == 2)
    assert failed.calls == killed.calls == [("start", "mine"), ("end", "mine", EndReason("failed"))]
