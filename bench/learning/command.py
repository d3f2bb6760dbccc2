"""Records training runs as evidence, and rebuilds tables and plots from the committed records.

python -m bench learning run --task cartpole --system apex --seed K
python -m bench learning run --task cartpole --system sb3 --seed K          # bench/peers/setup.sh first
python -m bench learning run --task pong --system apex --seed 2 --minutes 20 -- --learner.learning-rate 2e-4
python -m bench learning untuned --hours 2
python -m bench learning trial bench/learning/trials/minatar.toml
python -m bench learning tables

`run` starts the command as a user does, `apex train` with TensorBoard and live view (plain lines without a terminal),
and measures the time until it exits. Then full games on seeds that were not used before give the score.
docs/results/learning/TASK/ gets SYSTEM-seed-K.json and .csv. A run that was stopped or has failed is not recorded.
`untuned` records the missing runs of the first table in docs/learning.md. It begins no game and seed whose runs would
end after the hours if the 100 games of each took GAMES_SECONDS. All runs need the same code: make them from one
checkout, with --root FOLDER for the records if it is not the newest.
`trial` makes the missing runs of a designed experiment, and prints its effects (bench/learning/design.py).
`tables` rewrites the results in docs/learning.md and draws docs/results/learning/TASK.png.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from apex.config.arguments import Parser, positive_float, value_of
from apex.runtime.provenance import describe_versions
from apexreplay.errors import FAILED, FINISHED, UsageError, require
from apexreplay.files.atomic_files import replace_file
from apexreplay.process.lifecycle import Stop, reports_errors, stop_on_signals
from bench.learning.measure import FRESH, GRACE_SECONDS, STANDARD_OUTPUT, Place, evaluate, wait
from bench.learning.processor_time import OTHERS_SHARE, ProcessorTime
from bench.learning.records import (
    CODE,
    MAX_SEED,
    PACKAGES,
    Record,
    RecordedScore,
    clean_commit,
    describe_code,
    describe_machine,
    is_changed_since,
    is_same_code,
    read_records,
    record_path,
    write_record,
)
from bench.learning.runs import ROOT, ApexSystem, PeerSystem, RunError, System
from bench.learning.tables import write
from bench.learning.tasks import SYSTEMS, TASKS, UNTUNED, UNTUNED_RUNS, VARIANTS
from bench.learning.trial import CHANGED, EARLY_SECONDS, require_native_code, run_trial
from bench.learning.untuned import CORES, counts, missing_runs

START_SECONDS = 60.0  # time for start and end of a run
GAMES_SECONDS = 400.0  # time for 100 games of Atari
MOST_BUSY = 2  # runs beside other programs in a row, after which the machine is not otherwise idle
# the code that makes the runs of one table
MADE_BY = (*PACKAGES, "bench/peers", *(f"bench/learning/{name}.py" for name in ("measure", "runs", "tasks")))


class BusyError(RunError):
    """Other programs used too much of the machine during a run."""


@reports_errors("python -m bench learning")
def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; every error is one sentence on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, further = arguments, []
    if "--" in arguments:
        place = arguments.index("--")
        own, further = arguments[:place], arguments[place + 1 :]
    options = _make_parser().parse_args(own)
    try:
        if options.command == "tables":
            require(not further, "tables accepts no arguments after --")
            write(options.root, lambda line: print(line, file=sys.stderr))
        else:
            with stop_on_signals() as stop:
                if options.command == "run":
                    _run(options, further, stop)
                    return FINISHED
                require(not further, f"{options.command} accepts no arguments after --: its settings are fixed")
                if options.command == "untuned":
                    return _run_untuned(options, stop)
                limits = {"jobs": options.jobs, "seconds": 3_600 * options.hours}
                good = run_trial(options.root, options.file, options.python, **limits, stop=stop)
                return FINISHED if good else FAILED
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(str(error)) from error
    return FINISHED


def _make_parser() -> Parser:
    parser = Parser(
        prog="python -m bench learning",
        description="Records training runs, and creates tables and plots of them.",
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="FOLDER", help="folder that contains docs (default: the repository)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tables", help="rebuild tables and plots from the committed records")
    run = commands.add_parser(
        "run", help="record one run and its final games; OPTIONS after -- are passed to its command"
    )
    run.add_argument("--task", choices=list(TASKS), required=True)
    run.add_argument("--system", choices=list(SYSTEMS), required=True)
    run.add_argument("--seed", type=value_of(Annotated[int, Meta(ge=0, le=MAX_SEED)]), required=True, metavar="K")
    text = "time limit of the run (default: that of the task)"
    run.add_argument("--minutes", type=positive_float, metavar="M", help=text)
    untuned = commands.add_parser("untuned", help="record the missing runs of games that no setting was tuned on")
    trial = commands.add_parser("trial", help="make the missing runs of a designed experiment, and print its effects")
    trial.add_argument("file", type=Path, metavar="FILE", help="its design, see bench/learning/design.py")
    text = "start no run that is expected to end later (default: no limit)"
    untuned.add_argument("--hours", type=positive_float, default=math.inf, metavar="H", help=text)
    text = "start no run after these hours (default: no limit)"
    trial.add_argument("--hours", type=positive_float, default=math.inf, metavar="H", help=text)
    cores = len(os.sched_getaffinity(0))
    some = value_of(Annotated[int, Meta(ge=1, le=cores)])
    text = "runs at once, which share the cores (default: 1)"
    trial.add_argument("--jobs", type=some, default=1, metavar="J", help=text)
    run.add_argument(
        "--cores", type=some, default=cores, metavar="N", help=f"cores that the run may use (default: all {cores})"
    )
    peer, text = ROOT / ".peer-sb3/bin/python", "interpreter with apex (default: this one)"
    for command in (run, untuned):
        command.add_argument("--peer-python", type=Path, default=peer, metavar="PYTHON")
    for command in (run, untuned, trial):
        command.add_argument("--python", default=sys.executable, metavar="PYTHON", help=text)
    return parser


def _run_untuned(options: argparse.Namespace, stop: Stop) -> int:
    """Records one missing run after the other, in their fixed order, until the time is over; returns the status."""
    commit, cpu = _require_circumstances(options), describe_machine()["cpu"]
    began, failed, made, busy, too_long = time.monotonic(), False, 0, 0, ""
    for task, system, seed in missing_runs(read_records(options.root)):
        records = [record for record in read_records(options.root) if record.task == task and counts(record)]
        group = [run for run in UNTUNED_RUNS if (run[0], run[2]) == (task, seed)]
        beside = [record for record in records if record.seed == seed]
        # A seed without peers is compared with their other seeds.
        is_single = len({name for _, name, other in UNTUNED_RUNS if other == seed}) == 1
        processors = {record.machine["cpu"] for record in (records if is_single else beside)}
        if cpu not in processors and (processors or is_single):
            where = f"{', '.join(sorted(processors))}, as the other systems had" if processors else "runs of the others"
            print(f"learning: {task}, {system}, seed {seed} needs {where}, and is not made now", file=sys.stderr)
            failed = failed or bool(processors)
            continue
        failure = record_path(options.root, task, system, seed, ".failed")
        if failure.exists():  # It is not repeated until it succeeds.
            what = f"{failure.relative_to(options.root)} exists, so this run is not made again"
            print(f"learning: {what}; remove it (git rm) and say why", file=sys.stderr)
            continue
        if stop.poll():
            break
        require(not is_changed_since(commit, MADE_BY), "the code has changed since the first run")
        seconds = 60 * TASKS[task].minutes + START_SECONDS + GAMES_SECONDS
        if not beside:  # The next sitting may have another processor.
            seconds *= len(group)
        if time.monotonic() - began + seconds > 3_600 * options.hours:
            too_long = too_long or f"{task}, {system}, seed {seed} needs {seconds / 3_600:.2f} hours with its group"
            continue
        made += 1
        run = {"task": task, "system": system, "seed": seed, "minutes": None, "cores": CORES}
        started = time.monotonic()
        try:
            _run(argparse.Namespace(**vars(options) | run), (), stop)
            busy = 0
        except BusyError as error:  # It is missing, and can be made again.
            failed, busy = True, busy + 1
            if busy == MOST_BUSY:
                raise
            print(f"learning: {task}, {system}, seed {seed}: {error}", file=sys.stderr)
        except RunError as error:  # The other runs do not depend on it.
            if stop.poll() or time.monotonic() - started < EARLY_SECONDS:
                raise
            require(not is_changed_since(commit, MADE_BY), CHANGED)
            failed = True
            print(f"learning: {task}, {system}, seed {seed}: {error}", file=sys.stderr)
            failure.parent.mkdir(parents=True, exist_ok=True)
            replace_file(failure, f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}: {error}\n".encode())
    if too_long and not made:
        print(f"learning: {too_long}", file=sys.stderr)
        failed = True
    records = [record for record in read_records(options.root) if record.task in UNTUNED]
    for record in records:
        if not counts(record):
            what = (
                f"{record.task}, {record.system}, seed {record.seed} does not count, see Conditions in docs/learning.md"
            )
            print(f"learning: {what}; to repeat it, remove its record (git rm) and say why", file=sys.stderr)
    missing = len(missing_runs(list(filter(counts, records))))
    print(f"learning: {missing} of {len(UNTUNED_RUNS)} runs are missing", file=sys.stderr)
    return FAILED if failed else FINISHED


def _require_circumstances(options: argparse.Namespace) -> str:
    """Refuses runs that would not count, before they take their time; returns the commit of the code."""
    peer = PeerSystem(options.peer_python, "sb3")
    require_native_code()
    commit, cores, gpus = clean_commit(), len(os.sched_getaffinity(0)), describe_machine()["gpus"]
    require(cores >= CORES, f"a run of the table has {CORES} cores, this process may use {cores}")
    require(not gpus, f"a run of the table has no GPU, here is {gpus}", remedy="hide it with CUDA_VISIBLE_DEVICES=")
    if commit is None:
        raise UsageError("the code is not in a git checkout, so a run would have no commit")
    own, peers = describe_versions(), peer.versions()
    for record in read_records(options.root):
        if (record.task, record.system, record.seed) not in UNTUNED_RUNS:
            continue
        run = f"{record.task} {record.name}"
        versions: Mapping[str, str | None] = own if record.system == "apex" else peers
        if record.commit is not None:
            remedy = f"make the missing runs in a checkout of {record.commit}, with --root {options.root.absolute()}"
            same = is_same_code(commit, record.commit, folders=MADE_BY)
            require(same, f"{run} was made by other code", remedy=remedy)
        for name in versions.keys() & record.versions.keys():
            was, now = record.versions[name], versions[name]
            require(was == now, f"{run} was made with {name} {was}, here is {now}", remedy="install the same version")
    return commit


def _run(options: argparse.Namespace, further: Sequence[str], stop: Stop) -> None:
    task = TASKS[options.task]
    available = sorted(os.sched_getaffinity(0))
    minutes = task.minutes if options.minutes is None else options.minutes
    there = record_path(options.root, options.task, options.system, options.seed)
    require(
        not there.exists(),
        f"{there.relative_to(options.root)} exists, and records are not replaced by luckier runs: take "
        "another seed, or remove it (git rm) and say why",
    )
    is_fixed = (options.task, options.system, options.seed) in UNTUNED_RUNS
    problem = f"seed {options.seed} of {options.task} belongs to the table of games that no setting was tuned on"
    require(not is_fixed or options.command == "untuned", problem, remedy="python -m bench learning untuned makes it")
    system: System
    if options.system.startswith("apex"):
        _, variant = VARIANTS.get(options.system, ("", ()))
        system = ApexSystem(options.python, variant)
    else:
        system = PeerSystem(options.peer_python, options.system)
    os.sched_setaffinity(0, available[: options.cores])  # Started programs inherit the limit.
    # Everything that describes the circumstances is read before the run changes it.
    commit, dirty = describe_code(MADE_BY if is_fixed else CODE)
    load, date = os.getloadavg()[0], datetime.now(UTC).isoformat(timespec="seconds")
    if load > 0.5 * options.cores:
        print(f"learning: a load of {load:.1f} before the start: times of a busy machine do not count", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="apex-learning-") as name:
        folder = Path(name)
        place = Place(folder)
        command = system.train(task, options.seed, minutes, further)
        print(f"learning: {system.show(command)}", file=sys.stderr, flush=True)
        began, clock, processor = time.time(), time.monotonic(), ProcessorTime(available[: options.cores])
        wait(place.start(command, STANDARD_OUTPUT), 60 * minutes + GRACE_SECONDS, stop)
        seconds, others = time.monotonic() - clock, processor.others_share()
        if others > OTHERS_SHARE:
            what = f"other processes used {others:.0%} of the cores: the times do not count"
            if is_fixed:
                raise BusyError(what, "make the run again on an otherwise idle machine")
            print(f"learning: {what}", file=sys.stderr)
        outcome = system.read(folder, began)
        if not outcome.curve:
            raise RunError("the run ended before its first evaluation, so there is no curve")
        games = task.episodes, options.seed + FRESH

        def play(*, is_final: bool) -> RecordedScore:
            return evaluate(system.evaluate(folder, *games, final=is_final), place, *games, stop)

        score = play(is_final=task.final_only)
        # A run that ends at a score ends with the policy that reached it.
        final = None if task.bar is not None else score if task.final_only else play(is_final=True)
    if is_changed_since(commit, MADE_BY):
        require(not is_fixed, CHANGED)
        dirty = True
    record = Record(
        task=options.task,
        system=options.system,
        seed=options.seed,
        command=system.show(command),
        score=score,
        final_score=final,
        reached=task.reached(score.mean, seconds),
        seconds=round(seconds, 2),
        steps=outcome.steps,
        updates=outcome.updates,
        date=date,
        commit=commit,
        dirty=dirty,
        load=round(load, 2),
        machine=describe_machine(),
        versions=outcome.versions,
        settings=outcome.settings,
        others_share=round(others, 3),
        dormant_shares=outcome.dormant_shares,
    )
    path = write_record(options.root, record, outcome.curve)
    goal = "" if record.reached is None else ", the goal is reached" if record.reached else ", the goal is not reached"
    print(f"learning: {score.mean:.1f} after {seconds:.1f} s{goal}; wrote {path} and its curve", file=sys.stderr)
