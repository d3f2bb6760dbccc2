"""The launcher of `python -m chaos unusable`: the product's launcher, with actors that damage some segments.

Frames of vectors are compressed with LZ4 here; otherwise no frame could be undecodable.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from apex.config import Config
from apex.environments.inspection import Inspector
from apex.launch.train import execute, read_start, show
from apex.runtime.supervisor import Program
from apex.schema import Schema
from apexreplay.process.lifecycle import reports_errors, stop_on_signals


@reports_errors("python -m chaos unusable")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root; arguments: kinds and share of the damage, then the options of `apex train`."""
    kinds, share, *rest = sys.argv[1:] if argv is None else argv
    start = replace(read_start(rest), edit_programs=partial(_spoil, kinds, share), inspector=CompressingInspector())
    with stop_on_signals() as stop:
        return show(execute(start, stop))


class CompressingInspector(Inspector):
    """Reports that frames of vectors are compressed."""

    def schema(self, config: Config, report: Callable[[str], None] = print) -> Schema:
        """See `Inspector.schema`."""
        return replace(super().schema(config, report), codec="lz4")


def _spoil(kinds: str, share: str, programs: list[Program]) -> list[Program]:
    made = []
    for program in programs:
        if program.role == "actor":
            # `chaos` can be imported from the current folder only.
            command = [argument for argument in program.command if argument != "-P"]
            at = command.index("apex.actor")
            command[at : at + 1] = ["chaos.unusable.actor", kinds, share]
            program = replace(program, command=tuple(command))
        made.append(program)
    return made


if __name__ == "__main__":
    sys.exit(main())
