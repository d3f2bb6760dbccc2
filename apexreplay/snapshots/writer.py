"""Copies the replay memory to disk while it is in use.

A separate process makes the copy. It maps the store read-only, as samplers do, and needs no help from the writer.
Segments never change, so each snapshot only adds the new segments to those on disk. All weights are written each time.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apexreplay.errors import SnapshotError
from apexreplay.files.atomic_files import Steps, uninterrupted
from apexreplay.frame_blob import as_words, measure_blobs
from apexreplay.item_kinds import Array
from apexreplay.snapshots.folder import Snapshot, SnapshotFile, SnapshotFolder
from apexreplay.store.file import open_file
from apexreplay.store.layout import Store
from apexreplay.tables import Table

FILE_BYTES = 8 << 20  # approximate bytes of blobs per file, which are copied at once
ROW_ATTEMPTS = 1_000

log = logging.getLogger("apexreplay")


class _Chunk(NamedTuple):
    """Complete segments that stayed live while they were copied."""

    keys: range
    records: Array  # stored_record_dtype[M]; `segment` counts from the beginning of `blobs`
    blobs: memoryview


class SnapshotWriter(Store):
    """Takes snapshots of the store at `path`.

    As in a draw, the commit number is read first and the watermark last, so that data overwritten in the meantime is
    left out. `steps` is called before each step.
    """

    def __init__(
        self,
        path: Path,
        table: Table,
        folder: SnapshotFolder,
        *,
        run_id: int,
        num_drawn: Callable[[], int],
        file_bytes: int = FILE_BYTES,
        steps: Steps = uninterrupted,
    ) -> None:
        """`num_drawn` returns the number of transitions that samplers have drawn."""
        super().__init__(open_file(path, table, writable=False))
        self._table = table
        self._folder = folder
        self._run_id = run_id
        self._num_drawn = num_drawn
        self._file_bytes = file_bytes
        self._before = steps
        self._segment_bytes = self._regions.records["segment"]
        self._words = as_words(self._regions.arena)

    def take(self, rest: Callable[[float], object] = lambda seconds: None) -> Snapshot | None:
        """Writes a snapshot to the folder and returns it; None if the store is empty.

        `rest` is called after each file with the seconds that writing it took. Raises OSError if the disk fails or is
        full, and SnapshotError if the memory cannot be copied; earlier snapshots stay unchanged.
        """
        try:
            return self._take(rest)
        except (OSError, SnapshotError):
            with suppress(OSError):
                self._folder.prune()  # Removes the files of the failed snapshot: the disk may be full.
            raise

    def _take(self, rest: Callable[[float], object]) -> Snapshot | None:
        num_steps = self.num_steps  # Before the rows: never more than those of the saved transitions.
        num_drawn = self._num_drawn()  # Before them too: a queue must not skip items that are not in the snapshot.
        rows, end_key = self._rows()
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
            schema=self._table.fingerprint,
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
            num_steps=num_steps,
            draws_per_item=self.draws_per_item,
        )
        self._folder.commit(snapshot)
        return snapshot

    def _rows(self) -> tuple[Array, int]:
        """Returns the row of each stream at one commit number, and that commit number.

        If the commit number is the same before and after the copy, the valid version of every row is complete.
        """
        for _ in range(ROW_ATTEMPTS):
            commit = self.num_inserted
            self._before("copy rows")
            versions = self._regions.streams.copy()
            if self.num_inserted == commit:
                held = np.where(versions["commit"] <= commit, versions["commit"], -1)
                return versions[np.arange(len(versions)), held.argmax(axis=1)], commit
            time.sleep(0.001)
        raise SnapshotError(f"the rows of the streams changed during each of {ROW_ATTEMPTS} attempts to copy them")

    def _files_to_keep(self) -> list[SnapshotFile]:
        """Returns the files of the newest snapshot that the next one can reuse; none if it is of another store.

        The last file is always written again, so that no two snapshots share the file with their newest keys, and so
        that small files grow.
        """
        newest = self._folder.newest()
        if newest is None or newest.store_incarnation != self.store_incarnation or newest.run_id != self._run_id:
            return []
        kept: list[SnapshotFile] = []
        for file in newest.segments[:-1]:
            if not self._folder.is_there(file):
                log.error("%s is missing or truncated; writing it again", self._folder.path / file.name)
                break
            kept.append(file)
        return kept

    def _copy(self, key: int, end_key: int) -> _Chunk | None:
        """Returns the next segments from `key` on, about `file_bytes` bytes; None if there are no more."""
        arena_bytes = self._regions.sizes.arena_bytes
        while (key := max(key, self.first_key)) < end_key:
            start = self._byte(key)
            lap_end = start - start % arena_bytes + arena_bytes
            limit = min(start + self._file_bytes, lap_end)
            keys = range(key, key + bisect_left(range(key, end_key), limit, key=self._byte))
            if self.first_key > key:
                continue  # The search may have read overwritten records.
            self._before("copy")
            records = self._regions.records.take(np.arange(keys.start, keys.stop) % self.capacity)
            blobs = self._blobs(start, int(records["segment"][-1]))
            self._before("check")
            live = self.first_key  # Read last: data that is live now was not overwritten before.
            if live < keys.stop:
                return _cut(records, blobs, range(max(key, live), keys.stop), start)
        return None

    def _blobs(self, start: int, last: int) -> bytes:
        """Returns the arena from byte number `start` to the end of the blob at `last`; b"" if its table is invalid."""
        arena_bytes = self._regions.sizes.arena_bytes
        (length,) = measure_blobs(self._words, np.array([last % arena_bytes]))
        stop = -(-(last % arena_bytes + int(length)) // 8) * 8
        return bytes(self._regions.arena[start % arena_bytes : stop]) if length else b""

    def _byte(self, key: int) -> int:
        return int(self._segment_bytes[key % self.capacity])

    def _weights(self, end_key: int) -> tuple[int, NDArray[np.float64]]:
        """Returns the first key that is live after the copy, and the weights from that key on.

        A weight that the writer is setting may be 0.
        """
        first_key = min(self.first_key, end_key)
        self._before("copy weights")
        weights = self._regions.tree.weights(np.arange(first_key, end_key) % self.capacity)
        live = min(self.first_key, end_key)
        return live, weights[live - first_key :]


def _cut(records: Array, blobs: bytes, keys: range, start: int) -> _Chunk:
    """Returns a chunk of `keys`, which belong to the last of the records; `blobs` begins at byte number `start`."""
    records = records[len(records) - len(keys) :]
    if not blobs or not (records["key"] == np.arange(keys.start, keys.stop)).all():
        raise SnapshotError(f"the replay memory is damaged: keys {keys.start} ... {keys.stop - 1} are missing")
    first = int(records["segment"][0])
    records["segment"] -= first
    return _Chunk(keys, records, memoryview(blobs)[first - start :])
