"""While a writer in another process inserts and updates, drawn transitions are intact and follow priorities."""

import multiprocessing
import os
import time

import numpy as np
import pytest
from support.builders import chi_square_bound
from support.store_builders import create, decode, expect, make_segment, make_update, open_reader

pytestmark = pytest.mark.no_cover  # Coverage would double the time; test_writer.py and test_reader.py measure it.

FORK = multiprocessing.get_context("fork")
COUNT = 5  # transitions of a segment, one of each class: each class always has a fifth of the store
CLASSES = np.arange(1, COUNT + 1, dtype=np.float32)  # A transition of class c has a multiple of c as its priority.


def write(path, ready, done, sizes, segments, num_first, choose):
    """Inserts, and updates the keys of `choose`, without pauses; sets `ready` after `num_first` inserts."""
    rng = np.random.default_rng(1)
    writer = create(path, **sizes)
    number = 0
    while not done.is_set():
        writer.insert(segments[number % len(segments)]._replace(number=number))
        number += 1
        if number == num_first:
            ready.set()
        writer.update_priorities(make_update(*choose(writer, rng)))
    writer.close()


def whole_segments(writer, rng):
    """Scales whole segments, so that the shares stay the same."""
    blocks = rng.integers(-3, writer.size // COUNT, 4) * COUNT + writer.first_key // COUNT * COUNT
    keys = (blocks[:, None] + np.arange(COUNT)).ravel()
    return keys, (rng.choice([1, 2, 3, np.nan, -1], 4)[:, None] * CLASSES).ravel()


@pytest.mark.parametrize(
    "sizes", [{"capacity": 200, "max_bytes": 100_000}, {"capacity": 10_000, "max_bytes": 8_000}, {"capacity": 12}]
)
def test_draws_are_intact_and_proportional_during_writes(path, sizes):
    segments = [make_segment(number, count=COUNT, priority=CLASSES) for number in range(400)]
    ready, done = FORK.Event(), FORK.Event()
    child = FORK.Process(target=write, args=(path, ready, done, sizes, segments, 200, whole_segments))
    child.start()
    try:
        assert ready.wait(20)
        reader, rng = open_reader(path), np.random.default_rng(2)
        num_drawn, counts = 0, np.zeros(COUNT)
        goal = reader.num_inserted + 30 * max(reader.size, 100)  # The store wraps many times.
        deadline = time.monotonic() + 20
        seen = 0
        while seen < goal or num_drawn < 200:
            assert time.monotonic() < deadline
            if reader.num_inserted == seen:  # One draw per commit: draws during an insert are biased.
                os.sched_yield()
                continue
            seen, first_key = reader.num_inserted, reader.first_key
            sample = reader.sample(64, rng)
            if sample is None:  # With only three segments, all drawn transitions may be evicted meanwhile.
                continue
            for key, entry in decode(sample).items():
                assert first_key <= key < reader.num_inserted
                segment = segments[key // COUNT % len(segments)]
                assert entry == expect(segment, key % COUNT)
            counts += np.bincount(sample.records["key"] % COUNT, minlength=COUNT)
            num_drawn += 1
    finally:
        done.set()
        child.join(20)
    assert child.exitcode == 0
    if sizes["capacity"] == 12:  # Draws are biased while one of only three segments is replaced.
        keys = np.concatenate([reader.sample(64, rng).records["key"] for _ in range(200)])
        counts = np.bincount(keys % COUNT, minlength=COUNT)
    expected = counts.sum() * CLASSES / CLASSES.sum()
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_bound(COUNT - 1)


PERIOD = 2 * COUNT  # The first of each two segments stays unchanged; the priorities of the second change all the time.
ALONE = np.arange(PERIOD) < COUNT
WATCHED = 400  # consecutive keys, half of them unchanged


def every_second_segment(writer, rng):
    """Returns priorities of keys that are not observed."""
    keys = rng.integers(writer.first_key - PERIOD, writer.num_inserted, 128)
    keys = keys[~ALONE[keys % PERIOD]]
    return keys, rng.choice([0, 1, 2, 5, 20, np.nan, -1], len(keys))


@pytest.mark.parametrize("priority_exponent", [0.6, 0.0])
def test_unchanged_keys_are_drawn_by_weight_while_others_change(path, priority_exponent):
    """Observes a set of keys from insertion to eviction, then the next set."""
    sizes = {"capacity": 2_000, "max_bytes": 200_000, "priority_exponent": priority_exponent}
    priorities = 1 + np.random.default_rng(0).random(COUNT).astype(np.float32) * 9
    segments = [make_segment(number, count=COUNT, priority=priorities) for number in range(400)]
    ready, done = FORK.Event(), FORK.Event()
    child = FORK.Process(
        target=write, args=(path, ready, done, sizes, segments, 2 * sizes["capacity"] // COUNT, every_second_segment)
    )
    child.start()
    try:
        assert ready.wait(20)
        reader, rng = open_reader(path), np.random.default_rng(2)
        first = seen = num_sets = 0
        counts = np.zeros(WATCHED)
        deadline = time.monotonic() + 90
        while counts.sum() < 30_000 or num_sets < 10:
            assert time.monotonic() < deadline
            if reader.num_inserted == seen:  # As above.
                os.sched_yield()
                continue
            seen = reader.num_inserted
            if reader.first_key > first:  # The oldest keys are gone: observe the next set, whose keys have weights.
                first = (seen - WATCHED - PERIOD) // PERIOD * PERIOD
                num_sets += 1
            records = (sample := reader.sample(256, rng)).records
            if reader.first_key > first:
                continue
            ranks = records["key"] - first
            counts += np.bincount(ranks[(ranks >= 0) & (ranks < WATCHED)], minlength=WATCHED)
            if rng.random() < 0.25:
                for key, entry in decode(sample).items():
                    assert entry == expect(segments[key // COUNT % len(segments)], key % COUNT)
        assert reader.num_inserted > 4 * sizes["capacity"]
    finally:
        done.set()
        child.join(20)
    assert child.exitcode == 0
    counts = counts[np.resize(ALONE, WATCHED)].reshape(-1, COUNT)
    share = priorities.astype(np.float64) ** priority_exponent
    share /= share.sum()
    for observed in (
        counts,
        counts.sum(axis=0, keepdims=True),
    ):  # The first shows a wrong key, the second a wrong distribution.
        expected = counts.sum() / len(observed) * share
        assert ((observed - expected) ** 2 / expected).sum() < chi_square_bound(observed.size - 1)


def test_single_transition_is_drawn_intact_while_it_is_replaced(path):
    segments = [make_segment(number, count=1, priority=3) for number in range(400)]
    ready, done = FORK.Event(), FORK.Event()
    child = FORK.Process(target=write, args=(path, ready, done, {"capacity": 1}, segments, 200, whole_segments))
    child.start()
    try:
        assert ready.wait(20)
        reader, rng = open_reader(path), np.random.default_rng(2)
        drawn = set()
        deadline = time.monotonic() + 20
        while len(drawn) < 100:
            assert time.monotonic() < deadline
            sample = reader.sample(8, rng)
            if sample is None:
                continue
            (found,) = decode(sample).items()
            key, entry = found
            assert entry == expect(segments[key % len(segments)], 0)
            assert sample.records["probability"].tolist() == [1.0] * 8
            drawn.add(key)
    finally:
        done.set()
        child.join(20)
    assert child.exitcode == 0
