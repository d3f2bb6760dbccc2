"""Keeps programs running: starts them, starts lost ones again within a budget, stops them in order, leaves nobody."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

from apex.runtime.children import KILL_SECONDS, LAST_WORDS_SECONDS
from apex.runtime.lifecycle import (
    FAILED,
    FINISHED,
    HOPELESS,
    INTERRUPTED,
    NEIGHBOUR_GONE,
    POLL_SECONDS,
    REFUSED,
    Stop,
    Wait,
)
from apex.runtime.spawn import spawn
from apex.runtime.text import last_lines
from apex.runtime.watchdog import Listener, Silence, is_traced

log = logging.getLogger("apex")

FIRST_PAUSE_SECONDS = 0.5  # before a first restart; doubles with each that the budget has not yet forgotten
LONGEST_PAUSE_SECONDS = 10.0
FORGET_SECONDS = 120.0  # one crash is forgotten in this time
INNOCENT_COST = 0.25  # of a restart that is not the program's own fault: it ended well, or its neighbour was gone
REST_SECONDS = 3.0  # before a program that ended well starts again: the run may just be ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One role's program. Programs start in order and stop in reverse order, neighbours of one group together."""

    role: str
    command: tuple[str, ...]
    crash_budget: float = 3.0  # restarts in a row; past it the run ends with the program's status
    grace_seconds: float = 2.0  # from SIGTERM to SIGKILL
    stops_with: str = ""  # a group; "": alone
    ends_run: bool = False  # status 0 of this one ends the run well; any other is started again
    essential: bool = True  # False: past its budget the run goes on without it
    niceness: int = 0  # above 0: runs when nobody else wants the core
    stuck_seconds: float = 0.0  # without a sign of life by sd_notify; past it, it is killed; 0: it need give none
    ready: Callable[[], bool] = lambda: True  # it is started, and started again, once this holds


class Ending(NamedTuple):
    """How a run ended."""

    status: int
    cause: str  # one sentence; "" when it finished
    role: str = ""  # who ended it, unless it was asked to stop


class CrashBudget:
    """A bucket that leaks: each crash pours into it, and the level says how long to pause before a restart."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._level = 0.0
        self._at = 0.0

    def charge(self, cost: float, now: float) -> float | None:
        """Returns the pause in seconds before the restart; None: the budget is spent."""
        self._level = max(0.0, self._level - (now - self._at) / FORGET_SECONDS)
        self._at = now
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**self._level)
        self._level += cost
        return None if self._level > self._limit else pause


def supervise(
    programs: Sequence[Program],
    stop: Stop,
    *,
    logs: Path,
    tell: Callable[[str], None] = lambda sentence: None,
    tick: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Ending:
    """Runs until asked to stop or until a program that matters ends; nothing is left running whatever is raised.

    Each program writes to `logs`/ROLE.log, and gets `environment` beside this program's own. `tell` is called with
    sentences for a person, `tick` every 0.2 s.
    """
    running = [_Running(program, logs / f"{program.role}.log", tell, environment) for program in programs]
    standstill = Wait("launcher")
    try:
        while not stop.requested:
            for one in running:
                ending = one.check(time.monotonic())
                if ending is not None:
                    return _first_cause(ending, running)
            _kill_the_stuck(running, standstill)
            tick()
            time.sleep(POLL_SECONDS)
        return Ending(FINISHED, INTERRUPTED)
    finally:
        _stop_in_order(running[::-1])


class _Running:
    """A program in all its lives."""

    def __init__(
        self, program: Program, log: Path, tell: Callable[[str], None], environment: Mapping[str, str]
    ) -> None:
        self.program = program
        self.num_endings = 0
        self.last_status: int | None = None
        self._log = log
        self._tell = tell
        self._environment = environment
        self._budget = CrashBudget(program.crash_budget)
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at: float | None = 0.0  # None: given up
        self._ended_well = False  # the last time: what is said of it waits until it is seen to be missed
        self._listener: Listener | None = None
        self._silence = Silence()
        self._stuck_for = 0.0  # seconds, if it was killed for that
        self.is_stuck = False

    def check(self, now: float) -> Ending | None:
        """Starts what is due, and looks after what has ended; returns an ending if it is the run's."""
        if self._process is None:
            if self._start_at is not None and now >= self._start_at and self.program.ready():
                self._start()
            return None
        status = self._process.poll()
        if status is None:
            heard = self._listener is not None and self._listener.heard()
            self.is_stuck = self._silence.look(heard, self.program.stuck_seconds)
            return None
        self.kill()  # Its children may have outlived it.
        self.last_status = status
        self.num_endings += 1
        if status == FINISHED and self.program.ends_run:
            return Ending(FINISHED, "", self.program.role)
        if status == FINISHED and not self.program.ready():
            return None  # It has done its part: the run is ending.
        cost = INNOCENT_COST if status in (FINISHED, NEIGHBOUR_GONE) else 1.0
        pause = None if status in (REFUSED, HOPELESS) else self._budget.charge(cost, now)
        if pause is not None:
            self._ended_well = status == FINISHED
            self._start_at = now + (max(pause, REST_SECONDS) if self._ended_well else pause)
            if not self._ended_well:
                self._tell(f"{self.program.role} {self._words()}; it starts again in {pause:.1f} s; see {self._log}")
            return None
        if self.program.essential:
            return self.ending()
        self._start_at = None
        self._tell(f"going on without {self.program.role}: {self.ending().cause}")
        return None

    def ending(self) -> Ending:
        """What to say and to return when the run ends because of this program."""
        status = FAILED if self.last_status in (None, HOPELESS) else max(FAILED, self.last_status or 0)
        last_words = "" if self._stuck_for else ": ".join(["", *last_lines(self._log, 1)])
        if status == REFUSED:
            return Ending(status, f"{self.program.role} refused to run{last_words}; see {self._log}", self.program.role)
        often = {1: "once", 2: "twice"}.get(self.num_endings, f"{self.num_endings} times")
        cause = f"{self.program.role} {self._words()} {often}{last_words}; see {self._log}"
        return Ending(status, cause, self.program.role)

    def _start(self) -> None:
        if self._ended_well:
            self._tell(f"{self.program.role} {self._words()}, and starts again; see {self._log}")
        self._ended_well, self._stuck_for, self._silence = False, 0.0, Silence()
        if self.program.stuck_seconds:
            self._listener = Listener(self.program.stuck_seconds)
        own = self._listener.environment if self._listener else {}
        with _open_log(self._log) as output:
            self._process = spawn(
                self.program.command,
                output=output,
                environment={**self._environment, **own},
                niceness=self.program.niceness,
            )

    def _words(self) -> str:
        if self._stuck_for:
            return f"made no turn for {self._stuck_for:.0f} s, and was killed as stuck (--run.stuck-seconds)"
        status = self.last_status or FINISHED
        if status >= 0:
            return f"ended with status {status}"
        return f"was ended by signal {-status} ({signal.strsignal(-status)})"

    @property
    def alive(self) -> bool:
        """Whether the program runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def silence(self) -> float:
        """Seconds without a sign of life; 0 for a program that need give none, or is looked at by a debugger."""
        if self._process is None or not self.program.stuck_seconds or is_traced(self._process.pid):
            return 0.0
        return self._silence.seconds

    def kill_as_stuck(self) -> None:
        """Ends the program and its children; one that is not stopped says first, in its log, where it was."""
        if self._process is not None:
            self._stuck_for = self.silence
            self._process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LAST_WORDS_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def ask(self) -> None:
        """Asks the program to end."""
        if self._process is not None and self.alive:
            self._tell(f"stopping {self.program.role}")
            self._process.send_signal(signal.SIGTERM)

    def stop(self, asked_at: float) -> None:
        """Waits for the grace of a program that was asked to end, and kills what is left of it."""
        if self._process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, asked_at + self.program.grace_seconds - time.monotonic()))
        if self.alive:
            self._tell(f"{self.program.role} did not stop within {self.program.grace_seconds:.1f} s and is killed")
        self.kill()

    def kill(self) -> None:
        """Ends the program and its children at once."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        self._process, self.is_stuck = None, False
        if self._listener is not None:
            self._listener.close()


def _kill_the_stuck(running: Sequence[_Running], standstill: Wait) -> None:
    """Kills who is silent while others are not. Where all fell silent together, it is the machine: none is to blame."""
    watched = [one for one in running if one.alive and one.program.stuck_seconds]
    stuck = [one for one in watched if one.is_stuck and one.silence]
    others = [one for one in watched if one not in stuck]
    if not stuck:
        standstill.over()
    elif len(watched) > 1 and not any(one.silence < one.program.stuck_seconds / 2 for one in others):
        standstill.on("its programs: all fell silent together, so the machine is too busy, or all were stopped")
    else:
        for one in stuck:
            one.kill_as_stuck()


def _open_log(path: Path) -> BinaryIO:
    """A log to append to; where that cannot be had the program runs all the same, unheard."""
    try:
        return path.open("ab")
    except OSError as error:
        log.warning("cannot write %s: %s; what the program says is lost", path, error.strerror)
        return open(os.devnull, "ab")


def _stop_in_order(running: Sequence[_Running]) -> None:
    try:
        for _, group in groupby(running, key=lambda one: one.program.stops_with or id(one)):
            together, asked_at = list(group), time.monotonic()
            for one in together:
                one.ask()
            for one in together:
                one.stop(asked_at)
    finally:  # A second Ctrl-C arrives as an exception and skips the grace of all.
        for one in running:
            one.kill()


def _first_cause(ending: Ending, running: Sequence[_Running]) -> Ending:
    """Who only missed its neighbour is not to blame where another program failed by itself."""
    if ending.status != NEIGHBOUR_GONE:
        return ending
    return next((one.ending() for one in running if one.last_status not in (None, FINISHED, NEIGHBOUR_GONE)), ending)
