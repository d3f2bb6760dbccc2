"""Starts the real programs of a run for a benchmark, on given cores, and stops them at the end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from apex.config import Config
from apex.runs.folder import RunFolder
from apexreplay.errors import ChildDiedError, UsageError
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.process.spawn import spawn
from apexreplay.store.file import open_file
from apexreplay.store.layout import Store
from apexreplay.store.location import memory_folder, store_path

T = TypeVar("T")

END_SECONDS = 15.0  # time for a program to end after SIGTERM
START_SECONDS = 120.0  # time until a started program is ready
GAP_SECONDS = 0.05  # A change after a longer pause begins a new burst.
LONGER = 3  # A busy machine with few bursts may be measured this many times longer.


class Programs:
    """The programs of one run, each in its own session and with its own log."""

    def __init__(self, folder: Path, stop: Stop) -> None:
        self._folder = folder
        self._stop = stop
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, role: str, arguments: Sequence[str], cores: set[int] | None = None) -> subprocess.Popen[bytes]:
        """Starts `python -m apex ARGUMENTS` on these cores only."""
        command = [sys.executable, "-m", "apex", *arguments]
        with (self._folder / f"{role}.log").open("ab") as output:
            process = spawn(command, output=output, cores=cores or (), ends_by=signal.SIGTERM)
        self._running.append((role, process))
        return process

    def check(self) -> None:
        """Raises KeyboardInterrupt if a stop was requested, and ChildDiedError with the last lines of a program that
        has ended.
        """
        if self._stop.poll():
            raise KeyboardInterrupt
        for role, process in self._running:
            if process.poll() is not None:
                lines = (self._folder / f"{role}.log").read_text(errors="replace").strip().splitlines()
                # A program that ends because of its child prints the cause last.
                last = " | ".join(lines[-2:]) or "nothing"
                raise ChildDiedError(f"the {role} ended with status {process.returncode}; last lines: {last}")

    def wait_for(self, get: Callable[[], T], what: str) -> T:
        """Waits until `get` returns a true value, and returns it; raises ChildDiedError after two minutes."""
        deadline = time.monotonic() + START_SECONDS
        while not (found := get()):
            self.check()
            if time.monotonic() > deadline:
                raise ChildDiedError(f"no {what} within {START_SECONDS:.0f} s; the logs are in {self._folder}")
            time.sleep(POLL_SECONDS)
        return found

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Stops a program and all its processes; kills them after `END_SECONDS`."""
        self._running = [(role, other) for role, other in self._running if other is not process]
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end_all(self) -> None:
        """Stops the running programs, the youngest first."""
        for _, process in reversed(list(self._running)):
            self.end(process)


@contextmanager
def open_programs(folder: Path, stop: Stop) -> Iterator[Programs]:
    """Yields programs. On exit, stops them and removes the replay memory of the runs below `folder`."""
    programs = Programs(folder, stop)
    try:
        yield programs
    finally:
        programs.end_all()
        for manifest in folder.glob("*/manifest.json"):
            for path in memory_folder().glob(f"apex-{RunFolder.open(manifest.parent).run_id:016x}*"):
                path.unlink(missing_ok=True)


def control_address(config: Config) -> str:
    """Returns HOST:PORT of the learner's control socket."""
    return f"{config.transport.bind}:{config.transport.control_port + config.transport.port_offset}"


def map_stores(run: RunFolder) -> list[Store]:
    """Maps the replay memory of a run on this host, shard by shard; returns [] until all of it exists."""
    try:
        paths = [store_path(run.run_id, shard) for shard in range(run.config.replay.num_shards)]
        return [Store(open_file(path, run.schema.table, writable=False)) for path in paths]
    except UsageError:
        return []


def measure_rates(count: Callable[[], int], seconds: float, pieces: int, check: Callable[[], None]) -> list[float]:
    """Returns the growth of `count` per second in each of several equal parts of the time.

    The count grows in bursts, because a process cuts the segments of all its streams at once. Therefore a part begins
    and ends at the beginning of a burst, or at any change if the bursts cannot be separated. A busy machine may need up
    to LONGER times `seconds`. Raises ChildDiedError if there are too few bursts even then.
    """
    changes: list[tuple[float, int, float]] = []  # when a burst began, the count before it, and the pause before it
    began = now = changed = time.monotonic()
    known = count()
    starts = changes
    while now < began + seconds or (len(starts) <= pieces and now < began + LONGER * seconds):
        check()
        time.sleep(0.001)
        now, number = time.monotonic(), count()
        if number != known:
            changes.append((now, known, now - changed))
            known, changed = number, now
        if now >= began + seconds:
            dense = sum(silence for *_, silence in changes if silence <= GAP_SECONDS) > (now - began) / 2
            starts = [change for change in changes if dense or change[2] > GAP_SECONDS]
    if len(starts) <= pieces:
        raise ChildDiedError(
            f"only {len(starts)} bursts in {now - began:.3g} s, too few to measure: use a larger --seconds"
        )
    edges = [starts[(len(starts) - 1) * piece // pieces] for piece in range(pieces + 1)]
    return [(then[1] - first[1]) / (then[0] - first[0]) for first, then in pairwise(edges)]
