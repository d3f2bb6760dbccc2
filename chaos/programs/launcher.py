"""The launcher of `python -m chaos`: the product's launcher with ledgers, and with proxies between the programs."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from apex.launch.monitor import RunMonitor
from apex.launch.train import execute, read_start, show
from apex.runtime.supervisor import Program
from apexreplay.errors import FAILED
from apexreplay.facts import Record
from apexreplay.process.lifecycle import reports_errors, stop_on_signals
from chaos.proxy import ADDRESSES

EVENTS = "events.jsonl"  # file beside the ledgers' folder, with the launcher's events


@reports_errors("python -m chaos")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root; arguments: folder of the ledgers, streams of each actor host, options of `apex train`."""
    ledgers, hosts, *rest = sys.argv[1:] if argv is None else argv
    record_events(Path(ledgers).with_name(EVENTS))
    edit = partial(edit_programs, Path(ledgers), [int(count) for count in hosts.split(",") if count])
    try:
        with stop_on_signals() as stop:
            return show(execute(replace(read_start(rest), edit_programs=edit), stop))
    except KeyboardInterrupt:
        return FAILED


def record_events(path: Path) -> None:
    """Makes the launcher append its events to a file."""
    show = RunMonitor.show_event

    def record(watch: RunMonitor, event: Record) -> None:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
        show(watch, event)

    RunMonitor.show_event = record  # type: ignore[assignment, method-assign]


def edit_programs(ledgers: Path, hosts: Sequence[int], programs: Sequence[Program]) -> list[Program]:
    """Changes the programs of a run: they connect through the proxies, and may crash without limit.

    `hosts`: the streams of each actor host, in one process each. Without any there is one host, as in the product.
    """
    made = []
    for program in programs:
        role = program.role.partition("-")[0]
        if role in ADDRESSES:
            program = replace(program, command=_through(program.command, ADDRESSES[role]))
        program = replace(program, crash_budget=math.inf)
        if role == "replay":
            made.append(replace(program, command=(*program.command, "--advertise", ADDRESSES["to replay"])))
        elif role == "actor":
            # `chaos` can be imported from the current folder only.
            arguments = (argument for argument in program.command if argument != "-P")
            command = tuple("chaos.programs.actor" if argument == "apex.actor" else argument for argument in arguments)
            at = command.index("chaos.programs.actor") + 1
            command = (*command[:at], str(ledgers), *command[at:])
            made += [
                replace(
                    program,
                    role=f"actor-{i}",
                    command=(*command, "--processes", "1", "--envs", str(n)),
                    stops_with="actor",
                )
                for i, n in enumerate(hosts)
            ] or [replace(program, command=command)]
        else:
            made.append(program)
    return made


def _through(command: tuple[str, ...], address: str) -> tuple[str, ...]:
    """Returns the same command with another address of the learner."""
    at = command.index("--learner") + 1
    port = command[at].rpartition(":")[2]
    return (*command[:at], f"{address}:{port}", *command[at + 1 :])


if __name__ == "__main__":
    sys.exit(main())
