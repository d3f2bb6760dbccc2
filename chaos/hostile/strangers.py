"""The messages and the number of hostile peers of `python -m chaos hostile`."""

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

from apex.transport.curve.key_store import read_keys
from apex.types import Role
from apexreplay.process.lifecycle import Stop
from apexreplay.transport.endpoints import ExperienceSender
from apexreplay.transport.sockets import open_context

HELD = 300  # simultaneous hostile connections, below the limit of 1,024 descriptors
PACE = 400  # new hostile connections per second

Attack = Callable[[socket.socket, Random], None]

_TYPES = {
    "experience": b"PUSH",
    "priorities": b"PUSH",
    "receipts": b"SUB",
    "batches": b"DEALER",
    "control": b"DEALER",
}
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_CURVE_GREETING = _GREETING.replace(b"NULL\0", b"CURVE")
_UNKNOWN = 20  # simultaneous strangers with an unknown key


def frame(body: bytes, flags: int = 0) -> bytes:
    """Returns a frame of ZMTP 3. Bits of `flags`: 1 more frames follow, 4 a command."""
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + struct.pack(">Q", len(body)) + body


def enter(peer: socket.socket, socket_type: bytes) -> None:
    """Completes the handshake of ZMTP 3 without security. Messages before the answer would be refused."""
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    peer.sendall(_GREETING + frame(ready, 4))
    received = b""
    while b"READY" not in received:
        if not (more := peer.recv(256)):
            raise ConnectionError("the peer closed the connection")
        received += more


def _rubbish(rng: Random, headed: bool) -> bytes:
    if not headed:
        return rng.randbytes(rng.randrange(1, 2_000))
    kind = rng.randrange(10)
    return b"ApeX" + bytes((1, kind)) + rng.randbytes(rng.randrange(46, 300))


def attacks(endpoint: str, strangers: str = "") -> dict[str, Attack]:
    """Returns the hostile messages for an endpoint by name. `strangers`: folder of unknown keys, used against CURVE."""

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
    on_curve: dict[str, Attack] = {
        "rubbish in a curve hello": lambda peer, rng: peer.sendall(_CURVE_GREETING + hello(rng)),
        "an enormous curve command": lambda peer, rng: peer.sendall(_CURVE_GREETING + enormous),
        "a curve hello without an end": lambda peer, rng: peer.sendall(_CURVE_GREETING + frame(b"x", 1) * 10_000),
    }
    if endpoint != "experience":
        return on_curve
    knocking: deque[ExitStack] = deque()

    def knock(peer: socket.socket, rng: Random) -> None:
        """Connects with the public key of the server, but with a key that is unknown there."""
        host, port = peer.getpeername()
        stranger = ExitStack()
        context = stranger.enter_context(open_context(read_keys(strangers, Role.ACTOR)))
        ExperienceSender(context, f"tcp://{host}:{port}", num_messages=1).send([rng.randbytes(100)])
        knocking.append(stranger)
        if len(knocking) > _UNKNOWN:
            knocking.popleft().close()

    return on_curve | {"an unknown key": knock}


def besiege(stop: Stop, host: str, ports: dict[str, int], strangers: str, connections: int, pipe: Connection) -> None:
    """The child's main function: opens the connections, HELD at a time; then reports the number of each kind."""
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
    """Sends one message of one-byte parts without a last part, and returns its open connection.

    Raises OSError if the connection is closed. With `curve`, the parts replace the CURVE hello after the greeting.
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
