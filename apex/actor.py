"""Actors: environment streams that explore with the newest parameters and send what they saw.

`apex actor --learner HOST` leases actor ids and runs one process per core; each steps E environments with one batched
forward pass. An actor, as in the paper, is one environment stream with one epsilon.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from apex.actor_host import Host, WorkerFigures
from apex.actor_worker import Task, Work, work
from apex.errors import ConfigError
from apex.lifecycle import FAILED, FINISHED, NEIGHBOUR_GONE, REFUSED, Stop, complain, configure_logging, stop_on_signals
from apex.parameter_board import ParameterBoard
from apex.processes import ChildDiedError, call_in_child, check_children, start_child, stop_children
from apex.session import Route, Session, Welcome, add_route_options, greet, read_route, read_welcome

log = logging.getLogger("apex")


def _join(stop: Stop, *, route: Route, processes: int, envs: int) -> dict[str, Any]:
    """Says hello, learns how many streams this host takes, and leases them."""
    answer = greet(route, "actor", stop, needs_replay=True)
    if not answer:
        return {}
    actor = read_welcome(answer).config.actor
    num_streams = (processes or actor.num_processes or 1) * (envs or actor.envs_per_process or 1)
    return greet(route, "actor", stop, num_streams=num_streams, needs_replay=True)


def main(argv: Sequence[str] | None = None, work: Work = work) -> int:
    """`apex actor`: the composition root. `work` is what each of its worker processes does."""
    parser = argparse.ArgumentParser(prog="apex actor", description="Explores for the learner at HOST.")
    add_route_options(parser)
    parser.add_argument(
        "--processes", type=int, default=0, help="processes on this host; default: the learner's choice"
    )
    parser.add_argument("--envs", type=int, default=0, help="streams per process; default: the learner's choice")
    arguments = parser.parse_args(argv)
    configure_logging("actor")
    try:
        if arguments.processes < 0 or arguments.envs < 0:
            raise ConfigError("--processes and --envs must be >= 1 (or 0: the learner's choice)")
        route = read_route(arguments)
        with stop_on_signals() as stop:
            join = partial(_join, route=route, processes=arguments.processes, envs=arguments.envs)
            answer = call_in_child("hello", lambda child_stop: join(child_stop), stop)
            return (
                _run(read_welcome(answer), int(answer["num_actors"]), arguments.envs, work, stop)
                if answer
                else FINISHED
            )
    except ConfigError as error:
        complain(f"apex actor: {error}")
        return REFUSED
    except ChildDiedError as error:
        log.error("%s", error)
        return FAILED


def _run(welcome: Welcome, num_actors: int, envs: int, work: Work, stop: Stop) -> int:
    streams = welcome.streams
    size = envs or welcome.config.actor.envs_per_process or len(streams)
    blocks = [streams[i : i + size] for i in range(0, len(streams), size)]
    board = ParameterBoard(welcome.num_parameters)
    figures = WorkerFigures(len(blocks))
    log.info("actors %d to %d in %d processes", streams[-1].actor_id, streams[0].actor_id, len(blocks))
    children = [
        start_child(f"actor-{block[0].actor_id}", work, Task(welcome, num_actors, block, board, figures, row))
        for row, block in enumerate(blocks)
    ]
    session = None
    try:
        host = Host(welcome, board, figures, [len(block) for block in blocks])
        session = Session(welcome, "actor", stop, host.status)

        def check() -> None:
            check_children(children, welcome.config.run.stuck_seconds)
            session.check()

        host.run(stop, check)
        return NEIGHBOUR_GONE if session.lost else FINISHED
    except ChildDiedError as error:
        raise ChildDiedError(": ".join(filter(None, [str(error), figures.last_words]))) from error
    finally:
        stop_children(children)
        if session is not None:
            session.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
