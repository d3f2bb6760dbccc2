"""The share of the cores that other processes used while a command ran. A record needs an otherwise idle machine."""

import os
import resource
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

STAT = Path("/proc/stat")
# user, nice, system, irq, softirq, and steal, the time of other virtual machines, in the line of a core [proc(5)]
BUSY = (0, 1, 2, 5, 6, 7)
OTHERS_SHARE = 0.05  # A higher share makes times unreliable. The kernel's own work is below it.


class ProcessorTime:
    """Counts from its creation. The commands in between are children of this process."""

    def __init__(
        self,
        cores: Collection[int],
        *,
        stat: Path = STAT,
        clock: Callable[[], float] = time.monotonic,
        usage: Callable[[int], Any] = resource.getrusage,
    ) -> None:
        """`cores`: those that the commands are bound to. Raises OSError if the system does not report their use."""
        self._cores = [f"cpu{core}" for core in cores]
        self._stat = stat
        self._clock = clock
        self._usage = usage
        self._since = clock()
        self._busy, self._own = self._read()

    def others_share(self) -> float:
        """Returns the share of the cores' time, 0 ... 1, that neither this process nor its ended children have used.

        The share includes the kernel's own work and children that nobody has waited for.
        """
        busy, own = self._read()
        capacity = len(self._cores) * (self._clock() - self._since)
        return min(max(0.0, busy - self._busy - (own - self._own)) / capacity, 1.0)

    def _read(self) -> tuple[float, float]:
        """Returns the busy seconds of the cores, and the seconds of this process and its ended children."""
        lines = {line.partition(" ")[0]: line.split()[1:] for line in self._stat.read_text().splitlines()}
        try:
            ticks = sum(int(lines[core][place]) for core in self._cores for place in BUSY)
        except (KeyError, IndexError, ValueError) as error:
            raise OSError(f"{self._stat} has no times of {', '.join(self._cores)}: {error}") from error
        usages = [self._usage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return ticks / os.sysconf("SC_CLK_TCK"), sum(usage.ru_utime + usage.ru_stime for usage in usages)
