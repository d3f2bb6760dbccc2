"""`python -m chaos deaths`: kills peers while a socket has stopped reading; the process of the socket must survive.

libzmq 4.3.5 aborts a process if three things coincide: a socket's queue is full, so that its input is stopped; the peer
dies; and the timer of a ZMTP heartbeat fires before the socket is read. Here, peers fill the queue of every kind of
receiving socket and are killed with SIGKILL. The socket is read later than any of our timers.
"""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zmq

from apex.config.arguments import Parser, positive_int
from apex.schema import Schema
from apex.transport.curve.command import new_folder
from apex.transport.curve.key_store import read_keys
from apex.transport.endpoints import ParameterPublisher, ParameterSubscriber
from apex.transport.run_codec import RunCodec
from apex.types import Parameters, Role
from apexreplay.errors import FAILED, FINISHED
from apexreplay.process.lifecycle import reports_errors
from apexreplay.transport.async_receiver import PULL, ROUTER, AsyncReceiver
from apexreplay.transport.endpoints import RequestReceiver
from apexreplay.transport.sockets import Context, connect, open_context, prepare

MARK = 50  # high-water mark of sockets that accept one as an argument
MESSAGE = bytes(2_000)
FULL_SECONDS = 0.5  # time in which no socket of a peer had room
TIMER_SECONDS = 3.0  # longer than the longest heartbeat interval that was ever used here, 2 s
READ_SECONDS = 0.3  # time without a message after which the queues count as empty
NUM_PEERS = 30  # connections that die at the same time
SCHEMA = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
CODEC = RunCodec(1, SCHEMA)
VALUES = np.zeros(1_000, np.float32)


class Kind(NamedTuple):
    """A receiving socket, and the roles that may connect to it."""

    role: Role  # role of the receiving program
    peer: Role  # role of the dying program


KINDS = {
    "experience": Kind(Role.REPLAY, Role.ACTOR),
    "priorities": Kind(Role.REPLAY, Role.LEARNER),
    "batches": Kind(Role.REPLAY, Role.LEARNER),
    "control": Kind(Role.LEARNER, Role.ACTOR),
    "parameters": Kind(Role.ACTOR, Role.LEARNER),
}


@reports_errors("python -m chaos deaths")
def main(argv: Sequence[str]) -> int:
    """Returns status 1 if a receiver ended, 0 if all survived."""
    if argv and argv[0] in ("receive", "die"):
        program, name, endpoint, keys = argv
        (_receive if program == "receive" else _fill)(name, endpoint, keys)
        return FINISHED
    parser = Parser(prog="python -m chaos deaths", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--deaths", type=positive_int, default=300, metavar="N", help="deaths for each kind of socket")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args(argv)
    rounds = -(-options.deaths // NUM_PEERS)
    with tempfile.TemporaryDirectory() as folder:
        new_folder(Path(folder) / "keys")
        cases = [(name, keys) for name in KINDS for keys in ("", f"{folder}/keys")]
        with ThreadPoolExecutor(len(cases)) as pool:
            statuses = list(pool.map(lambda case: survive(case[0], case[1], rounds), cases))
    report = {
        name + ("_with_keys" if keys else ""): status for (name, keys), status in zip(cases, statuses, strict=True)
    }
    if options.json:
        print(json.dumps({"deaths_of_each": rounds * NUM_PEERS, "exit_status": report}))
    else:
        for name, status in report.items():
            print(
                f"{name:<24}{'survived' if status == 0 else f'ended with status {status}'} {rounds * NUM_PEERS} deaths"
            )
    return FAILED if any(report.values()) else FINISHED


def survive(name: str, keys: str, rounds: int) -> int:
    """Kills the peers of one receiver `rounds` times; returns its exit status, 0 if it survived."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    command = (sys.executable, "-m", "chaos.deaths")
    with subprocess.Popen(
        (*command, "receive", name, endpoint, keys), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as receiver:
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        with suppress(BrokenPipeError):
            receiver.stdout.readline()
            for _ in range(rounds):
                with subprocess.Popen((*command, "die", name, endpoint, keys), stdout=subprocess.PIPE) as peer:
                    assert peer.stdout is not None
                    peer.stdout.readline()  # The receiver's queues are full.
                    peer.kill()
                time.sleep(TIMER_SECONDS)
                receiver.stdin.write(b"read\n")
                if not receiver.stdout.readline():
                    break
            receiver.stdin.close()
        return receiver.wait(60.0)


def _receive(name: str, endpoint: str, keys: str) -> None:
    """For each line of standard input, reads all messages and answers with a line."""
    with open_context(read_keys(keys, KINDS[name].role)) as context:
        read = _make_reader(name, context, endpoint)
        print("ready", flush=True)
        for _ in sys.stdin:
            while read(READ_SECONDS):
                pass
            print("read", flush=True)


def _make_reader(name: str, context: Context, endpoint: str) -> Callable[[float], object]:
    """Returns the product's own socket, and a function that waits up to the given seconds and returns the messages."""
    if name == "batches":
        requests = RequestReceiver(context, endpoint, CODEC)

        def read_requests(seconds: float) -> bool:
            count = requests.num_refused
            requests.receive(seconds)
            return requests.num_refused > count

        return read_requests
    if name == "parameters":
        subscribers = [
            ParameterSubscriber(context, endpoint, CODEC, num_parameters=len(VALUES)) for _ in range(NUM_PEERS)
        ]
        return lambda seconds: [one for one in subscribers if one.receive(seconds / NUM_PEERS) is not None]
    kind = ROUTER if name == "control" else PULL
    receiver = AsyncReceiver(context, kind, endpoint, name, high_water_mark=MARK, max_bytes=len(MESSAGE))
    loop = asyncio.new_event_loop()
    return lambda seconds: loop.run_until_complete(receiver.burst(seconds))


def _fill(name: str, endpoint: str, keys: str) -> None:
    """Fills the receiver's queues, reports it, and waits to be killed."""
    with open_context(read_keys(keys, KINDS[name].peer)) as context:
        if name == "parameters":
            publisher = ParameterPublisher(context, endpoint, CODEC)
            for version in range(50):
                publisher.publish(Parameters(version, VALUES))
                publisher.serve(0.02)
        else:
            _fill_queues(name, context, endpoint)
        print("full", flush=True)
        time.sleep(3_600)


def _fill_queues(name: str, context: Context, endpoint: str) -> None:
    kind = zmq.DEALER if name in ("batches", "control") else zmq.PUSH
    message = MESSAGE[:1_000] if name == "batches" else MESSAGE  # A socket for requests closes on larger ones.
    sockets = [context.socket(kind) for _ in range(NUM_PEERS)]
    for each in sockets:
        prepare(each, high_water_mark=MARK)
        connect(each, endpoint, name)
    full_at = time.monotonic() + FULL_SECONDS
    while time.monotonic() < full_at:
        for each in sockets:
            with suppress(zmq.Again):
                while True:
                    each.send(message, zmq.NOBLOCK)
                    full_at = time.monotonic() + FULL_SECONDS
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
