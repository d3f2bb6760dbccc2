"""Batches that are decoded directly from the replay memory are intact, whatever the writer does meanwhile."""

import dataclasses
import multiprocessing
import time
from functools import cache

import cramjam
import numpy as np
import pytest
from support.steps import CallAt
from support.store_builders import SCHEMA as LZ4

from apex.learning.batch_ring import BatchRing, BatchSlot
from apex.learning.batch_source import LocalSource
from apexreplay.files.atomic_files import uninterrupted
from apexreplay.frame_blob import make_blob
from apexreplay.frames.stack_decoder import StackDecoder
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.batch_drawer import BatchDrawer, DrawSettings
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.store.layout import StoreSettings
from apexreplay.store.reader import StoreReader
from apexreplay.store.writer import StoreWriter
from apexreplay.types import Segment, Stream

FORK = multiprocessing.get_context("fork")
COUNT = 5  # transitions of a segment
NUM_FRAMES = COUNT + LZ4.n_step
SETTINGS = StoreSettings(capacity=50, max_bytes=100_000, num_streams=1, priority_exponent=1.0, min_priority=0.5)
RAW = dataclasses.replace(LZ4, codec="raw")  # decoded from copies, as lz4 is without the native code


@pytest.fixture(params=[LZ4, RAW], ids=["lz4", "raw"])
def schema(request):
    return request.param


def create(path, schema, **sizes):
    return StoreWriter.create(path, schema.table, SETTINGS._replace(**sizes), store_incarnation=7)


@cache
def frame_of(number, index):
    """16 bytes that identify the segment and the frame."""
    rng = np.random.default_rng([number, index])
    return np.concatenate([np.array([number], "<u4").view(np.uint8), [index], rng.integers(0, 4, 11)]).astype(np.uint8)


def make_segment(schema, number):
    """The first transitions of an episode, so that depths grow from 1 to 4."""
    records = np.zeros(COUNT, schema.table.record)
    records["n_step_return"], records["priority"] = number, 1 + np.arange(COUNT)
    records["frame"] = np.arange(COUNT)
    records["next_frame"] = records["frame"] + schema.n_step
    records["depth"] = np.minimum(records["frame"] + 1, schema.stack)
    records["next_depth"] = schema.stack
    frames = [frame_of(number, index).tobytes() for index in range(NUM_FRAMES)]
    if schema.codec == "lz4":
        frames = [bytes(cramjam.lz4.compress_block(frame, store_size=False)) for frame in frames]
    return Segment(Stream(0, 1), number, number, records, make_blob(frames), number)


def expected(key):
    """uint8[2, 4, 16]: the stacks of the transition with this key."""
    number, index = divmod(key, COUNT)
    stacks = np.zeros((2, LZ4.stack, 16), np.uint8)
    for side, (newest, depth) in enumerate([(index, min(index + 1, 4)), (index + 3, 4)]):
        for back in range(depth):
            stacks[side, 3 - back] = frame_of(number, newest - back)
    return stacks


class SteppedDecoder(StackDecoder):
    """Decoding is a step, "decode". Also keeps the number of transitions of each decoding."""

    def __init__(self, schema, stacks, steps):
        super().__init__(schema.table, [stacks])
        self.steps = steps
        self.sizes = []

    def decode_located(self, located, rows):
        self.steps("decode")
        self.sizes.append(len(rows))
        return super().decode_located(located, rows)


class Slot:
    """A loader's slot that is filled from the store at `path`."""

    def __init__(self, path, schema, batch_size=64, *, seed=4, steps=uninterrupted):
        self.ring = BatchRing(schema, batch_size)
        settings = DrawSettings(0, 1, batch_size, 1_000, RateLimiter(1, 0.0, 0.0, inserts_wait=False))
        reader = StoreReader(path, schema.table, steps=steps)
        self.source = LocalSource(
            BatchDrawer(reader, SamplerCounters(1), 0, settings, np.random.default_rng(seed), clock=lambda: 0.0)
        )
        self.decoder = SteppedDecoder(schema, self.ring.stacks[0], steps)
        self.slot = BatchSlot(self.ring, self.decoder, 0, 0)

    def fill(self):
        """Returns the batch, whose slot is filled again by the next call; None if it was not filled."""
        if not self.source.fill(self.slot):
            return None
        self.ring.hand_over(0)
        return self.ring.receive(0.0)


def assert_intact(batch):
    for row in np.flatnonzero(batch.usable):
        key = int(batch.keys[row])
        np.testing.assert_array_equal(batch.stacks[:, row], expected(key))
        assert batch.n_step_return[row] == key // COUNT


def test_direct_batch_equals_the_batch_that_is_sent(path, schema):
    writer = create(path, schema, capacity=100)
    for number in range(30):
        writer.insert(make_segment(schema, number))
    direct = Slot(path, schema, seed=3).fill()
    sent = StoreReader(path, schema.table).sample(64, np.random.default_rng(3))
    for name, field in (("keys", "key"), ("probability", "probability"), ("version", "version")):
        np.testing.assert_array_equal(getattr(direct, name), sent.records[field])
    assert direct.usable.all()
    assert_intact(direct)
    stacks = np.empty_like(direct.stacks)
    assert StackDecoder(schema.table, [stacks]).decode(sent.records, sent.blob, np.arange(64)).all()
    np.testing.assert_array_equal(direct.stacks, stacks)
    writer.close()


@pytest.mark.parametrize("step", ["find", "copy records", "copy frames", "decode", "check"])
def test_transitions_overwritten_at_any_step_are_drawn_again(path, schema, step):
    writer = create(path, schema, max_bytes=4_000)
    numbers = iter(range(1_000))

    def fill(segments):
        for _ in range(segments):
            writer.insert(make_segment(schema, next(numbers)))

    fill(12)
    steps = CallAt(step, lambda: fill(40), times=1)  # Replaces all transitions, and all bytes of the arena.
    batch = Slot(path, schema, steps=steps).fill()
    assert steps.calls == 1
    assert batch.keys.min() >= writer.first_key
    assert batch.usable.all()
    assert_intact(batch)
    writer.close()


def test_only_overwritten_transitions_are_drawn_again(path, schema):
    writer = create(path, schema, capacity=500)
    numbers = iter(range(10_000))

    def fill(segments):
        for _ in range(segments):
            writer.insert(make_segment(schema, next(numbers)))

    fill(100)
    slot = Slot(path, schema, steps=CallAt("check", lambda: fill(10)))  # Replaces a tenth of the transitions.
    batch = slot.fill()
    assert batch.usable.all()
    assert_intact(batch)
    assert slot.decoder.sizes[0] == 64
    assert sum(slot.decoder.sizes) < 1.4 * 64
    writer.close()


def test_nothing_is_drawn_from_an_empty_or_a_vanishing_store(path, schema):
    writer = create(path, schema, capacity=2 * COUNT)
    assert Slot(path, schema, 8).fill() is None
    numbers = iter(range(1_000))

    def replace_all():
        for _ in range(2):
            writer.insert(make_segment(schema, next(numbers)))

    replace_all()
    for step in ("copy records", "check"):
        assert Slot(path, schema, 8, steps=CallAt(step, replace_all)).fill() is None
    writer.close()


def test_frames_that_do_not_decompress_make_their_rows_unusable(path, schema):
    writer = create(path, schema)
    writer.insert(make_segment(schema, 0)._replace(blob=make_blob([b"\xff\xff\xff"] * NUM_FRAMES)))
    slot = Slot(path, schema)
    assert not slot.fill().usable.any()
    for number in range(1, 6):
        writer.insert(make_segment(schema, number))
    batch = slot.fill()
    np.testing.assert_array_equal(batch.usable, batch.keys >= COUNT)
    assert batch.usable.any()
    assert_intact(batch)
    writer.close()


def write(path, schema, ready, done, segments):
    writer = create(path, schema, capacity=200, max_bytes=12_000)
    for number, segment in enumerate(segments):
        if done.is_set():
            break
        writer.insert(segment)
        if number == 100:
            ready.set()
    writer.close()


@pytest.mark.no_cover
def test_draws_are_intact_while_another_process_writes(path, schema):
    segments = [make_segment(schema, number) for number in range(8_000)]
    ready, done = FORK.Event(), FORK.Event()
    child = FORK.Process(target=write, args=(path, schema, ready, done, segments))
    child.start()
    try:
        assert ready.wait(60)
        slot = Slot(path, schema, 32, seed=6)
        num_drawn, deadline = 0, time.monotonic() + 80
        while child.is_alive() or num_drawn == 0:
            assert time.monotonic() < deadline
            batch = slot.fill()
            if batch is not None:
                assert batch.usable.all()
                assert_intact(batch)
                num_drawn += 1
    finally:
        done.set()
        child.join(20)
    assert child.exitcode == 0
    assert num_drawn > 20


def test_a_reader_cannot_write_to_the_memory(path):
    writer, reader = create(path, LZ4), StoreReader(path, LZ4.table)
    with pytest.raises(ValueError, match="read-only"):
        reader._rows[0] = 0
    writer.close()


def test_size_is_in_range_while_the_writer_replaces_everything(path):
    writer = create(path, LZ4, capacity=2 * COUNT)
    numbers = iter(range(1_000))

    class Racing(StoreReader):
        @property
        def first_key(self):
            for _ in range(3):
                writer.insert(make_segment(LZ4, next(numbers)))
            key = super().first_key
            writer.insert(make_segment(LZ4, next(numbers)))
            return key

    assert 0 < Racing(path, LZ4.table).size <= 2 * COUNT
    writer.close()
