"""What is decoded straight from the replay memory is whole, whatever the writer does meanwhile."""

from __future__ import annotations

import multiprocessing
import time
from functools import cache
from typing import NamedTuple

import cramjam
import numpy as np
import pytest
from support.store_builders import SCHEMA

from apex.frame_blob import make_blob
from apex.replay_memory.frames.stack_decoder import StackDecoder
from apex.replay_memory.store.layout import StoreSettings
from apex.replay_memory.store.reader import StoreReader
from apex.replay_memory.store.writer import StoreWriter
from apex.types import Segment, Stream, record_dtype

FORK = multiprocessing.get_context("fork")
COUNT = 5  # transitions of a segment
NUM_FRAMES = COUNT + SCHEMA.n_step
SETTINGS = StoreSettings(capacity=50, max_bytes=100_000, num_streams=1, priority_exponent=1.0, min_priority=0.5)


def create(path, **sizes):
    return StoreWriter.create(path, SCHEMA, SETTINGS._replace(**sizes), store_incarnation=7)


@cache  # It is asked for the same ones again and again.
def frame_of(number, index):
    """16 bytes that tell the segment, the frame, and whether they belong together."""
    rng = np.random.default_rng([number, index])
    return np.concatenate([np.array([number], "<u4").view(np.uint8), [index], rng.integers(0, 4, 11)]).astype(np.uint8)


def make_segment(number):
    """The first transitions of an episode, so that depths grow from 1 to 4."""
    records = np.zeros(COUNT, record_dtype(SCHEMA))
    records["n_step_return"], records["priority"] = number, 1 + np.arange(COUNT)
    records["frame"] = np.arange(COUNT)
    records["next_frame"] = records["frame"] + SCHEMA.n_step
    records["depth"] = np.minimum(records["frame"] + 1, SCHEMA.stack)
    records["next_depth"] = SCHEMA.stack
    frames = [
        bytes(cramjam.lz4.compress_block(frame_of(number, i).tobytes(), store_size=False)) for i in range(NUM_FRAMES)
    ]
    return Segment(Stream(0, 1), number, number, records, make_blob(frames), number)


def expected(key):
    """uint8[2, 4, 16] of the transition that was the key-th to be inserted."""
    number, index = divmod(key, COUNT)
    stacks = np.zeros((2, SCHEMA.stack, 16), np.uint8)
    for side, (newest, depth) in enumerate([(index, min(index + 1, 4)), (index + 3, 4)]):
        for back in range(depth):
            stacks[side, 3 - back] = frame_of(number, newest - back)
    return stacks


class Rows(NamedTuple):
    """All rows of some stacks, as a loader's slot has them."""

    decoder: StackDecoder
    sizes: list  # of what was decoded

    def decode_stored(self, arena, stored):
        self.sizes.append(len(stored))
        return self.decoder.decode_stored(arena, stored)


def make_rows(batch_size):
    stacks = np.empty((2, batch_size, SCHEMA.stack, 16), np.uint8)
    decoder = StackDecoder(SCHEMA, stacks)
    if not decoder.reads_stores:
        pytest.skip("installed without a C compiler, or there is no liblz4")
    return Rows(decoder, []), stacks


def assert_whole(sample, stacks):
    for row, key in enumerate(sample.records["key"].tolist()):
        np.testing.assert_array_equal(stacks[:, row], expected(key))
        assert sample.records["n_step_return"][row] == key // COUNT


def test_equals_what_travels_compressed(path):
    writer = create(path, capacity=100)
    for number in range(30):
        writer.insert(make_segment(number))
    rows, stacks = make_rows(64)
    direct = StoreReader(path, SCHEMA).sample(64, np.random.default_rng(3), rows)
    travelling = StoreReader(path, SCHEMA).sample(64, np.random.default_rng(3))
    assert direct.blob is None
    np.testing.assert_array_equal(direct.records, travelling.records)
    assert_whole(direct, stacks)
    twin = np.empty_like(stacks)
    StackDecoder(SCHEMA, twin).decode(travelling.records, travelling.blob)
    np.testing.assert_array_equal(stacks, twin)
    writer.close()


@pytest.mark.parametrize("step", ["find", "copy records", "copy frames", "check"])
def test_what_is_overwritten_at_any_step_is_drawn_again(path, step):
    writer = create(path, max_bytes=4_000)
    number = 0

    def fill(segments):
        nonlocal number
        for _ in range(segments):
            writer.insert(make_segment(number))
            number += 1

    fill(12)
    paused = []

    def pause(name):
        if name == step and not paused:
            paused.append(name)
            fill(40)  # Everything there was is gone, and its bytes are others'.

    rows, stacks = make_rows(64)
    sample = StoreReader(path, SCHEMA, pause=pause).sample(64, np.random.default_rng(4), rows)
    assert paused
    assert sample.records["key"].min() >= writer.first_key
    assert_whole(sample, stacks)
    writer.close()


def test_only_what_was_overwritten_is_drawn_again(path):
    """In a small memory that fills quickly some of every batch is lost: the rest of it must not be decoded in vain."""
    writer = create(path, capacity=500)
    numbers = iter(range(10_000))

    def fill(segments):
        for _ in range(segments):
            writer.insert(make_segment(next(numbers)))

    fill(100)

    def pause(name):
        if name == "check":
            fill(10)  # A tenth of all that there is.

    rows, stacks = make_rows(64)
    sample = StoreReader(path, SCHEMA, pause=pause).sample(64, np.random.default_rng(4), rows)
    assert_whole(sample, stacks)
    assert rows.sizes[0] == 64
    assert sum(rows.sizes) < 1.4 * 64
    writer.close()


def test_an_empty_store_gives_nothing(path):
    writer = create(path)
    assert StoreReader(path, SCHEMA).sample(8, np.random.default_rng(5), make_rows(8)[0]) is None
    writer.close()


def test_frames_that_do_not_decompress_are_marked_and_reported(path, caplog):
    writer = create(path)
    poison = make_segment(0)._replace(blob=make_blob([b"\xff\xff\xff"] * NUM_FRAMES))
    writer.insert(poison)
    rows, stacks = make_rows(64)
    reader = StoreReader(path, SCHEMA)
    assert np.isinf(reader.sample(8, np.random.default_rng(5), rows).records["probability"]).all()
    assert reader.num_undecodable == 8
    assert "frames that do not decompress" in caplog.text
    caplog.clear()
    reader.sample(7, np.random.default_rng(5), rows)
    assert reader.num_undecodable == 15
    assert not caplog.records  # The next line is written at 16: a flood of rubbish does not flood the log.
    reader.sample(1, np.random.default_rng(5), rows)
    assert "16 draws" in caplog.text
    for number in range(1, 6):
        writer.insert(make_segment(number))
    sample = reader.sample(64, np.random.default_rng(5), rows)
    is_sound = np.isfinite(sample.records["probability"])
    np.testing.assert_array_equal(is_sound, sample.records["key"] >= COUNT)
    assert is_sound.any()
    for row in np.flatnonzero(is_sound):
        np.testing.assert_array_equal(stacks[:, row], expected(int(sample.records["key"][row])))
    writer.close()


def write(path, ready, done, segments):
    writer = create(path, capacity=200, max_bytes=12_000)
    number = 0
    while not done.is_set() and number < len(segments):
        writer.insert(segments[number])
        number += 1
        if number == 100:
            ready.set()
    writer.close()


@pytest.mark.no_cover
def test_draws_are_whole_while_another_process_overwrites_them(path):
    segments = [make_segment(number) for number in range(8_000)]
    ready, done = FORK.Event(), FORK.Event()
    child = FORK.Process(target=write, args=(path, ready, done, segments))
    child.start()
    try:
        assert ready.wait(60)
        rows, stacks = make_rows(32)
        reader, rng = StoreReader(path, SCHEMA), np.random.default_rng(6)
        num_drawn, deadline = 0, time.monotonic() + 80
        while child.is_alive() or num_drawn == 0:
            assert time.monotonic() < deadline
            sample = reader.sample(32, rng, rows)
            if sample is not None:
                assert_whole(sample, stacks)
                num_drawn += 1
    finally:
        done.set()
        child.join(20)
    assert child.exitcode == 0
    assert num_drawn > 20
    assert reader.num_undecodable == 0


def test_a_reader_cannot_write_to_the_memory(path):
    writer, reader = create(path), StoreReader(path, SCHEMA)
    with pytest.raises(ValueError, match="read-only"):
        reader._rows[0] = 0
    writer.close()
