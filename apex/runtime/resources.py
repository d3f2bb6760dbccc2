"""CPU time and memory of a process, including its child processes, and CPU time of the host."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import psutil

PERIOD_SECONDS = 1.0  # minimum time between two measurements; each takes 10 microseconds per process of the host


class Usage(NamedTuple):
    """CPU and memory that a process and its children use."""

    cores: float  # CPU seconds per second since the last measurement
    memory_bytes: int  # resident bytes: all private memory, plus the largest shared memory of any process


class HostUse(NamedTuple):
    """Use of the CPU cores on which this process may run, in CPU seconds per second."""

    cores: int
    busy: float  # used by all programs of the host
    own: float  # used by one process and its descendants


class ResourceMeter:
    """Measures a process and all its descendants."""

    def __init__(self, pid: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`pid`: the process to measure; None: this process. Raises psutil.NoSuchProcess."""
        self._process = psutil.Process(pid)
        self._clock = clock
        self._at = clock()
        self._seconds: dict[psutil.Process, float] = {}  # CPU seconds at the last measurement
        self._usage = Usage(0.0, self._look())

    def measure(self) -> Usage:
        """Returns the present usage, or the last one if it is less than PERIOD_SECONDS old."""
        now, before = self._clock(), self._seconds
        if now - self._at >= PERIOD_SECONDS:
            memory_bytes = self._look()
            spent = sum(seconds - before.get(process, 0.0) for process, seconds in self._seconds.items())
            self._usage = Usage(spent / (now - self._at), memory_bytes)
            self._at = now
        return self._usage

    def _look(self) -> int:
        """Stores the CPU time of each process; returns the memory of all processes in bytes."""
        self._seconds = {}
        private = shared = 0
        with suppress(psutil.Error):  # The process has ended.
            for process in [self._process, *self._process.children(recursive=True)]:
                with suppress(psutil.Error), process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info()
                    self._seconds[process] = times.user + times.system
                    private += memory.rss - memory.shared
                    shared = max(shared, memory.shared)
        return private + shared


class HostMeter:
    """Measures the use of this host's cores, and the part of a process and its descendants."""

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises psutil.NoSuchProcess."""
        self._clock = clock
        self._meter = ResourceMeter(pid, clock)
        self._usage, self._at = self._meter.measure(), clock()
        cores, self._seconds = _read_busy_seconds()
        self._use = HostUse(cores, 0.0, 0.0)

    def measure(self) -> HostUse:
        """Returns the present use, or the last one if it is less than PERIOD_SECONDS old."""
        usage = self._meter.measure()
        if usage is not self._usage:
            now, (cores, seconds) = self._clock(), _read_busy_seconds()
            self._use = HostUse(cores, (seconds - self._seconds) / (now - self._at), usage.cores)
            self._usage, self._at, self._seconds = usage, now, seconds
        return self._use


def find_launcher(pid: int) -> int:
    """Returns the process that started a program; the program itself if that is process 1, or is not known."""
    with suppress(psutil.Error):
        parent = psutil.Process(pid).parent()
        return pid if parent is None or parent.pid == 1 else parent.pid
    return pid


def _read_busy_seconds() -> tuple[int, float]:
    """Returns the number of cores on which this process may run, and the CPU seconds that programs have used there."""
    allowed = os.sched_getaffinity(0)
    times = [each for core, each in enumerate(psutil.cpu_times(percpu=True)) if core in allowed]
    return len(times), sum(each.user + each.nice + each.system for each in times)
