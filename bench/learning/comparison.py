"""A table for tasks without a bar: each seed, also by scores without any selection of a policy."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apex.runs.history import Floats, Series
from apex.runs.plots.aggregate import read_csv
from bench.learning.records import Record, record_path
from bench.learning.tasks import ALGORITHMS, SYSTEMS, TASKS, VARIANTS, LearningTask

NEAR = 0.2  # Evaluations count for "at equal steps" and minutes up to this share of them before and after.
LAST = 2 / 3  # of the steps of a run, where the last third begins


def render_comparison(root: Path, records: Sequence[Record]) -> str:
    """Returns a column for each system and a row for each kind of score, or "" for a task with a bar.

    records: those of one task.
    """
    task = TASKS[records[0].task]
    if not has_peers(task):
        return ""
    peers = [record for record in records if is_peer(record.system)]
    columns = []
    for system in (system for system in SYSTEMS if any(record.system == system for record in records)):
        seeds = sorted((record for record in records if record.system == system), key=lambda record: record.seed)
        columns.append(
            [SYSTEMS[system], *_scores(root, task, seeds), _order(seeds, peers if is_compared(system) else [])]
        )
    steps, minutes = f"near {task.equal_steps:,} steps", f"near {task.equal_minutes:g} minutes"
    names = [
        "final policy",
        "best policy",
        "last third of the evaluations",
        steps,
        minutes,
        "every seed above every peer's",
    ]
    head, *rows = zip(["mean (each seed)", *names], *columns, strict=True)
    shown = [head, ["---"] * len(head), *(row for row in rows if any(row[1:]))]
    return "\n".join(f"| {' | '.join(row)} |" for row in shown)


def has_peers(task: LearningTask) -> bool:
    """Whether the task has no score as a bar, but other systems to compare with."""
    return task.bar is None and task.num_seeds > 0


def is_compared(system: str) -> bool:
    """Whether a system is ours, and not a variant of an ablation."""
    return system == "apex" or system in ALGORITHMS


def is_peer(system: str) -> bool:
    """Whether a system belongs to another project."""
    return system != "apex" and system not in VARIANTS


def peers_of(record: Record, others: Sequence[Record]) -> list[Record]:
    """Returns the records on the same processor: elsewhere, the same time is worth more or less."""
    return [other for other in others if is_same_processor(other, record)]


def is_above(record: Record, others: Sequence[Record]) -> bool:
    """Whether the score is above all scores of the other systems on the same processor."""
    pairs = [(record, other) for other in peers_of(record, others)]
    return all(ours > theirs for ours, theirs in (_scores_of(pair, final=have_finals(pair)) for pair in pairs))


def have_finals(records: Sequence[Record]) -> bool:
    """Whether the final policy of every run was scored.

    If so, these scores are compared: a best policy is selected by evaluations, of which systems make more or less.
    """
    return all(record.final_score is not None for record in records)


def mean_score(records: Sequence[Record], *, final: bool) -> float:
    """Returns the mean score of the final policies, or of the best ones."""
    return statistics.mean(_scores_of(records, final=final))


def is_same_processor(record: Record, other: Record) -> bool:
    """Whether two runs had the same processor. The oldest records lack family and model."""
    names: list[str] = [record.machine["cpu"], other.machine["cpu"]]
    shorter, longer = sorted(names, key=len)
    return longer == shorter or longer.startswith(f"{shorter} (family ")


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
    for processor, count in Counter(record.machine["cpu"] for record in ours).items():
        others = peers_of(next(record for record in ours if record.machine["cpu"] == processor), theirs)
        orders *= math.comb(count + len(others), count)
    return f"1 in {orders} by chance"


def _scores_of(records: Sequence[Record], *, final: bool) -> list[float]:
    return [record.final_score.mean if final and record.final_score else record.score.mean for record in records]


def _scores(root: Path, task: LearningTask, seeds: Sequence[Record]) -> list[str]:
    """Returns the scores of a system: of both policies, of the last third, at equal steps and after equal minutes."""
    curves = [read_csv(record_path(root, record.task, record.system, record.seed, ".csv")) for record in seeds]
    steps, minutes = task.equal_steps, task.equal_minutes
    return [
        values_of_seeds([record.final_score.mean if record.final_score else None for record in seeds]),
        values_of_seeds([record.score.mean for record in seeds]),
        values_of_seeds([mean_of_last_third(curve) for curve in curves]),
        values_of_seeds([score_at(curve.steps, curve.values, steps) for curve in curves] if steps else []),
        values_of_seeds([score_at(curve.seconds, curve.values, 60 * minutes) for curve in curves] if minutes else []),
    ]


def _order(seeds: Sequence[Record], others: Sequence[Record]) -> str:
    compared = [each for each in seeds if peers_of(each, others)]
    if not compared:
        return ""
    if not all(is_above(each, others) for each in compared):
        return "no"
    those = f", with {len(compared)} of {len(seeds)} seeds" * (len(compared) < len(seeds))
    return f"yes{those} ({chance_of_order(compared, others)})"


def values_of_seeds(values: Sequence[float | None]) -> str:
    """Returns one value per seed, after their mean if all have one; "" for no seed."""
    each = ", ".join("-" if value is None else f"{value:.1f}" for value in values)
    known = [value for value in values if value is not None]
    if not known:
        return "-" * bool(values)
    return f"{sum(known) / len(known):.1f} ({each})" if len(known) == len(values) > 1 else each
