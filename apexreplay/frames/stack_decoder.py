"""Decodes the entries of items into arrays, such as the frame stacks that a network takes as input."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apexreplay.frame_blob import FrameBlob, read_table
from apexreplay.frames.located import Located
from apexreplay.frames.lz4_blocks import MOST_FRAMES, NativeBlocks, make_blocks
from apexreplay.item_kinds import Array
from apexreplay.tables import Table


class StackDecoder:
    """Decodes the blobs of batches into the rows of preallocated arrays.

    Each entry is decompressed once, directly into its place. If both views of a window share a step (m < S), it is
    copied to the second place. Steps before the start of an episode, and after its end in a sequence, are zero.
    """

    def __init__(self, table: Table, targets: Sequence[Array]) -> None:
        """`targets`: for each entry of a step, dtype[V, B, W, *shape], contiguous; s_t in the first view of a window,
        s_{t+m} in the second."""
        self._item = table.item
        self._max_entry_bytes = table.max_entry_bytes
        self._num_views, self._batch_size, self._width = targets[0].shape[:3]
        self._places = [target.reshape(-1, *target.shape[3:]) for target in targets]
        self._blocks = [
            make_blocks(places.reshape(len(places), -1).view(np.uint8), entry.codec)
            for places, entry in zip(self._places, table.entries, strict=True)
        ]
        is_native = table.item.kind == "window" and len(self._blocks) == 1 and table.item.max_steps <= MOST_FRAMES
        self._is_native = is_native and isinstance(self._blocks[0], NativeBlocks)

    def decode(self, records: Array, blob: FrameBlob, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Decodes `records` (Table.batch_record[M]) and their blob into `rows`, int64[M], of the targets.

        Returns bool[M]: which were decoded. The rows of the others are undefined. `Codec.decode_batch` or
        `Located.copy` must have checked all lengths and counts.
        """
        if self._is_native:
            return self.decode_located(Located.received(records, blob, self._max_entry_bytes), rows)
        return self._decode(records, records["num_frames"].astype(np.int64), blob, rows)

    def decode_located(self, located: Located, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Decodes entries that are in a store's arena, as `decode` does. The native code does so without a copy."""
        entries, blocks = located.entries, self._blocks[0]
        if self._is_native and isinstance(blocks, NativeBlocks):
            entries["row"] = rows
            return blocks.decode_located(located, self._width)
        decoded = np.empty(len(entries), np.bool_)
        for part in located.parts():
            some = located._replace(entries=entries[part])
            counts = some.entries["num_frames"] // len(self._blocks)
            decoded[part] = self._decode(some.entries, counts, some.copy().blob, rows[part])
        return decoded

    def _decode(
        self, records: Array, counts: NDArray[np.int64], blob: FrameBlob, rows: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Decodes the `counts`, int64[M], steps of each item. `records` has the fields of the item's references."""
        item, views = self._item, np.arange(self._num_views)
        newest = np.stack([records[name] for name in item.positions], axis=1).astype(np.int64)  # [M, V]
        depths = np.ones_like(newest)
        for view, name in enumerate(item.depths):
            depths[:, view] = records[name]
        begins = (rows[:, None] + views * self._batch_size) * self._width  # [M, V]  first place of a view
        offsets, num_empty = np.arange(self._width), self._width - depths
        if item.zeros_first:
            last, is_empty = begins + self._width - 1, offsets < num_empty[..., None]
        else:
            last, is_empty = begins + depths - 1, offsets >= depths[..., None]
        empty = (begins[..., None] + offsets)[is_empty]
        owner = np.repeat(np.arange(len(records)), counts)
        steps = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        age = newest[owner] - steps[:, None]  # [N, V]  how many steps before the newest step of the view
        places = np.full((len(owner), 2), -1)
        places[:, : self._num_views] = np.where((age >= 0) & (age < depths[owner]), last[owner] - age, -1)
        table = read_table(blob, len(owner) * len(self._blocks))
        starts, stops = (offsets.reshape(-1, len(self._blocks)) for offsets in (table[:-1], table[1:]))
        decoded = np.ones(len(records), np.bool_)
        for index, (blocks, target) in enumerate(zip(self._blocks, self._places, strict=True)):
            target[empty] = 0
            first_bytes, last_bytes = (np.ascontiguousarray(offsets[:, index]) for offsets in (starts, stops))
            is_good = blocks.decompress(blob, first_bytes, last_bytes, places)
            decoded[owner[~is_good]] = False
        return decoded
