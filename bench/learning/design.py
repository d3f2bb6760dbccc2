"""A designed experiment: settings with a few levels each, and their main effects on the score with intervals.

Its TOML file is written before the first run:

    options = ["--env", "MinAtar/Asterix-v1", "--max-updates", "40000"]  # of every run, with --env and without a seed
    seeds = [101, 102, 103]  # at least three
    minutes = 20  # time limit of a run; default: none
    measure = "seconds"  # until --stop-score is reached, at most `minutes`; default: the score of the final policy
    half = true  # run only the combinations that change an even number of factors; default: all

    [factors]  # settings by their full names; the first level of each is the baseline
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
from statistics import NormalDist, geometric_mean, mean, variance
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from apex.command_line import SETTINGS, parse_config
from apex.config import Config
from apex.config.validation import did_you_mean
from apex.sweep.space import options_of
from apexreplay.errors import UsageError, require
from bench.learning.records import MAX_SEED

MIN_SEEDS = 3
CONFIDENCE = 0.95

Level = bool | int | float | str
Levels = tuple[Level, ...]  # of each factor
Scores = Mapping[Levels, Sequence[float | None]]  # of each seed; None: the run is missing
OWN = ("seed", "run.", "environment.id", "transport.")  # settings that no factor can be


class Design(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """See the module."""

    options: list[str]  # with --env
    seeds: Annotated[list[Annotated[int, Meta(ge=0, le=MAX_SEED)]], Meta(min_length=MIN_SEEDS)]
    factors: Annotated[dict[str, list[Level]], Meta(min_length=1)]
    minutes: Annotated[float, Meta(gt=0)] = math.inf
    half: bool = False
    measure: Literal["score", "seconds"] = "score"

    @property
    def environment(self) -> str:
        """Returns the id that follows --env."""
        return self.options[self.options.index("--env") + 1]

    def cells(self) -> list[Levels]:
        """Returns the combinations of levels, the baseline first."""
        every = itertools.product(*self.factors.values())
        return [levels for levels in every if not self.half or len(self.changes(levels)) % 2 == 0]

    @property
    def has_time_limit(self) -> bool:
        """Returns whether a faster or quieter machine trains longer."""
        return math.isfinite(self.minutes) or self.config(self.cells()[0]).run.max_minutes > 0

    def config(self, levels: Levels) -> Config:
        """Returns the configuration of a run, without seed and `minutes`. Raises UsageError."""
        return parse_config(self.settings(levels), prog="apex train")

    def changes(self, levels: Levels) -> dict[str, Level]:
        """Returns the factors that differ from the baseline."""
        pairs = zip(self.factors.items(), levels, strict=True)
        return {name: level for (name, known), level in pairs if level != known[0]}

    def settings(self, levels: Levels) -> list[str]:
        """Returns the options of a run, beside seed and time limit."""
        pairs = zip(self.factors, levels, strict=True)
        return [*self.options, *(option for name, level in pairs for option in options_of(name, level))]


class Effect(NamedTuple):
    """The mean score with a level of a factor, minus that with the factor's first level; of seconds, their ratio."""

    factor: str
    level: Level
    value: float
    low: float  # interval
    high: float
    none: float = 0.0  # the value without any effect

    @property
    def conclusion(self) -> str:
        """Returns what the interval allows to say."""
        if self.low <= self.none <= self.high:
            return f"none: the interval contains {self.none:g}"
        return "higher" if self.low > self.none else "lower"


def read_design(path: Path) -> Design:
    """Raises UsageError for a file that is no design."""
    try:
        design = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Design)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read the experiment {path}: {cause}", "see bench/learning/design.py") from error
    named: dict[str, Sequence[Level]] = {"seeds": design.seeds, **design.factors}
    for name, levels in named.items():
        shown = ", ".join(map(_show, levels))
        require(len(levels) > 1, f"{path}: {name} has only one value, {shown or 'none'}")
        options = {tuple(options_of(name, level)) for level in levels}
        require(len(levels) == len({*levels}) == len(options), f"{path}: {name} has a value twice: {shown}")
    for name in design.factors:
        require(name in SETTINGS, f"{path}: {name} is no setting", remedy=did_you_mean(name, SETTINGS))
        require(not name.startswith(OWN), f"{path}: {name} cannot be a factor")
    require("--env" in design.options[:-1], f"{path}: options must have --env and an environment")
    pairs = all(len(levels) == 2 for levels in design.factors.values())
    fits = pairs and len(design.factors) > 2
    require(not design.half or fits, f"{path}: half needs three or more factors of two levels")
    for cell in design.cells():  # Settings that cannot be are refused before the first run.
        run = design.config(cell).run
        limits = run.max_updates or run.max_steps or run.max_minutes or math.isfinite(design.minutes)
        require(bool(limits), f"{path}: the runs have no limit", remedy="add --max-updates or --max-steps to options")
        problem = f"{path}: runs that end at a score have different lengths"
        if design.measure == "score":
            require(run.stop_score is None, problem, remedy="add --stop-score none to options")
        else:
            ends = run.stop_score is not None and math.isfinite(design.minutes)
            others = run.max_updates or run.max_steps or run.max_minutes
            problem = f"{path}: seconds need minutes, --stop-score and no other limit"
            require(ends and not others, problem, remedy="see bench/learning/design.py")
    return design


def effects(design: Design, scores: Scores) -> list[Effect]:
    """Returns the main effect of each level of each factor beside the first; every cell has a score of each seed.

    An effect is a mean over the levels of the other factors. The spread of the seeds may differ between cells, so the
    degrees of freedom are those of Welch and Satterthwaite. Of seconds, the means are those of logarithms.
    """
    cells, num_seeds = design.cells(), len(design.seeds)
    there, back = (math.log, math.exp) if design.measure == "seconds" else (float, float)
    known = {cell: [there(score) for score in scores[cell] if score is not None] for cell in cells}
    found = []
    for place, (name, (first, *others)) in enumerate(design.factors.items()):
        for level in others:
            sides = [[known[cell] for cell in cells if cell[place] == each] for each in (level, first)]
            high, low = (mean(map(mean, side)) for side in sides)
            parts = [variance(seeds) / num_seeds / len(side) ** 2 for side in sides for seeds in side]
            total = sum(parts)
            freedom = total**2 / sum(part**2 / (num_seeds - 1) for part in parts) if total else math.inf
            reach = t_quantile((1 + CONFIDENCE) / 2, freedom) * math.sqrt(total)
            value = high - low
            found.append(Effect(name, level, *map(back, (value, value - reach, value + reach, 0.0))))
    return found


def t_quantile(probability: float, freedom: float) -> float:
    """Returns the quantile of Student's t; from 2 degrees of freedom on with an error below 1 %, for 0.025 ... 0.975.

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
    is_time = design.measure == "seconds"
    lines = [f"| changed | {'seconds: geometric mean' if is_time else 'score: mean'} (each seed) |", "|---|---|"]
    cells = design.cells()
    for cell in cells:
        changes = ", ".join(f"{name} {_show(level)}" for name, level in design.changes(cell).items())
        seeds = scores.get(cell, [None] * len(design.seeds))
        known = [score for score in seeds if score is not None]
        each = ", ".join("-" if score is None else f"{score:.{0 if is_time else 2}f}" for score in seeds)
        if len(known) == len(seeds):
            each = f"{geometric_mean(known):.0f} ({each})" if is_time else f"{mean(known):.2f} ({each})"
        lines.append(f"| {changes or 'nothing'} | {each} |")
    num_runs = len(cells) * len(design.seeds)
    missing = num_runs - sum(score is not None for seeds in scores.values() for score in seeds)
    if missing:
        return [*lines, "", f"No effects yet: {missing} of {num_runs} runs are missing."]
    kind = "ratio" if is_time else "effect"
    lines += ["", f"| setting | {kind} ({100 * CONFIDENCE:.0f} % interval) | conclusion |", "|---|---|---|"]
    for effect in effects(design, scores):
        first = _show(design.factors[effect.factor][0])
        change = f"{effect.factor} {_show(effect.level)}, not {first}"
        value, low, high = (f"{each:{'' if is_time else '+'}.2f}" for each in effect[2:5])
        lines.append(f"| {change} | {value} ({low} to {high}) | {effect.conclusion} |")
    if is_time:
        limit = 60 * design.minutes
        late = sum(seconds is not None and seconds >= limit for each in scores.values() for seconds in each)
        limited = f"{late} of {num_runs} runs took {design.minutes:g} minutes or longer, and count with this limit."
        lines += ["", limited]
    if design.half:
        lines += ["", "Half of the combinations ran: each effect is mixed with the interaction of all other factors."]
    return lines


def _show(level: Level) -> str:
    return level if isinstance(level, str) else json.dumps(level)
