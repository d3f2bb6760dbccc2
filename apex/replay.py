"""The replay server: one writer with asyncio and ZeroMQ, and K samplers that read shared memory without locks.

`apex replay --learner HOST` keeps the newest transitions in a file in tmpfs. All processes of the server map this file.
Only the writer changes the file: it inserts transitions and sets priorities. The samplers do not wait for the writer,
and the writer does not wait for the samplers. K is replay.num_samplers. A run has replay.num_shards of these servers;
each of them stores the streams of one shard.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from apex.config.arguments import Parser, non_negative_int
from apex.replay_memory.service import predecessor_is_dead, run_service
from apex.runs.live import find_route
from apex.runtime.logs import configure_logging
from apex.transport.hello import add_route_options, greet, greet_in_child
from apex.transport.messages.fields import HOST
from apex.types import Role
from apexreplay.errors import FINISHED
from apexreplay.process.lifecycle import reports_errors, stop_on_signals
from apexreplay.process.watchdog import take_notifier


def host(text: str) -> str:
    """Returns `text` if it is empty or a host's name or IPv4 address. argparse uses this as the type of an option."""
    if text and not re.fullmatch(HOST, text):
        raise argparse.ArgumentTypeError(f"must be a host name or an IPv4 address, got {text!r}")
    return text


@reports_errors("apex replay", logs_failures=True)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `apex replay`: the composition root."""
    parser = Parser(prog="apex replay", description="Starts a replay server for the learner at HOST.")
    add_route_options(parser)
    add = parser.add_argument
    add("--shard", type=non_negative_int, default=0, metavar="I", help="number of this shard, from 0 (default: 0)")
    add("--bind", default="", metavar="ADDRESS", help="this host's address to listen on (default: the learner decides)")
    reached = "address at which other hosts reach this one (default: automatic)"
    add("--advertise", default="", type=host, metavar="HOST", help=reached)
    add("--snapshots", type=Path, metavar="DIR", help="folder to restore the memory from and save snapshots to")
    arguments = parser.parse_args(argv)
    configure_logging(Role.REPLAY)
    route = find_route(arguments)
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
