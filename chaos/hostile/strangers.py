"""What strangers say at the endpoints of a run, for `python -m chaos hostile`, and how many of them come."""

from __future__ import annotations

import json
import resource
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from random import Random

from apex.runtime.lifecycle import Stop
from apex.transport.curve.key_store import read_keys
from apex.transport.endpoints import ExperienceSender
from apex.transport.sockets import open_context
from apex.types import Role

HELD = 300  # hostile connections at the same time: below the 1,024 descriptors that a program may have open
PACE = 400  # hostile connections per second

Attack = Callable[[socket.socket, Random], None]

_TYPES = {
    "experience": b"PUSH",
    "priorities": b"PUSH",
    "receipts": b"SUB",
    "batches": b"PUSH",
    "control": b"DEALER",
    "metrics": b"PUSH",
}
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_CURVE_GREETING = _GREETING.replace(b"NULL\0", b"CURVE")
_UNKNOWN = 20  # strangers with a key of their own that may try at the same time


def frame(body: bytes, flags: int = 0) -> bytes:
    """A frame of ZMTP 3; flags: 1 more follow, 4 a command."""
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + struct.pack(">Q", len(body)) + body


def enter(peer: socket.socket, socket_type: bytes) -> None:
    """Shakes hands as a peer of ZMTP 3 without security, and waits for the answer: earlier messages are refused."""
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    peer.sendall(_GREETING + frame(ready, 4))
    heard = b""
    while b"READY" not in heard:
        if not (more := peer.recv(256)):
            raise ConnectionError("the other side hung up")
        heard += more


def _rubbish(rng: Random, headed: bool) -> bytes:
    if not headed:
        return rng.randbytes(rng.randrange(1, 2_000))
    kind = rng.randrange(10)
    return b"ApeX" + bytes((1, kind)) + rng.randbytes(rng.randrange(46, 300))


def attacks(endpoint: str, strangers: str = "") -> dict[str, Attack]:
    """What a stranger may say at an endpoint, by name; `strangers`: a folder of unknown keys, used against CURVE."""

    def after_the_handshake(say: Callable[[Random], bytes]) -> Attack:
        def attack(peer: socket.socket, rng: Random) -> None:
            enter(peer, _TYPES[endpoint])
            peer.sendall(say(rng))

        return attack

    def rubbish(rng: Random) -> bytes:
        return b"".join(frame(_rubbish(rng, headed=rng.random() < 0.7)) for _ in range(30))

    everywhere: dict[str, Attack] = {
        "silence": lambda peer, rng: None,
        "garbage": lambda peer, rng: peer.sendall(rng.randbytes(1_000)),
        "http": lambda peer, rng: peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n"),
        "tls": lambda peer, rng: peer.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(506)),
        "half a greeting": lambda peer, rng: peer.sendall(_GREETING[: rng.randrange(1, 64)]),
        "zmtp 1": lambda peer, rng: peer.sendall(b"\x01\x00" + b"\x08\x00rubbish" * 20),
        "zmtp 2": lambda peer, rng: peer.sendall(b"\xff" + bytes(8) + b"\x7f\x01\x08\x00\x00" + b"\x00\x05hello" * 20),
        "rubbish messages": after_the_handshake(rubbish),
        "an enormous frame": after_the_handshake(lambda rng: b"\x02" + struct.pack(">Q", 2**62) + b"x" * 500),
        "an enormous command": lambda peer, rng: peer.sendall(_GREETING + b"\x06" + struct.pack(">Q", 2**63 - 1)),
        "a message without an end": after_the_handshake(lambda rng: frame(b"x", 1) * 10_000),
        "reset": lambda peer, rng: peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)),
    }
    return everywhere | _attacks_on_curve(endpoint, strangers) if strangers else everywhere


def _attacks_on_curve(endpoint: str, strangers: str) -> dict[str, Attack]:
    def hello(rng: Random) -> bytes:
        return frame(b"\x05HELLO\x01\x00" + bytes(72) + rng.randbytes(120), 4)

    enormous = b"\x06" + struct.pack(">Q", 2**40) + b"x" * 10_000
    said: dict[str, Attack] = {
        "rubbish in a curve hello": lambda peer, rng: peer.sendall(_CURVE_GREETING + hello(rng)),
        "an enormous curve command": lambda peer, rng: peer.sendall(_CURVE_GREETING + enormous),
        "a curve hello without an end": lambda peer, rng: peer.sendall(_CURVE_GREETING + frame(b"x", 1) * 10_000),
    }
    if endpoint != "experience":
        return said
    knocking: deque[ExitStack] = deque()

    def knock(peer: socket.socket, rng: Random) -> None:
        """As a program that found out whom it talks to, but whose own key nobody knows."""
        host, port = peer.getpeername()
        stranger = ExitStack()
        context = stranger.enter_context(open_context(read_keys(strangers, Role.ACTOR)))
        ExperienceSender(context, f"tcp://{host}:{port}", num_messages=1).send([rng.randbytes(100)])
        knocking.append(stranger)
        if len(knocking) > _UNKNOWN:
            knocking.popleft().close()

    return said | {"an unknown key": knock}


def besiege(stop: Stop, host: str, ports: dict[str, int], strangers: str, connections: int, pipe: Connection) -> None:
    """A child's main function: so many connections in all, HELD at a time; then says how many there were of each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * HELD)), hard))
    rng = Random(0)
    ways = {endpoint: list(attacks(endpoint, strangers).items()) for endpoint in ports}
    held: deque[socket.socket] = deque()
    counts: dict[str, int] = {}
    refused, began = 0, time.monotonic()
    for number in range(connections):
        if stop.poll():
            return
        if (early := number / PACE - (time.monotonic() - began)) > 0:
            time.sleep(early)
        endpoint = list(ports)[number % len(ports)]
        name, attack = ways[endpoint][number // len(ports) % len(ways[endpoint])]
        try:
            peer = socket.create_connection((host, ports[endpoint]), timeout=1.0)
        except OSError:
            refused += 1
            continue
        counts[name] = counts.get(name, 0) + 1
        with suppress(OSError):
            attack(peer, rng)
        held.append(peer)
        if name == "reset" or len(held) > HELD:
            (held.pop() if name == "reset" else held.popleft()).close()
    for peer in held:
        peer.close()
    pipe.send_bytes(json.dumps({"counts": counts, "not_accepted": refused}).encode())
    while not stop.poll():
        time.sleep(0.1)


def send_without_end(host: str, port: int, num_bytes: int, *, curve: bool = False) -> socket.socket:
    """One connection that sends one message of parts of a byte each, and never its last; it is still open.

    Raises OSError if it is cut off. With `curve` it greets as one who has keys, and says it in the place of the hello.
    """
    peer = socket.create_connection((host, port), timeout=5.0)
    if curve:
        peer.sendall(_CURVE_GREETING)
    else:
        enter(peer, b"PUSH")
    part = frame(b"x", 1)
    chunk = part * (2**16 // len(part))
    for _ in range(num_bytes // len(chunk)):
        peer.sendall(chunk)
    return peer
