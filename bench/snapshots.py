"""`python -m bench snapshots`: measures how long a snapshot of the replay memory takes, and how long it delays inserts
and samples, in a server of tables and in its parts.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from apex.config.arguments import positive_int
from apex.schema import Schema
from apexreplay.frame_blob import make_blob
from apexreplay.item_kinds import Array
from apexreplay.process.children import start_child, stop_children
from apexreplay.process.lifecycle import Stop
from apexreplay.server.snapshot_process import SnapshotProcess
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.restore import restore
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store.layout import StoreSettings
from apexreplay.store.location import memory_folder
from apexreplay.store.reader import StoreReader
from apexreplay.store.writer import StoreWriter
from apexreplay.types import Segment, Stream
from bench.harness.command import Figures, make_parser, run_bench
from bench.harness.report import ReportRow, print_rows
from bench.insert_latency import measure_inserts

SCHEMA = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=18, n_step=3, codec="lz4")
SEGMENT = 50  # transitions in the store
INSERTS_PER_SECOND = 12_500  # transitions/s of the paper's 360 actors
LAP_SECONDS = 40.0  # least time in which inserts replace the whole memory
BATCH = 512
BATCHES_PER_SECOND = 100
READY_SECONDS = 60.0  # time for the sampler's first draw
LOOK_SECONDS = 0.25  # interval between two looks at the folder
BEFORE, DURING = range(2)
LINES = [
    ReportRow("insert_p50_ms_without", "a segment is stored, without snapshots: median", "ms"),
    ReportRow("insert_p50_ms", "with snapshots: median", "ms"),
    ReportRow("insert_p999_ms_without", "without: 99.9 % within", "ms"),
    ReportRow("insert_p999_ms", "with: 99.9 % within", "ms"),
    ReportRow("insert_p999_ms_more", "difference", "ms", bar=50, less_is_better=True),
    ReportRow("insert_longest_ms_without", "without: longest", "ms"),
    ReportRow("insert_longest_ms", "with: longest", "ms"),
    ReportRow("snapshot_s", "snapshot of the whole memory", "s"),
    ReportRow("snapshot_mb", "its size", "MB", digits=0),
    ReportRow("restore_s", "restore", "s"),
]


def main(argv: Sequence[str]) -> int:
    """Measures; returns the exit status."""
    parser = make_parser("snapshots", "Measures snapshots.", seconds=60.0, of="duration of inserts, twice")
    parser.add_argument(
        "--transitions", type=positive_int, default=1_000_000, metavar="N", help="in the memory; default 1,000,000"
    )
    options = parser.parse_args(argv)

    def measure(folder: Path, stop: Stop) -> Figures:
        figures = measure_inserts(folder, stop, num_items=options.transitions, seconds=options.seconds)
        parts = measure_snapshot(folder / "parts", num_transitions=options.transitions, seconds=options.seconds / 6)
        return figures | {name: value for name, value in parts.items() if value is not None}

    title = f"{options.transitions:,} transitions, 84 x 84"
    return run_bench(measure, lambda figures: print_rows(title, LINES, figures), as_json=options.json)


def measure_snapshot(
    folder: Path, *, num_transitions: int = 1_000_000, frame_bytes: int = 600, seconds: float = 10.0
) -> dict[str, Any]:
    """Fills a store, then inserts and samples at the paper's rates for `seconds`, without a snapshot and then with one.
    Then a new writer attaches to the store, and another one restores the snapshot.

    A memory that these inserts would replace in less than 40 s gets fewer: on a busy machine, its snapshots would never
    be complete. Snapshots are written to `folder`. The longest calls are in milliseconds and include delays by other
    programs; compare only figures of one run.
    """
    rate = min(INSERTS_PER_SECOND, num_transitions / LAP_SECONDS)
    with tempfile.TemporaryDirectory(dir=memory_folder(), prefix="apex-timing-") as memory:
        path = Path(memory) / "store"
        settings = StoreSettings(
            capacity=num_transitions,
            max_bytes=num_transitions * (frame_bytes + 16) * (SEGMENT + 4) // SEGMENT,
            num_streams=360,
            priority_exponent=0.6,
            min_priority=1e-6,
        )
        store, insert = _make_full_store(path, settings, frame_bytes)
        longest = np.frombuffer(mmap.mmap(-1, 16), np.float64)  # longest sample before and during the snapshot
        phase = np.frombuffer(mmap.mmap(-1, 8), np.int64)
        snapshots = SnapshotFolder(folder)
        children = [start_child("sampler", _sample, path, longest, phase)]
        try:
            _keep_inserting(insert, rate, READY_SECONDS, lambda: longest[BEFORE] > 0)  # A busy machine needs more time.
            snapshot_process = SnapshotProcess(
                lambda: SnapshotWriter(path, SCHEMA.table, snapshots, run_id=1, num_drawn=lambda: 0), seconds
            )
            children.append(snapshot_process.process)
            longest_insert = [_keep_inserting(insert, rate, seconds, lambda: False)]
            began, phase[0] = time.monotonic(), DURING
            longest_insert.append(
                _keep_inserting(insert, rate, 600.0, lambda: snapshots.newest() is not None and longest[DURING] > 0)
            )
            took = time.monotonic() - began
            began = time.monotonic()
            for _ in range(num_transitions // SEGMENT // 20):
                insert()
            asked = time.monotonic()
            taken = not snapshot_process.take_last(60.0)
            again = time.monotonic() - asked
        finally:
            stop_children(children)
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        store.close()
        began = time.monotonic()
        StoreWriter.attach(path, SCHEMA.table, settings).close()
        attach = time.monotonic() - began
        path.unlink()
        began = time.monotonic()
        restored = restore(snapshots, path, SCHEMA.table, settings, run_id=1, store_incarnation=2)
        return {
            "snapshot_transitions": num_transitions,
            "snapshot_s": took,
            "snapshot_mb": num_bytes / 1e6,
            "snapshot_of_a_twentieth_more_s": again if taken else None,
            "restore_s": time.monotonic() - began,
            "attach_s": attach,  # with a check of the whole memory
            "memory_mb": settings.sizes.file_bytes(SCHEMA.table) / 1e6,
            "restored_transitions": restored.size if restored else 0,
            "longest_insert_ms_without": 1e3 * longest_insert[BEFORE],
            "longest_insert_ms": 1e3 * longest_insert[DURING],
            "longest_sample_ms_without": 1e3 * float(longest[BEFORE]),
            "longest_sample_ms": 1e3 * float(longest[DURING]),
        }


def _make_full_store(path: Path, settings: StoreSettings, frame_bytes: int) -> tuple[StoreWriter, Callable[[], None]]:
    """Returns a full store, and a function that inserts one more segment."""
    store = StoreWriter.create(path, SCHEMA.table, settings, store_incarnation=1)
    segments = _make_segments(frame_bytes)
    number = count()

    def insert() -> None:
        n = next(number)
        store.insert(segments[n % len(segments)]._replace(stream=Stream(n % 360, 1), number=n // 360))

    while store.num_inserted < settings.capacity:
        insert()
    return store, insert


def _make_segments(frame_bytes: int) -> list[Segment]:
    rng = np.random.default_rng(0)
    records: Array = np.zeros(SEGMENT, SCHEMA.table.record)
    records["frame"] = np.arange(SEGMENT)
    records["next_frame"] = np.arange(SEGMENT) + 3
    records["depth"] = np.minimum(np.arange(SEGMENT) + 1, 4)
    records["next_depth"] = 4
    segments = []
    for _ in range(64):
        records["priority"] = rng.random(SEGMENT)
        blob = make_blob([rng.bytes(frame_bytes) for _ in range(SEGMENT + 3)])
        segments.append(Segment(Stream(0, 1), 0, 0, records.copy(), blob))
    return segments


def _keep_inserting(insert: Any, rate: float, seconds: float, done: Any) -> float:
    """Inserts `rate` transitions/s until `done`, or for `seconds`; returns the duration of the longest insert."""
    longest, now = 0.0, time.monotonic()
    end, look_at, insert_at = now + seconds, now, now
    while now < end:
        if now >= look_at:
            if done():
                break
            look_at = now + LOOK_SECONDS
        time.sleep(max(0.0, insert_at - time.monotonic()))
        began = time.monotonic()
        insert()
        now = time.monotonic()
        longest = max(longest, now - began)
        insert_at = max(insert_at + SEGMENT / rate, now - 0.1)
    return longest


def _sample(stop: Stop, path: Path, longest: Array, phase: Array) -> None:
    reader, rng = StoreReader(path, SCHEMA.table), np.random.default_rng(os.getpid())
    reader.sample(BATCH, rng)
    sample_at = time.monotonic()
    while not stop.poll():
        time.sleep(max(0.0, sample_at - time.monotonic()))
        began, at = time.monotonic(), int(phase[0])
        reader.sample(BATCH, rng)
        now = time.monotonic()
        longest[at] = max(longest[at], now - began)
        sample_at = max(sample_at + 1 / BATCHES_PER_SECOND, now - 0.1)
