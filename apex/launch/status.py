"""`apex status`: what a run is doing, from any shell."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec

from apex.config import Config
from apex.config.arguments import Parser, positive_float
from apex.launch.terminal.view import show_once
from apex.runtime.lifecycle import FINISHED, NEIGHBOUR_GONE, reports_errors
from apex.transport.control_client import ControlClient
from apex.transport.curve.key_store import Keys, read_keys
from apex.transport.messages.control import StatusRequest
from apex.transport.messages.run_status import RunStatus
from apex.transport.sockets import open_context, split_address
from apex.types import Role


@reports_errors("apex status")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root; 75 when no learner answers."""
    parser = Parser(prog="apex status", description="Shows the run of the learner at HOST.")
    parser.add_argument("--learner", default="127.0.0.1", metavar="HOST[:PORT]", help="the learner's control address")
    parser.add_argument("--keys", default="", metavar="DIR", help="folder with an observer's keys, see apex keys")
    parser.add_argument("--json", action="store_true", help="print the whole status object")
    parser.add_argument(
        "--timeout", type=positive_float, default=3.0, metavar="SECONDS", help="how long to wait for an answer"
    )
    arguments = parser.parse_args(argv)
    host, port = split_address(arguments.learner, Config().transport.control_port)
    endpoint = f"tcp://{host}:{port}"
    status = ask(endpoint, arguments.timeout, read_keys(arguments.keys, Role.OBSERVER))
    if status is None:
        print(f"apex status: no learner answers at {endpoint} ({arguments.timeout:g} s)", file=sys.stderr)
        return NEIGHBOUR_GONE
    if arguments.json:
        print(msgspec.json.encode(status).decode())
    else:
        show_once(status)
    return FINISHED


def ask(endpoint: str, timeout: float, keys: Keys | None = None) -> RunStatus | None:
    """The status of the run of the learner at `endpoint`, or None after `timeout` seconds without an answer."""
    deadline = time.monotonic() + timeout
    with open_context(keys) as context:
        client = ControlClient(context, endpoint, linger=0.0)
        client.send(StatusRequest())
        while (remaining := deadline - time.monotonic()) > 0:
            answer = client.receive(remaining)
            if isinstance(answer, RunStatus):
                return answer
    return None
