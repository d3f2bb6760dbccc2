"""`apex doctor`: checks whether `apex train` could start here with the same options, and names the remedies.

The command starts no program and leaves no file.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from apex.command_line import parse_config
from apex.config import Config, flatten
from apex.config.arguments import reader_may_leave
from apex.config.sizing import Machine, bytes_per_transition, explain, size_to_machine
from apex.dqn.kernels.convolution import describe_convolution
from apex.environments.factory import describe
from apex.errors import FAILED, FINISHED, UsageError
from apex.launch.preflight.checks import (
    Check,
    check_cores,
    check_disk,
    check_gpu,
    check_leftovers,
    check_logout,
    check_native,
    check_packages,
    check_ports,
    check_processor,
    check_room,
    check_threads,
    read_room,
)
from apex.launch.preflight.fit import require_keys
from apex.launch.preflight.leftovers import find_leftovers
from apex.launch.preflight.requirements import disk_needed
from apex.launch.resume import reopen, resume_parser
from apex.replay_memory.frames.lz4_blocks import describe_native
from apex.replay_memory.store.location import store_path
from apex.runtime.gpu import read_cuda
from apex.runtime.hardware import ROOT, core_limits, read_machine, read_membership, read_space
from apex.runtime.lifecycle import reports_errors
from apex.runtime.logind import find_affected
from apex.runtime.ports import is_free
from apex.runtime.provenance import describe_versions
from apex.runtime.text import MAX_COLUMNS, clean
from apex.types import Schema

STYLES = {"ok": "green", "warning": "yellow", "short": "bold red"}
DISTRIBUTION = "apex-zeromq"
INDENT = 22 * " "  # indentation of wrapped text in the report


class Report(NamedTuple):
    """The results of all checks."""

    checks: list[Check]
    sizes: list[str]  # how each size was computed; empty if the run cannot be sized
    sized: Config | None

    @property
    def short(self) -> list[str]:
        """Names of the checks that prevent training from starting."""
        return [check.name for check in self.checks if check.verdict == "short"]


@reports_errors("apex doctor")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `apex doctor`; returns 0 if training can start, 1 if a check is short, 2 for wrong options."""
    parser = resume_parser("apex doctor")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options, rest = parser.parse_known_args(argv)
    own = None
    if options.resume is None:
        about = "Checks whether apex train can start here with the same options, and names the remedies."
        config = parse_config(rest, prog="apex doctor", description=about, own=[parser])
    else:
        folder, config = reopen(options.resume, rest, accept=options.accept_changes)
        own = store_path(folder.run_id)
    report = examine(config, own)
    print_report(config, report)
    if options.json:
        print(json.dumps(describe_report(config, report)))
    return FAILED if report.short else FINISHED


def examine(config: Config, own: Path | None = None) -> Report:
    """Makes all checks; `own` is the replay memory file of a run that is to be resumed."""
    cuda, leftovers, versions = read_cuda(), find_leftovers(), describe_versions()
    machine = read_machine(cuda)
    on_gpu = machine.gpu and config.learner.device != "cpu"
    gpu = check_gpu(config.learner.device, cuda, versions["torch"] or "")
    environment, schema = check_environment(config)
    checks = [
        check_packages(versions, _requirements()),
        check_native(describe_native(), describe_convolution()),
        check_processor(platform.machine(), config.learner, has_bfloat16=machine.cpu_bfloat16, on_gpu=on_gpu),
        check_cores(
            machine.cores,
            host=os.cpu_count() or 1,
            affinity=len(os.sched_getaffinity(0)),
            limits=core_limits(read_membership(), ROOT),
        ),
        check_threads(config, machine.cores),
        check_logout(find_affected(os.geteuid())),
        gpu,
        environment,
    ]
    sized, sizes = None, []
    if schema is not None and gpu.verdict != "short":
        check, sized = check_sizes(config, machine, schema)
        checks.append(check)
    if schema is not None and sized is not None:
        sizes = explain(config, machine, schema)
        room = read_room(machine, cuda, leftovers, own, config.learner.device)
        ports, sized = check_ports(sized, is_free)
        checks += [*check_room(sized, schema, room), _check_folder(sized, schema), ports]
    if config.transport.keys:
        checks.append(check_keys(config))
    return Report([*checks, check_leftovers(leftovers)], sizes, sized)


def check_environment(config: Config) -> tuple[Check, Schema | None]:
    """Creates an environment. Returns a check and the schema; the schema is None if no environment can be created."""
    changes: list[str] = []
    try:
        schema = describe(config.environment, config.actor.n_step, changes.append)
    except UsageError as error:
        figures, _, remedy = str(error).partition("; ")
        return Check("environment", figures, "short", remedy or "see --env in apex train --help"), None
    shape = " x ".join(map(str, schema.observation_shape))
    game = f"{config.environment.id}: observations {shape} {schema.frame_dtype}, {schema.actions}"
    return Check("environment", "; ".join([game, *changes])), schema


def check_sizes(config: Config, machine: Machine, schema: Schema) -> tuple[Check, Config | None]:
    """Chooses sizes for this machine. Returns a check and the sized configuration, which is None on failure."""
    try:
        sized = size_to_machine(config, machine, schema)
    except UsageError as error:
        figures, _, remedy = str(error).partition(": ")
        return Check("sizes", figures, "short", remedy), None
    actor, learner = sized.actor, sized.learner
    told = [
        f"actor processes {actor.num_processes}",
        f"environments per process {actor.envs_per_process}",
        f"actors {actor.num_actors}",
        f"learner threads {learner.num_threads}",
        f"loaders {learner.num_loaders}",
        f"batch {learner.batch_size}",
    ]
    streams = actor.num_processes * actor.envs_per_process
    problems, remedies = [], []
    if actor.num_processes * actor.num_threads > machine.cores:
        problems.append(f"{actor.num_processes * actor.num_threads} actor threads, but only {machine.cores} cores")
        remedies.append("leave out --actor.num-processes, --actor.envs-per-process and --actor.num-threads")
    if streams < actor.num_actors and not sized.run.head:
        problems.append(f"{actor.num_actors} actors, but only {streams} environments on this host")
        remedies.append("start apex actor on other hosts, or raise --actor.num-processes or --actor.envs-per-process")
    fit = sized.replay.max_bytes // bytes_per_transition(sized, schema)
    if fit < sized.replay.min_size_to_sample:
        begin = sized.replay.min_size_to_sample
        problems.append(f"the memory holds only {fit:,} transitions, and training begins at {begin:,}")
        remedies.append("raise --replay.max-bytes, or lower --replay.min-size-to-sample")
    told = [", ".join(told), *problems]
    return Check("sizes", "; ".join(told), "warning" if remedies else "ok", "; ".join(remedies)), sized


def check_keys(config: Config) -> Check:
    """Checks that the keys of each program of the run can be read."""
    try:
        require_keys(config)
    except UsageError as error:
        figures, _, remedy = str(error).partition(": ")
        return Check("keys", figures, "short", remedy or "create keys with apex keys new DIR")
    return Check("keys", f"{config.transport.keys} has the keys of every program")


def _check_folder(config: Config, schema: Schema) -> Check:
    folder = Path(config.run.folder)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return check_disk(disk_needed(config, schema), folder, read_space(there), writable=writable)


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # The package runs from a checkout without being installed.
        return []


# --- output -----------------------------------------------------------------------------------------------------------


def print_report(config: Config, report: Report, stream: TextIO | None = None) -> None:
    """Prints a table on a terminal; otherwise one line per check and one per remedy."""
    stream = stream or sys.stdout
    with reader_may_leave():
        if stream.isatty():
            console = Console(file=stream, highlight=False)
            console.print(_table(report), width=min(MAX_COLUMNS, console.width))
        else:
            for check in report.checks:
                head = f"{check.verdict:<8} {check.name:<12} "
                for text in _told(check):
                    print(textwrap.fill(text, MAX_COLUMNS, initial_indent=head, subsequent_indent=INDENT), file=stream)
                    head = INDENT
        if report.sizes:
            print("\nsizes that apex train would choose", file=stream)
            for line in report.sizes:
                print(textwrap.fill(line, MAX_COLUMNS, initial_indent="  ", subsequent_indent="      "), file=stream)
        print(f"\n{verdict(config, report)}", file=stream)


def verdict(config: Config, report: Report) -> str:
    """Returns the last sentence of the report: whether training can start."""
    if report.short:
        return f"training of {config.environment.id} cannot start: see {', '.join(report.short)}"
    warnings = [check.name for check in report.checks if check.verdict == "warning"]
    return f"training of {config.environment.id} can start" + (f"; see {', '.join(warnings)}" if warnings else "")


def describe_report(config: Config, report: Report) -> dict[str, Any]:
    """Returns the report for --json: the checks, the sizes, and every setting that was chosen for this machine."""
    asked = flatten(config)
    sized = flatten(report.sized) if report.sized is not None else asked
    return {
        "can_start": not report.short,
        "checks": [check._asdict() for check in report.checks],
        "sizes": report.sizes,
        "chosen": {name: value for name, value in sized.items() if value != asked[name]},
    }


def _told(check: Check) -> list[str]:
    """Returns the remedy, if there is one, followed by the figures."""
    return [f"-> {check.remedy}", check.figures] if check.remedy else [check.figures]


def _table(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        *remedy, figures = map(clean, _told(check))
        told = Text("".join(f"{text}\n" for text in remedy), style="bold")
        told.append(figures, style="not bold")
        table.add_row(Text(check.verdict, style=STYLES[check.verdict]), Text(check.name), told)
    return table


if __name__ == "__main__":
    sys.exit(main())
