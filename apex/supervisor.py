"""Keeps programs running: starts them, starts lost ones again within a budget, stops them in order, leaves nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from apex.lifecycle import FAILED, FINISHED, HOPELESS, NEIGHBOUR_GONE, POLL_SECONDS, REFUSED, Stop, die_with_parent

FIRST_PAUSE_SECONDS = 0.5  # before a first restart; doubles with each that the budget has not yet forgotten
LONGEST_PAUSE_SECONDS = 10.0
FORGET_SECONDS = 120.0  # one crash is forgotten in this time
INNOCENT_COST = 0.25  # of a restart that is not the program's own fault: it ended well, or its neighbour was gone
REST_SECONDS = 3.0  # before a program that ended well starts again: the run may just be ending
KILL_SECONDS = 1.0  # the kernel's time to end what was sent SIGKILL


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
) -> Ending:
    """Runs until asked to stop or until a program that matters ends; nothing is left running whatever is raised.

    Each program writes to `logs`/ROLE.log. `tell` hears of what a person wants to know; `tick` is called every 0.2 s.
    """
    running = [_Running(program, logs / f"{program.role}.log", tell) for program in programs]
    try:
        while not stop.requested:
            for one in running:
                ending = one.check(time.monotonic())
                if ending is not None:
                    return _first_cause(ending, running)
            tick()
            time.sleep(POLL_SECONDS)
        return Ending(FINISHED, "asked to stop")
    finally:
        _stop_in_order(running[::-1])


def last_lines(path: Path, count: int) -> list[str]:
    """The last non-empty lines of a log; none when there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65_536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()][-count:]


class _Running:
    """A program in all its lives."""

    def __init__(self, program: Program, log: Path, tell: Callable[[str], None]) -> None:
        self.program = program
        self.num_endings = 0
        self.last_status: int | None = None
        self._log = log
        self._tell = tell
        self._budget = CrashBudget(program.crash_budget)
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at: float | None = 0.0  # None: given up

    def check(self, now: float) -> Ending | None:
        """Starts what is due, and looks after what has ended; returns an ending if it is the run's."""
        if self._process is None:
            if self._start_at is not None and now >= self._start_at and self.program.ready():
                self._process = _start(self.program, self._log)
            return None
        status = self._process.poll()
        if status is None:
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
            pause = max(pause, REST_SECONDS) if status == FINISHED else pause
            self._start_at = now + pause
            self._tell(f"{self.program.role} {_in_words(status)}; it starts again in {pause:.1f} s; see {self._log}")
            return None
        if self.program.essential:
            return self.ending()
        self._start_at = None
        self._tell(f"going on without {self.program.role}: {self.ending().cause}")
        return None

    def ending(self) -> Ending:
        """What to say and to return when the run ends because of this program."""
        status = FAILED if self.last_status in (None, HOPELESS) else max(FAILED, self.last_status or 0)
        last_words = ": ".join(["", *last_lines(self._log, 1)])
        if status == REFUSED:
            return Ending(status, f"{self.program.role} refused to run{last_words}; see {self._log}", self.program.role)
        often = {1: "once", 2: "twice"}.get(self.num_endings, f"{self.num_endings} times")
        words = _in_words(self.last_status or FINISHED)
        return Ending(status, f"{self.program.role} {words} {often}{last_words}; see {self._log}", self.program.role)

    @property
    def alive(self) -> bool:
        """Whether the program runs."""
        return self._process is not None and self._process.poll() is None

    def ask(self) -> None:
        """Asks the program to end."""
        if self._process is not None and self.alive:
            self._tell(f"stopping {self.program.role}")
            self._process.terminate()

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
        self._process = None


def _start(program: Program, log: Path) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def before_exec() -> None:
        die_with_parent(signal.SIGTERM)
        if os.getppid() != parent:  # It died before the line above.
            os._exit(NEIGHBOUR_GONE)
        os.nice(program.niceness)

    with log.open("ab") as output:
        return subprocess.Popen(
            program.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then stops the roles in order.
            preexec_fn=before_exec,
        )


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
    if ending.status == NEIGHBOUR_GONE:
        for one in running:
            if one.last_status not in (None, FINISHED, NEIGHBOUR_GONE):
                return one.ending()
    return ending


def _in_words(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by signal {-status} ({signal.strsignal(-status)})"
