"""Actors: environment streams that explore with the newest parameters and send what they saw.

`apex actor --learner HOST` leases actor ids and runs one process per core; each steps E environments with one batched
forward pass. An actor, as in the paper, is one environment stream with one epsilon.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

from apex.acting.service import join, run_service
from apex.acting.worker import Work, run_worker
from apex.config.arguments import Parser, non_negative_int
from apex.runtime.lifecycle import (
    FINISHED,
    configure_logging,
    reports_errors,
    stop_on_signals,
)
from apex.runtime.watchdog import take_notifier
from apex.transport.hello import add_route_options, greet_in_child, read_route
from apex.types import Role


@reports_errors("apex actor", logs_failures=True)
def main(argv: Sequence[str] | None = None, work: Work = run_worker) -> int:
    """`apex actor`: the composition root. `work` is what each of its worker processes does."""
    parser = Parser(prog="apex actor", description="Explores for the learner at HOST.")
    add_route_options(parser)
    count = non_negative_int
    parser.add_argument("--processes", type=count, default=0, help="processes on this host; 0: by the learner")
    parser.add_argument("--envs", type=count, default=0, help="streams per process; 0: by the learner")
    arguments = parser.parse_args(argv)
    configure_logging(Role.ACTOR)
    route = read_route(arguments)
    with stop_on_signals(take_notifier()) as stop:
        greet = partial(join, route=route, processes=arguments.processes, envs=arguments.envs)
        welcome = greet_in_child(greet, stop)
        return run_service(welcome, arguments.envs, work, stop) if welcome is not None else FINISHED


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
