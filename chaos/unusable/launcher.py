"""The launcher of `python -m chaos unusable`: the product's own, with actors that spoil some segments.

Frames of vectors travel as LZ4 blocks here, or none could be undecodable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from apex.command_line import parse_config
from apex.config import Config, EnvironmentConfig
from apex.environments.factory import describe
from apex.launch import local
from apex.launch.monitor import RunMonitor
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import reports_errors, stop_on_signals
from apex.runtime.supervisor import Program
from apex.types import Schema


@reports_errors("python -m chaos unusable")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root: kinds of spoiling and their share, then the options of `apex train`."""
    kinds, share, *rest = sys.argv[1:] if argv is None else argv
    config = parse_config(rest, prog="python -m chaos unusable")
    with stop_on_signals() as stop, patch.object(local, "describe", _describe):
        return local.train(config, stop, rest, partial(_programs, kinds, share))


def _describe(config: EnvironmentConfig, n_step: int, tell: Callable[[str], None]) -> Schema:
    return replace(describe(config, n_step, tell), codec="lz4")


def _programs(kinds: str, share: str, config: Config, folder: RunFolder, watch: RunMonitor) -> list[Program]:
    made = []
    for program in local.make_programs(config, folder, watch):
        if program.role == "actor":
            words = [word for word in program.command if word != "-P"]  # `chaos` is in the current folder only.
            at = words.index("apex.actor")
            words[at : at + 1] = ["chaos.unusable.actor", kinds, share]
            program = replace(program, command=tuple(words))
        made.append(program)
    return made


if __name__ == "__main__":
    sys.exit(main())
