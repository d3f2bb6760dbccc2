"""Writes the replay memory: the one process that stores segments and changes priorities."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from apex.errors import require
from apex.replay_memory.store.deduplication import InsertOutcome, StreamRow
from apex.replay_memory.store.file import create_file, open_file, require_sound
from apex.replay_memory.store.layout import (
    COMMIT,
    END_BYTE,
    FIRST_BYTE,
    FIRST_KEY,
    STORED_RECORD,
    Regions,
    Store,
    StoreSettings,
)
from apex.replay_memory.store.location import beside, in_use
from apex.replay_memory.store.priority_weights import PriorityWeights, count_refused
from apex.runtime.atomic_files import go_on
from apex.runtime.file_lock import LOCK_ATTEMPTS, FileLock
from apex.types import RECORD, Array, PriorityUpdate, Receipt, Schema, Segment, Stream


class StoreCounters(NamedTuple):
    """What happened since this writer began."""

    stored: int  # segments
    duplicates: int  # segments
    evicted: int  # transitions
    stale_priorities: int  # of transitions that were no longer there
    refused: dict[str, int]  # segments and single priorities, by reason


class StoreWriter(Store):
    """The newest transitions, bounded in number and in bytes, drawn in proportion to priority ** exponent.

    A key is the insertion number of a transition and its slot is key % capacity; keys at or above the watermark are
    live. Segments are evicted whole, the oldest first. The records of a segment share its byte number.

    Readers without locks and the recovery after a crash rely on the order of writes. `pause` is called with the name
    of each step of an insert before it is taken: tests look, or crash, in between.
    """

    def __init__(
        self, regions: Regions, ownership: FileLock, weights: PriorityWeights, pause: Callable[[str], None]
    ) -> None:
        super().__init__(regions)
        self._ownership = ownership
        self._priority_weights = weights
        self._pause = pause
        self._segment_bytes = regions.records["segment"]
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    @classmethod
    def create(
        cls,
        path: Path,
        schema: Schema,
        settings: StoreSettings,
        *,
        store_incarnation: int,
        fill: Callable[[Regions], None] | None = None,
        pause: Callable[[str], None] = go_on,
    ) -> Self:
        """Makes a store, empty or as `fill` leaves it, which appears at `path` when it is whole.

        If that raises it leaves no file; if it is killed, one at `beside(path)`, which the next one removes.
        `store_incarnation` must differ from that of every earlier one.
        """
        weights = PriorityWeights(settings.min_priority, settings.priority_exponent)
        regions, ownership = create_file(path, schema, settings, store_incarnation)
        writer = cls(regions, ownership, weights, pause)
        try:
            if fill is not None:
                fill(regions)
                writer._recover(path)
            os.rename(beside(path), path)
        except BaseException:
            beside(path).unlink(missing_ok=True)
            ownership.release()
            raise
        return writer

    @classmethod
    def attach(
        cls, path: Path, schema: Schema, settings: StoreSettings, *, pause: Callable[[str], None] = go_on
    ) -> Self:
        """Goes on with the store that an earlier writer left at `path`, however it ended.

        Raises ConfigError where it is another store, DamagedMemoryError where it is none any more.
        """
        weights = PriorityWeights(settings.min_priority, settings.priority_exponent)
        regions = open_file(path, schema, writable=True)
        for name, value in settings.written().items():
            found = regions.header[name][0]
            require(found == value, f"{path} was made with {name} {found}, but this is {value}: use that, or remove it")
        ownership = FileLock(path, LOCK_ATTEMPTS, in_use(path))
        writer = cls(regions, ownership, weights, pause)
        try:
            writer._recover(path)
        except BaseException:
            ownership.release()
            raise
        return writer

    def close(self) -> None:
        """Gives the file free. Nothing has to be written: a store is always as a crash would leave it."""
        self._ownership.release()

    @property
    def counters(self) -> StoreCounters:
        """What happened since this writer began."""
        return StoreCounters(
            stored=self._counts[InsertOutcome.STORED],
            duplicates=self._counts[InsertOutcome.DUPLICATE],
            evicted=self._counts["evicted"],
            stale_priorities=self._counts["stale"],
            refused=dict(self._refused),
        )

    def receipt(self, actor_id: int) -> Receipt:
        """What the store has of the stream. One that was never heard of has incarnation 0, and nothing."""
        if not 0 <= actor_id < self._regions.sizes.num_streams:
            raise ValueError(f"actor id must be 0 ... {self._regions.sizes.num_streams - 1}, got {actor_id}")
        row = self._row(actor_id)
        return Receipt(Stream(actor_id, row.incarnation), self.store_incarnation, row.contiguous, row.bitmap)

    def insert(self, segment: Segment) -> InsertOutcome:
        """Stores a segment, once. Raises ValueError for one that does not fit into this store.

        The segment must be sound in itself: `Codec.decode_segment` checks that. An initial priority that is negative
        or not a number is counted, and stored as min_priority.
        """
        blob = memoryview(segment.blob).cast("B")
        num_records, num_bytes = len(segment.records), len(blob)
        if num_records > self.capacity:
            raise ValueError(f"segment: {num_records} records, capacity is {self.capacity}")
        if num_bytes > self._regions.sizes.arena_bytes:
            raise ValueError(f"segment: a blob of {num_bytes} bytes, {self._regions.sizes.arena_bytes} are kept")
        if not 0 <= segment.stream.actor_id < self._regions.sizes.num_streams:
            self._refused[InsertOutcome.UNKNOWN_ACTOR] += 1
            return InsertOutcome.UNKNOWN_ACTOR
        commit = self.num_inserted + num_records
        outcome, row = self._row(segment.stream.actor_id).judge(segment, commit)
        if outcome is InsertOutcome.STORED:
            self._store(segment, blob, row)
        counts = self._counts if outcome in (InsertOutcome.STORED, InsertOutcome.DUPLICATE) else self._refused
        counts[outcome] += 1
        return outcome

    def update_priorities(self, update: PriorityUpdate) -> int:
        """Applies what is still live, the last of several to one key, and returns how many keys were not.

        A priority that is negative or not a number is refused: that transition keeps its own. One above
        MAX_STORED_PRIORITY counts as MAX_STORED_PRIORITY, one below min_priority as min_priority.
        """
        keys, priorities = update.keys, update.priorities
        if update.store_incarnation != self.store_incarnation:
            keys, priorities = keys[:0], priorities[:0]
        live = (keys >= self._cells[FIRST_KEY]) & (keys < self._cells[COMMIT])
        if not live.all():
            keys, priorities = keys[live], priorities[live]
        num_stale = len(update.keys) - len(keys)
        self._counts["stale"] += num_stale
        refused = count_refused(priorities)
        if refused:
            self._refused.update(refused)
            acceptable = priorities >= 0  # A NaN is not.
            keys, priorities = keys[acceptable], priorities[acceptable]
        self._regions.tree.set(keys % self.capacity, self._priority_weights.of(priorities))
        return num_stale

    # --- one insert -------------------------------------------------------------------------------------------------

    def _store(self, segment: Segment, blob: memoryview, row: StreamRow) -> None:
        """Writes in a fixed order, so that readers and recovery find valid data after each step."""
        cells, regions = self._cells, self._regions
        keys = range(self.num_inserted, row.commit)
        start, end = self._place(len(blob))
        evicted = range(self.first_key, self._first_key_after(len(keys), end))
        records = _stored_records(segment, keys, start)
        weights = self._priority_weights.of(records["priority"])

        self._pause("watermark")
        cells[FIRST_KEY] = evicted.stop
        cells[FIRST_BYTE] = self._byte(evicted.stop) if evicted.stop < keys.start else start
        self._pause("evict")
        for slots, part in self._slots(evicted):
            regions.tree.set_range(slots.start, np.zeros(part.stop - part.start))
        self._pause("bytes")
        cells[END_BYTE] = end
        position = start % regions.sizes.arena_bytes
        regions.arena[position : position + len(blob)] = blob
        self._pause("records")
        for slots, part in self._slots(keys):
            regions.records[slots] = records[part]
        self._pause("row")
        versions = regions.streams[segment.stream.actor_id]
        versions[int(versions["commit"].argmin())] = row
        self._pause("commit")
        cells[COMMIT] = row.commit
        self._pause("leaves")
        for slots, part in self._slots(keys):
            regions.tree.set_range(slots.start, weights[part])

        self._counts["evicted"] += len(evicted)
        self._refused.update(count_refused(records["priority"]))

    def _place(self, num_bytes: int) -> tuple[int, int]:
        """Byte numbers of the next blob's beginning and end. One that would not fit goes to the arena's start."""
        arena_bytes = self._regions.sizes.arena_bytes
        start, padded = int(self._cells[END_BYTE]), -(-num_bytes // 8) * 8
        if start % arena_bytes + padded > arena_bytes:
            start += arena_bytes - start % arena_bytes
        return start, start + padded

    def _first_key_after(self, num_records: int, end_byte: int) -> int:
        """The oldest key that stays: neither the new records nor the new bytes touch its segment."""
        first_key, commit = self.first_key, self.num_inserted
        oldest_byte = end_byte - self._regions.sizes.arena_bytes
        oldest_key = commit + num_records - self.capacity
        if oldest_key > first_key:  # The segment of the key before goes whole.
            oldest_byte = max(oldest_byte, self._byte(oldest_key - 1) + 1)
        return first_key + bisect_left(range(first_key, commit), oldest_byte, key=self._byte)

    def _byte(self, key: int) -> int:
        """The byte number of a live key's segment."""
        return int(self._segment_bytes[key % self.capacity])

    def _slots(self, keys: range) -> Iterator[tuple[slice, slice]]:
        """The slots of consecutive keys in pieces without a wrap, and which of the keys each piece holds."""
        done = 0
        while done < len(keys):
            slot = keys[done] % self.capacity
            length = min(len(keys) - done, self.capacity - slot)
            yield slice(slot, slot + length), slice(done, done + length)
            done += length

    def _row(self, actor_id: int) -> StreamRow:
        """The version that holds: void ones have commit -1, so the newest."""
        return StreamRow(*max(self._regions.streams[actor_id].tolist()))

    # --- after a crash ----------------------------------------------------------------------------------------------

    def _recover(self, path: Path) -> None:
        """Keeps what is committed, and makes everything else agree with it."""
        require_sound(path, self._regions)
        cells, tree = self._cells, self._regions.tree
        commit, first_key = self.num_inserted, self.first_key
        cells[FIRST_BYTE] = self._byte(first_key) if first_key < commit else cells[END_BYTE]
        tags = self._regions.streams["commit"]
        tags[tags > commit] = -1  # Else such a version would come to hold as the commit number grows.
        live = np.zeros(self.capacity, np.bool_)
        for slots, _ in self._slots(range(first_key, commit)):
            live[slots] = True
        weighed = tree.weights(np.arange(self.capacity)) > 0
        dead, missing = np.flatnonzero(weighed & ~live), np.flatnonzero(live & ~weighed)
        tree.set(dead, np.zeros(len(dead)))
        tree.set(missing, self._priority_weights.of(self._regions.records["priority"][missing]))
        tree.rebuild()


def _stored_records(segment: Segment, keys: range, start: int) -> Array:
    stored = np.empty(len(keys), STORED_RECORD)
    for name in RECORD.names or ():
        stored[name] = segment.records[name]
    stored["key"] = np.arange(keys.start, keys.stop)
    stored["segment"] = start
    stored["version"] = segment.version
    return stored
