"""`apex.train`: a whole run on this machine as one call, the same as `apex train` does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apex.config import Config, EnvironmentConfig, from_dict, lay_over, presets
from apex.config.command_line import trains_on_gpu
from apex.environments.factory import kind
from apex.errors import ApexError, ConfigError, require
from apex.launch.local import Composer, RunOutcome
from apex.launch.local import run as run_programs
from apex.runtime.gpu import means_gpu
from apex.runtime.lifecycle import FINISHED, REFUSED, Stop, stop_on_signals

GUARD = 'Put what trains below `if __name__ == "__main__":`, so that the module can be imported without training'


class TrainingError(ApexError, RuntimeError):
    """A run that ended by itself and not well. The text is the first cause."""

    def __init__(self, cause: str, folder: Path | None) -> None:
        """`folder` has the logs and checkpoints; None if the run had not begun."""
        super().__init__(cause)
        self.folder = folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that has ended well. It stands for its folder wherever a path is asked for."""

    folder: Path
    config: Config = field(repr=False)  # with every size that was chosen for this machine
    reason: str  # why it ended, as in "reached the score 475"
    interrupted: bool  # by Ctrl-C, or by the `stop` that `train` was given
    score: float | None  # mean raw score of the evaluator's last games; None: it had finished none
    best_score: float | None  # of the evaluator's best
    steps: int | None  # of the environments; None here and below: the run was too short to be asked
    updates: int | None
    seconds: float | None  # of wall clock

    def __fspath__(self) -> str:
        """The run folder."""
        return str(self.folder)


def preset_for(environment_id: str, **changes: Any) -> Config:
    """What `apex train --env ID` takes: the settings for any Atari game, Gymnasium id or package.module:factory.

    `changes` are those of `apex.preset`; those for pixels go by whether this machine has a GPU, or by learner.device.
    Raises ConfigError for an environment that cannot be made here.
    """
    shown, asked = kind(EnvironmentConfig(id=environment_id)), lay_over(Config(), changes)
    return from_dict(changes, presets.preset_for(shown, environment_id, gpu=lambda: trains_on_gpu(asked, means_gpu)))


def train(config: Config, *, quiet: bool = False, stop: Callable[[], bool] | None = None) -> Run:
    """Trains on this machine until a limit of `config.run` is reached, and returns the run.

    Replay, learner, actors and evaluator are programs of their own, all of which have ended when this returns or
    raises. A script needs no `if __name__ == "__main__"`, unless its environment or network stands in the script
    itself: those programs import it. They can import what the caller can (sys.path).

    `quiet`: nothing is printed; the logs are in the run folder all the same. `stop` is asked five times a second, and
    True ends the run. Ctrl-C ends it too: what was learned is saved, and the run is returned with `interrupted` set; a
    second Ctrl-C kills every program and raises KeyboardInterrupt. SIGTERM ends the run, then takes its usual effect.
    Signals reach the main thread only: to end a run in another one, use `stop`.

    Raises ConfigError for what cannot be run as configured, TrainingError for a run that failed, with the first cause.
    """
    return train_as(config, None, quiet=quiet, stop=stop)


def train_as(
    config: Config, compose: Composer | None, *, quiet: bool = False, stop: Callable[[], bool] | None = None
) -> Run:
    """The same with other programs: `compose` names them, as in `run_programs`."""
    require(isinstance(config, Config), f'train takes an apex.Config, as apex.preset("pong"), got {config!r:.80}')
    with _once(), _stopping(stop) as request, ExitStack() as opened:
        out = opened.enter_context(open(os.devnull, "w")) if quiet else None
        paths = [path or os.getcwd() for path in sys.path]
        outcome = run_programs(
            config, request, ["apex.train"], compose, out=out, environment={"PYTHONPATH": os.pathsep.join(paths)}
        )
    if request.signum == signal.SIGTERM:
        signal.raise_signal(signal.SIGTERM)
    if outcome is None and request.signum:
        raise KeyboardInterrupt("stopped before the run began")
    if outcome is None:
        raise TrainingError("the run was stopped before it began", None)
    return _judge(outcome)


def _judge(outcome: RunOutcome) -> Run:
    folder, ending, status = outcome
    if ending.status == REFUSED:
        raise ConfigError(ending.cause)
    if ending.status != FINISHED:
        raise TrainingError(ending.cause, folder.path)
    return Run(
        folder=folder.path,
        config=folder.config,
        reason=(status.reason if status else "") or ending.cause,
        interrupted=not ending.role,
        score=status.evaluator.score if status else None,
        best_score=status.evaluator.best if status else None,
        steps=status.steps if status else None,
        updates=status.updates if status else None,
        seconds=status.elapsed_seconds if status else None,
    )


_busy = threading.local()


@contextmanager
def _once() -> Iterator[None]:
    """Refuses to train while a run imports the module that calls this: it would start runs without end."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    imported = getattr(_busy, "training", False) or (spec is not None and spec.name.partition(".")[0] == "apex")
    require(not imported, f"apex.train was called while a run imported the module that calls it. {GUARD}")
    _busy.training = True
    try:
        yield
    finally:
        _busy.training = False


@contextmanager
def _stopping(ask: Callable[[], bool] | None) -> Iterator[Stop]:
    """A Stop that `ask` requests, and in the main thread SIGINT and SIGTERM: no other can have handlers."""

    def on_tick() -> None:
        if ask is not None and ask():
            stop.request()

    if threading.current_thread() is threading.main_thread():
        with stop_on_signals(on_tick) as stop:
            yield stop
    else:
        stop = Stop(on_tick)
        yield stop
