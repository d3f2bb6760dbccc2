"""The launcher of `python -m chaos`: the product's own, with witnessed actors, and proxies between the programs."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from apex.errors import FAILED
from apex.launch.train import execute, read_start, show
from apex.runtime.lifecycle import reports_errors, stop_on_signals
from apex.runtime.supervisor import Program
from chaos.proxy import ADDRESSES


@reports_errors("python -m chaos")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root: the folder of the ledgers, streams of each actor host, then the options of `apex train`."""
    ledgers, hosts, *rest = sys.argv[1:] if argv is None else argv
    edit = partial(edit_programs, Path(ledgers), [int(count) for count in hosts.split(",") if count])
    try:
        with stop_on_signals() as stop:
            return show(execute(replace(read_start(rest), edit_programs=edit), stop))
    except KeyboardInterrupt:
        return FAILED


def edit_programs(ledgers: Path, hosts: Sequence[int], programs: Sequence[Program]) -> list[Program]:
    """Makes the programs of a run reach one another through the proxies; no number of crashes ends the run.

    `hosts`: the streams of each actor host, in a process each; without any there is one host, as in the product.
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
            words = (word for word in program.command if word != "-P")  # `chaos` is found in the current folder only.
            command = tuple("chaos.programs.actor" if word == "apex.actor" else word for word in words)
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
    """The same command with the learner at another address."""
    at = command.index("--learner") + 1
    port = command[at].rpartition(":")[2]
    return (*command[:at], f"{address}:{port}", *command[at + 1 :])


if __name__ == "__main__":
    sys.exit(main())
