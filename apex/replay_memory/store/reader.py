"""Draws from the replay memory without a lock, while its writer writes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from apex.frame_blob import join_blob, table_bytes
from apex.replay_memory.frames.lz4_blocks import STORED
from apex.replay_memory.store.file import open_file
from apex.replay_memory.store.layout import COMMIT, FIRST_BYTE, FIRST_KEY, STORED_RECORD, Store
from apex.runtime.atomic_files import go_on
from apex.types import BATCH_RECORD, Array, Schema

log = logging.getLogger("apex")


class Draw(NamedTuple):
    """What was drawn; the sampler makes a `types.BatchMessage` of it."""

    store_incarnation: int
    num_transitions: int  # alive when it was drawn
    records: Array  # BATCH_RECORD[B]
    blob: bytes | None  # the frames of all, laid out as by `frame_blob.make_blob`; None: they are in their place


class BatchSlot(Protocol):
    """Rows of stacks that frames may be decoded into, straight from the arena."""

    def decode_stored(self, arena: NDArray[np.uint8], stored: Array) -> NDArray[np.bool_]:
        """Decodes STORED[b], whose rows count from 0; returns which came out, bool[b]."""


class _Drawn(NamedTuple):
    """Transitions that stayed live while they were copied."""

    records: Array  # BATCH_RECORD[M]
    lengths: NDArray[np.int64]  # bytes of each frame of the first transition, of the second, ...
    blob: bytes  # their table, then these frames


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
        # The same memory once more: rows of int64 are fetched faster than records, and tables are uint32.
        self._rows = self._regions.records.view(np.int64).reshape(-1, STORED_RECORD.itemsize // 8)
        self._tables = np.frombuffer(self._regions.arena, "<u4", self._regions.sizes.arena_bytes // 4)
        self._bytes = np.frombuffer(self._regions.arena, np.uint8, self._regions.sizes.arena_bytes)
        self.num_undecodable = 0  # draws of frames that do not decompress although nobody has overwritten them

    def sample(
        self, batch_size: int, rng: np.random.Generator, place: BatchSlot | None = None, *, max_attempts: int = 16
    ) -> Draw | None:
        """Draws in proportion to the leaves, with replacement: one from each of B equal ranges of their sum.

        With a `place` the frames are decoded into it at once. Returns None when the store is empty, or when some of the
        batch met only what the writer was just overwriting, `max_attempts` times. The order within a batch means
        nothing.
        """
        if place is not None:
            return self._sample_into(place, batch_size, rng, max_attempts)
        num_transitions, missing = self.size, batch_size
        parts: list[_Drawn] = []
        for _ in range(max_attempts if num_transitions else 0):
            parts.append(self._draw(missing, rng))
            missing -= len(parts[-1].records)
            if missing == 0:
                drawn = parts[0] if len(parts) == 1 else _join(parts)
                return Draw(self.store_incarnation, num_transitions, drawn.records, drawn.blob)
        return None

    def _sample_into(
        self, place: BatchSlot, batch_size: int, rng: np.random.Generator, max_attempts: int
    ) -> Draw | None:
        num_transitions, records = self.size, np.zeros(batch_size, BATCH_RECORD)
        missing = np.arange(batch_size)
        for _ in range(max_attempts if num_transitions else 0):
            stored, drawn, first_frames = self._draw_records(len(missing), rng)
            described = np.empty(len(drawn), STORED)
            described["row"] = missing[: len(drawn)]
            described["blob"] = stored["segment"] % self._regions.sizes.arena_bytes
            described["first_frame"] = first_frames
            for name in ("num_frames", "frame", "depth", "next_frame", "next_depth"):
                described[name] = drawn[name]
            self._pause("copy frames")
            decoded = place.decode_stored(self._bytes, described)
            self._pause("check")
            live = self._still_live(stored)  # Last: what is live now was not touched before.
            self._note_undecodable(int((live & ~decoded).sum()))
            good = live & decoded
            records[described["row"][good]] = drawn[good]
            missing = np.concatenate([described["row"][~good], missing[len(drawn) :]])
            if not len(missing):
                return Draw(self.store_incarnation, num_transitions, records, None)
        return None

    def _note_undecodable(self, count: int) -> None:
        """Counts draws of frames that do not decompress although nobody has overwritten them; says so now and then."""
        if count:
            before, self.num_undecodable = self.num_undecodable, self.num_undecodable + count
            if before.bit_length() != self.num_undecodable.bit_length():
                log.warning("%d draws met frames that do not decompress: an actor sends rubbish", self.num_undecodable)

    def _draw(self, count: int, rng: np.random.Generator) -> _Drawn:
        """Draws `count` transitions; returns those that were live throughout."""
        stored, records, first_frames = self._draw_records(count, rng)
        self._pause("copy frames")
        lengths, starts, stops = self._locate(stored["segment"], first_frames, records["num_frames"])
        blob = join_blob(lengths, _cut(self._regions.arena, starts, stops))
        self._pause("check")
        live = self._still_live(stored)  # Last: what is live now was not touched before.
        if live.all():
            return _Drawn(records, lengths, blob)
        ends = table_bytes(len(lengths)) + np.cumsum(stops - starts)
        begins = ends - (stops - starts)
        lengths = lengths[np.repeat(live, records["num_frames"])]
        blob = join_blob(lengths, _cut(memoryview(blob), begins[live], ends[live]))
        return _Drawn(records[live], lengths, blob)

    def _draw_records(self, count: int, rng: np.random.Generator) -> tuple[Array, Array, NDArray[np.int64]]:
        """Draws `count` transitions, and leaves out those that are just being written.

        Returns, of the others, the stored record, what a sample tells of it, and its first frame.
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
        records, first_frames = _sample_records(stored)
        # A leaf may have grown since the root was read, and the root may have been 0 then.
        records["probability"] = weights / np.fmax(weights, total)
        return stored, records, first_frames

    def _still_live(self, stored: Array) -> NDArray[np.bool_]:
        """Whether each copied record is at or above the watermark: then nothing of it has been overwritten."""
        live: NDArray[np.bool_] = stored["key"] >= self._cells[FIRST_KEY]
        live &= stored["segment"] >= self._cells[FIRST_BYTE]
        return live

    def _locate(
        self, segments: NDArray[np.int64], first_frames: NDArray[np.int64], num_frames: NDArray[np.uint16]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns the length of every frame; where each transition's frames begin and end in the arena.

        A table that is just being overwritten may say anything, but never leads outside the arena, nor to more bytes
        than so many frames can have.
        """
        arena_bytes = self._regions.sizes.arena_bytes
        positions = segments % arena_bytes
        counts = num_frames.astype(np.int64)
        last = np.cumsum(counts) - 1
        first = last - counts + 1
        entries = np.repeat(positions // 4 + first_frames - first, counts) + np.arange(counts.sum())
        begins = self._tables.take(entries, mode="clip").astype(np.int64)
        ends = self._tables.take(entries + 1, mode="clip").astype(np.int64)
        starts, stops = positions + begins[first], positions + ends[last]
        most = counts * self._max_frame_bytes
        sound = (starts <= stops) & (stops <= arena_bytes) & (stops - starts <= most)
        return ends - begins, np.where(sound, starts, 0), np.where(sound, stops, 0)


def _sample_records(stored: Array) -> tuple[Array, NDArray[np.int64]]:
    """Returns what a sample tells of each stored record, frames counted from its first one; and which that is."""
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
    lengths = np.concatenate([part.lengths for part in parts])
    frames = [memoryview(part.blob)[table_bytes(len(part.lengths)) :] for part in parts]
    return _Drawn(np.concatenate([part.records for part in parts]), lengths, join_blob(lengths, frames))
