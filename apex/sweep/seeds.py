"""`apex train --seeds 1-5`: trains one run for each seed, one after the other, and plots them together."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import median

from apex.config.arguments import Parser
from apex.launch.resume import CONTINUE
from apex.launch.terminal.view import print_line
from apex.launch.train import add_seeds_option, read_start
from apex.launch.train import main as train
from apex.runs.folder import MANIFEST, RunFolder
from apex.runs.history import RunHistory
from apex.runs.plots.command import plot
from apex.runs.scores import find_scores
from apexreplay.errors import FINISHED, require


def main(argv: Sequence[str]) -> int:
    """Trains until a run fails or is stopped, prints a table, and draws the curves. Returns the last run's status.

    With --name NAME, the runs are NAME-seed-1 and so on.
    """
    parser = Parser(prog="apex train", add_help=False)
    add_seeds_option(parser)
    parser.add_argument("--name", "--run.name", dest="name")
    options, rest = parser.parse_known_args(argv)
    named = bool(options.name) or CONTINUE not in rest
    require(named, f"{CONTINUE}: the runs to continue have no name", remedy="add --name NAME")
    first = options.seeds[0]
    start = read_start([*rest, "--seed", str(first), "--name", f"{options.name or 'seeds'}-seed-{first}"])
    require(start.engine is None, "--seeds trains on this machine", remedy="leave out --engine ray")
    folder, status, runs = Path(start.config.run.folder), FINISHED, list[RunFolder]()
    name = options.name or next(f"seeds-{n}" for n in count(1) if not any(folder.glob(f"seeds-{n}-*")))
    for seed in options.seeds:
        path = folder / f"{name}-seed-{seed}"
        status = train([*rest, "--seed", str(seed), "--name", path.name])
        end = RunFolder.open(path).end if (path / MANIFEST).exists() else None
        if end is not None and end.is_limit:
            runs.append(RunFolder.open(path))
        if status != FINISHED or end is None or not end.is_limit:
            break
    scored = {run: scores for run in runs if (scores := find_scores(RunHistory(run))) is not None}
    for run in runs:
        if run not in scored:
            print_line(f"{run.path}: no evaluation was finished, so the table lacks it")
    if scored:
        columns = {
            "score": [last.mean for _, last in scored.values()],
            "best": [best.mean for best, _ in scored.values()],
        }
        columns["minutes"] = [last.seconds / 60 for _, last in scored.values()]
        for line in make_table("run", [run.config.seed for run in scored], columns):
            print_line(line)
        plot([run.path for run in scored], folder / f"{name}.png", threshold=start.config.run.stop_score)
        print_line(f"picture: {folder / name}.png")
    return status


def make_table(title: str, seeds: Sequence[int], columns: dict[str, list[float]]) -> list[str]:
    """Returns a table in Markdown: a row for each seed, and the median, lowest and highest value of each column."""
    rows = [(f"seed {seed}", row) for seed, row in zip(seeds, zip(*columns.values(), strict=True), strict=True)]
    summaries = (("median", median), ("lowest", min), ("highest", max))
    rows += [(name, tuple(map(of, columns.values()))) for name, of in summaries]
    cells = [
        [title, *columns],
        ["---"] * (1 + len(columns)),
        *([name, *(f"{x:.4g}" for x in row)] for name, row in rows),
    ]
    return [f"| {' | '.join(line)} |" for line in cells]
