"""Decodes compressed frames into the frame stacks that a network takes as input."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apex.frame_blob import FrameBlob, join_blob, read_table
from apex.replay_memory.frames.lz4_blocks import MOST_FRAMES, FrameError, NativeBlocks, make_blocks
from apex.types import Array, Schema


class StackDecoder:
    """Decodes the blobs of batches into the rows of preallocated stacks.

    Each frame is decompressed once, directly into its place. If s_t and s_{t+m} share a frame (m < S), it is copied to
    the second place. Frames before the start of an episode are zero.
    """

    def __init__(self, schema: Schema, stacks: Array) -> None:
        """`stacks`: frame_dtype[2, B, S, *F], contiguous; s_t in the first half, s_{t+m} in the second."""
        self._schema = schema
        _, self._batch_size, self._stack = stacks.shape[:3]
        self._places = stacks.reshape(-1, *schema.frame_shape)
        self._bytes = stacks.reshape(len(self._places), -1).view(np.uint8)
        self._blocks = make_blocks(self._bytes)

    def decode(self, records: Array, blob: FrameBlob, first_row: int = 0) -> None:
        """Decodes `records` (batch_record_dtype[b]) and their blob into rows from `first_row` on. Raises FrameError.

        `codec.Codec.decode_batch` must have checked all lengths and counts.
        """
        rows = np.stack([records["frame"], records["next_frame"]], axis=1).astype(np.int64)
        depths = np.stack([records["depth"], records["next_depth"]], axis=1).astype(np.int64)
        # One past the last place of each stack: [b, 2], for s_t and s_{t+m}.
        ends = (first_row + np.arange(len(records))[:, None] + [1, 1 + self._batch_size]) * self._stack
        self._clear(ends, depths)
        counts = records["num_frames"].astype(np.int64)
        owner = np.repeat(np.arange(len(records)), counts)
        frames = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        age = rows[owner] - frames[:, None]  # [N, 2]  how many frames before the newest frame of the stack
        places = np.where((age >= 0) & (age < depths[owner]), ends[owner] - 1 - age, -1)
        table = read_table(blob, len(owner))
        if self._schema.codec == "raw":
            self._copy(blob, int(table[0]), places)
        else:
            self._blocks.decompress(blob, table[:-1], table[1:], places)

    def decode_sound(self, records: Array, blob: FrameBlob, first_row: int = 0) -> NDArray[np.bool_]:
        """Decodes all records that can be decoded; returns bool[b]: which were decoded. Other rows are undefined."""
        try:
            self.decode(records, blob, first_row)
        except FrameError:  # Rare. Decodes each transition separately to find the bad ones.
            counts = records["num_frames"].astype(np.int64)
            table, stops = read_table(blob, int(counts.sum())), np.cumsum(counts)
            pieces = [table[stop - count : stop + 1] for count, stop in zip(counts, stops, strict=True)]
            return np.array(
                [
                    self._decodes(record, join_blob(np.diff(piece), [blob[piece[0] : piece[-1]]]), first_row + row)
                    for row, (record, piece) in enumerate(zip(np.split(records, len(records)), pieces, strict=True))
                ]
            )
        return np.ones(len(records), np.bool_)

    def _decodes(self, record: Array, blob: FrameBlob, row: int) -> bool:
        try:
            self.decode(record, blob, row)
        except FrameError:
            return False
        return True

    @property
    def reads_stores(self) -> bool:
        """Returns whether `decode_stored` is available."""
        return (
            isinstance(self._blocks, NativeBlocks)
            and self._schema.codec == "lz4"
            and self._stack + self._schema.n_step <= MOST_FRAMES
        )

    def decode_stored(self, arena: NDArray[np.uint8], stored: Array) -> NDArray[np.bool_]:
        """Decodes transitions (lz4_blocks.STORED[b]) from an arena into their rows; returns bool[b]: which were."""
        assert isinstance(self._blocks, NativeBlocks)
        return self._blocks.decode_stored(
            arena, stored, max_frame_bytes=self._schema.max_frame_bytes, stack=self._stack
        )

    def _clear(self, ends: NDArray[np.int64], depths: NDArray[np.int64]) -> None:
        back = np.arange(1, self._stack + 1)
        self._places[(ends[..., None] - back)[back > depths[..., None]]] = 0

    def _copy(self, blob: FrameBlob, first_byte: int, places: NDArray[np.int64]) -> None:
        body = np.frombuffer(blob, np.uint8, offset=first_byte).reshape(-1, self._schema.frame_bytes)
        for side in (0, 1):
            real = places[:, side] >= 0
            self._bytes[places[real, side]] = body[real]
