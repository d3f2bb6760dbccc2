"""Copies the replay memory to disk while it serves.

The copy is made by a process of its own that maps the store read-only, as samplers do: the writer does not know of it.
Segments never change, so each snapshot adds the new ones to those on disk, and writes all weights anew.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.frame_blob import BlobError, as_words, find_end
from apex.replay_memory.snapshots.folder import Snapshot, SnapshotError, SnapshotFile, SnapshotFolder
from apex.replay_memory.store.file import open_file
from apex.replay_memory.store.layout import Store
from apex.runtime.atomic_files import go_on
from apex.types import Array, Schema

FILE_BYTES = 8 << 20  # of blobs in one file: what is copied at once
ROW_ATTEMPTS = 1_000

log = logging.getLogger("apex")


class _Chunk(NamedTuple):
    """Whole segments that stayed live while they were copied."""

    keys: range
    records: Array  # STORED_RECORD; `segment` counts from the beginning of `blobs`
    blobs: memoryview


class SnapshotWriter(Store):
    """Takes snapshots of the store at `path`.

    As in a draw, the commit number is read first and the watermark last: what was overwritten meanwhile is not in the
    snapshot. `pause` is called with the name of each step before it is taken: tests write in between.
    """

    def __init__(
        self,
        path: Path,
        schema: Schema,
        folder: SnapshotFolder,
        *,
        run_id: int,
        num_drawn: Callable[[], int],
        file_bytes: int = FILE_BYTES,
        pause: Callable[[str], None] = go_on,
    ) -> None:
        """`num_drawn` tells how many transitions samplers have drawn."""
        super().__init__(open_file(path, schema, writable=False))
        self._schema = schema
        self._folder = folder
        self._run_id = run_id
        self._num_drawn = num_drawn
        self._file_bytes = file_bytes
        self._pause = pause
        self._segment_bytes = self._regions.records["segment"]
        self._words = as_words(self._regions.arena)

    def take(self, rest: Callable[[float], object] = lambda seconds: None) -> Snapshot | None:
        """Adds what is new to the folder; None if nothing is stored yet.

        `rest` is called after each file with the seconds that it took. Raises OSError where the disk refuses, and
        SnapshotError where the memory cannot be copied; earlier snapshots stay as they were.
        """
        try:
            return self._take(rest)
        except (OSError, SnapshotError):
            with suppress(OSError):
                self._folder.prune()  # A full disk needs the room of what was written in vain.
            raise

    def _take(self, rest: Callable[[float], object]) -> Snapshot | None:
        rows, end_key = self._rows()
        num_drawn = self._num_drawn()
        if self.first_key >= end_key:
            return None
        number = self._folder.next_number()
        files = self._files_to_keep()
        key = files[-1].end_key if files else 0
        began = time.monotonic()
        while (chunk := self._copy(key, end_key)) is not None:
            name, parts = f"{number:09d}-{len(files):04d}.segments", (chunk.records.tobytes(), chunk.blobs)
            files.append(self._folder.write(name, parts, chunk.keys))
            key = chunk.keys.stop
            rest(time.monotonic() - began)
            began = time.monotonic()
        first_key, weights = self._weights(end_key)
        files = [file for file in files if file.end_key > first_key]
        if not files:
            raise SnapshotError("the replay memory is overwritten faster than it can be copied")
        snapshot = Snapshot(
            number=number,
            run_id=self._run_id,
            schema=self._schema.fingerprint,
            store_incarnation=self.store_incarnation,
            priority_exponent=self.priority_exponent,
            num_streams=len(rows),
            num_drawn=num_drawn,
            first_key=first_key,
            end_key=end_key,
            state=self._folder.write(
                f"{number:09d}.state", (weights.tobytes(), rows.tobytes()), range(first_key, end_key)
            ),
            segments=tuple(files),
        )
        self._folder.commit(snapshot)
        return snapshot

    def _rows(self) -> tuple[Array, int]:
        """What was known of each stream at one commit number, and that number.

        While no commit comes in between, at most one version of one row is being written, and not the one that holds.
        """
        for _ in range(ROW_ATTEMPTS):
            commit = self.num_inserted
            self._pause("copy rows")
            versions = self._regions.streams.copy()
            if self.num_inserted == commit:
                held = np.where(versions["commit"] <= commit, versions["commit"], -1)
                return versions[np.arange(len(versions)), held.argmax(axis=1)], commit
            time.sleep(0.001)
        raise SnapshotError(f"the rows of the streams were not still for a moment in {ROW_ATTEMPTS} attempts")

    def _files_to_keep(self) -> list[SnapshotFile]:
        """Files of the newest snapshot of this very store that need not be written again: all but the last.

        The last one is always new: no two snapshots depend on one file for the newest keys, and small ones grow.
        """
        newest = self._folder.newest()
        if newest is None or newest.store_incarnation != self.store_incarnation or newest.run_id != self._run_id:
            return []
        kept: list[SnapshotFile] = []
        for file in newest.segments[:-1]:
            if not self._folder.is_there(file):
                log.error("%s is missing or cut short; it is written again", self._folder.path / file.name)
                break
            kept.append(file)
        return kept

    def _copy(self, key: int, end_key: int) -> _Chunk | None:
        """The next segments from `key` on, about `file_bytes` of them; None when there are no more."""
        arena_bytes = self._regions.sizes.arena_bytes
        while (key := max(key, self.first_key)) < end_key:
            start = self._byte(key)
            lap_end = start - start % arena_bytes + arena_bytes
            limit = min(start + self._file_bytes, lap_end)
            keys = range(key, key + bisect_left(range(key, end_key), limit, key=self._byte))
            if self.first_key > key:
                continue  # The search may have met what was just overwritten.
            self._pause("copy")
            records = self._regions.records.take(np.arange(keys.start, keys.stop) % self.capacity)
            blobs = self._blobs(start, int(records["segment"][-1]))
            self._pause("check")
            live = self.first_key  # Last: what is live now was not touched before.
            if live < keys.stop:
                return _cut(records, blobs, range(max(key, live), keys.stop), start)
        return None

    def _blobs(self, start: int, last: int) -> bytes:
        """The arena from byte number `start` to the end of the blob at `last`; empty if its table makes no sense."""
        arena_bytes = self._regions.sizes.arena_bytes
        try:
            stop = -(-find_end(self._words, last % arena_bytes) // 8) * 8
        except BlobError:
            return b""
        return bytes(self._regions.arena[start % arena_bytes : stop])

    def _byte(self, key: int) -> int:
        return int(self._segment_bytes[key % self.capacity])

    def _weights(self, end_key: int) -> tuple[int, NDArray[np.float64]]:
        """The first key that is live in the end, and the weights from there on. One that is being set may be 0."""
        first_key = min(self.first_key, end_key)
        self._pause("copy weights")
        weights = self._regions.tree.weights(np.arange(first_key, end_key) % self.capacity)
        live = min(self.first_key, end_key)
        return live, weights[live - first_key :]


def _cut(records: Array, blobs: bytes, keys: range, start: int) -> _Chunk:
    """Keeps `keys`, the last ones of the records; their blobs began at byte number `start`."""
    records = records[len(records) - len(keys) :]
    if not blobs or not (records["key"] == np.arange(keys.start, keys.stop)).all():
        raise SnapshotError(f"the replay memory is damaged: keys {keys.start} ... {keys.stop - 1} are not there")
    first = int(records["segment"][0])
    records["segment"] -= first
    return _Chunk(keys, records, memoryview(blobs)[first - start :])
