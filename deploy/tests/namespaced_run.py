"""What a run shows of itself while its programs run on machines in namespaces."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, NamedTuple

from namespaces import Machine, Network

from apex.runs.folder import RunFolder
from apexreplay.store.file import open_file
from apexreplay.store.layout import COMMIT
from apexreplay.store.location import MEMORY

TENSORBOARD = 6006
ANSWER_SECONDS = 2.0  # time for a connection to be answered
COUNTED = ("time", "steps", "learner/updates")  # increase in a curve

Port = tuple[str, int]  # address and number
Row = dict[str, Any]  # row of a curve


class Stored(NamedTuple):
    """The state of one stream."""

    incarnation: int
    contiguous: int  # segments 0 ... contiguous - 1 are stored
    bitmap: int  # bitmap of later segments; not 0: there is a gap


class Memory(NamedTuple):
    """The state of the whole store."""

    incarnation: int
    num_inserted: int  # transitions
    streams: list[Stored]  # streams by actor id


def read_memory(root: Path, run: Path) -> Memory:
    """Reads the store on the machine whose file system is at `root`; `run` is the learner's run folder."""
    folder = RunFolder.open(run)
    (path,) = (root / MEMORY.relative_to("/")).glob(f"apex-*/apex-{folder.run_id:016x}-0.replay")  # of any user
    regions = open_file(path, folder.schema.table, writable=False)
    while True:
        commit = int(regions.cells[COMMIT])
        rows = [max(row for row in versions if row[0] <= commit) for versions in regions.streams.tolist()]
        if int(regions.cells[COMMIT]) == commit:  # Otherwise rows may have been overwritten.
            streams = [Stored(*row[1:]) for row in rows]
            return Memory(int(regions.header["store_incarnation"][0]), commit, streams)


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a curve."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_continuation(lost: list[Row], rows: list[Row], resumed_at: int) -> None:
    """Checks that a curve has the rows of a lost host up to update `resumed_at`, and those of another continue them."""
    before = [row for row in rows if row["time"] <= lost[-1]["time"]]
    assert before == lost[: len(before)]
    assert 0 < len(before) < len(rows)
    times, steps, updates = ([row.get(name, row["scalars"].get(name)) for row in rows] for name in COUNTED)
    assert times == sorted(set(times))
    assert (steps, updates) == (sorted(steps), sorted(updates))
    assert updates[len(before) - 1] <= resumed_at <= updates[len(before)], "the rest was cut, and trained again"


def is_still(memory: Callable[[], Memory]) -> bool:
    """Returns whether nothing was stored for a second."""
    before = memory().num_inserted
    time.sleep(1.0)
    return memory().num_inserted == before


def connected_from(host: Machine, port: int) -> list[str]:
    """Returns the addresses that are connected to a port of the host."""
    found = []
    for line in Path(f"/proc/{host.pid}/net/tcp").read_text().splitlines()[1:]:
        _, own, other, state, *_ = line.split()
        if int(own.split(":")[1], 16) == port and state == "01":  # established
            found.append(str(IPv4Address(socket.htonl(int(other.split(":")[0], 16)))))
    return found


def renewed(before: Memory, after: Memory) -> set[int]:
    """Returns the actors whose streams have a new incarnation."""
    streams = enumerate(zip(before.streams, after.streams, strict=True))
    return {actor_id for actor_id, (old, new) in streams if new.incarnation != old.incarnation}


def find_late_streams(before: Memory, now: Memory, window: int) -> list[str]:
    """Returns the streams that have not stored all segments in flight and more, without a gap or a new incarnation."""
    return [
        f"actor {actor_id} had {old} and has {new}"
        for actor_id, (old, new) in enumerate(zip(before.streams, now.streams, strict=True))
        if new.incarnation != old.incarnation or new.contiguous <= old.contiguous + window or new.bitmap
    ]


def try_ports(network: Network, ports: Iterable[Port]) -> dict[int, set[Port]]:
    """Connects to all ports at once; returns them by the result: 0 for a connection, else the number of the error."""

    def connect() -> dict[int, set[Port]]:
        with ExitStack() as stack:
            connections = {port: stack.enter_context(socket.socket()) for port in ports}
            for port, connection in connections.items():
                connection.setblocking(False)
                connection.connect_ex(port)
            time.sleep(ANSWER_SECONDS)
            found: dict[int, set[Port]] = {}
            for port, connection in connections.items():  # A second call returns the result of the first.
                found.setdefault(connection.connect_ex(port), set()).add(port)
            return found

    return network.within(connect)


def shown_curves(network: Network, address: str) -> list[str]:
    """Returns the runs that the TensorBoard at `address` shows to `network`; none without an answer."""

    def get() -> list[str]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{address}:{TENSORBOARD}/data/runs", timeout=ANSWER_SECONDS) as answer:
                return list(json.load(answer))
        except OSError:
            return []

    return network.within(get)
