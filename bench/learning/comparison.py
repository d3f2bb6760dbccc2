"""The second table: games without a bar, seed by seed, also by scores without any selection of a policy."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apex.runs.history import Floats, Series
from apex.runs.plots.aggregate import read_csv
from bench.learning.records import Record, record_path
from bench.learning.tasks import SYSTEMS, TASKS, LearningTask

COLUMNS = (
    "task",
    "system",
    "seeds",
    "best policy",
    "final policy",
    "mean of the last third",
    "at equal steps",
    "after equal minutes",
    "each above each",
)
NEAR = 0.2  # Evaluations count for "at equal steps" and minutes up to this share of them before and after.
LAST = 2 / 3  # of the steps of a run, where the last third begins


def render_comparison(root: Path, records: Sequence[Record]) -> str:
    """Returns the table, or "" if no task without a bar has a record."""
    lines = []
    for name, task in TASKS.items():
        own = [record for record in records if record.task == name and has_peers(task)]
        systems = [system for system in SYSTEMS if any(record.system == system for record in own)]
        for system in systems:
            seeds = sorted((record for record in own if record.system == system), key=lambda record: record.seed)
            others = [record for record in own if record.system != system]
            lines.append(_row(root, task, seeds, others if system == "apex" else []))
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*head, *lines]) if lines else ""


def has_peers(task: LearningTask) -> bool:
    """Whether the task has no score as a bar, but other systems to compare with."""
    return task.bar is None and task.num_seeds > 0


def peers_of(record: Record, others: Sequence[Record]) -> list[Record]:
    """Returns the records on the same processor: elsewhere, the same time is worth more or less."""
    return [other for other in others if processor_of(other) == processor_of(record)]


def is_above(record: Record, others: Sequence[Record]) -> bool:
    """Whether the score is above all scores of the other systems on the same processor."""
    return all(record.score.mean > other.score.mean for other in peers_of(record, others))


def processor_of(record: Record) -> str:
    """Returns the processor's name without family and model, which older records lack."""
    name: str = record.machine["cpu"]
    return name.partition(" (family")[0]


def mean_of_last_third(curve: Series) -> float:
    """Returns the mean score of all evaluations in the last third of a run's steps."""
    return float(curve.values[curve.steps >= LAST * curve.steps[-1]].mean())


def score_at(x: Floats, scores: Floats, place: float) -> float | None:
    """Returns the mean score of the evaluations near `place`; None if there was none, or the run ended before.

    x: steps or seconds of each evaluation.
    """
    near = np.abs(x - place) <= NEAR * place
    return float(scores[near].mean()) if near.any() and x[-1] >= place else None


def chance_of_order(ours: Sequence[Record], theirs: Sequence[Record]) -> str:
    """Returns how often each of our seeds would be above each of theirs if both systems were equal."""
    orders = 1
    for processor in {processor_of(record) for record in ours}:
        count, others = (sum(processor_of(record) == processor for record in side) for side in (ours, theirs))
        orders *= math.comb(count + others, count)
    return f"1 in {orders} by chance"


def _row(root: Path, task: LearningTask, seeds: Sequence[Record], others: Sequence[Record]) -> str:
    curves = [read_csv(record_path(root, record.task, record.system, record.seed, ".csv")) for record in seeds]
    finals = [record.final_score.mean if record.final_score else None for record in seeds]
    steps, minutes = task.equal_steps, task.equal_minutes
    by_steps = [score_at(curve.steps, curve.values, steps) for curve in curves] if steps else []
    by_minutes = [score_at(curve.seconds, curve.values, 60 * minutes) for curve in curves] if minutes else []
    order = ""
    if others:
        above = all(is_above(record, others) for record in seeds)
        order = f"yes; {chance_of_order(seeds, others)}" if above else "no"
    cells = [
        task.name,
        SYSTEMS[seeds[0].system],
        ", ".join(str(record.seed) for record in seeds),
        values_of_seeds([record.score.mean for record in seeds]),
        values_of_seeds(finals),
        values_of_seeds([mean_of_last_third(curve) for curve in curves]),
        values_of_seeds(by_steps) + f" ({steps:,})" * bool(by_steps),
        values_of_seeds(by_minutes) + f" ({minutes:g})" * bool(by_minutes),
        order,
    ]
    return f"| {' | '.join(cells)} |"


def values_of_seeds(values: Sequence[float | None]) -> str:
    """Returns one value per seed, and their mean if all have one."""
    each = ", ".join("-" if value is None else f"{value:.1f}" for value in values)
    known = [value for value in values if value is not None]
    return f"{each}; mean {sum(known) / len(known):.1f}" if len(known) == len(values) > 1 else each
