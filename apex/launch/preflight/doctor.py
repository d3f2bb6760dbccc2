"""`apex doctor`: checks whether `apex train` could start here with the same options, and names the remedies.

The command starts no program and leaves no file. `--clean` removes the replay memories of killed runs.
"""

import importlib.metadata
import json
import os
import platform
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec
from rich.console import Console
from rich.text import Text

from apex.algorithms.kernels.convolution import find_convolution
from apex.command_line import choose_preset, parse_config
from apex.config import Config, flatten
from apex.config.arguments import reader_may_leave
from apex.config.presets import DEFAULT, PRESETS
from apex.environments.inspection import Inspector
from apex.launch.preflight import checks
from apex.launch.preflight.fit import (
    fit_one_process,
    require_announced_ports,
    require_head,
    require_keys,
    size_beside,
)
from apex.launch.preflight.leftovers import find_leftovers
from apex.launch.preflight.logind import find_affected
from apex.launch.preflight.report import Check, describe_check, describe_sizes
from apex.launch.preflight.requirements import disk_needed
from apex.launch.resume import reopen, resume_parser
from apex.runtime.gpu import read_cuda
from apex.runtime.hardware import read_link, read_machine
from apex.runtime.ports import is_free
from apex.runtime.provenance import describe_versions
from apex.runtime.text import MAX_COLUMNS
from apex.schema import Schema
from apex.sizing import Sized
from apexreplay.errors import FAILED, FINISHED, UsageError
from apexreplay.frames.lz4_blocks import find_native
from apexreplay.process.lifecycle import reports_errors, stop_on_signals
from apexreplay.process.limits import ROOT, core_limits, read_membership
from apexreplay.process.text import clean, size
from apexreplay.store.location import discard, read_run_folder, store_path

STYLES = {"ok": "green", "warning": "yellow", "short": "bold red"}
DISTRIBUTION = "apex-zeromq"
VERDICT_COLUMNS = 8


class Report(NamedTuple):
    """The results of all checks."""

    checks: list[Check]
    sized: Sized | None  # with the ports that are used; None if the run cannot be sized

    @property
    def short(self) -> list[str]:
        """Names of the checks that prevent training from starting."""
        return [check.name for check in self.checks if check.verdict == "short"]


@reports_errors("apex doctor")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `apex doctor`; returns 0 if training can start, 1 if a check is short, 2 for wrong options."""
    parser = resume_parser("apex doctor")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--clean", action="store_true", help="only remove the replay memories of killed runs, and end")
    options, rest = parser.parse_known_args(argv)
    if options.clean:
        return clean_memory()
    with stop_on_signals() as stop:  # Ctrl-C raises nothing while the child of the environment starts.
        own, inspector = None, Inspector(stop)
        if options.resume is None:
            about = "Checks whether apex train can start here with the same options, and names the remedies."
            config = parse_config(
                rest,
                prog="apex doctor",
                description=about,
                own=[parser],
                choose=_preset_or_default,
                inspector=inspector,
            )
        else:
            folder, config = reopen(options.resume, rest, accept=options.accept_changes, inspector=inspector)
            own = store_path(folder.run_id)
        report = examine(config, own, inspector)
    print_report(config, report)
    if options.json:
        print(json.dumps(describe_report(config, report)))
    return FAILED if report.short else FINISHED


def clean_memory() -> int:
    """Removes what is left of killed runs in tmpfs, and prints each file and the freed bytes; returns the status."""
    leftovers, freed = find_leftovers(), 0
    for path, num_bytes in (leftovers.dead | leftovers.kept).items():
        run = read_run_folder(path) or "another host"
        if discard(path):
            freed += num_bytes
            print(f"removed {path} ({size(num_bytes)}), the replay memory of {run}")
    print(f"freed {size(freed)}")
    return FINISHED


def examine(config: Config, own: Path | None = None, inspector: Inspector | None = None) -> Report:
    """Makes all checks; `own` is the replay memory file of a run that is to be resumed."""
    cuda, leftovers, versions = read_cuda(), find_leftovers(own), describe_versions()
    machine = read_machine(cuda)
    on_gpu = machine.gpu and config.learner.device != "cpu"
    gpu = checks.check_gpu(config.learner.device, cuda, versions["torch"] or "")
    inspector = inspector or Inspector()
    environment, schema = check_environment(config, inspector)
    limits = core_limits(read_membership(), ROOT)
    results = [
        checks.check_packages(versions, _requirements()),
        checks.check_native({"liblz4": find_native, "convolution": find_convolution}),
        checks.check_processor(platform.machine(), config.learner, has_bfloat16=machine.cpu_bfloat16, on_gpu=on_gpu),
        checks.check_cores(host=os.cpu_count() or 1, affinity=len(os.sched_getaffinity(0)), limits=limits),
        checks.check_logout(find_affected(os.geteuid())),
        gpu,
        environment,
    ]
    if config.run.head:
        try:
            require_head(config)
            require_announced_ports(config)
        except UsageError as error:
            results.append(checks.refused("head", error))
            schema = None  # Its sizes are not those of a run.
    sized = None
    if schema is not None and gpu.verdict != "short":
        try:
            sized = size_beside(leftovers.kept, config, machine, schema)
            if config.run.single_process:
                sized = sized._replace(config=fit_one_process(config, schema)[0])
        except UsageError as error:
            sized = None
            results.append(checks.refused("sizes", error))
    if schema is not None and sized is not None:
        try:
            inspector.try_algorithm(sized.config, schema)
        except UsageError as error:
            results.append(checks.refused("algorithm", error))
        room = checks.read_room(machine, cuda, leftovers, own, config.learner.device)
        ports, chosen = checks.check_ports(sized.config, is_free)
        results += [
            checks.check_limit(chosen),
            *checks.check_sizes(sized),
            *checks.check_room(chosen, schema, room),
            checks.check_link(chosen, read_link(chosen.transport.bind)),
            checks.check_disk(disk_needed(chosen, schema), Path(chosen.run.folder)),
            ports,
        ]
        sized = sized._replace(config=chosen)
    if config.transport.keys:
        results.append(check_keys(config))
    return Report([*results, checks.check_kept(leftovers.kept), *checks.check_leftovers(leftovers)], sized)


def check_environment(config: Config, inspector: Inspector) -> tuple[Check, Schema | None]:
    """Creates an environment. Returns a check and the schema; the schema is None if no environment can be created."""
    changes: list[str] = []
    try:
        schema = inspector.schema(config, changes.append)
    except UsageError as error:
        return checks.refused("environment", error, "see --env in apex train --help"), None
    note = f"{config.environment.id}: observations {schema.observations}, {schema.actions}"
    return Check("environment", 1, note="; ".join([note, *changes])), schema


def check_keys(config: Config) -> Check:
    """Checks that the keys of each program of the run can be read."""
    try:
        require_keys(config)
    except UsageError as error:
        return checks.refused("keys", error, "create keys with apex keys new DIR")
    return Check("keys", 1, note=f"{config.transport.keys} has the keys of every program")


def _preset_or_default(asked: Config, inspector: Inspector) -> Config:
    """Returns the preset for the environment; if no environment can be created, which the report shows, the default."""
    try:
        return choose_preset(asked, inspector)
    except UsageError:
        return PRESETS[DEFAULT].config


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # The package runs from a checkout without being installed.
        return []


# --- output -----------------------------------------------------------------------------------------------------------


def print_report(config: Config, report: Report, stream: TextIO | None = None) -> None:
    """Prints the checks, each with its remedy if there is too little, the sizes, and whether training can start."""
    stream = stream or sys.stdout
    console = Console(file=stream, highlight=False, soft_wrap=True)
    width = min(MAX_COLUMNS, console.width) if stream.isatty() else MAX_COLUMNS

    def show(text: str, head: str, style: str = "") -> None:
        wrapped = Text(textwrap.fill(clean(text), width, initial_indent=head, subsequent_indent=len(head) * " "))
        wrapped.stylize(style, 0, VERDICT_COLUMNS)
        console.print(wrapped)

    with reader_may_leave(stream):
        for check in report.checks:
            head, style = f"{check.verdict:<{VERDICT_COLUMNS}} {check.name:<12} ", STYLES[check.verdict]
            if check.verdict != "ok":
                show(f"-> {check.remedy}", head, style)
                head = len(head) * " "
            show(describe_check(check), head, style)
        if report.sized:
            console.print("\nsizes that apex train would choose")
            for line in describe_sizes(report.sized):
                show(line, "  ")
        console.print(f"\n{verdict(config, report)}", markup=False)


def verdict(config: Config, report: Report) -> str:
    """Returns the last sentence of the report: whether training can start."""
    if report.short:
        return f"training of {config.environment.id} cannot start: see {', '.join(report.short)}"
    warnings = [check.name for check in report.checks if check.verdict == "warning"]
    return f"training of {config.environment.id} can start" + (f"; see {', '.join(warnings)}" if warnings else "")


def describe_report(config: Config, report: Report) -> dict[str, Any]:
    """Returns the report for --json: the checks, the sizes, and every setting that was chosen for this machine."""
    asked = flatten(config)
    sized = flatten(report.sized.config) if report.sized else asked
    return {
        "can_start": not report.short,
        "checks": [
            msgspec.to_builtins(check) | {"verdict": check.verdict, "figures": describe_check(check)}
            for check in report.checks
        ],
        "sizes": describe_sizes(report.sized) if report.sized else [],
        "chosen": {name: value for name, value in sized.items() if value != asked[name]},
    }
