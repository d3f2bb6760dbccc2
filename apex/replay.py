"""The replay server: one writer with asyncio and ZeroMQ, K samplers that read shared memory without locks.

`apex replay --learner HOST` keeps the newest transitions in a file in tmpfs that all its processes map. The writer owns
every write: inserts and priorities. No other process of ours waits for it, and it waits for none. There are
replay.num_shards of these servers, each with its --shard of the streams and of the memory.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from apex.config.arguments import Parser, non_negative_int
from apex.replay_memory.recovery import predecessor_is_dead
from apex.replay_memory.service import run_service
from apex.runtime.lifecycle import (
    FINISHED,
    configure_logging,
    reports_errors,
    stop_on_signals,
)
from apex.runtime.watchdog import take_notifier
from apex.transport.hello import add_route_options, greet, greet_in_child, read_route
from apex.transport.messages.fields import HOST
from apex.types import Role


def host(text: str) -> str:
    """A host's name or address, for argparse."""
    if text and not re.fullmatch(HOST, text):
        raise argparse.ArgumentTypeError(f"must be a name or an address (IPv6 in brackets), got {text!r}")
    return text


@reports_errors("apex replay", logs_failures=True)
def main(argv: Sequence[str] | None = None) -> int:
    """`apex replay`: the composition root."""
    parser = Parser(prog="apex replay", description="Keeps experience for the learner at HOST.")
    add_route_options(parser)
    parser.add_argument(
        "--shard", type=non_negative_int, default=0, metavar="I", help="which of replay.num_shards, from 0; default 0"
    )
    parser.add_argument(
        "--bind", default="", metavar="ADDRESS", help="interface to listen on; default: the learner's choice"
    )
    parser.add_argument(
        "--advertise", default="", type=host, metavar="HOST", help="how the others reach this host; default: found out"
    )
    parser.add_argument(
        "--snapshots", type=Path, metavar="DIR", help="folder for snapshots of the memory, and to go on from; else none"
    )
    arguments = parser.parse_args(argv)
    configure_logging(Role.REPLAY)
    route = read_route(arguments)
    with stop_on_signals(take_notifier()) as stop:
        is_dead = partial(predecessor_is_dead, arguments.shard)
        hello = partial(greet, route, Role.REPLAY, shard=arguments.shard, holder_is_dead=is_dead)
        welcome = greet_in_child(hello, stop)
        if welcome is None:
            return FINISHED
        if arguments.bind:
            welcome = welcome.with_transport(bind=arguments.bind)
        return run_service(welcome, arguments.shard, arguments.advertise, arguments.snapshots, stop)


if __name__ == "__main__":
    sys.exit(main())
