"""Measures how long a segment waits until a server of tables has stored it, without snapshots and with them."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from signal import SIGTERM

import numpy as np

from apex.runtime.ports import is_free
from apexreplay import Client, Writer
from apexreplay.item_kinds import Array
from apexreplay.process.lifecycle import Stop
from apexreplay.process.spawn import spawn
from apexreplay.snapshots.folder import SnapshotFolder
from bench.harness.command import Figures, VerificationError

SEGMENT = 25  # items
SEGMENTS_PER_SECOND = 100
FRAME_BYTES = 600  # of the 7,056 bytes of an image, those that do not compress
START_SECONDS = 60.0  # time for the server to start
LATER = 1.25  # A snapshot begins at this multiple of the time that the table needs to be filled.
TABLE = """
[steps]
capacity = {capacity}
max_bytes = {max_bytes}
num_samplers = 0
segment_length = {segment}
steps = {{ image = ["uint8", [84, 84]], action = "int64" }}
"""


def measure_inserts(folder: Path, stop: Stop, *, num_items: int, seconds: float) -> Figures:
    """Fills a table with `num_items`, then inserts for `seconds` at a fixed rate; without snapshots, then with them.

    A latency counts from the time at which a segment is due. With snapshots, that of the whole table begins soon after
    it is full. Raises VerificationError if the server takes none.
    """
    figures: Figures = {"insert_items": num_items}
    snapshots, filled, taken = SnapshotFolder(folder / "saved/steps"), 0.0, 0
    for label in ("_without", ""):
        options = [] if label else ["--snapshots", str(folder / "saved"), "--snapshot-seconds", str(LATER * filled)]
        with _serve(folder, num_items, options) as writer:
            insert, began = _inserts(writer), time.monotonic()
            for _ in range(num_items // SEGMENT):
                if stop.poll():
                    raise KeyboardInterrupt
                insert()
            writer.flush()
            filled, before = time.monotonic() - began, _newest(snapshots)
            waits = 1e3 * _time_inserts(writer, insert, seconds, stop)
            taken = _newest(snapshots) - before
        for name, share in (("p50", 0.5), ("p999", 0.999), ("longest", 1.0)):
            figures[f"insert_{name}_ms{label}"] = float(np.quantile(waits, share))
    if not taken:
        raise VerificationError(f"no snapshot was taken within {seconds:g} s", "use a larger --seconds")
    figures["insert_p999_ms_more"] = figures["insert_p999_ms"] - figures["insert_p999_ms_without"]
    return figures


def _newest(snapshots: SnapshotFolder) -> int:
    snapshot = snapshots.newest()
    return 0 if snapshot is None else snapshot.number


@contextmanager
def _serve(folder: Path, num_items: int, options: list[str]) -> Iterator[Writer]:
    """Starts `apexreplay serve` with a table, and opens a writer of it."""
    declared = folder / "table.toml"
    max_bytes = (FRAME_BYTES + 200) * num_items + 2**23
    declared.write_text(TABLE.format(capacity=num_items, max_bytes=max_bytes, segment=SEGMENT))
    port = next(first for first in range(26_000, 30_000, 20) if all(is_free("127.0.0.1", first + i) for i in range(11)))
    command = [sys.executable, "-m", "apexreplay", "serve", "--table", str(declared), "--port", str(port), *options]
    server = spawn(command, errors=None, ends_by=SIGTERM)
    try:
        with Client(port=port) as client, client.writer("steps", timeout=START_SECONDS) as writer:
            yield writer
    finally:
        server.terminate()
        server.wait()


def _inserts(writer: Writer) -> Callable[[], None]:
    """Returns a function that appends one segment."""
    rng, numbers = np.random.default_rng(0), count()
    images: Array = np.zeros((64, 84 * 84), np.uint8)
    images[:, :FRAME_BYTES] = rng.integers(0, 256, (64, FRAME_BYTES))
    images = images.reshape(64, 84, 84)

    def insert() -> None:
        for _ in range(SEGMENT):
            number = next(numbers)
            writer.append({"image": images[number % 64], "action": number}, priority=float(rng.random()))

    return insert


def _time_inserts(writer: Writer, insert: Callable[[], None], seconds: float, stop: Stop) -> Array:
    """Returns the seconds from the time at which each segment is due until it is stored."""
    waits, began = [], time.monotonic()
    for number in range(max(1, int(seconds * SEGMENTS_PER_SECOND))):
        if stop.poll():
            raise KeyboardInterrupt
        due = began + number / SEGMENTS_PER_SECOND
        time.sleep(max(0.0, due - time.monotonic()))
        insert()
        writer.flush()
        waits.append(time.monotonic() - due)
    return np.array(waits)
