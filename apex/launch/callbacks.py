"""Calls the user's callbacks during a run. Each has its own thread, so that none of them delays the run or another."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from apex.config import Config
from apex.facts import INTERRUPTED, Ending, EndReason
from apex.runs.checkpoints.paths import newest_update
from apex.transport.messages.fields import printable
from apex.transport.messages.run_status import EvaluationRow, RunStatus
from apexreplay.errors import describe_exception, require
from apexreplay.process.lifecycle import POLL_SECONDS

MAX_SECONDS = 1_000_000  # of a callback's limits
SHORT_SECONDS = 2.0  # A shorter wait at the end of a run is not announced.
MAX_WAITING = 10_000  # calls that wait for a slow callback; beyond this, the oldest are dropped

log = logging.getLogger("apex")


class LiveRun:
    """A run that has not ended, as callbacks see it."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config  # including the sizes chosen for this machine
        self.folder = folder  # with --engine ray, it is on the head's host
        self.status: RunStatus | None = None  # the newest status; None before the first one
        self.asked: EndReason | None = None  # why a callback has asked for the end; None: none has

    def stop(self, reason: str = "") -> None:
        """Ends the run in order, with a last checkpoint. `apex.Run.end` has the kind "callback" and this reason."""
        self.asked = self.asked or EndReason("callback", detail=printable(reason))


class Callback:
    """What to do during a run: override the methods that you need, and pass objects to `apex.train`.

    The methods run in the process that called `apex.train`, one at a time, in a thread of each callback. A callback
    that raises or hangs costs one line in the log, and the run continues. While a callback is busy, every evaluation
    and checkpoint waits for it, but of the statuses only the newest one.
    """

    slow_seconds: float = 10.0  # A call that takes longer is logged.
    end_seconds: float = 5.0  # how long the end of the run waits for this callback

    def on_start(self, run: LiveRun) -> None:
        """Is called when the run folder exists and the programs of the run are about to start."""

    def on_status(self, run: LiveRun, status: RunStatus) -> None:
        """Is called at each report, about once a second."""

    def on_evaluation(self, run: LiveRun, evaluation: EvaluationRow) -> None:
        """Is called after each evaluation."""

    def on_checkpoint(self, run: LiveRun, path: Path) -> None:
        """Is called when a checkpoint is finished, if the run folder is on this host. `path`: folder of the checkpoint.

        The folder's name is the number of updates. Later checkpoints replace it (`checkpoint.keep`).
        """

    def on_end(self, run: LiveRun, end: EndReason | None) -> None:
        """Is called when all programs have ended and the run folder is free. `end`: why; None if that is not known."""


class Callbacks:
    """The callbacks of one run. Its methods return at once, except `end`."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for each in callbacks:
            problem, remedy = f"callbacks must be apex.Callback objects, got {each!r:.80}", "pass [MyCallback()]"
            require(isinstance(each, Callback), problem, remedy=remedy)
            for name in ("slow_seconds", "end_seconds"):
                seconds = getattr(each, name)
                is_time = isinstance(seconds, int | float) and 0 <= seconds <= MAX_SECONDS
                problem = f"{type(each).__name__}.{name} must be a number of seconds >= 0, got {seconds!r:.80}"
                require(is_time, problem, remedy=f"use at most {MAX_SECONDS:,}")
        self.all = tuple(callbacks)
        self._threads: list[_CallbackThread] = []
        self._run: LiveRun | None = None
        self._num_evaluations = 0  # of this start of the learner
        self._checkpoint: int | None = None  # update of the newest one

    @property
    def asked(self) -> EndReason | None:
        """Why a callback has asked for the end of the run; None if none has."""
        return None if self._run is None else self._run.asked

    def begin(self, config: Config, folder: Path) -> None:
        """Starts the threads, which call `on_start`."""
        self._run = run = LiveRun(config, folder)
        self._checkpoint = newest_update(folder / "checkpoints")  # of an earlier start of the run
        self._threads = [_CallbackThread(callback, run) for callback in self.all]
        self._post("on_start")

    def report(self, status: RunStatus) -> RunStatus:
        """Passes on a status, and the evaluation and checkpoint that are new in it. Returns it with its true end."""
        if self._run is None or not self._threads:
            return status
        self._run.status = status = replace(status, end=self.true_end(status.end))
        newest = status.evaluations[-1].number if status.evaluations else 0
        known = self._num_evaluations if newest >= self._num_evaluations else 0  # 0: the learner has started again.
        for evaluation in status.evaluations:
            if evaluation.number > known:
                self._post("on_evaluation", evaluation)
        self._num_evaluations = newest
        self._look_for_checkpoint(self._run.folder)
        self._post("on_status", status)
        for thread in self._threads:
            thread.check()
        return status

    def true_end(self, end: EndReason | None) -> EndReason | None:
        """Replaces the end of an interrupted run if a callback has asked for it: the learner does not know of that."""
        return self.asked or end if end == INTERRUPTED else end

    def end(
        self,
        ending: Ending,
        end: EndReason | None,
        tell: Callable[[str], None] = lambda sentence: None,
        leaves: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        """Calls `on_end`, and waits for each callback for its `end_seconds`. Returns what went wrong in that time.

        `tell` is called with a sentence if this takes long. Does not wait longer once `leaves` returns True.
        """
        if self._run is not None:
            self._look_for_checkpoint(self._run.folder)
        before = [thread.problem for thread in self._threads]
        self._post("on_end", EndReason("failed") if ending.failure is not None else self.true_end(end))
        since, said, left = time.monotonic(), False, False
        try:
            for thread in self._threads:
                until = since + thread.callback.end_seconds
                while thread.is_alive() and time.monotonic() < until and not (left := left or leaves()):
                    thread.join(POLL_SECONDS)
                    if not said and thread.is_alive() and time.monotonic() > since + SHORT_SECONDS:
                        tell(f"the run has ended; waiting for {thread.name}. Ctrl-C ends the wait")
                        said = True
        except KeyboardInterrupt:
            left = True
        for thread in self._threads:
            thread.end(left)
        found = [thread.problem for thread, old in zip(self._threads, before, strict=True) if thread.problem != old]
        self._threads = []
        return found

    def close(self) -> None:
        """Ends the threads without a wait if an exception has skipped `end`."""
        self._post("on_end", EndReason("failed"))

    def _look_for_checkpoint(self, folder: Path) -> None:
        newest = None
        with suppress(OSError):  # A network file system may fail for a moment.
            newest = newest_update(folder / "checkpoints")
        if newest is not None and newest != self._checkpoint:
            self._checkpoint = newest
            self._post("on_checkpoint", folder / "checkpoints" / f"{newest:09d}")

    def _post(self, method: str, *arguments: Any) -> None:
        for thread in self._threads:
            thread.post(method, *arguments)


class _CallbackThread(threading.Thread):
    """Calls one callback until `on_end` was called."""

    def __init__(self, callback: Callback, run: LiveRun) -> None:
        super().__init__(name=type(callback).__name__, daemon=True)
        self.callback = callback
        self._live_run = run
        self._calls: list[tuple[str, tuple[Any, ...]]] = []  # those that wait, the oldest first
        self._changed = threading.Condition()
        self._now = ""  # the method that is being called; "": none
        self._since = 0.0
        self.problem = ""  # the last one; of each kind only the first counts
        self._kinds: set[str] = set()
        self.start()

    def post(self, method: str, *arguments: Any) -> None:
        """Adds a call. Only the newest status waits."""
        with self._changed:
            waiting = [call for call in self._calls if call[0] != method or method != "on_status"]
            self._calls = [*waiting, (method, arguments)][-MAX_WAITING:]
            self._changed.notify()

    def run(self) -> None:
        """Makes the calls."""
        method = ""
        while method != "on_end":
            with self._changed:
                self._changed.wait_for(lambda: self._calls)
                method, arguments = self._calls.pop(0)
            self._since, self._now = time.monotonic(), method
            try:
                getattr(self.callback, method)(self._live_run, *arguments)
            except BaseException as error:  # Even SystemExit must not end the thread before `on_end`.
                problem = f"{method} raised {describe_exception(error)}; its further errors are not logged"
                self._complain("raised", problem)
            self._now = ""

    def check(self) -> None:
        """Logs a call that takes long."""
        seconds = self.callback.slow_seconds
        if (method := self._now) and time.monotonic() - self._since > seconds:
            self._complain("late", f"{method} takes longer than {seconds:g} s; the run continues meanwhile")

    def end(self, left: bool) -> None:
        """Logs a call that has not returned. `left`: whether the wait was ended early."""
        if self.is_alive():
            call, seconds = self._now or "a call", self.callback.end_seconds
            problem = f"{call} did not return within {seconds:g} s after the end of the run"
            self._complain("late", f"{call} had not returned when the wait was ended" if left else problem)

    def _complain(self, kind: str, problem: str) -> None:
        if kind not in self._kinds:
            self._kinds.add(kind)
            self.problem = f"callback {self.name}: {problem}"
            log.warning("%s", self.problem)
