"""`apex plot`: draws learning curves of runs and CSV files against steps and wall clock in one picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apex.config.arguments import Formatter, Parser, check_out, finite_float
from apex.errors import ConfigError, require
from apex.runs.folder import RunFolder
from apex.runs.plots.aggregate import CurveGroup, group_runs, reached, read_csv, read_run
from apex.runs.plots.figure import save_picture
from apex.runtime.lifecycle import FINISHED
from apex.runtime.text import number_text, time_text

EPILOG = """RUN: a run folder, or its name below runs/. Runs of one configuration but for the seed are one band.
The clock of a run begins when its folder is made, some seconds after the command was typed.

A CSV file has the header seconds,steps,score: seconds since the command was typed, agent decisions, and the mean raw
score of one evaluation. Several files of one NAME are its seeds."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status; raises ConfigError for a user's mistake."""
    options = _make_parser().parse_intermixed_args(argv)
    check_out(options.out, ".png", ".svg")
    groups = _read(options.run, options.curve)
    title = options.title if options.title is not None else _title(options.run)
    save_picture(options.out, groups, title, options.threshold)
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
    parser.add_argument("run", nargs="*", metavar="RUN", help="runs to draw, by their evaluator's scores")
    parser.add_argument("--curve", action="append", default=[], metavar="NAME=FILE.csv", help="somebody else's curve")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the picture: .png or .svg")
    parser.add_argument("--title", metavar="T", help="default: the environment")
    parser.add_argument(
        "--threshold", type=finite_float, metavar="SCORE", help="a dashed line, and who reaches it when"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def _read(names: Sequence[str], curves: Sequence[str]) -> list[CurveGroup]:
    if not names and not curves:
        raise ConfigError(f"nothing to plot: name a run, or --curve NAME=FILE.csv; the latest: {_latest()}")
    folders = [RunFolder.open(name) for name in names]
    for folder in folders:
        times = sum(other.run_id == folder.run_id for other in folders)
        require(times == 1, f"{folder.path} is named {times} times: a seed counts once")
    groups = group_runs([read_run(folder) for folder in folders])
    files: dict[str, list[Path]] = {}
    for words in curves:
        name, _, file = words.partition("=")
        require(bool(name.strip() and file), f"--curve must read NAME=FILE.csv, got {words!r}")
        files.setdefault(name.strip(), []).append(Path(file))
    for name, paths in files.items():
        require(name not in [group.label for group in groups], f"--curve {name}: the runs are called that; rename it")
        require(len(set(paths)) == len(paths), f"--curve {name}: a file is named twice: a seed counts once")
    return groups + [CurveGroup(name, [read_csv(path) for path in paths]) for name, paths in files.items()]


def _latest() -> str:
    try:
        return str(RunFolder.find_latest().path)
    except ConfigError as error:
        return str(error)


def _title(names: Sequence[str]) -> str:
    environments = dict.fromkeys(RunFolder.open(name).config.environment.id for name in names)
    return ", ".join(environments) or "Learning curves"


def _figures(group: CurveGroup, threshold: float | None) -> dict[str, Any]:
    """The figures of a group, ready for JSON."""
    last = [float(curve.scores[-1]) for curve in group.curves]
    figures: dict[str, Any] = {
        "label": group.label,
        "note": group.note,
        "seeds": len(group.curves),
        "seconds": [float(curve.seconds[-1]) for curve in group.curves],
        "steps": [float(curve.steps[-1]) for curve in group.curves],
        "last_scores": last,
        "best_scores": [float(curve.scores.max()) for curve in group.curves],
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
    count = f"{len(last)} seed{'s' * (len(last) > 1)}"
    note = f", {figures['note']}" if figures["note"] else ""
    words = [f"{figures['label']}: {count}{note}, last score {figures['median_last_score']:.4g}{spread}"]
    if threshold is not None:
        times = [seconds for seconds in figures["reached_seconds"] if seconds is not None]
        if len(times) == len(last):
            spread = f" ({time_text(min(times))} ... {time_text(max(times))})" if len(last) > 1 else ""
            words.append(f"{number_text(threshold)} after {time_text(float(np.median(times)))}{spread}")
        else:
            words.append(f"{number_text(threshold)} by {len(times)} of {len(last)}")
    return ", ".join(words)
