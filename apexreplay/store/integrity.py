"""Finds damage of the replay memory by its checksums. They cover the bytes whose fields the codec has checked.

A killed writer may leave one row that is not valid yet, and half-written weights and sums, which `StoreWriter` repairs.
The cell TORN says so. Everything else must be exact; if TORN is 0, everything must be.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apexreplay.crc32 import crc32
from apexreplay.errors import DamagedMemoryError
from apexreplay.frame_blob import as_words, measure_blobs
from apexreplay.store.layout import BLOB_ALIGNMENT, COMMIT, TORN, Regions
from apexreplay.store.priority_weights import MAX_STORED_PRIORITY
from apexreplay.tables import Table


class _Segments(NamedTuple):
    """The live segments, oldest first; each field has one item for each of them."""

    begins: NDArray[np.int64]  # index of the first transition among the live ones
    counts: NDArray[np.int64]  # transitions
    starts: NDArray[np.int64]  # first byte of the blob in the arena
    stops: NDArray[np.int64]  # end of the blob in the arena


def require_sound(path: Path, regions: Regions, table: Table) -> None:
    """Raises DamagedMemoryError unless every byte that is used is as a writer left it, even a killed one.

    No process may write at the same time. Reads the whole memory: 1 to 2 GB per second.
    """
    with _reports_damage(path):
        _check_rows(regions)
        _check_segments(regions, table)
        _check_weights(regions)


def seal(path: Path, regions: Regions, table: Table) -> None:
    """Sets the checksums of a store that was filled from a snapshot; raises DamagedMemoryError if frames overlap."""
    with _reports_damage(path):
        regions.row_checksums[:] = regions.checksum_rows(regions.streams)
        slots, segments = regions.live_slots(), _find_segments(regions)
        regions.segment_checksums["final"][slots[segments.begins]] = _checksums(regions, table, slots, segments)


@contextmanager
def _reports_damage(path: Path) -> Iterator[None]:
    """Turns a ValueError into a DamagedMemoryError."""
    try:
        yield
    except ValueError as error:
        raise DamagedMemoryError(f"{path} is damaged: {error}") from error


def _check_rows(regions: Regions) -> None:
    commit, commits, is_torn = int(regions.cells[COMMIT]), regions.streams["commit"], bool(regions.cells[TORN])
    is_later = commits > commit
    newest = np.where(is_later, -1, commits).max(axis=1)
    _require(is_later.sum() <= is_torn, f"the row of a stream is newer than the commit number {commit}")
    _require(newest.max() == commit, f"the commit number is {commit}, but that of the newest row is {newest.max()}")
    _require_no(newest < 0, "streams have no valid row")
    wrong = regions.checksum_rows(regions.streams) != regions.row_checksums
    _require_no(wrong & ~is_later, "rows of streams do not match their checksums")


def _check_segments(regions: Regions, table: Table) -> None:
    commit, first_key, *_ = regions.cells.tolist()
    in_range = max(0, commit - regions.sizes.capacity) <= first_key <= commit
    _require(in_range, f"the range of keys {first_key} ... {commit - 1} is invalid")
    slots, records = regions.live_slots(), regions.records
    _require_no(records["key"][slots] != np.arange(first_key, commit), "items have a wrong key")
    segments = _find_segments(regions)
    finals = regions.segment_checksums["final"][slots[segments.begins]]
    _require_no(_checksums(regions, table, slots, segments) != finals, "segments do not match their checksums")
    versions = records["version"][slots]
    expected = np.repeat(versions[segments.begins], segments.counts)
    _require_no(versions != expected, "items have another version than their segment")


def _find_segments(regions: Regions) -> _Segments:
    """Finds the live segments; raises ValueError unless their blobs are in order and within the arena."""
    _, _, first_byte, end_byte, is_torn, *_ = regions.cells.tolist()
    arena_bytes = regions.sizes.arena_bytes
    blobs = regions.records["segment"][regions.live_slots()]
    begins = np.flatnonzero(np.diff(blobs, prepend=blobs[:1] - 1))
    places = blobs[begins]
    ends = np.append(places[1:], end_byte)[: len(places)]
    oldest = int(places[0]) if len(places) else end_byte
    fits = 0 <= oldest <= end_byte <= oldest + arena_bytes and end_byte % BLOB_ALIGNMENT == 0
    _require(fits, f"frames cannot be in the bytes {oldest} ... {end_byte}")
    _require(is_torn or first_byte == oldest, f"the first byte is {first_byte}, but the oldest frame is at {oldest}")
    _require_no((places >= ends) | (places % BLOB_ALIGNMENT != 0), "segments have frames in a wrong place")
    starts = places % arena_bytes
    lengths = measure_blobs(as_words(regions.arena), starts)
    _require_no((lengths == 0) | (lengths > ends - places), "segments have no valid table of frames")
    return _Segments(begins, np.diff(begins, append=len(blobs)), starts, starts + lengths)


def _checksums(regions: Regions, table: Table, slots: NDArray[np.int64], segments: _Segments) -> NDArray[np.uint32]:
    """Computes the final checksum of each segment."""
    record, stored = table.record, regions.records.dtype
    end = stored.itemsize - stored["unused"].itemsize
    received = regions.records.view(np.uint8).reshape(-1, stored.itemsize)[:, end - record.itemsize : end]
    firsts = slots[segments.begins]
    initials = regions.segment_checksums["initial"][firsts] ^ regions.records["version"][firsts]
    ends = segments.begins + segments.counts
    spans = np.stack([initials, segments.begins, ends, segments.starts, segments.stops], axis=1)
    return np.array(
        [
            crc32(regions.arena[start:stop], crc32(received[slots[begin:end]].tobytes(), initial))
            for initial, begin, end, start, stop in spans.tolist()
        ],
        np.uint32,
    )


def _check_weights(regions: Regions) -> None:
    tree, is_torn = regions.tree, bool(regions.cells[TORN])
    weights = tree.weights(np.arange(tree.capacity))
    limit = MAX_STORED_PRIORITY ** regions.header["priority_exponent"][0] * (1 + 1e-9)  # 1e-9: for rounding
    _require_no(~(weights <= limit), f"weights are not in 0 ... {limit:g}")  # True for NaN.
    tree.check(sums=not is_torn)
    weighed = np.zeros(len(weights), np.bool_)
    weighed[regions.weighed_slots()] = True
    _require_no((not is_torn) & (weighed != (weights > 0)), "weights do not fit the stored items")


def _require_no(wrong: NDArray[np.bool_], problem: str) -> None:
    num_wrong = int(wrong.sum())
    _require(not num_wrong, f"{num_wrong} of {wrong.size} {problem}")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
