"""`apex status`: prints the status of a run."""

import sys
import time
from collections.abc import Sequence

import msgspec

from apex.config.arguments import Parser, positive_float
from apex.launch.terminal.view import show_once
from apex.runs.live import find_route
from apex.transport.curve.key_store import Keys, read_keys
from apex.transport.hello import has_address
from apex.transport.messages.control import StatusRequest, decode_answer
from apex.transport.messages.run_status import RunStatus
from apex.types import Role
from apexreplay.errors import FINISHED, NEIGHBOUR_GONE
from apexreplay.process.lifecycle import reports_errors
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.sockets import open_context


@reports_errors("apex status")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `apex status`; returns the exit status, 75 if no learner answers."""
    parser = Parser(prog="apex status", description="Prints the status of the run whose learner is at HOST.")
    learner = "control address of the learner; default: the newest run in ./runs that is running on this host"
    parser.add_argument("--learner", metavar="HOST[:PORT]", help=learner)
    parser.add_argument("--keys", default="", metavar="DIR", help="folder with the keys of an observer, see apex keys")
    parser.set_defaults(insecure_no_auth=False)
    parser.add_argument("--json", action="store_true", help="print the whole status as one JSON object")
    parser.add_argument(
        "--timeout", type=positive_float, default=3.0, metavar="SECONDS", help="how long to wait for an answer"
    )
    arguments = parser.parse_args(argv)
    route = find_route(arguments)
    status = ask(route.endpoint, arguments.timeout, read_keys(route.keys, Role.OBSERVER))
    if status is None:
        text = f"apex status: no learner answered at {route.endpoint} within {arguments.timeout:g} s"
        remedy = "check the address, and give the --keys of the run if it has any"
        if arguments.learner is None:
            remedy = "for a run elsewhere or with keys, give --learner and --keys"
        elif not has_address(route):
            remedy = f"the host name {route.host!r} cannot be resolved: check it"
        print(f"{text}; {remedy}", file=sys.stderr)
        return NEIGHBOUR_GONE
    if arguments.json:
        print(msgspec.json.encode(status).decode())
    else:
        show_once(status)
    return FINISHED


def ask(endpoint: str, timeout: float, keys: Keys | None = None) -> RunStatus | None:
    """Returns the status of the run whose learner is at `endpoint`; None without an answer in `timeout` seconds."""
    deadline = time.monotonic() + timeout
    with open_context(keys) as context:
        client = ControlSocket(context, endpoint, decode_answer, linger=0.0)
        client.send(StatusRequest())
        while (remaining := deadline - time.monotonic()) > 0:
            answer = client.receive(remaining)
            if isinstance(answer, RunStatus):
                return answer
    return None
