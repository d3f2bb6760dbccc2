"""The replay memory's regions: what lies where in its file.

    header | stream rows | records | tree | arena

The file lies in tmpfs and is mapped by one writer and any number of readers. It is the only copy: after a
crash the next writer goes on with it. All numbers are little-endian.
"""

from __future__ import annotations

import mmap
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.replay_memory.store.sum_tree import SumTree

# Written once, `magic` last. What follows must be equal wherever the file is opened again.
STORE_HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("format", "<u4"),
        ("schema", "<u4"),  # Schema.fingerprint
        ("store_incarnation", "<u8"),
        ("capacity", "<i8"),
        ("max_bytes", "<i8"),
        ("num_streams", "<i8"),
        ("priority_exponent", "<f8"),
    ]
)

# The live cells, int64 each and alone in their cache line. Keys below COMMIT were stored; of these the keys from
# FIRST_KEY on, with the bytes from FIRST_BYTE on, are live. END_BYTE is where the next blob may begin.
COMMIT, FIRST_KEY, FIRST_BYTE, END_BYTE = range(4)
CELLS_OFFSET = 512

# What replay has of one stream, in two versions that are written in turn. `commit` is the commit number with which a
# version begins to hold: the newest one not above COMMIT holds. A version that never came to hold has -1.
STREAM_ROW = np.dtype([("commit", "<i8"), ("incarnation", "<u8"), ("contiguous", "<u8"), ("bitmap", "<u8")])

# One transition, at slot key % capacity. `segment` is the byte number of the segment's blob: byte numbers grow
# with the keys and are never reused, and the blob lies at byte number % arena size.
STORED_RECORD = np.dtype(
    [
        ("key", "<i8"),
        ("segment", "<i8"),
        ("n_step_return", "<f4"),
        ("discount", "<f4"),
        ("priority", "<f4"),  # the initial one: recovery makes a missing leaf from it
        ("version", "<u4"),
        ("action", "<u2"),
        ("frame", "<u2"),  # this and the rest as in types.RECORD
        ("next_frame", "<u2"),
        ("depth", "u1"),
        ("next_depth", "u1"),
    ]
)


class Sizes(NamedTuple):
    """What the file is made for."""

    capacity: int  # transitions
    max_bytes: int  # bytes of blobs
    num_streams: int

    @property
    def arena_bytes(self) -> int:
        """`max_bytes`, rounded down so that every blob begins at a multiple of 8."""
        return self.max_bytes // 8 * 8

    @property
    def offsets(self) -> list[int]:
        """Where each region begins, on a page each; then the length of the file."""
        lengths = [
            mmap.PAGESIZE,
            2 * self.num_streams * STREAM_ROW.itemsize,
            self.capacity * STORED_RECORD.itemsize,
            8 * SumTree.num_nodes(self.capacity),
            self.arena_bytes,
        ]
        return list(accumulate((-(-n // mmap.PAGESIZE) * mmap.PAGESIZE for n in lengths), initial=0))

    @property
    def file_bytes(self) -> int:
        """Length of the file: all the memory that the store takes."""
        return self.offsets[-1]


class StoreSettings(NamedTuple):
    """What a shard's store is made for."""

    capacity: int  # transitions
    max_bytes: int  # bytes of blobs
    num_streams: int
    priority_exponent: float
    min_priority: float

    @property
    def sizes(self) -> Sizes:
        """What decides the length of the file."""
        return Sizes(self.capacity, self.max_bytes, self.num_streams)

    def written(self) -> dict[str, float]:
        """What the file's header holds: it cannot change while the file is there."""
        return {**self.sizes._asdict(), "priority_exponent": self.priority_exponent}


class Regions:
    """Arrays over the mapped file. It stays mapped as long as they live."""

    def __init__(self, buffer: mmap.mmap, sizes: Sizes) -> None:
        header, streams, records, nodes, arena, _ = sizes.offsets
        num_nodes = SumTree.num_nodes(sizes.capacity)
        self.sizes = sizes
        self.header = np.frombuffer(buffer, STORE_HEADER, 1, header)
        self.cells = np.frombuffer(buffer, np.int64, 4, header + CELLS_OFFSET)
        self.streams = np.frombuffer(buffer, STREAM_ROW, 2 * sizes.num_streams, streams).reshape(-1, 2)
        self.records = np.frombuffer(buffer, STORED_RECORD, sizes.capacity, records)
        self.tree = SumTree(np.frombuffer(buffer, np.float64, num_nodes, nodes), sizes.capacity)
        self.arena = memoryview(buffer)[arena : arena + sizes.arena_bytes]


class Store:
    """What the writer and the readers of a store tell of it alike."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._cells = regions.cells

    @property
    def store_incarnation(self) -> int:
        """Keys and receipts are meaningful within this only."""
        return int(self._regions.header["store_incarnation"][0])

    @property
    def capacity(self) -> int:
        """The most transitions that are kept."""
        return self._regions.sizes.capacity

    @property
    def max_bytes(self) -> int:
        """The most bytes of blobs that are kept."""
        return self._regions.sizes.max_bytes

    @property
    def priority_exponent(self) -> float:
        """What priorities are raised to; 0 draws uniformly."""
        return float(self._regions.header["priority_exponent"][0])

    @property
    def num_inserted(self) -> int:
        """Transitions stored since the store was made: the next key."""
        return int(self._cells[COMMIT])

    @property
    def first_key(self) -> int:
        """The oldest live key."""
        return int(self._cells[FIRST_KEY])

    @property
    def size(self) -> int:
        """Transitions that are live."""
        return self.num_inserted - self.first_key

    @property
    def bytes_used(self) -> int:
        """Bytes of the arena from the oldest live blob to the end of the newest."""
        return int(self._cells[END_BYTE] - self._cells[FIRST_BYTE])

    def weights(self, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        """priority ** exponent of live keys; 0 where one is just being stored or overwritten."""
        return self._regions.tree.weights(keys % self.capacity)
