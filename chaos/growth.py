"""What the roles of a run hold in memory and open files after a while, and what that has grown by."""

from __future__ import annotations

import time
from statistics import median

from chaos.processes import Footprint, footprints
from chaos.report import Figure
from chaos.run import ChaosRun

SAMPLES = 13  # footprints, of which the median counts: they span a snapshot of the replay memory
SAMPLE_SECONDS = 5.0
PATIENCE = 5  # times as long as it is to have settled for


def settled_footprints(run: ChaosRun, settle: float) -> dict[str, Footprint]:
    """Of each role, the median of several looks once no descriptor has come or gone for `settle` seconds.

    After a last fault a program may still be starting, on a busy machine for minutes: it would count as growth later.
    """
    began = unchanged = time.monotonic()
    held: list[tuple[str, int]] = []
    while max(time.monotonic() - unchanged, (time.monotonic() - began) / PATIENCE) < settle:
        run.wait(min(SAMPLE_SECONDS, settle))
        now = sorted((role, footprint.num_files) for role, footprint in footprints(run.processes()).items())
        if now != held:
            held, unchanged = now, time.monotonic()
    samples: list[dict[str, Footprint]] = []
    while len(samples) < SAMPLES:
        run.wait(SAMPLE_SECONDS)
        samples.append(footprints(run.processes()))
    return {
        role: Footprint(*(int(median(sample[role][i] for sample in samples)) for i in range(3)))
        for role in samples[-1]
        if all(role in sample for sample in samples)
    }


def growth_figures(middle: dict[str, Footprint], end: dict[str, Footprint], when: str) -> list[Figure]:
    """What each role, and all together, hold more at the end; None, which keeps to no bar, where one was not there."""
    figures = []
    for role in sorted(middle.keys() | end.keys()):
        before, after = middle.get(role), end.get(role)
        growth = 100 * (after.memory_bytes / before.memory_bytes - 1) if before and after else None
        more = after.num_files - before.num_files if before and after else None
        figures.append(Figure(f"{role}: memory at half time", before.memory_bytes / 2**20 if before else None, "MiB"))
        figures.append(Figure(f"{role}: growth {when}", growth, "%", "<= 1"))
        figures.append(Figure(f"{role}: more descriptors", more, "", "<= 0"))
    then, now = (sum(footprint.memory_bytes for footprint in half.values()) for half in (middle, end))
    whole = 100 * (now / then - 1) if middle.keys() == end.keys() and then else None
    return [*figures, Figure(f"all roles: growth {when}", whole, "%", "<= 1")]
