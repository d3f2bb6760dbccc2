"""Writes the replay memory: the only process that stores segments and changes priorities."""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from apexreplay.crc32 import crc32
from apexreplay.errors import LostMemoryError, require
from apexreplay.files.atomic_files import Steps, uninterrupted
from apexreplay.files.file_lock import LOCK_ATTEMPTS, FileLock
from apexreplay.item_kinds import Array
from apexreplay.store.deduplication import InsertOutcome, StreamRow
from apexreplay.store.file import create_file, open_file
from apexreplay.store.integrity import require_sound, seal
from apexreplay.store.layout import (
    COMMIT,
    END_BYTE,
    FIRST_BYTE,
    FIRST_KEY,
    NOTES,
    STEPS,
    TORN,
    Regions,
    Store,
    StoreSettings,
)
from apexreplay.store.location import beside, in_use
from apexreplay.store.priority_weights import PriorityWeights, count_refused
from apexreplay.store.version_bound import VersionBound
from apexreplay.tables import Table
from apexreplay.types import RECEIPT_ROW, PriorityUpdate, Receipt, Receipts, Segment

# 10 s: after `kill -9` of an owner, the kernel releases the lock only once it has unmapped the memory.
ATTACH_ATTEMPTS = 50 * LOCK_ATTEMPTS


class StoreWriter(Store):
    """Stores the newest transitions, limited in number and in bytes, with weights of priority ** exponent.

    The key of a transition is its insertion number; its slot is key % capacity. Keys at or above the watermark are
    live. Whole segments are evicted, the oldest first. All records of a segment contain the byte number of its blob.

    Readers without locks and recovery after a crash depend on the order of writes. `steps` is called before each step
    of an insert.
    """

    def __init__(
        self,
        path: Path,
        regions: Regions,
        ownership: FileLock,
        weights: PriorityWeights,
        settings: StoreSettings,
        steps: Steps,
    ) -> None:
        super().__init__(regions)
        self._path = path
        self._ownership = ownership
        self._priority_weights = weights
        self._version_bound = VersionBound(regions, settings.max_version_lag)
        self._in_order = settings.in_order
        # actor id -> incarnation, first and last number of the newest series of segments that were out of order
        self._refused_series: dict[int, tuple[int, int, int]] = {}
        self._before = steps
        self._segment_bytes = regions.records["segment"]
        # Counts since this writer started:
        self.num_duplicates = 0  # segments
        self.num_stale = 0  # priorities for transitions that were already evicted
        self.refused: Counter[str] = Counter()  # reason -> segments or single priorities

    @classmethod
    def create(
        cls,
        path: Path,
        table: Table,
        settings: StoreSettings,
        *,
        store_incarnation: int,
        fill: Callable[[Regions], None] | None = None,
        steps: Steps = uninterrupted,
    ) -> Self:
        """Creates a store, empty or filled by `fill`. The file appears at `path` only when it is complete.

        On an exception, no file remains. If the process is killed, a file at `beside(path)` remains, which the next
        call removes. `store_incarnation` must differ from that of every earlier store.
        """
        weights = PriorityWeights(settings.min_priority, settings.priority_exponent)
        regions, ownership = create_file(path, table, settings, store_incarnation)
        writer = cls(path, regions, ownership, weights, settings, steps)
        try:
            if fill is not None:
                fill(regions)
                seal(path, regions, table)
                writer._repair()
            os.rename(beside(path), path)
        except BaseException:
            beside(path).unlink(missing_ok=True)
            ownership.release()
            raise
        return writer

    @classmethod
    def attach(cls, path: Path, table: Table, settings: StoreSettings, *, steps: Steps = uninterrupted) -> Self:
        """Attaches to the store that an earlier writer left at `path`, even after a crash.

        Raises UsageError if the store has other settings, and DamagedMemoryError if it is damaged.
        """
        weights = PriorityWeights(settings.min_priority, settings.priority_exponent)
        regions = open_file(path, table, writable=True)
        for name, value in settings.written().items():
            found = regions.header[name][0]
            mismatch = f"{path} was created with {name} {found}, but the setting is {value}{NOTES.get(name, '')}"
            remedy = "use the same order and number" if name == "draws_per_item" else f"set it to {found}"
            require(found == value, mismatch, remedy=f"{remedy}, or remove the file")
        ownership = FileLock(path, ATTACH_ATTEMPTS, in_use(path))
        writer = cls(path, regions, ownership, weights, settings, steps)
        try:
            require_sound(path, regions, table)
            writer._repair()
        except BaseException:
            ownership.release()
            raise
        return writer

    def close(self) -> None:
        """Releases the lock of the file. Nothing has to be written: the file is always in a recoverable state."""
        self._ownership.release()

    def require_in_place(self) -> None:
        """Raises LostMemoryError if the file is no longer at its path, where later servers look for it."""
        if not self._ownership.is_at(self._path):
            raise LostMemoryError(
                f"{self._path} was removed or replaced while it was in use: systemd-logind removes such files when the "
                "last session of their user ends",
                "stay logged in, or run loginctl enable-linger",
            )

    @property
    def total_weight(self) -> float:
        """The sum of all leaf weights; 0 if no item can be drawn."""
        return self._regions.tree.total

    def receipt(self, actor_id: int) -> Receipt:
        """Returns which segments of a stream are stored."""
        if not 0 <= actor_id < self.num_streams:
            raise ValueError(f"a stream is 0 ... {self.num_streams - 1}, got {actor_id}")
        return self.receipts(np.array([actor_id])).each()[0]

    def receipts(self, actor_ids: NDArray[np.int64], group: int = 0) -> Receipts:
        """Returns which segments of streams are stored; the incarnation is 0 if a stream never sent any."""
        versions = self._regions.streams[actor_ids]
        newest = versions[np.arange(len(versions)), versions["commit"].argmax(1)]  # as in `_row`
        rows = np.empty(len(newest), RECEIPT_ROW)
        rows["actor_id"] = actor_ids
        for name in ("incarnation", "contiguous", "bitmap"):
            rows[name] = newest[name]
        return Receipts(group, self.store_incarnation, rows)

    @property
    def num_streams(self) -> int:
        """The number of streams, which are 0 ... num_streams - 1."""
        return self._regions.sizes.num_streams

    def insert(self, segment: Segment) -> InsertOutcome:
        """Stores a segment if it is new, and returns the outcome. Raises ValueError if it is too large for this store.

        `Codec.decode_segment` must have checked the segment. An initial priority that is negative or NaN is counted as
        refused and stored as min_priority.
        """
        blob = memoryview(segment.blob).cast("B")
        num_records, num_bytes = len(segment.records), len(blob)
        if num_records > self.capacity:
            raise ValueError(f"a segment has {num_records} records, but the capacity is {self.capacity}")
        if num_bytes > self._regions.sizes.arena_bytes:
            raise ValueError(f"a blob has {num_bytes} bytes, but the maximum is {self._regions.sizes.arena_bytes}")
        if not 0 <= segment.stream.actor_id < self._regions.sizes.num_streams:
            self.refused[InsertOutcome.UNKNOWN_ACTOR] += 1
            return InsertOutcome.UNKNOWN_ACTOR
        commit = self.num_inserted + num_records
        known = self._row(segment.stream.actor_id)
        outcome, row = known.judge(segment, commit, in_order=self._in_order)
        if outcome is InsertOutcome.OUT_OF_ORDER and self._comes_again(segment):
            outcome, row = known.judge(segment, commit)
        if outcome is InsertOutcome.STORED:
            self._refused_series.pop(segment.stream.actor_id, None)
            self._store(segment, blob, row)
        elif outcome is InsertOutcome.DUPLICATE:
            self.num_duplicates += 1
        else:
            self.refused[outcome] += 1
        return outcome

    def count_steps(self, num_steps: int) -> None:
        """Adds to `num_steps` those of a segment that was stored."""
        self._cells[STEPS] += num_steps

    def first_key_after(self, num_records: int, num_bytes: int) -> int:
        """Returns the oldest key that is live after a segment of this size was stored."""
        return self._first_key_after(num_records, self._place(num_bytes)[1])

    def update_priorities(self, update: PriorityUpdate) -> int:
        """Sets priorities of live keys; returns the number of other keys. If a key repeats, its last priority counts.

        A priority that is negative or NaN is refused: the transition keeps its previous priority. Others are clipped to
        [min_priority, MAX_STORED_PRIORITY].
        """
        keys, priorities = update.keys, update.priorities
        if update.store_incarnation != self.store_incarnation:
            keys, priorities = keys[:0], priorities[:0]
        live = (keys >= self._cells[FIRST_KEY]) & (keys < self._cells[COMMIT])
        live &= self._version_bound.allows(keys)
        if not live.all():
            keys, priorities = keys[live], priorities[live]
        num_stale = len(update.keys) - len(keys)
        self.num_stale += num_stale
        refused = count_refused(priorities)
        if refused:
            self.refused.update(refused)
            acceptable = priorities >= 0  # also False for NaN
            keys, priorities = keys[acceptable], priorities[acceptable]
        self._cells[TORN] = True
        self._regions.tree.set(keys % self.capacity, self._priority_weights.of(priorities))
        self._cells[TORN] = False
        return num_stale

    def _comes_again(self, segment: Segment) -> bool:
        """Returns whether the writer has begun two series in a row with this segment, which is out of order.

        A writer sends again from its lowest number on, so the earlier ones do not come: they were acknowledged, and
        then lost with the memory.
        """
        actor_id, incarnation, number = *segment.stream, segment.number
        known, first, last = self._refused_series.get(actor_id, (incarnation, number, number - 1))
        begins = known != incarnation or number <= last
        self._refused_series[actor_id] = incarnation, number if begins else first, number
        return begins and known == incarnation and number == first

    # --- one insert -------------------------------------------------------------------------------------------------

    def _store(self, segment: Segment, blob: memoryview, row: StreamRow) -> None:
        """Writes a segment in a fixed order, so that readers and recovery find valid data after each step."""
        cells, regions = self._cells, self._regions
        keys = range(self.num_inserted, row.commit)
        start, end = self._place(len(blob))
        oldest, kept = self._version_bound.after(segment.version), self._first_key_after(len(keys), end)
        evicted = range(self.first_key, self._version_bound.first_key(range(kept, keys.start), oldest))
        records = _stored_records(segment, keys, start, regions.records.dtype)
        weights = self._priority_weights.of(records["priority"])
        if segment.version < oldest:
            weights[:] = 0
        initial, final = segment.checksum or (0, crc32(blob, crc32(segment.records.tobytes())))

        cells[TORN] = True
        self._before("watermark")
        cells[FIRST_KEY] = evicted.stop
        cells[FIRST_BYTE] = self._byte(evicted.stop) if evicted.stop < keys.start else start
        self._before("evict")
        for slots, part in self._slots(evicted):
            regions.tree.set_range(slots.start, np.zeros(part.stop - part.start))
        self._version_bound.raise_to(oldest)
        self._before("bytes")
        cells[END_BYTE] = end
        position = start % regions.sizes.arena_bytes
        regions.arena[position : position + len(blob)] = blob
        self._before("records")
        for slots, part in self._slots(keys):
            regions.records[slots] = records[part]
        regions.segment_checksums[keys.start % self.capacity] = initial ^ segment.version, final
        self._before("row")
        place = segment.stream.actor_id, int(regions.streams["commit"][segment.stream.actor_id].argmin())
        regions.streams["commit"][place] = row.commit  # First: above COMMIT, so that a half-written row is not valid.
        regions.streams[place] = row
        regions.row_checksums[place] = regions.checksum_row(row)
        self._before("commit")
        cells[COMMIT] = row.commit
        self._before("leaves")
        for slots, part in self._slots(keys):
            regions.tree.set_range(slots.start, weights[part])
        cells[TORN] = False

        self.refused.update(count_refused(records["priority"]))

    def _place(self, num_bytes: int) -> tuple[int, int]:
        """Returns the byte numbers of the next blob's start and end. A blob never wraps around the end of the arena."""
        arena_bytes = self._regions.sizes.arena_bytes
        start, padded = int(self._cells[END_BYTE]), -(-num_bytes // 8) * 8
        if start % arena_bytes + padded > arena_bytes:
            start += arena_bytes - start % arena_bytes
        return start, start + padded

    def _first_key_after(self, num_records: int, end_byte: int) -> int:
        """Returns the oldest key whose segment the new records and a blob that ends at `end_byte` do not overwrite."""
        first_key, commit = self.first_key, self.num_inserted
        oldest_byte = end_byte - self._regions.sizes.arena_bytes
        oldest_key = commit + num_records - self.capacity
        if oldest_key > first_key:  # The segment of the previous key is evicted completely.
            oldest_byte = max(oldest_byte, self._byte(oldest_key - 1) + 1)
        return first_key + bisect_left(range(first_key, commit), oldest_byte, key=self._byte)

    def _byte(self, key: int) -> int:
        """Returns the byte number of the blob that belongs to a live key."""
        return int(self._segment_bytes[key % self.capacity])

    def _slots(self, keys: range) -> Iterator[tuple[slice, slice]]:
        """Yields (slots, positions in `keys`) for consecutive keys, split where the slots wrap around."""
        done = 0
        while done < len(keys):
            slot = keys[done] % self.capacity
            length = min(len(keys) - done, self.capacity - slot)
            yield slice(slot, slot + length), slice(done, done + length)
            done += length

    def _row(self, actor_id: int) -> StreamRow:
        """Returns the valid version of a stream's row: the newest, because unused versions have commit -1."""
        return StreamRow(*max(self._regions.streams[actor_id].tolist()))

    # --- after a crash ----------------------------------------------------------------------------------------------

    def _repair(self) -> None:
        """Keeps the committed transitions and makes rows, weights and sums consistent with them."""
        cells, regions, tree = self._cells, self._regions, self._regions.tree
        commit, first_key = self.num_inserted, self.first_key
        cells[TORN] = True
        cells[FIRST_BYTE] = self._byte(first_key) if first_key < commit else cells[END_BYTE]
        rows = regions.streams.copy()
        rows["commit"][rows["commit"] > commit] = -1  # Rows of interrupted inserts, which would become valid later.
        regions.row_checksums[:] = regions.checksum_rows(rows)  # First: this function may be killed too.
        regions.streams[:] = rows
        self._version_bound.restart()
        live = np.zeros(self.capacity, np.bool_)
        live[regions.weighed_slots()] = True
        weighed = tree.weights(np.arange(self.capacity)) > 0
        dead, missing = np.flatnonzero(weighed & ~live), np.flatnonzero(live & ~weighed)
        tree.set(dead, np.zeros(len(dead)))
        tree.set(missing, self._priority_weights.of(regions.records["priority"][missing]))
        tree.rebuild()
        cells[TORN] = False


def _stored_records(segment: Segment, keys: range, start: int, dtype: np.dtype[Any]) -> Array:
    stored = np.zeros(len(keys), dtype)
    for name in segment.records.dtype.names or ():
        stored[name] = segment.records[name]
    stored["key"] = np.arange(keys.start, keys.stop)
    stored["segment"] = start
    stored["version"] = segment.version
    return stored
