"""`python -m chaos unusable`: compares CartPole with unusable segments to a clean run.

Each kind of damage is tried alone, then all together. The bar: 475 within twice the time of the clean run.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from apex.config.arguments import Parser, positive_float, positive_int
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apexreplay.errors import FAILED, FINISHED
from apexreplay.process.lifecycle import reports_errors
from chaos.report import Figure, ScenarioReporter
from chaos.unusable.spoil import KINDS

TRIALS = {"clean": (), **{kind: (kind,) for kind in KINDS}, "mixed": tuple(KINDS)}
MOST_SLOWER = 2.0  # multiple of the clean time
UNUSABLE = "learner/unusable_transitions"


@reports_errors("python -m chaos unusable")
def main(argv: Sequence[str]) -> int:
    """The composition root; returns status 1 unless every run reaches the score in time."""
    parser = Parser(prog="python -m chaos unusable", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of the first round; default: 1")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="runs of each kind; default: 3")
    parser.add_argument(
        "--percent", type=positive_float, default=1.0, metavar="P", help="percentage of unusable segments; default: 1"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options, train = parser.parse_known_args(argv)
    reporter = ScenarioReporter(options.json)
    seconds: dict[str, list[float | None]] = {name: [] for name in TRIALS}
    unusable = dict.fromkeys(TRIALS, 0.0)
    # The kinds alternate, so that other work on the machine affects all.
    for seed in range(options.seed, options.seed + options.rounds):
        for name, kinds in TRIALS.items():
            took, count = _run(kinds, options.percent / 100, seed, train)
            seconds[name].append(took)
            unusable[name] += count
            ended = "did not reach the score" if took is None else f"reached the score after {took:.1f} s"
            reporter.say(f"{name}, seed {seed}: {ended}; {count:.0f} draws of unusable transitions")
    rows = [row for name in TRIALS for row in figures(name, seconds, unusable[name])]
    passed = all(row.reached for row in rows)
    reporter.end({"scenario": "unusable", "percent": options.percent}, rows, passed)
    return FINISHED if passed else FAILED


def _run(kinds: Sequence[str], share: float, seed: int, train: Sequence[str]) -> tuple[float | None, float]:
    """Returns the seconds until the run ended with the score, or None; and how often unusable rows were drawn."""
    with tempfile.TemporaryDirectory(prefix="apex-unusable-") as folder:
        options = ["--preset", "cartpole", "--seed", str(seed), "--run.folder", folder, "--name", "run"]
        options += ["--run.no-tensorboard", "--max-minutes", "10", *train]
        command = [sys.executable, "-m", "chaos.unusable.launcher", ",".join(kinds), str(share), *options]
        began = time.monotonic()
        ended = subprocess.run(command, capture_output=True, text=True, timeout=1_200.0)
        took = time.monotonic() - began
        if ended.returncode != FINISHED:
            print(ended.stdout + ended.stderr, file=sys.stderr)
        run = Path(folder) / "run"
        rows = read_curve(run / "curves" / "learner.jsonl")
        end = RunFolder.open(run).end if ended.returncode == FINISHED else None
        count = rows[-1]["scalars"].get(UNUSABLE, 0.0) if rows else 0.0
    return took if end is not None and end.kind == "score" else None, count


def figures(name: str, seconds: dict[str, list[float | None]], unusable: float) -> list[Figure]:
    """Returns the median of all rounds; None if one of them did not reach the score."""

    def middle(times: list[float | None]) -> float | None:
        known = [took for took in times if took is not None]
        return median(known) if len(known) == len(times) else None

    took, clean = middle(seconds[name]), middle(seconds["clean"])
    if name == "clean":
        return [Figure("clean: to the end", took, "s", ">= 0")]
    bar = f"<= {MOST_SLOWER * clean:.1f}" if clean is not None else ">= 0"
    return [Figure(f"{name}: to the end", took, "s", bar), Figure(f"{name}: unusable rows", unusable)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
