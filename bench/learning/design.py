"""A designed experiment: settings with a few levels each, and their main effects on the score with intervals.

Its TOML file is written before the first run:

    options = ["--env", "MinAtar/Asterix-v1", "--max-updates", "40000"]  # of every run, with --env and without a seed
    seeds = [101, 102, 103]  # at least three
    minutes = 20  # time limit of a run; default: none
    half = true  # run only the combinations that change an even number of factors; default: all

    [factors]  # the first level of each is the baseline
    "learner.target_period" = [100, 1000]
    "learner.learning_rate" = [3e-4, 1e-4]
    "actor.n_step" = [3, 1]
"""

import itertools
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, mean
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from apex.sweep.space import options_of
from apexreplay.errors import UsageError, require
from bench.learning.comparison import values_of_seeds

MIN_SEEDS = 3
CONFIDENCE = 0.95

Levels = tuple[Any, ...]  # of each factor
Scores = Mapping[Levels, Sequence[float]]  # of each seed


class Design(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """See the module."""

    options: list[str]  # with --env
    seeds: Annotated[list[int], Meta(min_length=MIN_SEEDS)]
    factors: Annotated[dict[str, list[Any]], Meta(min_length=1)]
    minutes: Annotated[float, Meta(gt=0)] = math.inf
    half: bool = False

    @property
    def environment(self) -> str:
        """Returns the id that follows --env."""
        return self.options[self.options.index("--env") + 1]

    def cells(self) -> list[Levels]:
        """Returns the combinations of levels, the baseline first."""
        every = itertools.product(*self.factors.values())
        return [levels for levels in every if not self.half or len(self.changes(levels)) % 2 == 0]

    def changes(self, levels: Levels) -> dict[str, Any]:
        """Returns the factors that differ from the baseline."""
        pairs = zip(self.factors.items(), levels, strict=True)
        return {name: level for (name, known), level in pairs if level != known[0]}

    def settings(self, levels: Levels) -> list[str]:
        """Returns the options of a run, beside seed and time limit."""
        pairs = zip(self.factors, levels, strict=True)
        return [*self.options, *(option for name, level in pairs for option in options_of(name, level))]


class Effect(NamedTuple):
    """The mean score with a level of a factor, minus that with the factor's first level."""

    factor: str
    level: Any
    value: float
    low: float  # interval
    high: float

    @property
    def conclusion(self) -> str:
        """Returns what the interval allows to say."""
        if self.low <= 0 <= self.high:
            return "none: the seeds differ too much"
        return "higher" if self.low > 0 else "lower"


def read_design(path: Path) -> Design:
    """Raises UsageError for a file that is no design."""
    try:
        design = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Design)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read the experiment {path}: {cause}", "see bench/learning/design.py") from error
    for name, levels in (("seeds", design.seeds), *design.factors.items()):
        shown = list(map(json.dumps, levels))
        require(len(shown) > 1, f"{path}: {name} has only one value, {', '.join(shown) or 'none'}")
        require(len({*shown}) == len(shown), f"{path}: {name} has a value twice: {', '.join(shown)}")
    require("--env" in design.options[:-1], f"{path}: options must have --env and an environment")
    pairs = all(len(levels) == 2 for levels in design.factors.values())
    fits = pairs and len(design.factors) > 2
    require(not design.half or fits, f"{path}: half needs three or more factors of two levels")
    return design


def effects(design: Design, scores: Scores) -> list[Effect]:
    """Returns the main effect of each level of each factor beside the first; every cell has a score of each seed.

    The variance is that of the seeds within cells, which is assumed to be the same in all. An effect is a mean over the
    levels of the other factors.
    """
    cells, num_seeds = design.cells(), len(design.seeds)
    squares = sum((score - mean(scores[cell])) ** 2 for cell in cells for score in scores[cell])
    freedom = len(cells) * (num_seeds - 1)
    found = []
    for place, (name, (first, *others)) in enumerate(design.factors.items()):
        with_first = [mean(scores[cell]) for cell in cells if cell[place] == first]
        for level in others:
            with_level = [mean(scores[cell]) for cell in cells if cell[place] == level]
            value = mean(with_level) - mean(with_first)
            variance = squares / freedom / num_seeds * (1 / len(with_level) + 1 / len(with_first))
            reach = t_quantile((1 + CONFIDENCE) / 2, freedom) * math.sqrt(variance)
            found.append(Effect(name, level, value, value - reach, value + reach))
    return found


def t_quantile(probability: float, freedom: int) -> float:
    """Returns the quantile of Student's t; from 4 degrees of freedom on with an error below 0.5 %, for 0.025 ... 0.975.

    Abramowitz and Stegun 1964, 26.7.5.
    """
    x = NormalDist().inv_cdf(probability)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / freedom**power for power, term in enumerate(terms, 1))


def render_design(design: Design, scores: Scores) -> list[str]:
    """Returns the tables of cells and effects in Markdown. Without effects while runs are missing."""
    lines = ["| changed | score: mean (each seed) |", "|---|---|"]
    cells = design.cells()
    for cell in cells:
        changes = ", ".join(f"{name} {_show(level)}" for name, level in design.changes(cell).items())
        lines.append(f"| {changes or 'nothing'} | {values_of_seeds(scores.get(cell, ())) or '-'} |")
    num_runs = len(cells) * len(design.seeds)
    missing = num_runs - sum(map(len, scores.values()))
    if missing:
        return [*lines, "", f"No effects yet: {missing} of {num_runs} runs are missing."]
    lines += ["", f"| setting | effect ({CONFIDENCE:.0%} interval) | conclusion |".replace("%", " %"), "|---|---|---|"]
    for effect in effects(design, scores):
        first = _show(design.factors[effect.factor][0])
        change = f"{effect.factor} {_show(effect.level)}, not {first}"
        value = f"{effect.value:+.2f} ({effect.low:+.2f} to {effect.high:+.2f})"
        lines.append(f"| {change} | {value} | {effect.conclusion} |")
    if design.half:
        lines += ["", "Half of the combinations: an effect cannot be told from the interaction of all other factors."]
    return lines


def _show(level: Any) -> str:
    return level if isinstance(level, str) else json.dumps(level)
