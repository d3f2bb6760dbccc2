"""`python -m chaos hostile`: opens thousands of hostile connections to every port of a run under normal load.

The load: a real replay server, coordinator and loader, a writer that sends a recording at a steady rate, and a
replacement of the trainer that takes batches and returns priorities. Strangers send garbage, HTTP, nothing, half a
greeting, old greetings, invalid contents in valid messages, very long frames, and messages without an end. With
`--curve` the programs have keys, which strangers do not have: these try without a key, with a CURVE greeting followed
by garbage, and with an unknown key. The result: whether the programs survived, the share of the normal rate, and the
growth of memory.
"""

import json
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from apex.config import (
    ActorConfig,
    CheckpointConfig,
    Config,
    EnvironmentConfig,
    LearnerConfig,
    ReplayConfig,
    RunConfig,
    TransportConfig,
)
from apex.config.arguments import Parser, positive_float, positive_int, value_of
from apex.environments.factory import describe
from apex.launch.status import ask
from apex.schema import Schema
from apex.transport.curve.command import new_folder
from apex.transport.curve.key_store import PINNED, read_keys
from apex.types import Role
from apexreplay.errors import FAILED, FINISHED
from apexreplay.process.children import call_in_child, check_children, start_child, stop_children
from apexreplay.process.lifecycle import Stop, reports_errors, stop_on_signals
from apexreplay.store.file import open_file
from apexreplay.store.layout import Store
from bench.harness.recording import Recording, load, record
from bench.harness.replay_fixture import ReplayFixture, open_replay_fixture
from bench.replay_steps import read_memory
from chaos.hostile.strangers import besiege, send_without_end

GAME = "ALE/Pong-v5"
NUM_FRAMES = 1_000  # distinct frames that are recorded
BATCH_SIZE = 64
SETTLE_SECONDS = 2.0
SERVED = ("experience", "priorities", "receipts", "batches", "control")  # sockets that are attacked
BAR = 0.9  # share of the normal rate

Measurements = dict[str, Any]  # figures, and counts by kind of stranger


@reports_errors("python -m chaos hostile")
def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a program ended, or the normal rate fell below the bar."""
    parser = Parser(
        prog="python -m chaos hostile",
        description="Opens hostile connections to every port of a run under normal load.",
    )
    mebibytes = value_of(Annotated[int, Meta(ge=0, le=1_024)])
    parser.add_argument(
        "--connections",
        type=positive_int,
        default=10_000,
        metavar="N",
        help="hostile connections in total; default 10,000",
    )
    parser.add_argument(
        "--rate",
        type=positive_float,
        default=2_000.0,
        metavar="R",
        help="transitions/s of the normal load; default 2,000",
    )
    parser.add_argument(
        "--quiet",
        type=positive_float,
        default=10.0,
        metavar="S",
        help="seconds of normal load before and after the attack; default 10",
    )
    parser.add_argument(
        "--endless", type=mebibytes, default=4, metavar="MIB", help="MiB of one endless message; default 4"
    )
    parser.add_argument("--curve", action="store_true", help="use keys, which the strangers do not have")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    with stop_on_signals() as stop, tempfile.TemporaryDirectory(prefix="apex-hostile-") as name:
        figures = measure(
            Path(name),
            options.connections,
            options.rate,
            options.quiet,
            options.endless << 20,
            stop,
            curve=options.curve,
        )
    print_report(figures)
    if options.json:
        print(json.dumps(figures))
    return FINISHED if figures["honest_share"] >= BAR else FAILED


def print_report(figures: Measurements) -> None:
    """Prints what was sent, and its effects."""
    for name, value in figures.items():
        shown = ", ".join(f"{key} {count:,}" for key, count in value.items()) if isinstance(value, dict) else value
        print(f"{name.replace('_', ' '):<34}{shown:,.3f}" if isinstance(shown, float) else f"{name:<34}{shown}")


def measure(
    folder: Path,
    connections: int,
    rate: float,
    quiet_seconds: float,
    endless_bytes: int,
    stop: Stop,
    *,
    curve: bool = False,
) -> Measurements:
    """Returns all figures; with `curve`, creates keys in `folder` for the programs of the run."""
    keys, strangers = (str(folder / name) if curve else "" for name in ("keys", "strangers"))
    if curve:
        _make_keys(Path(keys), Path(strangers))
    environment = EnvironmentConfig(id=GAME)
    config = Config(
        environment=environment,
        actor=ActorConfig(num_actors=16),
        replay=ReplayConfig(capacity=50_000, max_bytes=2**28, min_size_to_sample=BATCH_SIZE),
        learner=LearnerConfig(batch_size=BATCH_SIZE),
        checkpoint=CheckpointConfig(replay=False),
        transport=TransportConfig(
            port_offset=10_000,
            lease_seconds=86_400.0,  # The writer sends no heartbeats.
            keys=keys,
        ),
    )
    schema = describe(environment, config.actor.n_step)
    recording = _record(folder, config, schema, stop)
    ours, theirs = Pipe()
    with open_replay_fixture(config, recording, folder, "tcp", stop) as bed:
        transport = bed.config.transport
        ports = {endpoint: int(transport.endpoint(endpoint).rpartition(":")[2]) for endpoint in SERVED}
        watched = _Watched(bed, Store(open_file(bed.store, bed.schema.table, writable=False)))
        bed.begin_insert(seconds=86_400.0, rate=rate)
        watched.work(SETTLE_SECONDS)
        before, memory_before = watched.work(quiet_seconds), watched.memory()
        besiegers = start_child("besieger", besiege, transport.bind, ports, strangers, connections, theirs)
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
        status = ask(transport.endpoint("control"), 5.0, read_keys(keys, Role.OBSERVER))
        figures: Measurements = {
            "curve": curve,
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
            "server_is_up": status is not None,
            "refused_connections": status.refused_connections if status is not None else {},
            "refusals": {
                f"{endpoint} {reason}": count
                for endpoint, counts in (status.refusals if status is not None else {}).items()
                for reason, count in counts.items()
            },
        }
        if endless_bytes:
            figures |= _measure_endless(watched, transport.bind, ports["experience"], endless_bytes, curve)
        return figures


def _make_keys(honest: Path, strangers: Path) -> None:
    """Creates the keys of a run, and other keys that are unknown there, whose holders know the public key of the
    server.
    """
    for folder in (honest, strangers):
        new_folder(folder)
    for role in PINNED:
        (strangers / f"{role}.key").write_bytes((honest / f"{role}.key").read_bytes())


class _Watched:
    """The fixture under normal load."""

    def __init__(self, bed: ReplayFixture, store: Store) -> None:
        self._bed = bed
        self._store = store
        self.num_batches = 0

    @property
    def stored(self) -> int:
        """Transitions."""
        return self._store.num_inserted

    def work(self, seconds: float) -> float:
        """Takes batches and returns priorities for this time; returns the stored transitions per second."""
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
        """Returns the memory of the replay server's processes, without the mapped file, in bytes."""
        whole, shared = read_memory(self._bed.processes)
        return whole - shared


def _measure_endless(watched: _Watched, host: str, port: int, num_bytes: int, curve: bool) -> Measurements:
    """Measures the memory that one message without an end takes while it is open, and afterwards."""
    before = watched.memory()
    peer: socket.socket | None = None
    sent = num_bytes
    try:
        peer = send_without_end(host, port, num_bytes, curve=curve)
    except OSError:
        sent = 0  # The server closed the connection.
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
    """Plays random actions in a child, because this process must not have the emulators' threads when it forks."""
    place = folder / "recording"
    place.mkdir()

    def play(child_stop: Stop) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        policy = lambda observation: rng.integers(schema.num_actions, size=len(observation))  # noqa: E731
        return record(child_stop, place, config, schema, policy, NUM_FRAMES)

    facts = call_in_child("recorder", play, stop, stuck_seconds=RunConfig().stuck_seconds)
    if stop.poll():
        raise KeyboardInterrupt
    return load(place, schema, facts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
