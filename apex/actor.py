"""Actors: environment streams that explore with the newest parameters and send transitions to replay servers.

`apex actor --learner HOST` leases actor ids and runs one process per core. Each process steps E environments with one
batched forward pass. An actor, as in the paper, is one environment stream with its own epsilon.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial

from apex.acting.service import join, run_service
from apex.acting.worker import Work, run_worker
from apex.config.arguments import Parser, non_negative_int
from apex.runs.live import find_route
from apex.runtime.logs import configure_logging
from apex.runtime.trust import add_allow
from apex.transport.hello import add_route_options, greet_in_child
from apex.types import Role
from apexreplay.errors import FINISHED, NEIGHBOUR_GONE
from apexreplay.process.lifecycle import reports_errors, sleep, stop_on_signals
from apexreplay.process.watchdog import take_notifier

REJOIN_SECONDS = 1.0  # pause before joining again, because a learner announces the end of its run for some seconds

log = logging.getLogger("apex")


@reports_errors("apex actor", logs_failures=True)
def main(argv: Sequence[str] | None = None, work: Work = run_worker) -> int:
    """Runs `apex actor`: the composition root. `work` is the function that each worker process runs."""
    parser = Parser(prog="apex actor", description="Starts actors that explore for the learner at HOST.")
    add_route_options(parser)
    add_allow(parser)
    count = non_negative_int
    parser.add_argument("--processes", type=count, default=0, help="processes on this host; 0: as the run configures")
    parser.add_argument("--envs", type=count, default=0, help="environments per process; 0: as the run configures")
    parser.add_argument("--wait-for-runs", action="store_true", help="after a run, wait for the next run at HOST")
    arguments = parser.parse_args(argv)
    configure_logging(Role.ACTOR)
    route = find_route(arguments)
    greet = partial(join, route=route, processes=arguments.processes, envs=arguments.envs)
    with stop_on_signals(take_notifier()) as signals:
        while True:
            stop = signals.follower()
            welcome = greet_in_child(greet, stop)
            status = run_service(welcome, arguments.envs, work, stop) if welcome is not None else FINISHED
            if signals.poll():  # A scheduler must see that the run is not over.
                return NEIGHBOUR_GONE if signals.signum == signal.SIGTERM else FINISHED
            if status is not None and not arguments.wait_for_runs:
                return status
            log.info("%s: joining again", "a replay server has moved" if status is None else f"ended with {status}")
            sleep(REJOIN_SECONDS, signals)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
