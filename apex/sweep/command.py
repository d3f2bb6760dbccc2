"""`apex sweep`: searches settings, and compares the best ones with the start settings on fresh seeds."""

import importlib.util
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from apex.config import dump_toml
from apex.config.arguments import Formatter, Parser, positive_int
from apex.config.validation import require_setting
from apex.errors import TrainingError
from apex.launch.terminal.view import print_line
from apex.runs.lock import hold
from apex.runs.plots.command import plot
from apex.runtime.optional_imports import remedy
from apex.runtime.trust import add_allow
from apex.sweep.seeds import make_table
from apex.sweep.space import read_sweep, with_settings
from apex.sweep.study import Sweep, first_number, judge
from apexreplay.errors import FINISHED, NEIGHBOUR_GONE, UsageError, require
from apexreplay.process.lifecycle import reports_errors, stop_on_signals

NUM_SEEDS = 5  # of the comparison
FIRST_SEED = 10_000  # added to the seed of the start settings; trials have smaller ones


@reports_errors("apex sweep")
def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    about = "Searches settings with Optuna, and compares the best ones with the start on fresh seeds."
    more = "Options of apex train override those of FILE. The same command continues. See docs/guide/sweep.md."
    parser = Parser(prog="apex sweep", description=about, epilog=more, formatter_class=Formatter)
    parser.add_argument("file", type=Path, metavar="FILE", help="TOML file with the start settings and the search")
    parser.add_argument("--trials", type=positive_int, default=20, metavar="N", help="number of trials (default: 20)")
    parser.add_argument("--jobs", type=positive_int, default=1, metavar="N", help="trials at once (default: 1)")
    parser.add_argument("--study", metavar="NAME", help="name of the study and its folder in sweeps/ (default: FILE)")
    parser.add_argument("--no-pruning", action="store_true", help="end no trial early")
    add_allow(parser)
    options, rest = parser.parse_known_args(argv)
    start, search = read_sweep(options.file, rest)
    limits = sum(map(bool, (start.run.max_minutes, start.run.max_steps, start.run.max_updates)))
    problem = f"the runs of a sweep need exactly one limit, got {limits}"
    require_setting(limits == 1, problem, "set one of max-minutes, max-steps and max-updates")
    require_setting(not start.run.mirror, "the runs of a sweep have no mirror", "leave out run.mirror")
    cores = len(os.sched_getaffinity(0))
    require(options.jobs <= cores, f"--jobs must be at most {cores}, the number of cores, got {options.jobs}")
    problem = "--jobs must be 1 with single_process, because trials in one process would share their random numbers"
    require(options.jobs == 1 or not start.run.single_process, problem)
    folder = Path("sweeps") / (options.study or options.file.stem)
    require(
        folder.parent.name == "sweeps" and folder.name != "..",
        f"--study must be a plain folder name, got {options.study!r}",
    )
    if importlib.util.find_spec("optuna") is None:
        raise UsageError("apex sweep needs an optional package", remedy("sweep"))
    folder.mkdir(parents=True, exist_ok=True)
    with stop_on_signals() as stop, hold(folder):
        sweep = Sweep(folder, start, search, stop, prunes=not options.no_pruning)
        sweep.run_trials(options.trials, options.jobs)
        if not stop.poll() and _compare(sweep):
            return FINISHED
        print_line("interrupted; the same command continues the sweep")
        return NEIGHBOUR_GONE if stop.signum == signal.SIGTERM else FINISHED


def _compare(sweep: Sweep) -> bool:
    """Trains with the best settings and the start settings by turns; prints and writes the result.

    Returns False if a stop was requested. Raises TrainingError if no trial has a result, or if a run fails.
    """
    start, folder, study, is_time = sweep.start, sweep.folder, sweep.study, sweep.start.run.stop_score is not None
    if not study.best_trials:
        raise TrainingError("no trial has a result; raise the limit, or set no stop score", folder)
    winner, name = with_settings(start, study.best_params), f"winner-{first_number(study.best_trial)}"
    seeds = range(start.seed + FIRST_SEED, start.seed + FIRST_SEED + NUM_SEEDS)
    runs = [(config, side, seed) for seed in seeds for config, side in ((winner, name), (start, "start"))]
    names = [f"{side}-seed-{seed}" for _, side, seed in runs]
    for (config, _, seed), run in zip(runs, names, strict=True):
        if run not in study.user_attrs:
            if (ended := sweep.train(with_settings(config, {"seed": seed}), run)) is None:
                return False
            study.set_user_attr(run, judge(ended))
    ours, theirs = ([study.user_attrs[run] for run in names[side::2]] for side in (0, 1))
    title = f"seconds to the score {start.run.stop_score:g}" if is_time else "score"
    verdict = "The ranges overlap: these runs do not show that one is better."
    if max(ours) < min(theirs) or min(ours) > max(theirs):
        better = name if (max(ours) < min(theirs)) == is_time else "start"
        verdict = f"The ranges do not overlap: {better} is better."
    lines = [*make_table(title, seeds, {name: ours, "start": theirs}), "", verdict]
    (folder / "table.md").write_text("\n".join([*lines, ""]))
    (folder / "winner.toml").write_text(dump_toml(winner), errors="surrogateescape")
    plot([folder / "runs" / run for run in names], folder / "winner.png", threshold=start.run.stop_score)
    for line in (*lines, f"written: table.md, winner.png and winner.toml in {folder}"):
        print_line(line)
    return True
