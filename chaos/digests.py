"""One 64-bit number for each transition, which is equal when it is made, sent and stored, if no bit has changed."""

from hashlib import blake2b
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from apexreplay.frame_blob import read_table
from apexreplay.item_kinds import Array
from apexreplay.store.layout import FIRST_KEY, Regions
from apexreplay.types import Segment

# The values of the other fields depend on the slot.
_OWN = (
    "n_step_return", "discount", "priority", "reward", "step_discount", "action", "depth", "next_depth", "next_mask"
)  # fmt: skip


def digest_segment(segment: Segment) -> NDArray[np.uint64]:
    """Returns uint64[K]: digests of record, version of the parameters, and all frames of both stacks of each
    transition.
    """
    return _digests(segment.records, np.full(len(segment.records), segment.version), memoryview(segment.blob))


def digest_store(regions: Regions, keys: range) -> NDArray[np.uint64]:
    """Returns uint64[len(keys)], digests of live keys of a store. Read FIRST_KEY afterwards: older keys are invalid.

    If only some keys of a segment are requested, the whole segment is read for its frames.
    """
    slots = np.arange(keys.start, keys.stop) % regions.sizes.capacity
    records = regions.records[slots]
    blobs = records["segment"]
    cuts = [0, *(np.flatnonzero(np.diff(blobs)) + 1).tolist(), len(records)]
    parts = [np.empty(0, np.uint64)]
    for first, stop in pairwise(cuts):
        if first < stop:
            begin = int(blobs[first]) % regions.sizes.arena_bytes
            part = records[first:stop]
            parts.append(_digests(part, part["version"], regions.arena[begin:]))
    found = np.concatenate(parts)
    # A record in a slot must be that of its key; otherwise the slot has other contents.
    found[records["key"] != np.arange(keys.start, keys.stop)] = 0
    return found


def first_live(regions: Regions) -> int:
    """Returns the oldest key that has not been overwritten."""
    return int(regions.cells[FIRST_KEY])


def _digests(records: Array, version: Array, blob: memoryview) -> NDArray[np.uint64]:
    own = [(name, records.dtype[name]) for name in _OWN if name in (records.dtype.names or ())]
    packed = np.empty(len(records), np.dtype([*own, ("version", "<u4"), ("length", "<u2")]))
    for name, _ in own:
        packed[name] = records[name]
    packed["version"] = version
    packed["length"] = records["next_frame"] - records["frame"]
    frame, next_frame = records["frame"].astype(np.int64), records["next_frame"].astype(np.int64)
    oldest = np.minimum(frame - records["depth"], next_frame - records["next_depth"]) + 1
    table = read_table(blob, int(next_frame.max()) + 1)
    begins, ends = table[oldest].tolist(), table[next_frame + 1].tolist()
    digests = np.empty(len(records), np.uint64)
    for i, (row, begin, end) in enumerate(zip(packed, begins, ends, strict=True)):
        hashed = blake2b(row.tobytes(), digest_size=8)
        hashed.update(blob[begin:end])
        digests[i] = int.from_bytes(hashed.digest(), "little")
    return digests
