"""While a writer in another process inserts and updates, what is drawn is whole and in proportion to its priority."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from store_builders import create, decode, expect, make_segment, make_update, open_reader

FORK = multiprocessing.get_context("fork")
COUNT = 5  # Transitions of a segment: one of each class, so that each class always has a fifth of the store.
CLASSES = np.arange(1, COUNT + 1, dtype=np.float32)  # A transition of class c has priority c, or a multiple of it.


@pytest.fixture
def path():
    """A name in tmpfs; its folder goes with the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "store"


def write(path, ready, done, sizes, segments):
    """Inserts and updates as fast as it can. A whole segment is scaled at once, so the shares stay as they are."""
    rng = np.random.default_rng(1)
    writer = create(path, **sizes)
    number = 0
    while not done.is_set():
        writer.insert(segments[number % len(segments)]._replace(number=number))
        number += 1
        if number == 200:
            ready.set()
        blocks = rng.integers(-3, writer.size // COUNT, 4) * COUNT + writer.first_key // COUNT * COUNT
        keys = (blocks[:, None] + np.arange(COUNT)).ravel()
        priorities = (rng.choice([1, 2, 3, np.nan, -1], 4)[:, None] * CLASSES).ravel()
        writer.update_priorities(make_update(keys, priorities))
    writer.close()


@pytest.mark.parametrize(
    "sizes", [{"capacity": 200, "max_bytes": 100_000}, {"capacity": 10_000, "max_bytes": 8_000}, {"capacity": 12}]
)
def test_draws_are_whole_and_in_proportion_while_another_process_writes(path, sizes):
    segments = [make_segment(number, count=COUNT, priority=CLASSES) for number in range(400)]
    ready, done = FORK.Event(), FORK.Event()
    child = FORK.Process(target=write, args=(path, ready, done, sizes, segments))
    child.start()
    try:
        assert ready.wait(20)
        reader, rng = open_reader(path), np.random.default_rng(2)
        num_drawn, counts = 0, np.zeros(COUNT)
        goal = reader.num_inserted + 30 * max(reader.size, 100)  # Round and round, many times.
        deadline = time.monotonic() + 20
        seen = 0
        while seen < goal or num_drawn < 200:
            assert time.monotonic() < deadline
            if reader.num_inserted == seen:  # A writer that was interrupted in the middle must not be drawn from twice.
                os.sched_yield()
                continue
            seen, first_key = reader.num_inserted, reader.first_key
            sample = reader.sample(64, rng)
            if sample is None:  # Where three segments are all, each may be on its way out.
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
    expected = counts.sum() * CLASSES / CLASSES.sum()
    # 4 degrees of freedom: 24 is exceeded once in 10,000.
    assert ((counts - expected) ** 2 / expected).sum() < 24
