"""From compressed frames to the stacks that a network reads."""

from __future__ import annotations

import cramjam
import numpy as np

from apex.types import Array, Image, Schema


class FrameError(ValueError):
    """A compressed frame that is none."""


class StackDecoder:
    """Decodes the images of samples into the rows of preallocated stacks.

    Each frame is decompressed once, straight into its place; where s_t and s_{t+m} share frames (n < S), the
    second place is a copy. Frames from before an episode's first are zero.
    """

    def __init__(self, schema: Schema, stacks: Array) -> None:
        """`stacks`: frame_dtype[2, B, S, *F], contiguous; s_t in the first half, s_{t+m} in the second."""
        self._schema = schema
        self._stacks = stacks
        _, self._batch_size, self._stack = stacks.shape[:3]
        self._rows = np.arange(2 * self._batch_size * self._stack).reshape(2, self._batch_size, self._stack)
        self._places = stacks.reshape(-1, *schema.frame_shape)
        self._bytes = stacks.reshape(len(self._places), -1).view(np.uint8)
        # Slicing costs as much as a third of decompressing: the slices are made once.
        self._targets = [row.data for row in self._bytes]

    def decode(self, records: Array, image: Image, first_row: int = 0) -> None:
        """Fills the stacks' rows from `first_row` on from `records` (SAMPLE_RECORD) and their image; raises FrameError.

        Lengths and counts must have been checked (`wire.Codec.decode_batch`).
        """
        stack = self._stack
        rows = self._rows[:, first_row : first_row + len(records)].reshape(-1)
        offsets = np.arange(stack)
        first = np.cumsum(records["num_frames"], dtype=np.int64) - records["num_frames"]
        # Which frame of the image belongs at each place [2, rows, S], oldest first; negative: before the episode.
        newest = np.stack([first + records["frame"], first + records["next_frame"]])[..., None]
        depth = np.stack([records["depth"], records["next_depth"]]).astype(np.int64)[..., None]
        real = offsets >= stack - depth
        wanted = np.where(real, newest - (stack - 1) + offsets, -1).reshape(-1)
        self._places[rows[wanted < 0]] = 0
        places = np.flatnonzero(wanted >= 0)
        frames, where = np.unique(wanted[places], return_index=True)
        unique_places = places[where]
        self._decompress(image, frames, rows[unique_places])
        copies = np.ones(len(wanted), bool)
        copies[unique_places] = False
        copies &= wanted >= 0
        twins = np.flatnonzero(copies)
        if twins.size:
            source = unique_places[np.searchsorted(frames, wanted[twins])]
            self._places[rows[twins]] = self._places[rows[source]]

    def _decompress(self, image: Image, frames: Array, places: Array) -> None:
        view = memoryview(image)
        table = np.frombuffer(view, "<u4", int.from_bytes(view[:4], "little") // 4)
        starts, ends = table[frames].tolist(), table[frames + 1].tolist()
        if self._schema.codec == "raw":
            size = self._schema.frame_bytes
            body = np.frombuffer(view, np.uint8, offset=int(table[0])).reshape(-1, size)
            self._bytes[places] = body[frames]
            return
        size, targets = self._schema.frame_bytes, self._targets
        decompress = cramjam.lz4.decompress_block_into
        try:
            for start, end, place in zip(starts, ends, places.tolist(), strict=True):
                if decompress(view[start:end], targets[place], output_len=size) != size:
                    raise FrameError(f"a frame of {end - start} bytes does not decompress to {size}")
        except cramjam.DecompressionError as error:
            raise FrameError(f"a frame does not decompress: {error}") from error
