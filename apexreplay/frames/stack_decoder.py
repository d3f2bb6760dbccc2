"""Decodes compressed frames into the frame stacks that a network takes as input."""

import numpy as np
from numpy.typing import NDArray

from apexreplay.frame_blob import FrameBlob, read_table
from apexreplay.frames.located import Located
from apexreplay.frames.lz4_blocks import MOST_FRAMES, NativeBlocks, make_blocks
from apexreplay.types import Array, Schema


class StackDecoder:
    """Decodes the blobs of batches into the rows of preallocated stacks.

    Each frame is decompressed once, directly into its place. If s_t and s_{t+m} share a frame (m < S), it is copied to
    the second place. Frames before the start of an episode are zero.
    """

    def __init__(self, schema: Schema, stacks: Array) -> None:
        """`stacks`: frame_dtype[2, B, S, *F], contiguous; s_t in the first half, s_{t+m} in the second."""
        _, self._batch_size, self._stack = stacks.shape[:3]
        self._places = stacks.reshape(-1, *schema.frame_shape)
        self._blocks = make_blocks(stacks.reshape(len(self._places), -1).view(np.uint8), schema.codec)
        self._few_frames = self._stack + schema.n_step <= MOST_FRAMES
        self._max_frame_bytes = schema.max_frame_bytes

    def decode(self, records: Array, blob: FrameBlob, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Decodes `records` (batch_record_dtype[M] or LOCATED[M]) and their blob into `rows`, int64[M], of the stacks.

        Returns bool[M]: which were decoded. The rows of the others are undefined. `Codec.decode_batch` or
        `Located.copy` must have checked all lengths and counts.
        """
        if isinstance(self._blocks, NativeBlocks) and self._few_frames:
            return self.decode_located(Located.received(records, blob, self._max_frame_bytes), rows)
        newest = np.stack([records["frame"], records["next_frame"]], axis=1).astype(np.int64)
        depths = np.stack([records["depth"], records["next_depth"]], axis=1).astype(np.int64)
        # One past the last place of each stack: [M, 2], for s_t and s_{t+m}.
        ends = (rows[:, None] + [1, 1 + self._batch_size]) * self._stack
        self._clear(ends, depths)
        counts = records["num_frames"].astype(np.int64)
        owner = np.repeat(np.arange(len(records)), counts)
        frames = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        age = newest[owner] - frames[:, None]  # [N, 2]  how many frames before the newest frame of the stack
        places = np.where((age >= 0) & (age < depths[owner]), ends[owner] - 1 - age, -1)
        table = read_table(blob, len(owner))
        is_good = self._blocks.decompress(blob, table[:-1], table[1:], places)
        decoded = np.ones(len(records), np.bool_)
        decoded[owner[~is_good]] = False
        return decoded

    def decode_located(self, located: Located, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Decodes frames that are in a store's arena, as `decode` does. The native code does so without a copy."""
        if not isinstance(self._blocks, NativeBlocks) or not self._few_frames:
            return self.decode(located.entries, located.copy().blob, rows)
        located.entries["row"] = rows
        return self._blocks.decode_located(located, self._stack)

    def _clear(self, ends: NDArray[np.int64], depths: NDArray[np.int64]) -> None:
        back = np.arange(1, self._stack + 1)
        self._places[(ends[..., None] - back)[back > depths[..., None]]] = 0
