"""`apex doctor`: whether `apex train` could start here with the same options, the arithmetic, and what to do if not.

It starts nothing and leaves nothing behind.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from apex.config import Config, flatten
from apex.config.arguments import reader_may_leave
from apex.config.command_line import parse_config
from apex.config.sizing import Machine, bytes_per_transition, explain, size_to_machine
from apex.dqn.kernels.convolution import describe_convolution
from apex.environments.factory import describe, kind
from apex.errors import ConfigError
from apex.launch.preflight.checks import (
    Check,
    check_cores,
    check_disk,
    check_gpu,
    check_leftovers,
    check_native,
    check_packages,
    check_ports,
    check_processor,
    check_room,
    check_threads,
    read_room,
)
from apex.launch.preflight.leftovers import find_leftovers
from apex.launch.preflight.requirements import disk_needed
from apex.launch.resume import reopen, resume_parser
from apex.replay_memory.frames.lz4_blocks import describe_native
from apex.replay_memory.store.location import store_path
from apex.runtime.gpu import means_gpu, read_cuda
from apex.runtime.hardware import ROOT, core_limits, read_machine, read_membership, read_space
from apex.runtime.lifecycle import FAILED, FINISHED, reports_errors
from apex.runtime.ports import is_free
from apex.runtime.provenance import describe_versions
from apex.runtime.text import clean
from apex.types import Schema

STYLES = {"ok": "green", "warning": "yellow", "short": "bold red"}
DISTRIBUTION = "apex-zeromq"


class Report(NamedTuple):
    """What was found out."""

    checks: list[Check]
    sizes: list[str]  # the rule's arithmetic; none where the run cannot be sized
    sized: Config | None

    @property
    def short(self) -> list[str]:
        """Names of what keeps training from starting."""
        return [check.name for check in self.checks if check.verdict == "short"]


@reports_errors("apex doctor")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root: status 0 when training can start, 1 when something is short, 2 for wrong options."""
    parser = resume_parser("apex doctor")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options, rest = parser.parse_known_args(argv)
    own = None
    if options.resume is None:
        about = "Says whether apex train could start here with the same options, and what to do if not."
        config = parse_config(rest, prog="apex doctor", description=about, kind=kind, means_gpu=means_gpu, own=[parser])
    else:
        folder, config = reopen(options.resume, rest, accept=options.accept_changes)
        own = store_path(folder.run_id)
    report = examine(config, own)
    print_report(config, report)
    if options.json:
        print(json.dumps(describe_report(config, report)))
    return FAILED if report.short else FINISHED


def examine(config: Config, own: Path | None = None) -> Report:
    """Looks at everything; `own` is the store of a run that is to go on."""
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
    return Report([*checks, check_leftovers(leftovers)], sizes, sized)


def check_environment(config: Config) -> tuple[Check, Schema | None]:
    """Makes one, as every start does."""
    changes: list[str] = []
    try:
        schema = describe(config.environment, config.actor.n_step, changes.append)
    except ConfigError as error:
        figures, _, remedy = str(error).partition("; ")
        return Check("environment", figures, "short", remedy or "see --env in apex train --help"), None
    shape = " x ".join(map(str, schema.observation_shape))
    game = f"{config.environment.id}: observations {shape} {schema.frame_dtype}, {schema.num_actions} actions"
    return Check("environment", "; ".join([game, *changes])), schema


def check_sizes(config: Config, machine: Machine, schema: Schema) -> tuple[Check, Config | None]:
    """What the rule makes of it, in short."""
    try:
        sized = size_to_machine(config, machine, schema)
    except ConfigError as error:
        figures, _, remedy = str(error).partition(": ")
        return Check("sizes", figures, "short", remedy), None
    actor, learner = sized.actor, sized.learner
    told = [
        f"actor processes {actor.num_processes}",
        f"environments of each {actor.envs_per_process}",
        f"actors {actor.num_actors}",
        f"learner threads {learner.num_threads}",
        f"loaders {learner.num_loaders}",
        f"batch {learner.batch_size}",
    ]
    streams = actor.num_processes * actor.envs_per_process
    remedies = []
    if actor.num_processes * actor.num_threads > machine.cores:
        told.append(f"but {machine.cores} cores")
        remedies.append("leave --actor.num-processes, --actor.envs-per-process and --actor.num-threads to the rule")
    if streams < actor.num_actors:
        told.append(f"but {streams} streams")
        remedies.append("start apex actor on other hosts, or raise --actor.num-processes or --actor.envs-per-process")
    fit = sized.replay.max_bytes // bytes_per_transition(sized, schema)
    if fit < sized.replay.min_size_to_sample:
        told.append(
            f"but room for about {fit:,} transitions, and training begins at {sized.replay.min_size_to_sample:,}"
        )
        remedies.append("raise --replay.max-bytes, or lower --replay.min-size-to-sample")
    return Check("sizes", ", ".join(told), "warning" if remedies else "ok", "; ".join(remedies)), sized


def _check_folder(config: Config, schema: Schema) -> Check:
    folder = Path(config.run.folder)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return check_disk(disk_needed(config, schema), folder, read_space(there), writable=writable)


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # It runs from a checkout that is not installed.
        return []


# --- what a person and a program see ----------------------------------------------------------------------------------


def print_report(config: Config, report: Report, stream: TextIO | None = None) -> None:
    """A table on a terminal, else a line for each check and one for each remedy."""
    stream = stream or sys.stdout
    with reader_may_leave():
        if stream.isatty():
            Console(file=stream, highlight=False).print(_table(report))
        else:
            for check in report.checks:
                print(f"{check.verdict:<8} {check.name:<12} {check.figures}", file=stream)
                if check.remedy:
                    print(f"{'':<8} {'':<12} -> {check.remedy}", file=stream)
        if report.sizes:
            print("\nwhat apex train would choose, and why", file=stream)
            print("\n".join(f"  {line}" for line in report.sizes), file=stream)
        print(f"\n{verdict(config, report)}", file=stream)


def verdict(config: Config, report: Report) -> str:
    """The last sentence."""
    if report.short:
        return f"training of {config.environment.id} cannot start: see {', '.join(report.short)}"
    warnings = [check.name for check in report.checks if check.verdict == "warning"]
    return f"training of {config.environment.id} can start" + (f"; see {', '.join(warnings)}" if warnings else "")


def describe_report(config: Config, report: Report) -> dict[str, Any]:
    """The same for a program: the checks, the rule's lines, and every setting that the machine decided."""
    asked = flatten(config)
    sized = flatten(report.sized) if report.sized is not None else asked
    return {
        "can_start": not report.short,
        "checks": [check._asdict() for check in report.checks],
        "sizes": report.sizes,
        "chosen": {name: value for name, value in sized.items() if value != asked[name]},
    }


def _table(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        told = Text(clean(check.figures))
        if check.remedy:
            told.append(f"\n-> {clean(check.remedy)}", style="bold")
        table.add_row(Text(check.verdict, style=STYLES[check.verdict]), Text(check.name), told)
    return table


if __name__ == "__main__":
    sys.exit(main())
