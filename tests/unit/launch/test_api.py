"""`apex.train` from a program of one's own. The programs of the run are played by `sh -c`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from support.launches import cartpole, stand_in

from apex import TrainingError, UsageError, train
from apex.config import EnvironmentConfig
from apex.facts import INTERRUPTED
from apex.launch.api import Run, train_as
from apex.runs.folder import RunFolder

pytestmark = pytest.mark.programs


def ends_with(script):
    return lambda *_: [stand_in("learner", script, ends_run=True)]


ENDLESS = ends_with("exec sleep 600")


def test_a_run_is_returned_and_stands_for_its_folder(tmp_path, capsys):
    run = train_as(cartpole(tmp_path), ends_with("exit 0"))
    assert os.fspath(run) == str(tmp_path / "mine")
    assert RunFolder.open(run.folder).config == run.config
    assert run.config.learner.num_threads > 0  # sized to this machine
    assert not run.interrupted
    assert (run.score, run.steps, run.updates) == (None, None, None)
    assert "run folder: " in capsys.readouterr().out


def test_quiet_says_nothing_and_leaves_logging_as_it_was(tmp_path, capfd):
    before = logging.raiseExceptions, logging.getLogger("apex").level
    train_as(cartpole(tmp_path), ends_with("exit 0"), quiet=True)
    assert capfd.readouterr() == ("", "")
    assert (logging.raiseExceptions, logging.getLogger("apex").level) == before


def test_a_run_that_fails_raises_its_first_cause_and_knows_its_folder(tmp_path):
    with pytest.raises(TrainingError, match=r"learner ended with status 3 once: no luck; see .*learner\.log") as error:
        train_as(cartpole(tmp_path), ends_with("echo no luck; exit 3"), quiet=True)
    assert error.value.folder == tmp_path / "mine"


def test_a_program_that_refuses_is_a_mistake_of_the_configuration(tmp_path):
    with pytest.raises(UsageError, match="learner refused to run: no GPU here"):
        train_as(cartpole(tmp_path), ends_with("echo no GPU here; exit 2"), quiet=True)


def test_what_is_no_configuration_is_refused_with_what_is():
    with pytest.raises(UsageError, match=r'apex.Config, such as apex.preset\("pong"\); got \'cartpole\''):
        train("cartpole")


def test_the_programs_can_import_what_the_caller_can(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    train_as(cartpole(tmp_path), ends_with(f'echo "$PYTHONPATH" > {tmp_path}/path'), quiet=True)
    assert str(tmp_path / "elsewhere") in (tmp_path / "path").read_text().split(":")


def test_control_c_ends_the_run_in_order_and_returns_it(tmp_path):
    asked = []

    def interrupt():
        if len(asked) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        asked.append(True)
        return False

    before = signal.getsignal(signal.SIGINT)
    run = train_as(cartpole(tmp_path), ENDLESS, quiet=True, stop=interrupt)
    assert (run.interrupted, run.end) == (True, INTERRUPTED)
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_ends_the_run_and_then_takes_its_usual_effect(tmp_path):
    folder, seen = tmp_path / "mine" / "logs", []

    def terminate():
        if folder.exists() and not seen:
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(signal.getsignal(signal.SIGTERM)))
    own = signal.getsignal(signal.SIGTERM)
    try:
        train_as(cartpole(tmp_path), ENDLESS, quiet=True, stop=terminate)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [own]


def test_another_thread_may_train_and_is_stopped_by_what_it_asks(tmp_path):
    """No signal reaches it, and none may be handled there."""
    logs, runs = tmp_path / "mine" / "logs", []

    def work():
        runs.append(train_as(cartpole(tmp_path), ENDLESS, quiet=True, stop=logs.exists))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert [run.interrupted for run in runs] == [True]


def test_a_run_that_was_stopped_before_it_began_leaves_no_folder(tmp_path):
    with pytest.raises(TrainingError, match="stopped before it began"):
        train_as(cartpole(tmp_path / "runs"), ENDLESS, quiet=True, stop=lambda: True)
    with pytest.raises(KeyboardInterrupt):
        train_as(
            cartpole(tmp_path / "runs"), ENDLESS, quiet=True, stop=lambda: bool(os.kill(os.getpid(), signal.SIGINT))
        )
    assert not (tmp_path / "runs").exists()


SELFISH = """
import apex, gymnasium

def make(**options):
    return gymnasium.make("CartPole-v1", **options)

apex.train(apex.preset("cartpole", environment={"id": "selfish:make"}))
"""
REMEDY = r'below `if __name__ == "__main__":`'


def test_a_module_that_trains_when_a_run_imports_it_is_refused_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "selfish.py").write_text(SELFISH)
    monkeypatch.syspath_prepend(tmp_path)
    config = replace(cartpole(tmp_path / "runs"), environment=EnvironmentConfig(id="selfish:make"))
    with pytest.raises(UsageError, match=REMEDY):
        train_as(config, ENDLESS, quiet=True, stop=lambda: True)
    assert not (tmp_path / "runs").exists()


def test_so_is_one_that_trains_when_a_program_of_a_run_imports_it(tmp_path, monkeypatch):
    program = ModuleType("__main__")
    program.__spec__ = ModuleSpec("apex.actor", None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    with pytest.raises(UsageError, match=REMEDY):
        train_as(cartpole(tmp_path), ENDLESS, quiet=True, stop=lambda: True)


def test_a_run_is_short_to_look_at(tmp_path):
    run = train_as(cartpole(tmp_path), ends_with("exit 0"), quiet=True)
    assert isinstance(run, Run)
    assert len(repr(run)) < 400
