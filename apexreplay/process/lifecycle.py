"""Starting, waiting and stopping, in the same way in every process of a run."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from types import FrameType
from typing import NoReturn, ParamSpec

from msgspec.structs import replace

from apexreplay.errors import FAILED, FINISHED, REFUSED, ApexError
from apexreplay.facts import Waiting

KILLED_BY_CTRL_C = 130  # exit status after SIGINT, as in a shell
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # characters that control a terminal, except the end of a line
# causes of an OSError that lie outside of the program: without the name of a file, and with one
FULL = {errno.ENOSPC, errno.EDQUOT}
FORBIDDEN = {*FULL, errno.EROFS, errno.EACCES, errno.EPERM}
POLL_SECONDS = 0.2  # No call blocks longer, so a role returns within a second after a stop request.
EXPLAIN_SECONDS = 10.0  # A longer wait is logged with its reason.

log = logging.getLogger("apexreplay")
_interrupted = False  # whether SIGINT was received since the `main` of this process's program began

P = ParamSpec("P")


class Stop:
    """A request to stop. It is a plain attribute, because a signal handler must not take a lock.

    Only the main thread's loop may call `poll`: each call is also a heartbeat for `watchdog`.
    """

    def __init__(self, on_tick: Callable[[], None] = lambda: None) -> None:
        self.ticks = 0
        self.signum = 0  # the first signal that requested the stop; 0: no signal
        self._on_tick = on_tick
        self._requested = False

    def poll(self) -> bool:
        """Sends a heartbeat of the main thread; returns whether the calling loop should return."""
        self.tick()
        return self._requested

    def tick(self) -> None:
        """Sends a heartbeat of the main thread. Long computations that do not call `poll` must call this."""
        self.ticks += 1
        self._on_tick()

    def request(self) -> None:
        """Requests every loop that watches this object to return."""
        self._requested = True

    def follower(self) -> Stop:
        """Returns a Stop for a part of the program that may stop earlier. If this Stop is requested, so is that one."""

        def look() -> None:
            if self.poll():
                part.request()

        part = Stop(look)
        return part


@contextmanager
def stop_on_signals(on_tick: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """Yields a Stop that SIGINT, SIGTERM or SIGHUP requests. A later SIGINT raises KeyboardInterrupt.

    If SIGHUP is ignored, as under nohup, it stays ignored. `on_tick` is called at every heartbeat; a program with a
    watchdog passes `take_notifier()`.
    """
    stop = Stop(on_tick)
    asked = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        global _interrupted
        _interrupted = _interrupted or signum == signal.SIGINT
        if asked and signum == signal.SIGINT:
            raise KeyboardInterrupt("interrupted twice")
        asked, stop.signum = True, stop.signum or signum
        stop.request()

    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    previous = {s: signal.signal(s, handle) for s in [signal.SIGINT, signal.SIGTERM, *hangup]}
    try:
        yield stop
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)


def sleep(seconds: float, stop: Stop) -> None:
    """Sleeps for `seconds`, or less if `stop` is requested."""
    until = time.monotonic() + seconds
    while not stop.poll() and time.monotonic() < until:
        time.sleep(POLL_SECONDS)


class Wait:
    """Logs the reason of a wait after EXPLAIN_SECONDS, and again each time the waiting time has doubled."""

    def __init__(self, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._who = who
        self._clock = clock
        self._since: float | None = None
        self._explain_at = 0.0
        self.waiting: Waiting | None = None  # None while there is no wait

    def on(self, waiting: Waiting) -> None:
        """Records what `who` waits for. Must be called in every iteration of the waiting loop."""
        now = self._clock()
        if self._since is None:
            self._since, self._explain_at = now, EXPLAIN_SECONDS
        waited = now - self._since
        self.waiting = replace(waiting, who=self._who, seconds=waited)
        if waited >= self._explain_at:
            log.warning(self.waiting)
            self._explain_at *= 2

    def over(self) -> None:
        """Records that the wait has ended."""
        self._since = self.waiting = None


class Helper(threading.Thread):
    """A thread whose exceptions are not lost: an exception stops the role, and `check` raises it in the caller."""

    def __init__(self, name: str, target: Callable[[], None], stop: Stop) -> None:
        super().__init__(name=name, daemon=True)
        self._target_function = target
        self._stop_request = stop
        self.exception: BaseException | None = None

    def run(self) -> None:
        """Runs the target. Stores an exception and requests the role to stop."""
        try:
            self._target_function()
        except BaseException as exception:
            self.exception = exception
            self._stop_request.request()

    def check(self) -> None:
        """Raises the exception that ended the thread, if any."""
        if self.exception is not None:
            raise self.exception


def end_process(status: int) -> NoReturn:
    """Ends this process, even if an environment has left a thread for which Python would wait."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        with suppress(OSError, ValueError):
            print(end="", flush=True)
        os._exit(status)
    sys.exit(status)


def complain(sentence: str) -> None:
    """Prints a program's final error to standard error. Ignores a failed write: the exit status shows the error too.

    Control characters become spaces, because a sentence may quote a file of somebody else.
    """
    with suppress(OSError):
        print(CONTROL.sub(" ", sentence), file=sys.stderr, flush=True)


def reports_errors(program: str, *, logs_failures: bool = False) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorates the `main` of `program`: prints an ApexError as one sentence and returns the error's exit status.

    A full disk and missing permissions are reported alike, with status 1.
    With `logs_failures`, errors that are not caused by the user's input are logged instead. After Ctrl-C, status 0
    becomes 130, and so does a KeyboardInterrupt (a second Ctrl-C).
    """

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @wraps(main)
        def reporting(*args: P.args, **kwargs: P.kwargs) -> int:
            global _interrupted
            _interrupted = False
            try:
                status = main(*args, **kwargs)
            except ApexError as error:
                if logs_failures and error.exit_status != REFUSED:
                    log.error("%s", error)
                else:
                    complain(f"{program}: {error}")
                status = error.exit_status
            except OSError as error:
                if logs_failures or error.errno not in (FORBIDDEN if error.filename else FULL):
                    raise
                place = f"cannot use {error.filename}: " if error.filename else ""
                complain(f"{program}: {place}{error.strerror}")
                status = FAILED
            except KeyboardInterrupt:
                return KILLED_BY_CTRL_C
            return KILLED_BY_CTRL_C if _interrupted and status == FINISHED else status

        return reporting

    return decorate
