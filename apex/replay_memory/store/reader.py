"""Draws from the replay memory without a lock, while its writer writes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from apex.frame_blob import as_words, find_frames, join_blob, table_bytes
from apex.replay_memory.frames.lz4_blocks import STORED
from apex.replay_memory.store.file import open_file
from apex.replay_memory.store.layout import COMMIT, FIRST_BYTE, FIRST_KEY, STORED_RECORD, Store
from apex.runtime.atomic_files import go_on
from apex.types import BATCH_RECORD, Array, Schema

log = logging.getLogger("apex")


class Draw(NamedTuple):
    """Transitions that were chosen in the store, with their probabilities."""

    store_incarnation: int
    num_transitions: int  # alive when it was drawn
    records: Array  # BATCH_RECORD[B]
    blob: bytes | None  # frames of all transitions, see `frame_blob`; None: decoded already


class FrameDecoder(Protocol):
    """Decodes frames straight from the arena into rows of stacks."""

    def decode_stored(self, arena: NDArray[np.uint8], stored: Array) -> NDArray[np.bool_]:
        """Decodes STORED[b], whose rows count from 0; returns which were decoded, bool[b]."""


class _Frames(NamedTuple):
    """Compressed frames of M transitions, side by side."""

    lengths: NDArray[np.int64]  # bytes of each frame of the first transition, of the second, ...
    num_bytes: NDArray[np.int64]  # [M]  of each transition's frames
    blob: bytes  # their table, then these frames

    def take(self, kept: NDArray[np.bool_], num_frames: NDArray[np.uint16]) -> _Frames:
        """The frames of the transitions that are kept, bool[M]; `num_frames` [M] each of all had."""
        lengths, num_bytes = self.lengths[np.repeat(kept, num_frames)], self.num_bytes[kept]
        stops = table_bytes(len(self.lengths)) + np.cumsum(self.num_bytes)[kept]
        return _Frames(lengths, num_bytes, join_blob(lengths, _cut(memoryview(self.blob), stops - num_bytes, stops)))


class _Drawn(NamedTuple):
    """Transitions that stayed live while they were copied."""

    rows: NDArray[np.int64]  # [M]  of the batch
    records: Array  # BATCH_RECORD[M]
    frames: _Frames | None  # None: decoded into their rows


class StoreReader(Store):
    """Maps the store read-only. Any number of readers, in any process, none of which the writer knows of.

    The writer may overwrite what is being copied. So the commit number is read before anything else and the
    watermark after everything else; only what was live throughout is kept, and the rest is drawn again. `pause` is
    called with the name of each step of a draw before it is taken: tests write in between.
    """

    def __init__(self, path: Path, schema: Schema, *, pause: Callable[[str], None] = go_on) -> None:
        """Raises ConfigError unless there is a store for `schema` at `path`."""
        super().__init__(open_file(path, schema, writable=False))
        self._pause = pause
        self._max_frame_bytes = schema.max_frame_bytes
        # The same memory once more: rows of int64 are fetched faster than records.
        self._rows = self._regions.records.view(np.int64).reshape(-1, STORED_RECORD.itemsize // 8)
        self._words = as_words(self._regions.arena)
        self._bytes = np.frombuffer(self._regions.arena, np.uint8, self._regions.sizes.arena_bytes)
        self.num_undecodable = 0  # draws of frames that do not decompress although nobody has overwritten them

    def sample(
        self, batch_size: int, rng: np.random.Generator, decoder: FrameDecoder | None = None, *, max_attempts: int = 16
    ) -> Draw | None:
        """Draws in proportion to the leaves, with replacement: one from each of B equal ranges of their sum.

        A `decoder` decodes the frames at once, those of record i into its row i; the probability of a record whose
        frames do not decompress is infinite. Returns None when the store is empty, or when part of the batch met only
        what the writer was just overwriting, `max_attempts` times. The order within a batch means nothing.
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
        """Draws a transition for each of these rows of a batch; returns those that were live throughout."""
        stored, records, first_frames = self._draw_records(len(rows), rng)
        rows, frames = rows[: len(records)], None
        self._pause("copy frames")
        if decoder is None:
            copied = np.ones(len(rows), np.bool_)
            frames = self._copy_frames(stored["segment"], first_frames, records["num_frames"])
        else:
            copied = decoder.decode_stored(self._bytes, self._describe(rows, stored["segment"], first_frames, records))
        self._pause("check")
        live = self._still_live(stored)  # Last: what is live now was not touched before.
        records["probability"][~copied] = np.inf
        self._note_undecodable(int((live & ~copied).sum()))
        if live.all():
            return _Drawn(rows, records, frames)
        frames = None if frames is None else frames.take(live, records["num_frames"])
        return _Drawn(rows[live], records[live], frames)

    def _describe(
        self, rows: NDArray[np.int64], segments: NDArray[np.int64], first_frames: NDArray[np.int64], records: Array
    ) -> Array:
        """What a decoder is told of transitions, STORED[b]."""
        described = np.empty(len(rows), STORED)
        described["row"] = rows
        described["blob"] = segments % self._regions.sizes.arena_bytes
        described["first_frame"] = first_frames
        for name in ("num_frames", "frame", "depth", "next_frame", "next_depth"):
            described[name] = records[name]
        return described

    def _note_undecodable(self, count: int) -> None:
        """Counts draws of frames that do not decompress although nobody has overwritten them; says so now and then."""
        if count:
            before, self.num_undecodable = self.num_undecodable, self.num_undecodable + count
            if before.bit_length() != self.num_undecodable.bit_length():
                log.warning("%d draws met frames that do not decompress: an actor sends rubbish", self.num_undecodable)

    def _draw_records(self, count: int, rng: np.random.Generator) -> tuple[Array, Array, NDArray[np.int64]]:
        """Draws `count` transitions, and leaves out those that are just being written.

        Returns, of the others, the stored record, what a batch tells of it, and its first frame.
        """
        commit = self._cells[COMMIT]  # First: records of later keys may be half written.
        tree = self._regions.tree
        total = tree.total  # Once: the writer changes it.
        targets = (np.arange(count) + rng.random(count)) * (total / count)
        self._pause("find")
        slots = tree.find(targets)
        weights = tree.weights(slots)
        self._pause("copy records")
        stored = self._rows.take(slots, axis=0).view(STORED_RECORD)[:, 0]
        live = (weights > 0) & (stored["key"] < commit) & self._still_live(stored)  # So these records are whole.
        stored, weights = stored[live], weights[live]
        records, first_frames = _batch_records(stored)
        # A leaf may have grown since the root was read, and the root may have been 0 then.
        records["probability"] = weights / np.fmax(weights, total)
        return stored, records, first_frames

    def _still_live(self, stored: Array) -> NDArray[np.bool_]:
        """Whether each copied record is at or above the watermark: then nothing of it has been overwritten."""
        live: NDArray[np.bool_] = stored["key"] >= self._cells[FIRST_KEY]
        live &= stored["segment"] >= self._cells[FIRST_BYTE]
        return live

    def _copy_frames(
        self, segments: NDArray[np.int64], first_frames: NDArray[np.int64], num_frames: NDArray[np.uint16]
    ) -> _Frames:
        """Copies the frames of transitions, once.

        A table that is just being overwritten may say anything, but never leads outside the arena, nor to more bytes
        than so many frames can have.
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


def _batch_records(stored: Array) -> tuple[Array, NDArray[np.int64]]:
    """Returns what a batch tells of each stored record, frames counted from its first one; and which that is."""
    frame, next_frame = stored["frame"].astype(np.int64), stored["next_frame"].astype(np.int64)
    first = np.minimum(frame - stored["depth"], next_frame - stored["next_depth"]) + 1
    records = np.zeros(len(stored), BATCH_RECORD)
    for name in ("key", "n_step_return", "discount", "version", "action", "depth", "next_depth"):
        records[name] = stored[name]
    records["num_frames"] = next_frame - first + 1
    records["frame"], records["next_frame"] = frame - first, next_frame - first
    return records, first


def _cut(buffer: memoryview, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[memoryview]:
    return [buffer[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def _join(parts: list[_Drawn]) -> _Drawn:
    """All parts of a batch. Without frames, which are in their rows already, the records go there too."""
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
