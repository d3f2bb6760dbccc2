"""Builders of small, complete objects."""

import numpy as np

from apex.schema import Schema, pack_mask
from apexreplay.frame_blob import make_blob
from apexreplay.frames.encoder import COMPRESS
from apexreplay.types import RECEIPT_ROW, BatchMessage, Receipts, Segment, Stream

PIXELS = Schema(frame_shape=(6, 5), frame_dtype="uint8", stack=4, num_actions=3, n_step=3, codec="lz4")
VECTORS = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
CONTINUOUS = Schema(
    frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=0, n_step=3, codec="raw", action_size=3
)
MASKED = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=11, n_step=3, codec="raw", masked=True)
RUN = 0xABCDEF


def make_frames(schema, count, first=0):
    """Returns frames that all differ: each value of frame i is i, or i plus a fraction."""
    dtype = np.dtype(schema.frame_dtype)
    return [np.full(schema.frame_shape, (first + i) % 251, dtype) for i in range(count)]


def make_actions(schema, count):
    """Returns actions that differ: 0, 1, 2, ... if there are enough, or values in [-1, 1]."""
    if schema.action_size:
        return np.linspace(-1, 1, count * schema.action_size, dtype=np.float32).reshape(count, -1)
    return np.arange(count) % schema.num_actions


def make_masks(schema, count):
    """Returns packed masks that differ: after transition i, action i and the last one are allowed."""
    masks = np.zeros((count, schema.num_actions), np.bool_)
    masks[np.arange(count), np.arange(count) % schema.num_actions] = masks[:, -1] = True
    return pack_mask(masks)


def make_records(schema, count, **fields):
    """Returns `count` consecutive one-step transitions, as deep as their place in the episode allows."""
    records = np.zeros(count, schema.table.record)
    steps = np.arange(count)
    records["n_step_return"] = steps
    records["discount"] = 0.5
    records["priority"] = 1 + steps
    records["reward"] = -steps
    records["step_discount"] = 0.75
    records["action"] = make_actions(schema, count)
    if schema.masked:
        records["next_mask"] = make_masks(schema, count)
    records["frame"] = steps
    records["next_frame"] = steps + 1
    records["depth"] = np.minimum(steps + 1, schema.stack)
    records["next_depth"] = np.minimum(steps + 2, schema.stack)
    for name, value in fields.items():
        records[name] = value
    return records


def make_segment(schema, count=5, *, actor_id=2, incarnation=7, number=3, version=11, base=1, records=None, first=0):
    """Returns a segment from the beginning of an episode."""
    records = make_records(schema, count) if records is None else records
    frames = make_frames(schema, count + 1, first)
    blob = make_blob([COMPRESS[schema.codec](frame) for frame in frames])
    return Segment(Stream(actor_id, incarnation), number, version, records, blob, base)


def make_receipts(*receipts, group=0):
    """Returns the message with these receipts, which are of one store."""
    rows = [(*receipt.stream, receipt.contiguous, receipt.bitmap) for receipt in receipts]
    return Receipts(group, receipts[0].store_incarnation, np.array(rows, RECEIPT_ROW))


def make_batch(schema, count=4, *, sampler=1, number=9, num_transitions=100):
    """Returns a part of a batch with full stacks; each transition has frames 0 ... S-1+2 of its own, 2 steps apart."""
    num_frames = schema.stack + 2
    records = np.zeros(count, schema.table.batch_record)
    records["key"] = 1000 + np.arange(count)
    records["probability"] = 0.25
    records["n_step_return"] = np.arange(count)
    records["discount"] = 0.9
    records["version"] = 5
    records["action"] = make_actions(schema, count)
    if schema.masked:
        records["next_mask"] = make_masks(schema, count)
    records["num_frames"] = num_frames
    records["frame"] = schema.stack - 1
    records["next_frame"] = schema.stack + 1
    records["depth"] = records["next_depth"] = schema.stack
    frames = make_frames(schema, count * num_frames)
    blob = make_blob([COMPRESS[schema.codec](frame) for frame in frames])
    return BatchMessage(0, 77, sampler, number, num_transitions, records, blob)


def chi_square_bound(degrees_of_freedom):
    """Returns the bound that chance exceeds once in 10,000: the Wilson-Hilferty approximation at z = 3.72."""
    k = 2 / (9 * degrees_of_freedom)
    return degrees_of_freedom * (1 - k + 3.72 * k**0.5) ** 3


VALUES = np.arange(10, dtype=np.float32)
