"""The real programs around a benchmark: started as anybody starts them, on the cores that it says, gone at its end."""

from __future__ import annotations

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
from apex.errors import ChildDiedError, UsageError
from apex.replay_memory.store.file import open_file
from apex.replay_memory.store.layout import Store
from apex.replay_memory.store.location import MEMORY, store_path
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import POLL_SECONDS, Stop
from apex.runtime.spawn import spawn

T = TypeVar("T")

END_SECONDS = 15.0  # how long a program may take to end in order
START_SECONDS = 120.0  # until what was started does its work
GAP_SECONDS = 0.05  # without a change: the next one begins a burst
LONGER = 3  # times as long as asked for may be measured, where a busy machine has too few bursts until then


class Programs:
    """Programs of one run, each in a session of its own, with its log beside the others'."""

    def __init__(self, folder: Path, stop: Stop) -> None:
        self._folder = folder
        self._stop = stop
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, role: str, arguments: Sequence[str], cores: set[int] | None = None) -> subprocess.Popen[bytes]:
        """Starts `python -m apex ARGUMENTS`, which runs on `cores` only."""
        command = [sys.executable, "-m", "apex", *arguments]
        with (self._folder / f"{role}.log").open("ab") as output:
            process = spawn(command, output=output, cores=cores or (), ends_by=signal.SIGTERM)
        self._running.append((role, process))
        return process

    def check(self) -> None:
        """Raises KeyboardInterrupt when asked to stop, ChildDiedError with the last lines of who has ended."""
        if self._stop.poll():
            raise KeyboardInterrupt
        for role, process in self._running:
            if process.poll() is not None:
                said = (self._folder / f"{role}.log").read_text(errors="replace").strip().splitlines()
                last = " | ".join(said[-2:]) or "nothing"  # A program that refuses for its child's sake says so last.
                raise ChildDiedError(f"the {role} ended with status {process.returncode} and said: {last}")

    def wait_for(self, get: Callable[[], T], what: str) -> T:
        """What `get` returns once that is something; raises ChildDiedError after two minutes."""
        deadline = time.monotonic() + START_SECONDS
        while not (found := get()):
            self.check()
            if time.monotonic() > deadline:
                raise ChildDiedError(f"no {what} within {START_SECONDS:.0f} s; the logs are in {self._folder}")
            time.sleep(POLL_SECONDS)
        return found

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Ends a program and all that it has started: in order, else by force."""
        self._running = [(role, other) for role, other in self._running if other is not process]
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end_all(self) -> None:
        """Ends what still runs, the last that was started first."""
        for _, process in reversed(list(self._running)):
            self.end(process)


@contextmanager
def open_programs(folder: Path, stop: Stop) -> Iterator[Programs]:
    """Programs that end with the block, and the replay memory of the runs below `folder` with them."""
    programs = Programs(folder, stop)
    try:
        yield programs
    finally:
        programs.end_all()
        for manifest in folder.glob("*/manifest.json"):
            for path in MEMORY.glob(f"apex-{RunFolder.open(manifest.parent).run_id:016x}*"):
                path.unlink(missing_ok=True)


def control_address(config: Config) -> str:
    """HOST:PORT of the learner's control socket."""
    return f"{config.transport.bind}:{config.transport.control_port + config.transport.port_offset}"


def map_stores(run: RunFolder) -> list[Store]:
    """The replay memory of a run on this host, to look at, shard by shard; [] until all of it is there."""
    try:
        paths = [store_path(run.run_id, shard) for shard in range(run.config.replay.num_shards)]
        return [Store(open_file(path, run.schema, writable=False)) for path in paths]
    except UsageError:
        return []


def measure_rates(count: Callable[[], int], seconds: float, pieces: int, check: Callable[[], None]) -> list[float]:
    """How fast `count` grows, per second, in each of several equal pieces of the time.

    What it counts comes in bursts (a process cuts the segments of all its streams at once), so a piece lasts from the
    beginning of one burst to that of another; where they come too fast to be told apart, from one change to another.
    A busy machine may take longer over them than `seconds`: then they are waited for, up to LONGER times as long.
    Raises ChildDiedError when there are too few even so.
    """
    changes: list[tuple[float, int, float]] = []  # when, what was counted before, how long that had not changed
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
        raise ChildDiedError(f"only {len(starts)} bursts in {now - began:.3g} s, too few to measure: take more seconds")
    edges = [starts[(len(starts) - 1) * piece // pieces] for piece in range(pieces + 1)]
    return [(then[1] - first[1]) / (then[0] - first[0]) for first, then in pairwise(edges)]
