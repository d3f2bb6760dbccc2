"""Whose the processor was while a command ran: evidence is of a machine that does nothing else."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

STAT = Path("/proc/stat")
BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq and softirq, of a core's line there [proc(5)]
OTHERS_SHARE = 0.05  # above which times say little; what the kernel does by itself is below


class ProcessorTime:
    """Counts from where it is made; the commands in between are children of this process."""

    def __init__(
        self,
        cores: Collection[int],
        *,
        stat: Path = STAT,
        clock: Callable[[], float] = time.monotonic,
        usage: Callable[[int], Any] = resource.getrusage,
    ) -> None:
        """`cores`: those that the commands are bound to. Raises OSError where the system does not tell of them."""
        self._cores = [f"cpu{core}" for core in cores]
        self._stat = stat
        self._clock = clock
        self._usage = usage
        self._since = clock()
        self._busy, self._own = self._read()

    def others_share(self) -> float:
        """Of the cores' time since, what neither this process had nor its children that have ended; 0 ... 1.

        The kernel's own work is in it, and a process that nobody has waited for.
        """
        busy, own = self._read()
        capacity = len(self._cores) * (self._clock() - self._since)
        return min(max(0.0, busy - self._busy - (own - self._own)) / capacity, 1.0)

    def _read(self) -> tuple[float, float]:
        """Seconds for which the cores were busy, and seconds of this process and of its children that have ended."""
        lines = {line.partition(" ")[0]: line.split()[1:] for line in self._stat.read_text().splitlines()}
        try:
            ticks = sum(int(lines[core][place]) for core in self._cores for place in BUSY)
        except (KeyError, IndexError, ValueError) as error:
            raise OSError(f"{self._stat} does not tell how busy {', '.join(self._cores)} were: {error}") from error
        usages = [self._usage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return ticks / os.sysconf("SC_CLK_TCK"), sum(usage.ru_utime + usage.ru_stime for usage in usages)
