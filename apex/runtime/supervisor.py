"""Keeps programs running: starts them, restarts failed ones within a budget, and stops all of them in order."""

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
from typing import BinaryIO

from apex.config import RunConfig
from apex.facts import Ending, Failure, FailureKind, ProgramEvent
from apex.runtime.logs import ENTRIES
from apex.runtime.text import last_lines
from apexreplay.errors import FAILED, FINISHED, HOPELESS, NEIGHBOUR_GONE, REFUSED
from apexreplay.facts import Waiting
from apexreplay.process.children import KILL_SECONDS
from apexreplay.process.lifecycle import POLL_SECONDS, Stop, Wait
from apexreplay.process.spawn import spawn
from apexreplay.process.watchdog import Listener, StuckDetector, abort

log = logging.getLogger("apex")

FIRST_PAUSE_SECONDS = 0.5  # pause before the first restart; doubles with each recent crash
LONGEST_PAUSE_SECONDS = 10.0
FORGET_SECONDS = 120.0  # time in which the level of CrashBudget falls by one crash
INNOCENT_COST = 0.25  # level added by a restart after exit status 0 or the loss of another process; a crash adds 1
SHORT_LIFE_SECONDS = 15.0  # A program that fails earlier after its start has probably done nothing.
SILENT_SECONDS = 5.0  # A program that is given more time to save must send heartbeats more often.
REST_SECONDS = 3.0  # minimum pause before a restart after exit status 0, because the run may be ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program of one role. Programs start in order and stop in reverse order; a group stops together."""

    role: str
    command: tuple[str, ...]
    crash_budget: float = RunConfig().crash_budget  # maximum level of CrashBudget; above it, no restart follows
    grace_seconds: float = 2.0  # time from SIGTERM to SIGKILL
    saving_seconds: float = 0.0  # further time before SIGKILL, as long as it sends heartbeats
    stops_with: str = ""  # group name: adjacent programs of the same group stop together; "": no group
    ends_run: bool = False  # True: exit status 0 ends the run; False: the program is restarted
    essential: bool = True  # False: the run continues without the program when its budget is used up
    niceness: int = 0  # above 0: the program leaves CPU time to other programs
    stuck_seconds: float = 0.0  # the program is killed after this time without a heartbeat (sd_notify); 0: no limit
    ready: Callable[[], bool] = lambda: True  # the program is started and restarted only if this returns True


class CrashBudget:
    """A leaky bucket: each crash raises the level, which falls over time and determines the pause before a restart."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._level = 0.0
        self._at = 0.0

    def charge(self, cost: float, now: float) -> float | None:
        """Adds `cost` to the level. Returns the pause in seconds before the restart; None if the budget is used up."""
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
    notify: Callable[[ProgramEvent], None] = lambda event: None,
    tick: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Ending:
    """Runs the programs until a stop is requested or a program ends the run, then stops all, even on an exception.

    The run has failed if an essential program has failed again and again until the end, within its crash budget.
    Each program writes to `logs`/ROLE.log and gets `environment` in addition to the environment of this process.
    `notify` is called with each event, `tick` every 0.2 s.
    """
    running = [_Running(program, logs / f"{program.role}.log", notify, environment) for program in programs]
    standstill = Wait("launcher")
    try:
        while not stop.poll():
            for one in running:
                ending = one.check(time.monotonic())
                if ending is not None:
                    return _first_cause(ending, running)
            _kill_stuck(running, standstill)
            tick()
            time.sleep(POLL_SECONDS)
        return Ending(FINISHED)
    finally:
        _stop_in_order(running[::-1])


@dataclass(eq=False)
class _Running:
    """One program, across all its restarts."""

    program: Program
    log: Path
    notify: Callable[[ProgramEvent], None]
    environment: Mapping[str, str]

    def __post_init__(self) -> None:
        self.num_endings = 0
        self.last_status: int | None = None
        self.is_stuck = False
        self._budget = CrashBudget(self.program.crash_budget)
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at: float | None = 0.0  # None: do not start the program again
        self._ended_well = False  # last exit status was 0; reported only when the program is restarted
        self._listener: Listener | None = None
        self._detector: StuckDetector | None = None
        self._stuck_for = 0.0  # seconds without a heartbeat if the program was killed as stuck; else 0
        self._started_at = 0.0
        self._short_lives = 0  # number of failures in a row, each soon after a start

    def check(self, now: float) -> Ending | None:
        """Starts the program if it is due, and handles its end. Returns an Ending if the run ends."""
        program = self.program
        if self._process is None:
            if self._start_at is None or now < self._start_at or not program.ready():
                return None
            try:
                self._start()
            except OSError as error:  # no process, memory or descriptor is left
                self._started_at = now
                with suppress(OSError), self.log.open("a") as log_file:
                    log_file.write(f"cannot start {program.role}: {error}\n")
                return self._handle_end(FAILED, now)
            return None
        status = self._process.poll()
        if status is None:
            self.is_stuck = self._detector is not None and self._detector.check(program.stuck_seconds)
            return None
        self.kill()  # Child processes may still be running.
        return self._handle_end(status, now)

    def _handle_end(self, status: int, now: float) -> Ending | None:
        program = self.program
        if status == FINISHED and program.ends_run:
            return Ending(FINISHED, program.role)
        if status == FINISHED and not program.ready():
            if not self._is_young(now):
                self._short_lives = 0
            return None  # The program has finished, and the run is ending. Failures soon before it remain.
        self.last_status = status
        self.num_endings += 1
        cost = INNOCENT_COST if status in (FINISHED, NEIGHBOUR_GONE) else 1.0
        self._short_lives = self._short_lives + 1 if cost == 1.0 and self._is_young(now) else 0
        pause = None if status in (REFUSED, HOPELESS) else self._budget.charge(cost, now)
        if pause is not None:
            self._ended_well = status == FINISHED
            self._start_at = now + (max(pause, REST_SECONDS) if self._ended_well else pause)
            if not self._ended_well:
                self.notify(ProgramEvent(program.role, "restarting", pause, self.failure()))
            return None
        if program.essential:
            return self.ending()
        self._start_at = None
        self.notify(ProgramEvent(program.role, "abandoned", failure=self.failure()))
        return None

    def keeps_failing(self, now: float) -> bool:
        """Whether the program has failed several times in a row, each time soon after its start, until now."""
        is_useless = not self.alive or self._is_young(now)
        return self.program.essential and self._short_lives > 1 and is_useless

    def _is_young(self, now: float) -> bool:
        return now - self._started_at < SHORT_LIFE_SECONDS

    def failure(self) -> Failure:
        """Returns why the program ended."""
        status = self.last_status or FINISHED
        kind: FailureKind = "signal" if status < 0 else "refused" if status == REFUSED else "exit"
        return Failure(
            role=self.program.role,
            kind="stuck" if self._stuck_for else kind,
            value=self._stuck_for or abs(status),
            times=self.num_endings,
            detail="" if self._stuck_for else "".join(last_lines(self.log, 1)),
            log=str(self.log),
        )

    def ending(self) -> Ending:
        """Returns the Ending of a run that ends because of this program."""
        status = max(FAILED, self.last_status or FAILED)
        return Ending(status, self.program.role, self.failure())

    def _start(self) -> None:
        program = self.program
        environment = {**self.environment, ENTRIES: str(self.log.with_suffix(".jsonl"))}
        if self._ended_well:
            self.notify(ProgramEvent(program.role, "restarting", failure=self.failure()))
        self._ended_well, self._stuck_for, self._detector = False, 0.0, None
        if program.stuck_seconds:
            self._listener = Listener(program.stuck_seconds)
            environment |= self._listener.environment
        command, niceness = program.command, program.niceness
        try:
            with _open_log(self.log) as output:
                self._process = spawn(command, output=output, environment=environment, niceness=niceness)
        except OSError:
            if self._listener is not None:
                self._listener.close()
            raise
        self._started_at = time.monotonic()
        if self._listener is not None:
            self._detector = StuckDetector(self._listener.count, self._process.pid)

    @property
    def alive(self) -> bool:
        """Whether the program is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat; 0 if the program sends none."""
        return self._detector.silence if self._detector is not None else 0.0

    def kill_as_stuck(self) -> None:
        """Kills the program and its children. The program first logs its stack traces, unless SIGSTOP stopped it."""
        if self._process is not None:
            self._stuck_for = self.silence
            abort(self._process.pid, self._process.wait)
            self.send_kill()

    def request_stop(self) -> None:
        """Sends SIGTERM to the program."""
        if self._process is not None and self.alive:
            self.notify(ProgramEvent(self.program.role, "stopping"))
            self._process.send_signal(signal.SIGTERM)

    def stop(self, requested_at: float) -> None:
        """Waits until the grace period since `requested_at` is over, and kills the program's remaining processes.

        Waits longer for a program that may save for longer, as long as it sends heartbeats. One that has sent none yet
        has nothing to save.
        """
        if self._process is None:
            return
        grace, saving = self.program.grace_seconds, self.program.saving_seconds
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, requested_at + grace - time.monotonic()))
        if self._detector is not None:
            self._detector.check(SILENT_SECONDS)  # reads the heartbeats that have come since the last check
        if self.alive and saving and (self._detector is None or self._detector.has_begun):
            self.notify(ProgramEvent(self.program.role, "saving", saving))
            self._wait_while_beating(requested_at + grace + saving)
            grace = time.monotonic() - requested_at
        if self.alive and self.program.essential:  # Killing any other program, such as TensorBoard, loses nothing.
            self.notify(ProgramEvent(self.program.role, "killing", grace))
        self.kill()

    def _wait_while_beating(self, deadline: float) -> None:
        detector = self._detector  # None: heartbeats have no limit
        while self.alive and time.monotonic() < deadline:
            if detector is not None and detector.check(SILENT_SECONDS):
                return
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """Kills the program and its children immediately."""
        if self._process is None:
            return
        self.send_kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        self._process, self.is_stuck = None, False
        if self._listener is not None:
            self._listener.close()

    def send_kill(self) -> None:
        """Sends SIGKILL to the program and its children."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _kill_stuck(running: Sequence[_Running], standstill: Wait) -> None:
    """Kills each program whose heartbeats have stopped for too long.

    If several programs are watched and no other one has sent a heartbeat recently, kills none: the machine is probably
    too busy, or all programs were stopped.
    """
    watched = [one for one in running if one.alive and one.program.stuck_seconds]
    stuck = [one for one in watched if one.is_stuck]
    others = [one for one in watched if one not in stuck]
    if not stuck:
        standstill.over()
    elif len(watched) > 1 and not any(one.silence < one.program.stuck_seconds / 2 for one in others):
        standstill.on(Waiting("any_heartbeat"))
    else:
        for one in stuck:
            one.kill_as_stuck()


def _open_log(path: Path) -> BinaryIO:
    """Opens a log to append to; if that fails, the program runs without a log."""
    try:
        return path.open("ab")
    except OSError as error:
        log.warning("cannot write %s: %s; the program runs without a log", path, error.strerror)
        return open(os.devnull, "ab")


def _stop_in_order(running: Sequence[_Running]) -> None:
    try:
        for _, group in groupby(running, key=lambda one: one.program.stops_with or id(one)):
            together, requested_at = list(group), time.monotonic()
            for one in together:
                one.request_stop()
            for one in together:
                one.stop(requested_at)
    finally:  # A second Ctrl-C raises an exception, which skips all grace periods; a third one must find none alive.
        for one in running:
            one.send_kill()
        for one in running:
            one.kill()


def _first_cause(ending: Ending, running: Sequence[_Running]) -> Ending:
    """Returns the ending of the program that failed first, if `ending` only reports the loss of another process.

    If `ending` reports no failure, returns that of a program that keeps failing, if there is one.
    """
    if ending.status == FINISHED:
        return next((one.ending() for one in running if one.keeps_failing(time.monotonic())), ending)
    if ending.status != NEIGHBOUR_GONE:
        return ending
    return next((one.ending() for one in running if one.last_status not in (None, FINISHED, NEIGHBOUR_GONE)), ending)
