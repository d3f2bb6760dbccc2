"""The layout of the replay memory's file.

    header | stream rows | records | tree | arena | checksums of segments | checksums of rows

The file is in tmpfs. One writer and any number of readers map it. After a crash, the next writer attaches to the same
file. All numbers are little-endian.
"""

import mmap
import struct
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apexreplay.crc32 import crc32
from apexreplay.item_kinds import Array
from apexreplay.store.sum_tree import SumTree
from apexreplay.tables import Table, padded

# Written once, `magic` last. All fields except `store_incarnation` must match when a writer opens the file again.
STORE_HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("format", "<u4"),
        ("schema", "<u4"),  # Table.fingerprint
        ("store_incarnation", "<u8"),
        ("capacity", "<i8"),
        ("max_bytes", "<i8"),
        ("num_streams", "<i8"),
        ("priority_exponent", "<f8"),
        ("draws_per_item", "<i8"),  # of a queue; 0: another order
    ]
)

# Indices of the int64 cells that change. The cells have a cache line of their own. Keys below COMMIT are stored; of
# these, keys from FIRST_KEY on are live. Blobs of live keys lie between the byte numbers FIRST_BYTE and END_BYTE.
# TORN is 1 during each write. It stays 1 if the writer is killed, and recovery then repairs what is half written.
# Items of an older version than OLDEST_VERSION have weight 0 and are not drawn.
# STEPS counts the steps that the stored items stand for; if the writer is killed, those of its last segment may be
# missing.
COMMIT, FIRST_KEY, FIRST_BYTE, END_BYTE, TORN, OLDEST_VERSION, STEPS = range(7)
CELLS_OFFSET = 512  # offset of the cells in the file, in bytes

NOTES = {"draws_per_item": " (0: no queue)"}  # on settings that the header contains

BLOB_ALIGNMENT = 8  # in the arena, every blob begins at a multiple of this, in bytes

# The stored segments of one stream, in two versions that are written alternately. The valid version is the one with the
# highest `commit` that does not exceed COMMIT. Unused versions have `commit` -1.
STREAM_ROW = np.dtype([("commit", "<i8"), ("incarnation", "<u8"), ("contiguous", "<u8"), ("bitmap", "<u8")])
_SEALED_ROW = struct.Struct("<QqQQQ")  # store incarnation, row

# At the slot of a segment's first transition: the segment's `checksum`. `initial` is combined with the version by XOR,
# so that a change of the stored version is noticed too.
SEGMENT_CHECKSUM = np.dtype([("initial", "<u4"), ("final", "<u4")])


@cache
def stored_record_dtype(table: Table) -> np.dtype[Any]:
    """Returns the dtype of one transition, which is at slot key % capacity.

    `segment` is the byte number of the segment's blob. Byte numbers increase with the keys and are never reused. The
    blob is at (byte number % arena size). The fields of `Table.record` are unchanged from the segment; recovery uses
    `priority`, the initial priority, to set a missing leaf.
    """
    return padded([("key", "<i8"), ("segment", "<i8"), ("version", "<u4"), *table.record.descr])


def fixed_bytes(capacity: int, table: Table) -> int:
    """Returns the bytes of records, checksums and the sum-tree. They depend on the capacity, not on the content."""
    return _record_bytes(capacity, table) + _node_bytes(capacity) + capacity * SEGMENT_CHECKSUM.itemsize


def _record_bytes(capacity: int, table: Table) -> int:
    return capacity * stored_record_dtype(table).itemsize


def _node_bytes(capacity: int) -> int:
    return 8 * SumTree.num_nodes(capacity)


class Sizes(NamedTuple):
    """The sizes that determine the length of the file."""

    capacity: int  # maximum transitions
    max_bytes: int  # maximum bytes of blobs
    num_streams: int

    @property
    def arena_bytes(self) -> int:
        """Returns `max_bytes` rounded down, as every blob begins at a multiple of BLOB_ALIGNMENT."""
        return self.max_bytes // BLOB_ALIGNMENT * BLOB_ALIGNMENT

    def offsets(self, table: Table) -> list[int]:
        """Returns the offset of each region, aligned to a page, followed by the length of the file."""
        lengths = [
            mmap.PAGESIZE,
            2 * self.num_streams * STREAM_ROW.itemsize,
            _record_bytes(self.capacity, table),
            _node_bytes(self.capacity),
            self.arena_bytes,
            self.capacity * SEGMENT_CHECKSUM.itemsize,
            2 * self.num_streams * 4,
        ]
        return list(accumulate((-(-n // mmap.PAGESIZE) * mmap.PAGESIZE for n in lengths), initial=0))

    def file_bytes(self, table: Table) -> int:
        """Returns the length of the file in bytes, which is all the memory that the store takes."""
        return self.offsets(table)[-1]


class StoreSettings(NamedTuple):
    """The settings of the store of one shard."""

    capacity: int  # transitions
    max_bytes: int  # bytes of blobs
    num_streams: int
    priority_exponent: float
    min_priority: float
    max_version_lag: int = -1  # how much older than the newest version an item may be to be drawn; -1: any
    in_order: bool = False  # whether the segments of a stream are stored in the order of their numbers
    draws_per_item: int = 0  # of a queue, whose position is a number of draws; 0: another order

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes that determine the length of the file."""
        return Sizes(self.capacity, self.max_bytes, self.num_streams)

    def written(self) -> dict[str, float]:
        """Returns the settings that the file's header contains. They cannot change while the file exists."""
        order = {"draws_per_item": self.draws_per_item}  # The default of `max_bytes` depends on it.
        return {**order, **self.sizes._asdict(), "priority_exponent": self.priority_exponent}


class Regions:
    """Arrays over the mapped file. The file stays mapped as long as one of these arrays exists."""

    def __init__(self, buffer: mmap.mmap, sizes: Sizes, table: Table) -> None:
        header, streams, records, nodes, arena, segment_checksums, row_checksums, _ = sizes.offsets(table)
        num_nodes = SumTree.num_nodes(sizes.capacity)
        self.sizes = sizes
        self.header = np.frombuffer(buffer, STORE_HEADER, 1, header)
        self.cells = np.frombuffer(buffer, np.int64, 7, header + CELLS_OFFSET)
        self.streams = np.frombuffer(buffer, STREAM_ROW, 2 * sizes.num_streams, streams).reshape(-1, 2)
        self.records = np.frombuffer(buffer, stored_record_dtype(table), sizes.capacity, records)
        self.tree = SumTree(np.frombuffer(buffer, np.float64, num_nodes, nodes), sizes.capacity)
        self.arena = memoryview(buffer)[arena : arena + sizes.arena_bytes]
        self.segment_checksums = np.frombuffer(buffer, SEGMENT_CHECKSUM, sizes.capacity, segment_checksums)
        self.row_checksums = np.frombuffer(buffer, "<u4", 2 * sizes.num_streams, row_checksums).reshape(-1, 2)

    def live_slots(self) -> NDArray[np.int64]:
        """Returns the slots of all live keys, oldest first."""
        return np.arange(self.cells[FIRST_KEY], self.cells[COMMIT]) % self.sizes.capacity

    def weighed_slots(self) -> NDArray[np.int64]:
        """Returns the slots of all live keys whose version is not too old."""
        slots = self.live_slots()
        fresh: NDArray[np.int64] = slots[self.records["version"][slots] >= self.cells[OLDEST_VERSION]]
        return fresh

    def checksum_row(self, row: Sequence[int]) -> int:
        """Returns the checksum of a row, which also protects the store's incarnation."""
        return crc32(_SEALED_ROW.pack(int(self.header["store_incarnation"][0]), *row))

    def checksum_rows(self, rows: Array) -> NDArray[np.uint32]:
        """Returns the checksums of all rows in both versions. `rows`: STREAM_ROW[num_streams, 2]."""
        return np.array([[self.checksum_row(row) for row in versions] for versions in rows.tolist()], np.uint32)


class Store:
    """The properties of a store that the writer and all readers share."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._cells = regions.cells

    @property
    def store_incarnation(self) -> int:
        """Identifies the store: keys and receipts are valid only for one incarnation."""
        return int(self._regions.header["store_incarnation"][0])

    @property
    def capacity(self) -> int:
        """Maximum number of transitions."""
        return self._regions.sizes.capacity

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of blobs."""
        return self._regions.sizes.max_bytes

    @property
    def priority_exponent(self) -> float:
        """Exponent that is applied to priorities; 0: transitions are drawn uniformly."""
        return float(self._regions.header["priority_exponent"][0])

    @property
    def draws_per_item(self) -> int:
        """How often a queue gives each item; 0: the items have another order."""
        return int(self._regions.header["draws_per_item"][0])

    @property
    def num_inserted(self) -> int:
        """Number of transitions stored since the store was created, which is also the next key."""
        return int(self._cells[COMMIT])

    @property
    def num_steps(self) -> int:
        """Number of steps that the items stand for that were stored since the store was created."""
        return int(self._cells[STEPS])

    @property
    def first_key(self) -> int:
        """The oldest live key."""
        return int(self._cells[FIRST_KEY])

    @property
    def size(self) -> int:
        """Number of live transitions."""
        first_key = self.first_key  # Read first, so that the result is never negative while the writer continues.
        return min(self.num_inserted - first_key, self.capacity)

    @property
    def bytes_used(self) -> int:
        """Bytes of the arena from the oldest live blob to the end of the newest."""
        return int(self._cells[END_BYTE] - self._cells[FIRST_BYTE])

    def weights(self, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns priority ** exponent of live keys; 0 for a key that is being stored or overwritten."""
        return self._regions.tree.weights(keys % self.capacity)
