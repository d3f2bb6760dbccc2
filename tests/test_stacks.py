"""Stacks are decoded exactly: shared frames, zero frames, and nothing that is no frame."""

from __future__ import annotations

import numpy as np
import pytest
from builders import PIXELS, VECTORS, make_batch, make_frames

from apex.segments import COMPRESS
from apex.stacks import FrameError, StackDecoder
from apex.types import SAMPLE_RECORD, make_image


def naive_stacks(schema, records, frames):
    """Straight from the definition: one stack after the other, frame by frame."""
    stacks = np.zeros((2, len(records), *schema.observation_shape), schema.frame_dtype)
    first = 0
    for b, record in enumerate(records):
        for side, (newest, depth) in enumerate([("frame", "depth"), ("next_frame", "next_depth")]):
            for back in range(int(record[depth])):
                stacks[side, b, schema.stack - 1 - back] = frames[first + int(record[newest]) - back]
        first += int(record["num_frames"])
    return stacks


def random_records(schema, rng, count):
    records = np.zeros(count, SAMPLE_RECORD)
    for record in records:
        depth = int(rng.integers(1, schema.stack + 1))
        steps = int(rng.integers(1, schema.n_step + 1))
        record["depth"], record["next_depth"] = depth, min(depth + steps, schema.stack)
        record["frame"] = depth - 1
        record["next_frame"] = depth - 1 + steps
        record["num_frames"] = depth + steps
    return records


def empty_stacks(schema, count):
    stacks = np.empty((2, count, *schema.observation_shape), schema.frame_dtype)
    stacks.view(np.uint8)[...] = 0xEE  # What was not written shows.
    return stacks


@pytest.mark.parametrize("schema", [PIXELS, VECTORS])
@pytest.mark.parametrize("seed", range(5))
def test_matches_the_definition(schema, seed):
    rng = np.random.default_rng(seed)
    records = random_records(schema, rng, 17)
    frames = [
        rng.integers(0, 256, schema.frame_shape).astype(schema.frame_dtype) for _ in range(records["num_frames"].sum())
    ]
    image = make_image([COMPRESS[schema.codec](frame) for frame in frames])
    stacks = empty_stacks(schema, 17)
    decoder = StackDecoder(schema, stacks)
    for _ in range(2):  # A slot is used again and again.
        decoder.decode(records, image)
        np.testing.assert_array_equal(stacks, naive_stacks(schema, records, frames))


def test_refuses_frames_that_do_not_decompress_to_a_frame():
    batch = make_batch(PIXELS, 1)
    short = COMPRESS["lz4"](np.zeros((3, 5), np.uint8))
    for frame in (short, b"\xff" * 20, b"\x00"):
        compressed = [COMPRESS["lz4"](frame) for frame in make_frames(PIXELS, 5)]
        with pytest.raises(FrameError):
            StackDecoder(PIXELS, empty_stacks(PIXELS, 1)).decode(batch.records, make_image([frame, *compressed]))


def test_a_frame_that_looks_like_a_length_is_decoded_as_a_frame():
    """27, 0, 0 and six more distinct bytes compress to a block whose first four bytes read as the number 7056."""
    schema = PIXELS.__class__(frame_shape=(84, 84), frame_dtype="uint8", stack=1, num_actions=2, n_step=1, codec="lz4")
    frame = np.random.default_rng(0).integers(0, 2, 7056, dtype=np.uint8)
    frame[:13] = [27, 0, 0, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
    frame = frame.reshape(84, 84)
    compressed = COMPRESS["lz4"](frame)
    assert int.from_bytes(compressed[:4], "little") == frame.size
    records = np.zeros(1, SAMPLE_RECORD)
    records["num_frames"], records["next_frame"], records["depth"], records["next_depth"] = 2, 1, 1, 1
    stacks = empty_stacks(schema, 1)
    StackDecoder(schema, stacks).decode(records, make_image([compressed, compressed]))
    np.testing.assert_array_equal(stacks[0, 0, 0], frame)


@pytest.mark.parametrize("schema", [PIXELS, VECTORS])
def test_parts_of_a_batch_are_decoded_into_their_own_rows_and_touch_no_others(schema):
    rng = np.random.default_rng(3)
    stacks, expected = empty_stacks(schema, 11), empty_stacks(schema, 11)
    decoder = StackDecoder(schema, stacks)
    for first, count in ((7, 4), (2, 5)):
        records = random_records(schema, rng, count)
        frames = [
            rng.integers(0, 256, schema.frame_shape).astype(schema.frame_dtype)
            for _ in range(records["num_frames"].sum())
        ]
        image = make_image([COMPRESS[schema.codec](frame) for frame in frames])
        decoder.decode(records, image, first_row=first)
        expected[:, first : first + count] = naive_stacks(schema, records, frames)
        np.testing.assert_array_equal(stacks.view(np.uint8), expected.view(np.uint8))
