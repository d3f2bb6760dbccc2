"""`apex.train` and `apex.resume`: train on this machine with one call, as the command `apex train` does."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from apex.command_line import choose_preset
from apex.config import Config, from_dict, lay_over
from apex.environments.foreign import require_trust
from apex.environments.inspection import Inspector
from apex.errors import StoppedError, TrainingError
from apex.facts import EndReason
from apex.launch.callbacks import Callback, Callbacks
from apex.launch.engine import LOCAL, RAY, RayEngine
from apex.launch.preflight.fit import require_announced_ports
from apex.launch.resume import reopen
from apex.launch.start import Start, find_end
from apex.launch.train import execute
from apex.runtime import trust
from apex.sentences import describe_end, describe_failure
from apexreplay.errors import REFUSED, UsageError, require
from apexreplay.process.lifecycle import Stop, stop_on_signals

GUARD = 'move the training code below `if __name__ == "__main__":`, so that the module can be imported without training'


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that ended without an error. A `Run` can be passed wherever the path of a run folder is accepted."""

    folder: Path
    config: Config = field(repr=False)  # including the sizes chosen for this machine
    end: EndReason | None  # why the run ended; None if that is not known
    interrupted: bool  # whether Ctrl-C or the argument `stop` of `train` ended the run
    score: float | None  # mean raw score of the last evaluation; None: no evaluation was finished
    score_updates: int | None  # updates of the policy with this score; lower than `updates` if the last one has none
    best_score: float | None  # mean raw score of the best evaluation of a trained policy; None: there was none
    steps: int | None  # environment steps. `steps`, `updates` and `seconds` are None if the run never reported them
    updates: int | None
    seconds: float | None  # wall-clock time

    @property
    def reason(self) -> str:
        """`end` as a phrase, for example "reached the score 475"; "" if it is not known."""
        return "" if self.end is None else describe_end(self.end)

    def __fspath__(self) -> str:
        """Returns the path of the run folder."""
        return str(self.folder)


def preset_for(environment_id: str | Callable[..., Any], **changes: Any) -> Config:
    """Returns the settings of `apex train --env ID` for an Atari game, a Gymnasium id or package.module:factory.

    Instead of the latter, pass the class or function itself, as everywhere in the settings. The programs of the run
    import it by its name, so it must be at the top level of a module, not in a notebook or in the script itself.

    `changes` are the same as in `apex.preset`. If observations are images, the settings depend on learner.device, or,
    if that is "auto", on whether this machine has a GPU. Raises UsageError if the environment cannot be created here.
    """
    asked = lay_over(lay_over(Config(), changes), {"environment": {"id": environment_id}})
    require_trust(asked, given=True)
    return from_dict(changes, choose_preset(asked, Inspector()))


_busy = threading.local()


@contextmanager
def _only_call() -> Iterator[None]:
    """Raises UsageError if a process of a run imports a module that calls `train`, because this would start a run."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    imported = getattr(_busy, "training", False) or (spec is not None and spec.name.partition(".")[0] == "apex")
    require(not imported, "a process of a run imported this module, which trains", remedy=GUARD)
    _busy.training = True
    try:
        yield
    finally:
        _busy.training = False


@_only_call()
def train(
    config: Config,
    *,
    quiet: bool = False,
    stop: Callable[[], bool] | None = None,
    engine: str | RayEngine = "local",
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Trains until a limit of `config.run` is reached, and returns the run. It is a new run: see `resume`.

    `engine`: "local" trains on this machine. "ray", or a RayEngine with the number of actor hosts and their CPUs,
    trains on a Ray cluster: this process is Ray's driver, and `Run.folder` is a path on the host of the run's head.

    Replay, learner, actors and evaluator run as separate processes. All of them have ended when this function returns
    or raises. They can import the same modules as the caller (sys.path). A script needs `if __name__ == "__main__"`
    only if it defines its environment or network itself, because the processes then import the script. Imports the
    modules that `config` names: do not pass a configuration from somebody else.

    `quiet`: print nothing; the logs are still written to the run folder. `stop` is called five times a second; the run
    ends when it returns True. Ctrl-C also ends the run: the learner saves a checkpoint, and the returned run has
    `interrupted` set. A second Ctrl-C kills every process and raises KeyboardInterrupt. SIGTERM ends the run;
    then this process handles it as usual. Only the main thread receives signals: use `stop` in other threads.
    `callbacks` are called during the run, in threads of this process, and may end it: see `Callback`.

    Raises UsageError if the configuration cannot be run, and TrainingError, with the first cause, if the run failed.
    """
    require(
        isinstance(config, Config),
        f"config must be an apex.Config, got {config!r:.80}",
        remedy='use apex.preset("pong")',
    )
    chosen = RayEngine() if engine == RAY else None if engine == LOCAL else engine
    if not isinstance(chosen, RayEngine | None):
        raise UsageError(f'engine must be "local", "ray" or an apex.RayEngine, got {engine!r}')
    require_trust(config, given=True)
    return _train(partial(Start, config=config, argv=["apex.train"], engine=chosen), quiet, stop, callbacks)


@_only_call()
def resume(
    run: str | os.PathLike[str],
    /,
    *,
    accept_changes: bool = False,
    quiet: bool = False,
    stop: Callable[[], bool] | None = None,
    callbacks: Sequence[Callback] = (),
    allow: str | Iterable[str] = (),
    **changes: Any,
) -> Run:
    """Continues a run that has ended, on this machine, as `apex train --resume RUN` does, and returns it.

    `run` is the result of `train`, a run folder or its name below runs/. `changes` are those of `apex.preset`, such as
    `run={"max_minutes": 20}`. Limits may change, and mirror, TensorBoard, keys and addresses; other settings only with
    `accept_changes`, which also permits the loss of saved data. `allow`: as in `load_policy`. See `train` for the other
    arguments.

    Raises UsageError if the run cannot be continued, or would end at once at its limit, and otherwise as `train`.
    """
    path = os.fspath(run)
    trust.allow(allow)

    def make_start(inspector: Inspector, **others: Any) -> Start:
        folder, config = reopen(path, changes, accept=accept_changes, inspector=inspector)
        require_announced_ports(config)
        start = partial(Start, config=config, argv=["apex.resume"], folder=folder.path, accept_changes=accept_changes)
        return start(inspector=inspector, **others)

    return _train(make_start, quiet, stop, callbacks)


def _train(
    make_start: Callable[..., Start], quiet: bool, stop: Callable[[], bool] | None, callbacks: Sequence[Callback]
) -> Run:
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    calls, outcome = Callbacks(callbacks), None

    def is_over() -> bool:
        return calls.asked is not None or (stop is not None and stop())

    with (
        closing(calls),
        _stop_request(is_over) as request,
        open(os.devnull, "w") as nowhere,
        suppress(StoppedError),
    ):
        start = make_start(inspector=Inspector(request), environment={"PYTHONPATH": paths}, callbacks=calls)
        outcome = execute(start, request, nowhere if quiet else None)
    if request.signum == signal.SIGTERM:
        signal.raise_signal(signal.SIGTERM)
    if outcome is None and request.signum:
        raise KeyboardInterrupt("stopped before the run began")
    if outcome is None:
        raise TrainingError("the run was stopped before it began", None)
    ending, status = outcome.ending, outcome.status
    if ending.failure is not None:
        cause = describe_failure(ending.failure)
        raise UsageError(cause) if ending.status == REFUSED else TrainingError(cause, outcome.folder)
    end = calls.true_end(find_end(ending, status))
    return Run(
        folder=outcome.folder.absolute(),
        config=outcome.config,
        end=end,
        interrupted=not ending.role and (calls.asked is None or bool(request.signum)),
        score=status.evaluator.score if status else None,
        score_updates=status.evaluator.updates if status else None,
        best_score=status.evaluator.best if status else None,
        steps=status.steps if status else None,
        updates=status.updates if status else None,
        seconds=status.elapsed_seconds if status else None,
    )


@contextmanager
def _stop_request(ask: Callable[[], bool]) -> Iterator[Stop]:
    """Yields a Stop that is requested when `ask` returns True; in the main thread, also by SIGINT or SIGTERM.

    Other threads cannot have signal handlers.
    """

    def on_tick() -> None:
        if ask():
            stop.request()

    main_thread = threading.current_thread() is threading.main_thread()
    with stop_on_signals(on_tick) if main_thread else nullcontext(Stop(on_tick)) as stop:
        yield stop
