"""Reads learning curves, groups runs that differ only in the seed, and computes the median and range of a group."""

import csv
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from apex.config import Config, flatten
from apex.runs.folder import RunFolder
from apex.runs.history import ACTOR_SCORE, EVALUATION, Floats, RunHistory, Series
from apex.runtime.text import number
from apex.sentences import plural
from apexreplay.errors import DataError, UsageError, require
from apexreplay.process.text import clean

HEADER = ["seconds", "steps", "score"]  # first line of a CSV file
OWN = "apex"  # label if all runs have the same settings
MAX_DIFFERENCES = 2  # maximum number of settings in a label

# Settings that do not affect the curve: the identity, location and end of a run.
_SAME = ("seed", "run.", "transport.bind", "transport.keys", "transport.insecure_no_auth", "transport.port_offset")

Axis = Literal["seconds", "steps"]


class RunCurves(NamedTuple):
    """The curve of one run."""

    name: str
    config: Config
    curve: Series  # the mean raw score of each evaluation
    is_evaluated: bool  # False: the values are from the training games of the actor with the highest id


class CurveGroup(NamedTuple):
    """Curves that differ only in the seed."""

    label: str
    curves: list[Series]
    note: str = ""  # remark about the scores

    @property
    def title(self) -> str:
        """The label, the number of seeds, and the note."""
        count = len(self.curves)
        return " · ".join(filter(None, [self.label, plural(count, "seed") if count > 1 else "", self.note]))


class Band(NamedTuple):
    """Median and range of the scores of a group's seeds, at each x at which any seed was evaluated.

    Scores between evaluations are interpolated. A seed that has ended keeps its last score. The band begins at the
    first x at which every seed has a score.
    """

    x: Floats
    median: Floats
    low: Floats  # score of the lowest seed
    high: Floats  # score of the highest seed
    first_end: float  # x at which the shortest curve ends


def read_run(folder: RunFolder) -> RunCurves:
    """Reads the scores of the evaluator; if there are none, the scores of the actor that explores least.

    Raises UsageError if the run has no scores.
    """
    history = RunHistory(folder)
    for role, tag in (EVALUATION, ACTOR_SCORE):
        curve = history.series(role, tag)
        if len(curve.values):
            return RunCurves(folder.name, folder.config, curve, (role, tag) == EVALUATION)
    raise UsageError(f"{folder.path} has no scores yet: no evaluation and no game of its last actor has finished")


def read_csv(path: Path) -> Series:
    """Reads the scores of a CSV file with the header seconds,steps,score. Raises UsageError, which names a bad line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = [(number, row) for number, row in enumerate(csv.reader(file), 1) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"--curve: cannot read {path}: {cause}") from error
    header = lines[0][1] if lines else []
    require(header == HEADER, f"{path}, line 1: must be {','.join(HEADER)}, got {','.join(header)!r}")
    points = [(line, _parse_point(path, line, row)) for line, row in lines[1:]]
    require(bool(points), f"{path} has no scores: no line follows the header")
    for (_, before), (line, after) in pairwise(points):
        for name, one, other in zip(HEADER[:2], before, after, strict=False):
            require(one <= other, f"{path}, line {line}: {name} must not decrease, got {other:g} after {one:g}")
    return Series(*np.array([point for _, point in points], np.float64).T)


def group_runs(runs: Sequence[RunCurves]) -> list[CurveGroup]:
    """Groups runs that differ only in the seed. The label of a group names the settings that differ between groups."""
    names = [name for name in flatten(Config()) if not _is_same(name)]
    groups: dict[tuple[str, bool], list[RunCurves]] = {}
    for run in runs:
        settings = flatten(run.config)
        groups.setdefault((str([settings[name] for name in names]), run.is_evaluated), []).append(run)
    firsts = [flatten(group[0].config) for group in groups.values()]
    differing = [name for name in names if len({str(settings[name]) for settings in firsts}) > 1]
    differing = [name for name in differing if name != "replay.max_bytes"] or differing  # follows from the environment
    labels = [_label(settings, differing) for settings in firsts]
    return [
        CurveGroup(
            label=label if labels.count(label) == 1 else f"{label}, {group[0].name}",
            curves=[run.curve for run in group],
            note="" if group[0].is_evaluated else _training_note(group[0].config),
        )
        for label, group in zip(labels, groups.values(), strict=True)
    ]


def band(curves: Sequence[Series], axis: Axis) -> Band:
    """Computes the median, lowest and highest score of the seeds over `axis`."""
    if len(curves) == 1:
        x, scores = getattr(curves[0], axis), curves[0].values
        return Band(x, scores, scores, scores, float(x[-1]))
    xs: list[Floats] = [getattr(curve, axis) for curve in curves]
    begin = max(x[0] for x in xs)
    x = np.unique(np.concatenate([[begin], *xs]))
    x = x[x >= begin]
    all_scores = np.array([np.interp(x, own, curve.values) for own, curve in zip(xs, curves, strict=True)])
    return Band(
        x, np.median(all_scores, axis=0), all_scores.min(0), all_scores.max(0), float(min(own[-1] for own in xs))
    )


def reached(curve: Series, threshold: float) -> tuple[float, float] | None:
    """Returns seconds and steps of the first evaluation that reached `threshold`; None if no evaluation did."""
    found = np.flatnonzero(curve.values >= threshold)
    return (float(curve.seconds[found[0]]), float(curve.steps[found[0]])) if len(found) else None


def _parse_point(path: Path, number: int, row: Sequence[str]) -> tuple[float, ...]:
    require(len(row) == 3, f"{path}, line {number}: must be three numbers, got {','.join(row)!r}")
    values = []
    for name, text in zip(HEADER, row, strict=True):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        good = math.isfinite(value) and (value >= 0 or name == "score")
        least = "" if name == "score" else " >= 0"
        require(good, f"{path}, line {number}: {name} must be a number{least}, got {text!r}")
        values.append(value)
    return tuple(values)


def _training_note(config: Config) -> str:
    return f"training scores of actor {config.actor.num_actors - 1}, not evaluations"


def _is_same(setting: str) -> bool:
    return setting.startswith(_SAME) or (setting.startswith("transport.") and setting.endswith("_port"))


def _label(settings: dict[str, Any], differing: Iterable[str]) -> str:
    """Returns a label with the first MAX_DIFFERENCES of the settings `differing`."""
    parts = [_describe(name, settings[name]) for name in differing]
    more = [f"{len(parts) - MAX_DIFFERENCES} more"] if len(parts) > MAX_DIFFERENCES else []
    return ", ".join([*parts[:MAX_DIFFERENCES], *more]) or OWN


def _describe(name: str, value: Any) -> str:
    if name == "environment.id":
        return clean(str(value))
    if isinstance(value, bool) or value is None:
        return f"{name} {'none' if value is None else 'on' if value else 'off'}"
    return f"{name} {number(value) if isinstance(value, int | float) else clean(str(value or 'none'))}"
