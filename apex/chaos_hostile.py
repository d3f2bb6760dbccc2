"""`apex chaos hostile`: thousands of hostile connections against every port of a run, while honest work goes on.

A real replay server, coordinator and loader; an honest writer that sends a recording at a steady rate, and a stand-in
for the trainer that takes batches and returns priorities. Then strangers come: garbage, HTTP, silence, half a greeting,
old greetings, rubbish in well-formed messages, frames of enormous length, messages without an end. At the end it says
whether the programs are up, what was left of the honest rate, and how much memory it took.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from apex.config import (
    ActorConfig,
    CheckpointConfig,
    Config,
    EnvironmentConfig,
    LearnerConfig,
    ReplayConfig,
    TransportConfig,
    require,
)
from apex.environment import describe
from apex.lifecycle import FAILED, FINISHED, Stop, stop_on_signals
from apex.processes import ChildDiedError, call_in_child, check_children, start_child, stop_children
from apex.recording import Recording, load, record
from apex.replay_bed import Bed, open_bed
from apex.replay_timing import read_memory
from apex.status import ask
from apex.store_layout import Store, open_file
from apex.types import Schema

GAME = "ALE/Pong-v5"
NUM_FRAMES = 1_000  # recorded
BATCH_SIZE = 64
SETTLE_SECONDS = 2.0
HELD = 300  # hostile connections at the same time: below the 1,024 descriptors that a program may have open
PACE = 400  # hostile connections per second
SERVED = ("experience", "priorities", "receipts", "batches", "control", "metrics")  # whose sockets the programs bind
BAR = 0.9  # of the honest rate

Figures = dict[str, Any]
Attack = Callable[[socket.socket, Random], None]

# --- the strangers ----------------------------------------------------------------------------------------------------

_TYPES = {
    "experience": b"PUSH",
    "priorities": b"PUSH",
    "receipts": b"SUB",
    "batches": b"PUSH",
    "control": b"DEALER",
    "metrics": b"PUSH",
}
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


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


def attacks(door: str) -> dict[str, Attack]:
    """What a stranger may say at a door, by name."""

    def after_the_handshake(say: Callable[[Random], bytes]) -> Attack:
        def attack(peer: socket.socket, rng: Random) -> None:
            enter(peer, _TYPES[door])
            peer.sendall(say(rng))

        return attack

    def rubbish(rng: Random) -> bytes:
        return b"".join(frame(_rubbish(rng, headed=rng.random() < 0.7)) for _ in range(30))

    return {
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


def besiege(stop: Stop, host: str, ports: dict[str, int], connections: int, pipe: Connection) -> None:
    """A child's main function: so many connections in all, HELD at a time; then says how many there were of each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * HELD)), hard))
    rng = Random(0)
    ways = {door: list(attacks(door).items()) for door in ports}
    held: deque[socket.socket] = deque()
    counts: dict[str, int] = {}
    refused, began = 0, time.monotonic()
    for number in range(connections):
        if stop.requested:
            return
        if (early := number / PACE - (time.monotonic() - began)) > 0:
            time.sleep(early)
        door = list(ports)[number % len(ports)]
        name, attack = ways[door][number // len(ports) % len(ways[door])]
        try:
            peer = socket.create_connection((host, ports[door]), timeout=1.0)
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
    while not stop.requested:
        time.sleep(0.1)


def send_without_end(host: str, port: int, num_bytes: int) -> socket.socket:
    """One connection that sends one message of parts of a byte each, and never its last; it is still open."""
    peer = socket.create_connection((host, port), timeout=5.0)
    enter(peer, b"PUSH")
    part = frame(b"x", 1)
    chunk = part * (2**16 // len(part))
    for _ in range(num_bytes // len(chunk)):
        peer.sendall(chunk)
    return peer


# --- the measurement --------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a program ended, or the honest rate fell below the bar."""
    parser = argparse.ArgumentParser(
        prog="apex chaos hostile", description="Opens hostile connections to every port while honest work goes on."
    )
    parser.add_argument("--connections", type=int, default=10_000, metavar="N", help="in all; default 10,000")
    parser.add_argument("--rate", type=float, default=2_000.0, metavar="R", help="honest transitions/s; default 2,000")
    parser.add_argument("--quiet", type=float, default=10.0, metavar="S", help="before and after it; default 10 s")
    parser.add_argument("--endless", type=int, default=4, metavar="MIB", help="sent as one endless message; default 4")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    require(options.connections >= 1, f"--connections must be >= 1, got {options.connections}")
    require(options.rate > 0, f"--rate must be > 0, got {options.rate}")
    require(options.quiet > 0, f"--quiet must be > 0, got {options.quiet}")
    require(0 <= options.endless <= 1_024, f"--endless must be 0 ... 1024, got {options.endless}")
    try:
        with stop_on_signals() as stop, tempfile.TemporaryDirectory(prefix="apex-hostile-") as name:
            figures = measure(Path(name), options.connections, options.rate, options.quiet, options.endless << 20, stop)
    except ChildDiedError as error:
        print(f"apex chaos hostile: {error}", file=sys.stderr)
        return FAILED
    print_report(figures)
    if options.json:
        print(json.dumps(figures))
    return FINISHED if figures["honest_share"] >= BAR else FAILED


def print_report(figures: Figures) -> None:
    """What came, and what it did."""
    for name, value in figures.items():
        shown = ", ".join(f"{key} {count:,}" for key, count in value.items()) if isinstance(value, dict) else value
        print(f"{name.replace('_', ' '):<34}{shown:,.3f}" if isinstance(shown, float) else f"{name:<34}{shown}")


def measure(
    folder: Path, connections: int, rate: float, quiet_seconds: float, endless_bytes: int, stop: Stop
) -> Figures:
    """All figures."""
    environment = EnvironmentConfig(id=GAME)
    config = Config(
        environment=environment,
        actor=ActorConfig(num_actors=16),
        replay=ReplayConfig(capacity=50_000, max_bytes=2**28, min_size_to_sample=BATCH_SIZE),
        learner=LearnerConfig(batch_size=BATCH_SIZE),
        checkpoint=CheckpointConfig(replay=False),
        transport=TransportConfig(port_offset=-21_000, lease_seconds=86_400.0),  # The writer sends no heartbeats.
    )
    schema = describe(environment, config.actor.n_step)
    recording = _record(folder, config, schema, stop)
    ours, theirs = Pipe()
    with open_bed(config, recording, folder, "tcp", stop) as bed:
        transport = bed.config.transport
        ports = {door: int(transport.endpoint(door).rpartition(":")[2]) for door in SERVED}
        watched = _Watched(bed, Store(open_file(bed.store, bed.schema, writable=False)))
        bed.begin_insert(seconds=86_400.0, rate=rate)
        watched.work(SETTLE_SECONDS)
        before, memory_before = watched.work(quiet_seconds), watched.memory()
        besiegers = start_child("besieger", besiege, transport.bind, ports, connections, theirs)
        try:
            began, stored, most = time.monotonic(), watched.stored, memory_before
            while not ours.poll():
                watched.work(0.5)
                check_children([besiegers])
                most = max(most, watched.memory())
            during = (watched.stored - stored) / (time.monotonic() - began)
            came = json.loads(ours.recv_bytes())
        finally:
            stop_children([besiegers])
        watched.work(SETTLE_SECONDS)
        after, memory_after = watched.work(quiet_seconds), watched.memory()
        status = ask(transport.endpoint("control"), 5.0) or {}
        figures: Figures = {
            "connections": sum(came["counts"].values()),
            "connections_by_kind": came["counts"],
            "connections_not_accepted": came["not_accepted"],
            "seconds": time.monotonic() - began,
            "honest_rate_before": before,
            "honest_rate_during": during,
            "honest_rate_after": after,
            "honest_share": during / before,
            "honest_batches": watched.num_batches,
            "memory_bytes_before": memory_before,
            "memory_bytes_most": most,
            "memory_bytes_after": memory_after,
            "server_is_up": bool(status),
            "refusals": {
                f"{door} {reason}": n for door, all_ in status.get("refusals", {}).items() for reason, n in all_.items()
            },
        }
        if endless_bytes:
            figures |= _measure_endless(watched, transport.bind, ports["experience"], endless_bytes)
        return figures


class _Watched:
    """The bed at its honest work."""

    def __init__(self, bed: Bed, store: Store) -> None:
        self._bed = bed
        self._store = store
        self.num_batches = 0

    @property
    def stored(self) -> int:
        """Transitions."""
        return self._store.num_inserted

    def work(self, seconds: float) -> float:
        """Takes batches and answers them for so long; returns how many transitions were stored per second."""
        began, stored = time.monotonic(), self.stored
        while (elapsed := time.monotonic() - began) < seconds:
            self._bed.check()
            sample = self._bed.ring.receive(0.02)
            if sample is not None:
                self._bed.answer(sample, np.ones(BATCH_SIZE, np.float32))
                self.num_batches += 1
                time.sleep(0.02)
        return (self.stored - stored) / elapsed

    def memory(self) -> int:
        """Bytes of the replay server's processes without the mapped file."""
        whole, shared = read_memory(self._bed.processes)
        return whole - shared


def _measure_endless(watched: _Watched, host: str, port: int, num_bytes: int) -> Figures:
    """What one message without an end costs while it is open, and after it."""
    before = watched.memory()
    peer: socket.socket | None = None
    sent = num_bytes
    try:
        peer = send_without_end(host, port, num_bytes)
    except OSError:
        sent = 0  # It was cut off.
    watched.work(SETTLE_SECONDS)
    grown = watched.memory() - before
    if peer is not None:
        peer.close()
    watched.work(SETTLE_SECONDS)
    return {
        "endless_bytes_sent": sent,
        "endless_memory_bytes": grown,
        "endless_memory_bytes_after": watched.memory() - before,
    }


def _record(folder: Path, config: Config, schema: Schema, stop: Stop) -> Recording:
    """Plays at random in a child: the emulators' threads must not be there when the programs are forked."""
    place = folder / "recording"
    place.mkdir()

    def play(child_stop: Stop) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        policy = lambda observation: rng.integers(schema.num_actions, size=len(observation))  # noqa: E731
        return record(child_stop, place, config, schema, policy, NUM_FRAMES)

    facts = call_in_child("recorder", play, stop)
    if stop.requested:
        raise KeyboardInterrupt
    return load(place, schema, facts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
