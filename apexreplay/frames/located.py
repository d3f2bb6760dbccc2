"""Frames in the arena of a store: their places, and copies of them.

The writer may overwrite the arena at any time. Every read here stays inside the arena, whatever the arena holds.
`StoreReader.still_live` says afterwards whether the frames were intact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apexreplay.frame_blob import FrameBlob, as_words, copy_runs, find_frames, join_blob, table_bytes
from apexreplay.item_kinds import Array

PART_BYTES = 1 << 28  # maximum bytes of frames that are copied at once for decoding

# The entries of one item, counted from its first; `struct located` of decompress.c, which reads windows of one entry.
LOCATED = np.dtype(
    [
        (name, "<i8")
        for name in ("row", "blob", "first_frame", "num_frames", "frame", "depth", "next_frame", "next_depth")
    ]
)


class Arena:
    """The memory with the compressed frames of all segments, read-only; or one blob that was received."""

    def __init__(self, memory: memoryview, max_frame_bytes: int, *, is_shared: bool = True) -> None:
        """`max_frame_bytes`: maximum size of one compressed frame. `is_shared`: another process may write to it."""
        self.memory = memory
        self.words = as_words(memory)
        self.bytes = np.frombuffer(memory, np.uint8, len(memory))
        self.max_frame_bytes = max_frame_bytes
        self.is_shared = is_shared


class Located(NamedTuple):
    """The places of the entries of M items. A frame is an entry, such as the compressed image of one step."""

    arena: Arena
    entries: Array  # LOCATED[M]; `row` is set by the decoder

    @classmethod
    def received(cls, records: Array, blob: FrameBlob, max_frame_bytes: int) -> Located:
        """Returns the places of the frames of `records`, batch_record_dtype[M], in the blob of their message."""
        entries = np.zeros(len(records), LOCATED)
        for name in ("num_frames", "frame", "depth", "next_frame", "next_depth"):
            entries[name] = records[name]
        entries["first_frame"] = np.cumsum(entries["num_frames"]) - entries["num_frames"]
        return cls(Arena(memoryview(blob), max_frame_bytes, is_shared=False), entries)

    def parts(self) -> Iterator[slice]:
        """Returns consecutive slices of the items. The frames of each have at most PART_BYTES, or belong to one item.

        The frames of a whole batch may exceed 4 GiB, the maximum of a blob.
        """
        item_bytes = int(self.entries["num_frames"].max(initial=1)) * self.arena.max_frame_bytes
        size = max(1, PART_BYTES // item_bytes)
        return (slice(first, first + size) for first in range(0, len(self.entries), size))

    def copy(self) -> CopiedFrames:
        """Copies the frames, each of them once. A transition whose offset table makes no sense gets empty frames."""
        arena, entries = self.arena, self.entries
        positions, counts = entries["blob"], entries["num_frames"]
        begins, ends = find_frames(arena.words, positions, entries["first_frame"], counts)
        last = np.cumsum(counts) - 1
        starts, stops = positions + begins[last - counts + 1], positions + ends[last]
        lengths = ends - begins
        sound = (starts <= stops) & (stops <= len(arena.memory)) & (stops - starts <= counts * arena.max_frame_bytes)
        # `begins` and `ends` were read one after the other, so the table may have changed in between.
        sound &= np.add.reduceat(lengths, last - counts + 1) == stops - starts
        if not sound.all():
            starts, stops = np.where(sound, starts, 0), np.where(sound, stops, 0)
            lengths = np.where(np.repeat(sound, counts), lengths, 0)
        return CopiedFrames(lengths, stops - starts, join_blob(lengths, _cut(arena.memory, starts, stops)))


class CopiedFrames(NamedTuple):
    """Compressed frames of M transitions, one after the other."""

    lengths: NDArray[np.int64]  # bytes of each frame, in the order of the transitions
    num_bytes: NDArray[np.int64]  # [M]  bytes of the frames of each transition
    blob: bytes  # offset table, then the frames

    def take(self, kept: NDArray[np.bool_], num_frames: NDArray[np.int64]) -> CopiedFrames:
        """Returns the frames of the transitions selected by `kept`, bool[M]. `num_frames`, [M]: per transition."""
        lengths, num_bytes = self.lengths[np.repeat(kept, num_frames)], self.num_bytes[kept]
        stops = table_bytes(len(self.lengths)) + np.cumsum(self.num_bytes)[kept]
        pieces = _cut(memoryview(self.blob), stops - num_bytes, stops)
        return CopiedFrames(lengths, num_bytes, join_blob(lengths, pieces))

    @staticmethod
    def join(parts: list[CopiedFrames]) -> bytes:
        """Returns the blob with the frames of all parts, in their order."""
        if len(parts) == 1:
            return parts[0].blob
        pieces = [memoryview(part.blob)[table_bytes(len(part.lengths)) :] for part in parts]
        return join_blob(np.concatenate([part.lengths for part in parts]), pieces)


def _cut(buffer: memoryview, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Sequence[bytes | memoryview]:
    """Returns the bytes from each of `starts` to its stop; in one piece, which is faster, if all have one length."""
    size = int((stops - starts).max(initial=0))
    if size and (stops - starts == size).all():
        return [copy_runs(np.frombuffer(buffer, np.uint8), starts, size).tobytes()]
    return [buffer[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
