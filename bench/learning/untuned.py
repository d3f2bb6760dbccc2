"""The first table of the results: games that no setting was tuned on, with intervals over the seeds of these games.

Interquartile means and probabilities of improvement with stratified bootstrap: Agarwal et al. 2021, "Deep reinforcement
learning at the edge of the statistical precipice".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from apex.runs.history import Floats
from bench.learning.comparison import values_of_seeds
from bench.learning.processor_time import OTHERS_SHARE
from bench.learning.records import Record
from bench.learning.tasks import SYSTEMS, TASKS, UNTUNED, UNTUNED_RUNS
from bench.learning.verdicts import SAME_TIME
from bench.plots.untuned import draw_untuned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Scores of random play and of a professional tester: Badia et al. 2020, "Agent57", table of all games.
RANDOM_AND_HUMAN = {
    "battle-zone": (2_360.0, 37_187.5),
    "double-dunk": (-18.6, -16.4),
    "name-this-game": (2_292.3, 8_049.0),
    "phoenix": (761.4, 7_242.6),
    "qbert": (163.9, 13_455.0),
}
RESAMPLES = 20_000
CORES = 2  # of each run
COLUMNS = ("apex", "sb3-ppo", "sb3")

Run = tuple[str, str, int]  # task, system, seed
Scores = Sequence[Floats]  # for each game, in the order of UNTUNED: scores of the seeds, [..., seeds]


def counts(record: Record) -> bool:
    """Whether the run had two cores for itself, no GPU, all of its time and committed code."""
    time = SAME_TIME * TASKS[record.task].limit_seconds
    alone = record.others_share is not None and record.others_share <= OTHERS_SHARE
    machine = record.machine["cores"] == CORES and not record.machine["gpus"]
    return machine and record.seconds >= time and alone and record.dirty is False


def missing_runs(records: Sequence[Record]) -> list[Run]:
    """Returns task, system and seed of each run of the table that has no record, in the order of the runs."""
    there = {(record.task, record.system, record.seed) for record in records}
    return [run for run in UNTUNED_RUNS if run not in there]


def normalize(task: str, scores: Floats) -> Floats:
    """Returns scores as a share of the way from random play, 0, to a human, 1."""
    random, human = RANDOM_AND_HUMAN[task]
    return (scores - random) / (human - random)


def scores_of(records: Sequence[Record], system: str) -> list[Floats]:
    """Returns the mean scores of the table's runs of a system that count: for each game those of its seeds."""
    means = {(record.task, record.system, record.seed): record.score.mean for record in records if counts(record)}
    there = [run for run in UNTUNED_RUNS if run[1] == system and run in means]
    return [np.array([means[run] for run in there if run[0] == task]) for task in UNTUNED]


def interquartile_mean(scores: Floats) -> Floats:
    """Returns the mean along the last axis without the lowest and the highest quarter of the values, rounded down."""
    cut = scores.shape[-1] // 4
    kept: Floats = np.sort(scores, axis=-1)[..., cut : scores.shape[-1] - cut].mean(axis=-1)
    return kept


def interquartile_mean_of_games(games: Scores) -> Floats:
    """Returns the interquartile mean of all seeds of all games."""
    return interquartile_mean(np.concatenate(games, axis=-1))


def probability_of_improvement(ours: Scores, theirs: Scores) -> Floats:
    """Returns the mean over games of the chance that a seed of ours scores higher than one of theirs; a tie is a half.

    Each game has an array of shape [..., seeds].
    """
    pairs = [(a[..., :, None], b[..., None, :]) for a, b in zip(ours, theirs, strict=True)]
    chances = [((a > b) + 0.5 * (a == b)).mean(axis=(-2, -1)) for a, b in pairs]
    mean: Floats = np.mean(chances, axis=0)
    return mean


def interval(statistic: Callable[..., Floats], *systems: Scores) -> tuple[float, float]:
    """Returns the 95 % interval of a statistic of systems, from seeds drawn with replacement within each game."""
    rng = np.random.default_rng(0)
    drawn = [[game[rng.integers(len(game), size=(RESAMPLES, len(game)))] for game in scores] for scores in systems]
    low, high = np.percentile(statistic(*drawn), (2.5, 97.5))
    return float(low), float(high)


def render_untuned(records: Sequence[Record], failed: Sequence[Run] = ()) -> list[str]:
    """Returns the lines of the table in Markdown. failed: runs that left a file instead of a record.

    A figure is "-" until each game has a run, and has no interval until each game has two.
    """
    own = [record for record in records if (record.task, record.system, record.seed) in UNTUNED_RUNS]
    counted = list(filter(counts, own))
    missing = missing_runs(counted)
    raw = {system: scores_of(records, system) for system in COLUMNS}
    normalized = {system: list(map(normalize, UNTUNED, games)) for system, games in raw.items()}

    def cell(statistic: Callable[..., Floats], *systems: str) -> str:
        scores = [normalized[system] for system in systems]
        fewest = min(len(seeds) for games in scores for seeds in games)
        if not fewest:
            return "-"
        figure = f"{100 * float(statistic(*scores)):.1f} %"
        if fewest == 1:
            return figure
        low, high = interval(statistic, *scores)
        return f"{figure} ({100 * low:.1f} to {100 * high:.1f})"

    lines = [f"| mean (each seed) | {' | '.join(SYSTEMS[system] for system in COLUMNS)} |", "|---" * 4 + "|"]
    for number, task in enumerate(UNTUNED):
        seeds = [values_of_seeds(raw[system][number].tolist()) or "-" for system in COLUMNS]
        lines.append(f"| {TASKS[task].game} | {' | '.join(seeds)} |")
    means = [cell(interquartile_mean_of_games, system) for system in COLUMNS]
    better = [cell(probability_of_improvement, "apex", system) for system in COLUMNS[1:]]
    lines.append(f"| interquartile mean, human-normalized | {' | '.join(means)} |")
    lines.append(f"| probability that a run of Ape-X scores higher | | {' | '.join(better)} |")
    processors = Counter(f"{SYSTEMS[record.system]} on {record.machine['cpu']}" for record in counted)
    lines += ["", "Exploration and learning rate of the peers are fitted to the time of the run."]
    lines += ["", f"Runs: {', '.join(f'{number} of {name}' for name, number in sorted(processors.items()))}."] * bool(
        counted
    )
    if missing:
        named = [
            f"{TASKS[task].game} {', '.join(f'{system} {seed}' for name, system, seed in missing if name == task)}"
            for task in UNTUNED
            if any(name == task for name, _, _ in missing)
        ]
        lines += ["", f"{len(missing)} of {len(UNTUNED_RUNS)} runs (system and seed) are missing: {'; '.join(named)}."]
    if refused := [f"{record.task} {record.name}" for record in own if not counts(record)]:
        why = "other programs, cores or GPUs, time or code"
        lines += ["", f"These runs do not count, because of {why}: {', '.join(refused)}."]
    if failed:
        named = [f"{task} {system} seed {seed}" for task, system, seed in failed]
        lines += ["", f"These runs failed: {', '.join(named)}."]
    return lines


def draw(records: Sequence[Record]) -> Figure:
    """Draws each run of the table."""
    scores = {
        SYSTEMS[system]: [normalize(*each).tolist() for each in zip(UNTUNED, scores_of(records, system), strict=True)]
        for system in COLUMNS
    }
    return draw_untuned([TASKS[task].game for task in UNTUNED], scores)
