"""`python -m bench engines`: compares runs with and without Ray on one machine, alternately.

Start a Ray cluster first, as in docs/tutorials/ray.md. Its idle nodes then run beside both kinds of runs.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from apex.config.arguments import positive_int
from apex.runs.metrics.writer import read_curve
from apexreplay.errors import FINISHED
from apexreplay.process.lifecycle import Stop
from bench.harness.command import Figures, make_parser, run_bench
from bench.harness.programs import open_programs
from bench.harness.report import ReportRow, print_rows

END_SECONDS = 300.0  # time for a run to start and to end
BAR = 0.95
LINES = [
    ReportRow("local_steps_per_s", "steps stored without Ray", "/s", digits=0),
    ReportRow("ray_steps_per_s", "steps stored with Ray", "/s", digits=0),
    ReportRow("steps_ratio", "median of the rounds' ratios", "%", 100, 1, bar=BAR),
    ReportRow("local_updates_per_s", "updates without Ray", "/s", digits=2),
    ReportRow("ray_updates_per_s", "updates with Ray", "/s", digits=2),
    ReportRow("updates_ratio", "median of the rounds' ratios", "%", 100, 1, bar=BAR),
]


def main(argv: Sequence[str]) -> int:
    """Measures; returns the exit status."""
    about = "Compares runs with and without Ray. Other options are those of apex train."
    parser = make_parser("engines", about, seconds=60.0, of="duration of each run")
    parser.add_argument("--rounds", type=positive_int, default=3, help="runs of each kind; default 3")
    parser.add_argument("--processes", type=positive_int, default=1, help="actor processes; default 1")
    parser.add_argument("--threads", type=positive_int, default=1, help="threads of the learner; default 1")
    options, rest = parser.parse_known_args(argv)
    return run_bench(
        lambda folder, stop: measure(options, rest, folder, stop),
        lambda figures: print_rows(f"{options.rounds} rounds of {options.seconds:g} s", LINES, figures),
        as_json=options.json,
    )


def measure(options: Any, rest: Sequence[str], folder: Path, stop: Stop) -> Figures:
    """Returns the median rates of both kinds of runs, and the median ratio of a round."""
    both = [*rest, "--learner.num-threads", str(options.threads), "--max-minutes", f"{options.seconds / 60:g}"]
    both += ["--run.no-tensorboard", "--evaluator.no-enabled", "--run.folder", str(folder)]
    engines = {
        "local": ["--actor.num-processes", str(options.processes)],
        "ray": ["--engine", "ray", "--cpus-per-host", str(options.processes), "--head-cpus", str(options.threads)],
    }
    rates: dict[str, list[tuple[float, float]]] = {engine: [] for engine in engines}
    for number in range(options.rounds):
        for engine in sorted(engines, reverse=bool(number % 2)):
            name = f"{engine}-{number}"
            with open_programs(folder, stop) as programs:
                run = programs.start(name, ["train", *both, *engines[engine], "--name", name])
                deadline = time.monotonic() + options.seconds + END_SECONDS
                while run.poll() is None and time.monotonic() < deadline and not stop.poll():
                    time.sleep(0.2)
                if run.poll() != FINISHED:
                    programs.check()
            rates[engine].append(read_rates(folder / name / "curves" / "learner.jsonl"))
    figures: Figures = {}
    for column, what in enumerate(("steps", "updates")):
        local, ray = ([pair[column] for pair in rates[engine]] for engine in ("local", "ray"))
        figures |= {f"local_{what}_per_s": median(local), f"ray_{what}_per_s": median(ray)}
        figures[f"{what}_ratio"] = median(b / a for a, b in zip(local, ray, strict=True))
    print(json.dumps(rates))
    return figures


def read_rates(curve: Path) -> tuple[float, float]:
    """Returns steps and updates per second, without the first quarter of the curve, in which caches fill."""
    rows = [row for row in read_curve(curve) if row["scalars"].get("learner/updates")]
    first, last = rows[len(rows) // 4], rows[-1]
    seconds = last["time"] - first["time"]
    updates = last["scalars"]["learner/updates"] - first["scalars"]["learner/updates"]
    return (last["steps"] - first["steps"]) / seconds, updates / seconds
