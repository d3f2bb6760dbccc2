"""`apex plot`: draws learning curves of runs and CSV files against steps and wall clock in one picture."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apex.config.arguments import Formatter, Parser, check_out, finite_float
from apex.runs.folder import RunFolder, open_run
from apex.runs.plots.aggregate import CurveGroup, group_runs, reached, read_csv, read_run
from apex.runs.plots.figure import save_picture
from apex.runtime.text import duration, number
from apex.sentences import plural
from apexreplay.errors import FINISHED, require

EPILOG = """RUN: a run folder, or its name below runs/. Runs that differ only in the seed are drawn as one band.
The clock of a run starts when its folder is created, a few seconds after the training command was entered.

A CSV file has the header seconds,steps,score: seconds since the training command was entered, agent decisions, and the
mean raw score of one evaluation. Files passed with the same NAME (--curve NAME=FILE.csv) are treated as seeds of one
curve."""

PICTURE = "curves.png"


def plot(
    runs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str] = PICTURE,
    *,
    title: str | None = None,
    threshold: float | None = None,
) -> Path:
    """Draws the scores of runs against steps and wall clock, as `apex plot` does; returns the path of the picture.

    `runs`: one or several runs, as in `apex.load_policy`; runs that differ only in the seed become one band. `out`: the
    picture, ending in .png or .svg. `title` None: the environment. `threshold`: a score at which to draw a dashed line.
    Raises UsageError if a run has no scores, or if the picture cannot be written.
    """
    names = [runs] if isinstance(runs, str | os.PathLike) else runs
    _draw(Path(out), [os.fspath(run) for run in names], (), title, threshold)
    return Path(out)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status; raises UsageError if the arguments are not valid."""
    options = _make_parser().parse_intermixed_args(argv)
    runs = options.run or ([] if options.curve else [open_run(None).path])
    groups = _draw(options.out, [os.fspath(run) for run in runs], options.curve, options.title, options.threshold)
    figures = [_figures(group, options.threshold) for group in groups]
    for group in figures:
        print(_row(group, options.threshold))
    print(f"picture: {options.out}")
    if options.json:
        band = {"line": "median of the seeds", "band": "lowest to highest seed"}
        print(json.dumps({"out": str(options.out), "threshold": options.threshold, **band, "groups": figures}))
    return FINISHED


def _make_parser() -> Parser:
    parser = Parser(
        prog="apex plot",
        description="Draws score against steps and against wall clock.",
        epilog=EPILOG,
        formatter_class=Formatter,
    )
    parser.add_argument(
        "run",
        nargs="*",
        metavar="RUN",
        help="runs to draw (default: the newest, if there is no --curve)",
    )
    parser.add_argument("--curve", action="append", default=[], metavar="NAME=FILE.csv", help="a curve from a CSV file")
    text = f"picture to write: .png or .svg (default: {PICTURE})"
    parser.add_argument("--out", type=Path, default=Path(PICTURE), metavar="FILE", help=text)
    parser.add_argument("--title", metavar="T", help="title (default: the environment)")
    parser.add_argument(
        "--threshold",
        type=finite_float,
        metavar="SCORE",
        help="draw a dashed line at this score, and print when each curve reaches it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def _draw(
    out: Path, names: Sequence[str], curves: Sequence[str], title: str | None, threshold: float | None
) -> list[CurveGroup]:
    """Draws runs and CSV files; returns their curves."""
    check_out(out, ".png", ".svg")
    groups = _read(names, curves)
    save_picture(out, groups, _title(names) if title is None else title, threshold)
    return groups


def _read(names: Sequence[str], curves: Sequence[str]) -> list[CurveGroup]:
    folders = [RunFolder.open(name) for name in names]
    for folder in folders:
        times = sum(other.run_id == folder.run_id for other in folders)
        require(times == 1, f"{folder.path} is given {times} times", remedy="give each run only once")
    groups = group_runs([read_run(folder) for folder in folders])
    files: dict[str, list[Path]] = {}
    for option in curves:
        name, _, file = option.partition("=")
        require(bool(name.strip() and file), f"--curve must have the form NAME=FILE.csv, got {option!r}")
        files.setdefault(name.strip(), []).append(Path(file))
    for name, paths in files.items():
        taken = name in [group.label for group in groups]
        require(not taken, f"--curve {name}: a group of runs already has this name", remedy="choose another name")
        require(len({*paths}) == len(paths), f"--curve {name}: a file is given twice", remedy="give each file once")
    return groups + [CurveGroup(name, [read_csv(path) for path in paths]) for name, paths in files.items()]


def _title(names: Sequence[str]) -> str:
    environments = dict.fromkeys(RunFolder.open(name).config.environment.id for name in names)
    return ", ".join(environments) or "Learning curves"


def _figures(group: CurveGroup, threshold: float | None) -> dict[str, Any]:
    """Returns the results of a group for JSON."""
    last = [float(curve.values[-1]) for curve in group.curves]
    figures: dict[str, Any] = {
        "label": group.label,
        "note": group.note,
        "seeds": len(group.curves),
        "seconds": [float(curve.seconds[-1]) for curve in group.curves],
        "steps": [float(curve.steps[-1]) for curve in group.curves],
        "last_scores": last,
        "best_scores": [float(curve.values.max()) for curve in group.curves],
        "median_last_score": float(np.median(last)),
    }
    if threshold is not None:
        when = [reached(curve, threshold) for curve in group.curves]
        figures["reached_seconds"] = [None if each is None else each[0] for each in when]
        figures["reached_steps"] = [None if each is None else each[1] for each in when]
    return figures


def _row(figures: dict[str, Any], threshold: float | None) -> str:
    last = figures["last_scores"]
    spread = f" ({min(last):.4g} ... {max(last):.4g})" if len(last) > 1 else ""
    note = f", {figures['note']}" if figures["note"] else ""
    parts = [
        f"{figures['label']}: {plural(len(last), 'seed')}{note}, last score {figures['median_last_score']:.4g}{spread}"
    ]
    if threshold is not None:
        times = [seconds for seconds in figures["reached_seconds"] if seconds is not None]
        if len(times) == len(last):
            spread = f" ({duration(min(times))} ... {duration(max(times))})" if len(last) > 1 else ""
            parts.append(f"reached {number(threshold)} after {duration(float(np.median(times)))}{spread}")
        else:
            parts.append(f"{number(threshold)} reached by {len(times)} of {len(last)}")
    return ", ".join(parts)
