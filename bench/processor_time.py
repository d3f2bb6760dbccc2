"""Whose the processor was while a command ran: evidence is of a machine that does nothing else."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Collection
from pathlib import Path

STAT = Path("/proc/stat")
BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq and softirq, of a line there [proc(5)]
OTHERS_SHARE = 0.05  # above which times say little; the kernel's own work is below


class ProcessorTime:
    """Counts from where it is made; the commands in between are children of this process."""

    def __init__(self, cores: Collection[int], stat: Path = STAT) -> None:
        """`cores`: those that the commands are bound to. Raises OSError, ValueError where Linux does not tell."""
        self._cores = frozenset(f"cpu{core}" for core in cores)
        self._stat = stat
        self._since = time.monotonic()
        self._busy, self._own = self._read()

    def others_share(self) -> float:
        """Of the cores' time since, the share of others (kernel too), by children that have ended; 0 ... 1.

        A process that nobody has waited for counts as another.
        """
        busy, own = self._read()
        capacity = len(self._cores) * (time.monotonic() - self._since)
        return min(max(0.0, busy - self._busy - (own - self._own)) / capacity, 1.0)

    def _read(self) -> tuple[float, float]:
        """Seconds for which the cores were busy, and seconds of this process and of its children that have ended."""
        lines = [line.split() for line in self._stat.read_text().splitlines()]
        ticks = sum(int(line[1 + place]) for line in lines if line[0] in self._cores for place in BUSY)
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return ticks / os.sysconf("SC_CLK_TCK"), sum(usage.ru_utime + usage.ru_stime for usage in usages)
