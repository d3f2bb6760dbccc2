"""Draws from the replay memory without a lock, while the writer changes it."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apexreplay.files.atomic_files import Steps, uninterrupted
from apexreplay.frames.located import LOCATED, Arena, CopiedFrames, Located
from apexreplay.item_kinds import Array
from apexreplay.store.file import open_file
from apexreplay.store.layout import COMMIT, FIRST_BYTE, FIRST_KEY, OLDEST_VERSION, Store
from apexreplay.tables import Table

MAX_ATTEMPTS = 16  # draws of a batch until the writer has overwritten none of it


class Draw(NamedTuple):
    """M transitions drawn from the store. Decode or copy their frames, then call `StoreReader.still_live`."""

    records: Array  # Table.batch_record[M]
    frames: Located
    segments: NDArray[np.int64]  # [M]  byte number of the blob of each transition's segment


class Sample(NamedTuple):
    """A batch of transitions with a copy of their frames."""

    num_transitions: int  # live transitions when the batch was drawn
    records: Array  # Table.batch_record[B]
    blob: bytes  # frames of all transitions, see `frame_blob`


class StoreReader(Store):
    """Maps the store read-only. Any number of readers may exist, in any process; the writer does not know of them.

    The writer may overwrite data while it is copied. Therefore a draw reads the commit number first, and its user calls
    `still_live` last, after the frames were copied or decoded. Transitions that were not live throughout are drawn
    again.
    """

    def __init__(self, path: Path, table: Table, *, steps: Steps = uninterrupted) -> None:
        """Raises UsageError unless there is a store for `table` at `path`."""
        super().__init__(open_file(path, table, writable=False))
        self._before = steps
        self._table = table
        self._num_entries = len(table.entries)  # of a step
        # The records viewed as rows of int64, because copying these is faster than copying records.
        self._rows = self._regions.records.view(np.int64).reshape(self.capacity, -1)
        self._arena = Arena(self._regions.arena, table.max_entry_bytes)

    def sample(self, batch_size: int, rng: np.random.Generator, *, max_attempts: int = MAX_ATTEMPTS) -> Sample | None:
        """Draws a batch of `batch_size` transitions and copies their frames.

        Returns None if the store is empty, or if the batch is incomplete after `max_attempts` draws, because the writer
        overwrote drawn data. The order of the transitions in a batch has no meaning.
        """
        num_transitions, missing = self.size, batch_size
        records: list[Array] = []
        frames: list[CopiedFrames] = []
        for _ in range(max_attempts if num_transitions else 0):
            draw = self.draw(missing, rng)
            copied, copies = draw.records, draw.frames.copy()
            live = self.still_live(draw)
            if not live.all():
                copied, copies = (
                    copied[live],
                    copies.take(live, copied["num_frames"].astype(np.int64) * self._num_entries),
                )
            records.append(copied)
            frames.append(copies)
            missing -= len(copied)
            if not missing:
                batch = records[0] if len(records) == 1 else np.concatenate(records)
                return Sample(num_transitions, batch, CopiedFrames.join(frames))
        return None

    def draw(self, count: int, rng: np.random.Generator) -> Draw:
        """Draws in proportion to the weights, with replacement: one transition from each of `count` equal parts of
        their sum. Leaves out transitions that the writer is changing. `probability`: leaf / root of the sum-tree.
        """
        commit = self._cells[COMMIT]  # Read first: records of later keys may be incomplete.
        tree = self._regions.tree
        total = tree.total  # Read once: the writer changes it.
        targets = (np.arange(count) + rng.random(count)) * (total / count)
        self._before("find")
        slots = tree.find(targets)
        weights = tree.weights(slots)
        self._before("copy records")
        stored = self._copy_records(slots)
        live = (weights > 0) & self._can_be_drawn(stored, commit)
        weights = weights[live]
        # fmax: the weight may have grown since `total` was read, and `total` may be 0.
        return self._make_draw(stored[live], weights / np.fmax(weights, total))

    def can_be_drawn(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which of the keys, int64[M], are live, with a version that is not too old."""
        commit = self._cells[COMMIT]
        stored = self._copy_records(keys % self.capacity)
        can: NDArray[np.bool_] = (stored["key"] == keys) & self._can_be_drawn(stored, commit)
        return can

    def sample_keys(self, keys: NDArray[np.int64]) -> Sample | None:
        """Copies the items with these keys, int64[B]. `probability` is 1 / N, for N live items.

        Returns None if the writer has overwritten one of them.
        """
        num_transitions = self.size
        draw = self._make_draw(
            self._copy_records(keys % self.capacity), np.full(len(keys), 1 / max(num_transitions, 1))
        )
        blob = draw.frames.copy().blob
        intact = (draw.records["key"] == keys).all() and self.still_live(draw).all()
        return Sample(num_transitions, draw.records, blob) if intact else None

    def _copy_records(self, slots: NDArray[np.int64]) -> Array:
        return self._rows.take(slots, axis=0).view(self._regions.records.dtype)[:, 0]

    def _can_be_drawn(self, stored: Array, commit: int) -> NDArray[np.bool_]:
        """Returns which copied records are complete, live and not too old. `commit` was read before the copy."""
        can: NDArray[np.bool_] = (stored["key"] < commit) & self._is_live(stored["key"], stored["segment"])
        can &= stored["version"] >= self._cells[OLDEST_VERSION]
        return can

    def _make_draw(self, stored: Array, probabilities: NDArray[np.float64]) -> Draw:
        records, first_steps = _batch_records(stored, self._table)
        records["probability"] = probabilities
        located = Located(self._arena, self._locate(stored["segment"], first_steps, records))
        self._before("copy frames")
        return Draw(records, located, stored["segment"])

    def still_live(self, draw: Draw) -> NDArray[np.bool_]:
        """Returns bool[M]: for which transitions nothing was overwritten up to now. Call this last.

        What the caller has read of a transition that is live now, records and frames, was not overwritten before.
        """
        self._before("check")
        return self._is_live(draw.records["key"], draw.segments)

    def _is_live(self, keys: NDArray[np.int64], segments: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether each copied record is at or above the watermark, so that no part of it was overwritten."""
        live: NDArray[np.bool_] = keys >= self._cells[FIRST_KEY]
        live &= segments >= self._cells[FIRST_BYTE]
        return live

    def _locate(self, segments: NDArray[np.int64], first_steps: NDArray[np.int64], records: Array) -> Array:
        """Returns the places of the entries of drawn items, LOCATED[M]."""
        located = np.zeros(len(records), LOCATED)
        located["blob"] = segments % self._regions.sizes.arena_bytes
        located["first_frame"] = first_steps * self._num_entries
        located["num_frames"] = records["num_frames"]
        located["num_frames"] *= self._num_entries
        for name in (*self._table.item.positions, *self._table.item.depths):
            located[name] = records[name]
        return located


def _batch_records(stored: Array, table: Table) -> tuple[Array, NDArray[np.int64]]:
    """Returns the record of each item for the batch, with steps counted from its first step, and that step's number
    in the segment."""
    first, num_steps = table.item.spans(stored)
    records = np.zeros(len(stored), table.batch_record)
    for name in table.copied:
        records[name] = stored[name]
    records["num_frames"] = num_steps
    for name in table.item.positions:
        records[name] = stored[name] - first
    return records, first
