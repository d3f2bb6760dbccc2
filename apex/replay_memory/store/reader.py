"""Draws from the replay memory without a lock, while the writer changes it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from apex.frame_blob import as_words, find_frames, join_blob, table_bytes
from apex.replay_memory.frames.lz4_blocks import STORED
from apex.replay_memory.store.file import open_file
from apex.replay_memory.store.layout import COMMIT, FIRST_BYTE, FIRST_KEY, Store
from apex.runtime.atomic_files import go_on
from apex.types import Array, Schema, batch_record_dtype

_COPIED = ("key", "n_step_return", "discount", "action", "version", "depth", "next_depth")  # copied unchanged

log = logging.getLogger("apex")


class Draw(NamedTuple):
    """Transitions drawn from the store, with their probabilities."""

    store_incarnation: int
    num_transitions: int  # live transitions when the batch was drawn
    records: Array  # batch_record_dtype[B]
    blob: bytes | None  # frames of all transitions, see `frame_blob`; None: a `FrameDecoder` has decoded them


class FrameDecoder(Protocol):
    """Decodes frames directly from the arena into rows of stacks."""

    def decode_stored(self, arena: NDArray[np.uint8], stored: Array) -> NDArray[np.bool_]:
        """Decodes transitions described by STORED[b], with rows counted from 0; returns bool[b]: whether decoded."""


class _Frames(NamedTuple):
    """Compressed frames of M transitions, one after the other."""

    lengths: NDArray[np.int64]  # bytes of each frame, in the order of the transitions
    num_bytes: NDArray[np.int64]  # [M]  bytes of the frames of each transition
    blob: bytes  # offset table, then the frames

    def take(self, kept: NDArray[np.bool_], num_frames: NDArray[np.uint16]) -> _Frames:
        """Returns the frames of the transitions selected by `kept`, bool[M]. `num_frames`, [M]: per transition."""
        lengths, num_bytes = self.lengths[np.repeat(kept, num_frames)], self.num_bytes[kept]
        stops = table_bytes(len(self.lengths)) + np.cumsum(self.num_bytes)[kept]
        return _Frames(lengths, num_bytes, join_blob(lengths, _cut(memoryview(self.blob), stops - num_bytes, stops)))


class _Drawn(NamedTuple):
    """Transitions that stayed live while they were copied."""

    rows: NDArray[np.int64]  # [M]  row of each transition in the batch
    records: Array  # batch_record_dtype[M]
    frames: _Frames | None  # None: a decoder has decoded them into the rows


class StoreReader(Store):
    """Maps the store read-only. Any number of readers may exist, in any process; the writer does not know of them.

    The writer may overwrite data while it is copied. Therefore a draw reads the commit number first and the watermark
    last, keeps only transitions that were live throughout, and draws the others again. `pause` is called before each
    step of a draw with its name, so that tests can write to the store between steps.
    """

    def __init__(self, path: Path, schema: Schema, *, pause: Callable[[str], None] = go_on) -> None:
        """Raises UsageError unless there is a store for `schema` at `path`."""
        super().__init__(open_file(path, schema, writable=False))
        self._pause = pause
        self._max_frame_bytes = schema.max_frame_bytes
        self._batch_record = batch_record_dtype(schema)
        # The records viewed as rows of int64, because copying these is faster than copying records.
        self._rows = self._regions.records.view(np.int64).reshape(self.capacity, -1)
        self._words = as_words(self._regions.arena)
        self._bytes = np.frombuffer(self._regions.arena, np.uint8, self._regions.sizes.arena_bytes)
        self.num_undecodable = 0  # draws of live transitions whose frames do not decompress

    def sample(
        self, batch_size: int, rng: np.random.Generator, decoder: FrameDecoder | None = None, *, max_attempts: int = 16
    ) -> Draw | None:
        """Draws in proportion to the weights, with replacement: one transition from each of B equal parts of their sum.

        If there is a `decoder`, the frames of record i are decoded into row i of the decoder's arrays. A record whose
        frames do not decompress gets the probability infinity. Returns None if the store is empty, or if the batch is
        incomplete after `max_attempts` attempts, because the writer overwrote drawn data. The order of the transitions
        in a batch has no meaning.
        """
        num_transitions, missing = self.size, np.arange(batch_size)
        parts: list[_Drawn] = []
        for _ in range(max_attempts if num_transitions else 0):
            parts.append(self._draw(missing, rng, decoder))
            if len(parts[-1].rows) == len(missing):
                drawn = parts[0] if len(parts) == 1 else _join(parts)
                blob = None if drawn.frames is None else drawn.frames.blob
                return Draw(self.store_incarnation, num_transitions, drawn.records, blob)
            missing = np.setdiff1d(missing, parts[-1].rows, assume_unique=True)
        return None

    def _draw(self, rows: NDArray[np.int64], rng: np.random.Generator, decoder: FrameDecoder | None) -> _Drawn:
        """Draws one transition for each of the given batch rows; returns those that were live throughout."""
        stored, records, first_frames = self._draw_records(len(rows), rng)
        rows, frames = rows[: len(records)], None
        self._pause("copy frames")
        if decoder is None:
            copied = np.ones(len(rows), np.bool_)
            frames = self._copy_frames(stored["segment"], first_frames, records["num_frames"])
        else:
            copied = decoder.decode_stored(self._bytes, self._describe(rows, stored["segment"], first_frames, records))
        self._pause("check")
        live = self._still_live(stored)  # Read last: data that is live now was not overwritten before.
        records["probability"][~copied] = np.inf
        self._note_undecodable(int((live & ~copied).sum()))
        if live.all():
            return _Drawn(rows, records, frames)
        frames = None if frames is None else frames.take(live, records["num_frames"])
        return _Drawn(rows[live], records[live], frames)

    def _describe(
        self, rows: NDArray[np.int64], segments: NDArray[np.int64], first_frames: NDArray[np.int64], records: Array
    ) -> Array:
        """Returns STORED[b], which tells a decoder where each transition's frames are and into which row they go."""
        described = np.empty(len(rows), STORED)
        described["row"] = rows
        described["blob"] = segments % self._regions.sizes.arena_bytes
        described["first_frame"] = first_frames
        for name in ("num_frames", "frame", "depth", "next_frame", "next_depth"):
            described[name] = records[name]
        return described

    def _note_undecodable(self, count: int) -> None:
        """Counts draws of live transitions whose frames do not decompress; warns at 1, 2, 4, 8, ... of them."""
        if count:
            before, self.num_undecodable = self.num_undecodable, self.num_undecodable + count
            if before.bit_length() != self.num_undecodable.bit_length():
                log.warning("%d draws had frames that do not decompress: an actor sends bad data", self.num_undecodable)

    def _draw_records(self, count: int, rng: np.random.Generator) -> tuple[Array, Array, NDArray[np.int64]]:
        """Draws `count` transitions and leaves out those that the writer is changing.

        Returns three arrays with one entry for each remaining transition: its stored record, its record for the batch,
        and the number of its first frame in the segment.
        """
        commit = self._cells[COMMIT]  # Read first: records of later keys may be incomplete.
        tree = self._regions.tree
        total = tree.total  # Read once: the writer changes it.
        targets = (np.arange(count) + rng.random(count)) * (total / count)
        self._pause("find")
        slots = tree.find(targets)
        weights = tree.weights(slots)
        self._pause("copy records")
        stored = self._rows.take(slots, axis=0).view(self._regions.records.dtype)[:, 0]
        live = (weights > 0) & (stored["key"] < commit) & self._still_live(stored)  # These records are complete.
        stored, weights = stored[live], weights[live]
        records, first_frames = _batch_records(stored, self._batch_record)
        # fmax: the weight may have grown since `total` was read, and `total` may be 0.
        records["probability"] = weights / np.fmax(weights, total)
        return stored, records, first_frames

    def _still_live(self, stored: Array) -> NDArray[np.bool_]:
        """Returns whether each copied record is at or above the watermark, so that no part of it was overwritten."""
        live: NDArray[np.bool_] = stored["key"] >= self._cells[FIRST_KEY]
        live &= stored["segment"] >= self._cells[FIRST_BYTE]
        return live

    def _copy_frames(
        self, segments: NDArray[np.int64], first_frames: NDArray[np.int64], num_frames: NDArray[np.uint16]
    ) -> _Frames:
        """Copies the frames of transitions; each frame is copied once.

        An offset table that is being overwritten may hold any values. Even then, the copy stays inside the arena and
        within the maximum size of the frames.
        """
        arena_bytes = self._regions.sizes.arena_bytes
        positions, counts = segments % arena_bytes, num_frames.astype(np.int64)
        begins, ends = find_frames(self._words, positions, first_frames, counts)
        last = np.cumsum(counts) - 1
        starts, stops = positions + begins[last - counts + 1], positions + ends[last]
        most = counts * self._max_frame_bytes
        sound = (starts <= stops) & (stops <= arena_bytes) & (stops - starts <= most)
        starts, stops = np.where(sound, starts, 0), np.where(sound, stops, 0)
        lengths = ends - begins
        return _Frames(lengths, stops - starts, join_blob(lengths, _cut(self._regions.arena, starts, stops)))


def _batch_records(stored: Array, dtype: np.dtype[Any]) -> tuple[Array, NDArray[np.int64]]:
    """Returns the record of each transition for the batch, with frames counted from its first frame, and that frame's
    number in the segment."""
    frame, next_frame = stored["frame"].astype(np.int64), stored["next_frame"].astype(np.int64)
    first = np.minimum(frame - stored["depth"], next_frame - stored["next_depth"]) + 1
    records = np.zeros(len(stored), dtype)
    for name in _COPIED:
        records[name] = stored[name]
    if "next_mask" in (dtype.names or ()):
        records["next_mask"] = stored["next_mask"]
    records["num_frames"] = next_frame - first + 1
    records["frame"], records["next_frame"] = frame - first, next_frame - first
    return records, first


def _cut(buffer: memoryview, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[memoryview]:
    return [buffer[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def _join(parts: list[_Drawn]) -> _Drawn:
    """Joins all parts of a batch. If the frames are already decoded into rows, sorts the records by row."""
    rows = np.concatenate([part.rows for part in parts])
    records = np.concatenate([part.records for part in parts])
    every = [part.frames for part in parts if part.frames is not None]
    if not every:
        order = np.argsort(rows)
        return _Drawn(rows[order], records[order], None)
    lengths = np.concatenate([frames.lengths for frames in every])
    pieces = [memoryview(frames.blob)[table_bytes(len(frames.lengths)) :] for frames in every]
    num_bytes = np.concatenate([frames.num_bytes for frames in every])
    return _Drawn(rows, records, _Frames(lengths, num_bytes, join_blob(lengths, pieces)))
