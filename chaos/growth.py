"""Measures memory and open files of a run's roles after a while, and their growth."""

import time
from statistics import median

from chaos.processes import Footprint, footprints
from chaos.report import Figure
from chaos.run import ChaosRun

SAMPLES = 13  # footprints, whose median counts; they span a snapshot of the replay memory
SAMPLE_SECONDS = 5.0
MOST_SETTLINGS = 5  # maximum time to settle, as a multiple of the settling time


def settled_footprints(run: ChaosRun, settle: float) -> dict[str, Footprint]:
    """Returns the median footprint of each role, after the descriptors were constant for `settle` seconds.

    After the last fault a program may still be starting, on a busy machine for minutes, which would later look like
    growth.
    """
    began = unchanged = time.monotonic()
    held: list[tuple[str, int]] = []
    while max(time.monotonic() - unchanged, (time.monotonic() - began) / MOST_SETTLINGS) < settle:
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
    """Returns the growth of each role and of all together; None, which misses every bar, for a role without a
    footprint.
    """
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
