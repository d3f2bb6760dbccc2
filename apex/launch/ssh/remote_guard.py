"""The far end of a program started over ssh: `python -m apex.launch.ssh.remote_guard`, run in the installation there.

The first line of standard input says what to run, and has the keys; then comes a byte every second. When that input
ends, or is silent for too long, whoever started this is gone or has stopped the run, or the network is cut: the program
is asked to end, then killed. It is started again here when it fails, within its crash budget.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import TextIO

from apex.config import from_dict
from apex.errors import ConfigError, require
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import (
    FINISHED,
    HOPELESS,
    INTERRUPTED,
    NEIGHBOUR_GONE,
    POLL_SECONDS,
    REFUSED,
    Stop,
    log_to,
    reports_errors,
    stop_on_signals,
)
from apex.runtime.supervisor import Ending, Program, supervise
from apex.runtime.watchdog import take_notifier
from apex.transport.curve.key_store import write_private

BEAT_SECONDS = 1.0  # between two bytes from whoever started this
SILENCE_SECONDS = 15.0  # without one; whoever started this notices a cut in the same time
HANDOVER_SECONDS = 30.0  # for the guard before this one to end its program: the connection was lost, say

log = logging.getLogger("apex")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What to run. It goes over ssh's standard input, so that no secret is on a command line."""

    role: str
    arguments: tuple[str, ...]  # of python -m
    home: str  # folder of this guard, below the installation's; the keys go to home/keys
    keys: dict[str, str]  # text of each file
    grace_seconds: float
    stuck_seconds: float
    niceness: int
    run: dict[str, object] | None = None  # the learner's: the configuration of the run to be made, unless it is there
    argv: tuple[str, ...] = ()  # what was typed, for that run's manifest

    def encode(self) -> str:
        """One line."""
        return json.dumps(asdict(self)) + "\n"


@reports_errors("apex")
def main() -> int:
    """The composition root."""
    with stop_on_signals(take_notifier()) as signals:
        source = FileIO(sys.stdin.fileno(), closefd=False)
        try:
            job = JobSpec(**json.loads(source.readline() or b"{}"))
        except (TypeError, ValueError) as error:
            raise ConfigError("the first line is not a job; only apex train --hosts FILE starts this") from error
        try:
            ending = guard(job, Lifeline(sys.stdin.fileno(), signals))
        except OSError as error:
            raise ConfigError(str(error)) from error
        if not ending.role:  # It was stopped, which is no end of the run.
            return NEIGHBOUR_GONE
        return ending.status if ending.status in (FINISHED, REFUSED, NEIGHBOUR_GONE) else HOPELESS


class Lifeline:
    """Whoever started this: asks for the end when he is gone."""

    def __init__(self, descriptor: int, signals: Stop, silence_seconds: float = SILENCE_SECONDS) -> None:
        """`signals` was requested when this process is to end."""
        self.stop = Stop(self._look)
        self._silence_seconds = silence_seconds
        self._descriptor = descriptor
        self._signals = signals
        self._heard_at = time.monotonic()

    def _look(self) -> None:
        silent = time.monotonic() - self._heard_at > self._silence_seconds
        while select.select([self._descriptor], [], [], 0)[0]:
            if not os.read(self._descriptor, 4096):
                return self.stop.request()
            self._heard_at, silent = time.monotonic(), False
        if silent:
            log.warning("heard nothing for %.0f s from where this was started", self._silence_seconds)
        if silent or self._signals.requested:
            self.stop.request()


def guard(job: JobSpec, lifeline: Lifeline) -> Ending:
    """Runs the program until it ends, or the lifeline does. Raises ConfigError and OSError for what cannot be run."""
    home, stop = Path(job.home), lifeline.stop
    path = home / f"{job.role}.log"
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    with (home / "lock").open("a") as lock, log_to(path, "guard"):
        if not _take(lock, stop):
            return Ending(FINISHED, INTERRUPTED)
        copy = LogCopy(path, sys.stdout.fileno())
        _lay_out(home / "keys", job.keys)
        try:
            if job.run is not None:
                _make_run(job.run, job.argv)
            program = Program(
                role=job.role,
                command=(sys.executable, "-u", "-P", "-m", *job.arguments),
                grace_seconds=job.grace_seconds,
                ends_run=True,
                niceness=job.niceness,
                stuck_seconds=job.stuck_seconds,
            )
            ending = supervise([program], stop, logs=home, tell=log.warning, tick=copy)
            if ending.role and ending.status not in (FINISHED, REFUSED):
                log.error(ending.cause)
            return ending
        finally:
            shutil.rmtree(home / "keys", ignore_errors=True)
            copy()


class LogCopy:
    """Copies what comes into a log to whoever listens, as far as he takes it: nothing here waits for him."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Begins at the present end of the log."""
        os.set_blocking(descriptor, False)
        self._path = path
        self._offset = path.stat().st_size
        self._descriptor = descriptor

    def __call__(self) -> None:
        """Copies what is new."""
        with suppress(OSError), self._path.open("rb") as file:  # He is gone, or his pipe is full.
            file.seek(self._offset)
            while text := file.read(16_384):
                self._offset += os.write(self._descriptor, text)
                file.seek(self._offset)


def _take(lock: TextIO, stop: Stop) -> bool:
    """Whether no other guard has this home now: one whose connection was lost may still be ending its program.

    False: it was asked to stop before that. Raises ConfigError when it takes too long.
    """
    deadline = time.monotonic() + HANDOVER_SECONDS
    while not stop.requested:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        require(time.monotonic() < deadline, f"{lock.name} is held by another guard: this run still goes on there")
        time.sleep(POLL_SECONDS)
    return False


def _lay_out(folder: Path, files: dict[str, str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # Of a guard that was killed.
    folder.mkdir(mode=0o700)
    for name, text in files.items():
        write_private(folder / Path(name).name, text)


def _make_run(tree: dict[str, object], argv: Sequence[str]) -> None:
    """Makes the run folder, sized to this machine; one that is there goes on."""
    from apex.config.sizing import size_to_machine
    from apex.environments.factory import describe  # Other roles' guards need not wait for it.
    from apex.runtime.hardware import read_machine

    config = from_dict(tree)
    path = Path(config.run.folder) / config.run.name
    if not (path / "manifest.json").exists():
        schema = describe(config.environment, config.actor.n_step)
        RunFolder.create(size_to_machine(config, read_machine(), schema), schema, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
