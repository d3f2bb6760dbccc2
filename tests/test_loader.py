"""The loader hands decoded samples over through shared memory, and drops what does not decode."""

from __future__ import annotations

import numpy as np
import pytest
from builders import PIXELS, VECTORS, make_batch, make_frames

from apex.loader import Loader, SampleRing
from apex.processes import start_child, stop_children
from apex.types import make_image


class Batches:
    """A queue of batches."""

    def __init__(self, *batches):
        self.batches = list(batches)

    def receive(self, timeout):
        return self.batches.pop(0) if self.batches else None


def expect(sample, batch):
    assert (sample.num_transitions, sample.shard, sample.store_incarnation, sample.sampler, sample.number) == (
        batch.num_transitions,
        batch.shard,
        batch.store_incarnation,
        batch.sampler,
        batch.number,
    )
    for ours, theirs in [("keys", "key"), ("probability",) * 2, ("action",) * 2, ("version",) * 2, ("discount",) * 2]:
        np.testing.assert_array_equal(getattr(sample, ours), batch.records[theirs])


@pytest.mark.parametrize("schema", [PIXELS, VECTORS])
def test_a_batch_arrives_whole(schema):
    batch = make_batch(schema, sampler=3)._replace(store_incarnation=2**64 - 2)
    ring = SampleRing(schema, 4)
    assert Loader(schema, ring, Batches(batch)).step(0.0)
    sample = ring.receive(1.0)
    expect(sample, batch)
    frames = make_frames(schema, schema.stack + 2)
    np.testing.assert_array_equal(sample.stacks[0, 0], frames[: schema.stack])
    np.testing.assert_array_equal(sample.stacks[1, 0], frames[2:])


def test_never_overwrites_a_slot_that_was_not_released():
    batches = [make_batch(PIXELS, number=number) for number in range(4)]
    ring = SampleRing(PIXELS, 4, num_slots=2)
    loader = Loader(PIXELS, ring, Batches(*batches))
    assert [loader.step(0.0) for _ in range(3)] == [True, True, False]
    first, second = ring.receive(1.0), ring.receive(1.0)
    assert ring.receive(0.0) is None
    ring.release(first.slot)
    assert loader.step(0.0)
    assert second.number == 1
    assert ring.receive(1.0).number == 2


def test_what_does_not_decompress_is_counted_and_dropped():
    batch = make_batch(PIXELS)
    broken = batch._replace(image=make_image([b"\xff" * 20] * 24))
    ring = SampleRing(PIXELS, 4)
    loader = Loader(PIXELS, ring, Batches(broken, batch))
    assert not loader.step(0.0)
    assert loader.num_undecodable == 1
    assert loader.step(0.0)
    expect(ring.receive(1.0), batch)


def test_another_process_fills_what_this_one_reads():
    ring = SampleRing(PIXELS, 4)
    batches = [make_batch(PIXELS, number=number) for number in range(10)]

    def fill(stop):
        loader = Loader(PIXELS, ring, Batches(*batches))
        while not stop.requested:
            loader.step(0.05)

    child = start_child("loader", fill)
    try:
        for number in range(10):
            sample = ring.receive(10.0)
            assert sample.number == number
            ring.release(sample.slot)
    finally:
        stop_children([child])
