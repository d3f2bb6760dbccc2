"""How every program of ours begins, waits and ends."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import ParamSpec

from apex.errors import ApexError

FINISHED, FAILED, REFUSED, NEIGHBOUR_GONE = 0, 1, 2, 75  # exit statuses; 75 (EX_TEMPFAIL): try again
HOPELESS = 3  # of a role: failed, and would fail again however often it was started; the run's own status is FAILED
KILLED_BY_CTRL_C = 130  # as a shell reports it
INTERRUPTED = "interrupted"  # why a run ends that somebody has stopped, whoever of its programs says so
POLL_SECONDS = 0.2  # No call blocks longer, so a role returns within a second of being asked.
EXPLAIN_SECONDS = 10.0  # A wait longer than this says who waits for whom.

log = logging.getLogger("apex")

P = ParamSpec("P")


class Stop:
    """A request to stop: one plain attribute, because a signal handler may not take a lock.

    Only the main thread's loop may read `requested`: each read is also the sign of life that `watchdog` looks for.
    """

    def __init__(self, on_tick: Callable[[], None] = lambda: None) -> None:
        self.ticks = 0
        self.signum = 0  # the first signal that requested it; 0: none did
        self._on_tick = on_tick
        self._requested = False

    @property
    def requested(self) -> bool:
        """Whether the loop that asks should return."""
        self.tick()
        return self._requested

    def tick(self) -> None:
        """Shows that the main thread gets on; to be called by what works for long without asking."""
        self.ticks += 1
        self._on_tick()

    def request(self) -> None:
        """Asks every loop that watches this object to return."""
        self._requested = True


@contextmanager
def stop_on_signals(on_tick: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """Yields a Stop that SIGINT, SIGTERM or SIGHUP requests; a SIGINT after that raises KeyboardInterrupt.

    Where SIGHUP is ignored, as under nohup, it stays ignored. `on_tick` is called at every turn of the loop; a program
    that may be watched passes `take_notifier()`.
    """
    stop = Stop(on_tick)
    asked = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked and signum == signal.SIGINT:
            raise KeyboardInterrupt("told to stop twice")
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
    """Waits for as long, or until it is told to stop."""
    until = time.monotonic() + seconds
    while not stop.requested and time.monotonic() < until:
        time.sleep(POLL_SECONDS)


class Wait:
    """Explains a wait that has gone on for 10 s, and again each time it has doubled."""

    def __init__(self, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._who = who
        self._clock = clock
        self._since: float | None = None
        self._explain_at = 0.0
        self.reason = ""  # "" while nothing is waited for

    def on(self, whom: str) -> None:
        """Notes that `who` waits for `whom`; to be called at every turn of the waiting loop."""
        now = self._clock()
        if self._since is None:
            self._since, self._explain_at = now, EXPLAIN_SECONDS
        waited = now - self._since
        self.reason = f"for {whom} ({waited:.0f} s)"
        if waited >= self._explain_at:
            log.warning("%s waits %s", self._who, self.reason)
            self._explain_at *= 2

    def over(self) -> None:
        """Notes that the wait has ended."""
        self._since = None
        self.reason = ""


class Helper(threading.Thread):
    """A thread that fails loudly: it stops its role, and `check` raises its exception there."""

    def __init__(self, name: str, target: Callable[[], None], stop: Stop) -> None:
        super().__init__(name=name, daemon=True)
        self._target_function = target
        self._stop_request = stop
        self.exception: BaseException | None = None

    def run(self) -> None:
        """Runs the target; an exception is kept, and the role asked to stop."""
        try:
            self._target_function()
        except BaseException as exception:
            self.exception = exception
            self._stop_request.request()

    def check(self) -> None:
        """Raises what ended the thread, if anything did."""
        if self.exception is not None:
            raise self.exception


def complain(sentence: str) -> None:
    """Prints a program's last words on standard error; where they cannot be written, its exit status says enough."""
    with suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)


def reports_errors(program: str, *, logs_failures: bool = False) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorates the `main` of `program`: an ApexError becomes one sentence on standard error and an exit status.

    With `logs_failures`, errors that are not the user's mistake are logged instead. A KeyboardInterrupt (a second
    Ctrl-C) becomes status 130.
    """

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @wraps(main)
        def reporting(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except ApexError as error:
                if logs_failures and error.exit_status != REFUSED:
                    log.error("%s", error)
                else:
                    complain(f"{program}: {error}")
                return error.exit_status
            except KeyboardInterrupt:
                return KILLED_BY_CTRL_C

        return reporting

    return decorate


def configure_logging(role: str) -> None:
    """Logs to standard error: time, role, level, message; and where each thread was, when a signal ends the program."""
    logging.raiseExceptions = False  # A log that cannot be written harms nobody.
    faulthandler.enable(sys.__stderr__ or sys.stderr)  # SIGABRT is what a program that is stuck gets.
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s {role} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


@contextmanager
def log_to(path: Path, role: str = "launcher") -> Iterator[None]:
    """Within it this process's own log goes to a file: the terminal belongs to the view."""
    raises, level = logging.raiseExceptions, log.level
    logging.raiseExceptions = False  # A full disk would be told on the terminal, line by line.
    handler: logging.Handler
    try:
        handler = logging.FileHandler(path)
    except OSError as error:
        complain(f"cannot write {path}: {error.strerror}; what the {role} does is not noted")
        handler = logging.NullHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {role} %(levelname)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        with suppress(OSError):  # What it could not write until now.
            handler.close()
        logging.raiseExceptions = raises
        log.setLevel(level)
