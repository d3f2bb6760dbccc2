"""After a crash of the writer at any step, the next writer keeps all committed data and shows no incomplete data."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from support.steps import Crash, crash_at
from support.store_builders import (
    SCHEMA,
    STEPS,
    NaiveStore,
    assert_same,
    attach,
    create,
    decode,
    expect,
    make_segment,
    make_update,
    open_reader,
    write_number,
)

from apexreplay.errors import UsageError
from apexreplay.store.deduplication import InsertOutcome
from apexreplay.store.layout import CELLS_OFFSET, FIRST_KEY, TORN, Sizes

FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("step", STEPS)
def test_crash_at_any_step_loses_only_unacknowledged_segments(path, step, seed):
    rng = np.random.default_rng(seed)
    naive, numbers, writer = NaiveStore(), [0, 0, 0], create(path)
    reader = open_reader(path)
    for _ in range(12):
        for _ in range(int(rng.integers(0, 10))):
            actor_id = int(rng.integers(0, 3))
            segment = make_segment(numbers[actor_id], actor_id)
            numbers[actor_id] += 1
            assert writer.insert(segment) is naive.insert(segment) is InsertOutcome.STORED
            keys, priorities = rng.integers(0, naive.num_inserted, 3).tolist(), [1.0, 2.0, 3.0]
            assert writer.update_priorities(make_update(keys, priorities)) == naive.update(keys, priorities)
        writer.close()

        actor_id = int(rng.integers(0, 3))
        segment = make_segment(numbers[actor_id], actor_id)
        numbers[actor_id] += 1
        doomed = attach(path, steps=crash_at(step))
        with pytest.raises(Crash):
            doomed.insert(segment)
        doomed.close()
        if step == "leaves":  # It was committed.
            naive.insert(segment)
        elif step != "watermark":  # The writer had evicted segments to make room.
            word = naive.next_word
            naive.insert(segment, crash=True)
            naive.forget_last()
            if step in ("evict", "bytes"):
                naive.next_word = word  # The writer had not written any byte of it.

        writer = attach(path)
        assert_same(writer, reader, naive, rng)
        expected = InsertOutcome.DUPLICATE if step == "leaves" else InsertOutcome.STORED
        assert writer.insert(segment) is naive.insert(segment) is expected
        assert_same(writer, reader, naive, rng)
        assert writer.insert(segment) is InsertOutcome.DUPLICATE
    assert naive.num_inserted > 100
    writer.close()


def test_uncommitted_row_never_becomes_valid(path):
    writer = create(path, steps=crash_at("commit"))
    with pytest.raises(Crash):
        writer.insert(make_segment(0, actor_id=0, count=2))
    writer.close()
    writer = attach(path)
    for number in range(5):  # The commit number passes the one that the row of actor 0 was waiting for.
        writer.insert(make_segment(number, actor_id=1, count=2))
    assert writer.receipt(0).contiguous == 0
    assert writer.insert(make_segment(0, actor_id=0, count=2)) is InsertOutcome.STORED
    writer.close()


def test_uncommitted_incarnation_does_not_replace_the_old_one(path):
    writer = create(path)
    writer.insert(make_segment(0, incarnation=1))
    writer.close()
    writer = attach(path, steps=crash_at("commit"))
    with pytest.raises(Crash):
        writer.insert(make_segment(0, incarnation=2))
    writer.close()
    writer = attach(path)
    assert writer.receipt(0).stream.incarnation == 1
    assert writer.insert(make_segment(1, incarnation=1)) is InsertOutcome.STORED
    writer.close()


def test_half_moved_watermark_is_completed(path):
    writer = create(path)
    segments = [make_segment(number, count=4) for number in range(10)]
    for segment in segments:
        writer.insert(segment)
    bytes_used = writer.bytes_used
    writer.close()
    write_number(path, CELLS_OFFSET + 8 * FIRST_KEY, 4)  # The first live byte is still that of key 0.
    write_number(path, CELLS_OFFSET + 8 * TORN, 1)
    writer = attach(path)
    assert writer.first_key == 4
    assert writer.bytes_used == bytes_used - -(-len(segments[0].blob) // 8) * 8
    writer.close()


@pytest.mark.parametrize("node", [1, 2, 5])
def test_half_written_sums_are_recomputed(path, node):
    writer, naive = create(path), NaiveStore()
    for number in range(10):
        assert writer.insert(make_segment(number)) is naive.insert(make_segment(number))
    writer.close()
    write_number(path, Sizes(40, 4000, 3).offsets(SCHEMA.table)[3] + 8 * node, 99.5, "<d")
    write_number(path, CELLS_OFFSET + 8 * TORN, 1)
    writer = attach(path)
    assert_same(writer, open_reader(path), naive, np.random.default_rng(0))
    writer.close()


def test_the_incarnation_of_the_store_is_kept(path):
    create(path, store_incarnation=2**64 - 1).close()
    writer = attach(path)
    assert writer.store_incarnation == 2**64 - 1
    assert writer.receipt(1).store_incarnation == 2**64 - 1
    writer.close()


@pytest.mark.parametrize("first_key", [-1, 30])
def test_impossible_watermark_is_refused(path, first_key):
    writer = create(path)
    for number in range(5):
        writer.insert(make_segment(number, count=5))
    writer.close()
    write_number(path, CELLS_OFFSET + 8 * FIRST_KEY, first_key)
    for _ in range(2):  # The lock is released each time.
        with pytest.raises(UsageError, match=str(path)):
            attach(path)


def insert_for_ever(path):
    """Inserts all segments in order, and sets some priorities after each."""
    writer = attach(path)
    number = writer.receipt(0).contiguous
    while True:
        writer.insert(make_segment(number))
        keys = range(writer.first_key, writer.num_inserted, 3)
        writer.update_priorities(make_update(keys, [1 + number % 3] * len(keys)))
        number += 1


def test_writer_killed_at_any_moment_leaves_an_intact_store(path):
    create(path).close()
    reader = open_reader(path)
    contents, number = [], 0
    for kill in range(6):
        goal = reader.num_inserted + 100 * (kill + 1)
        child = FORK.Process(target=insert_for_ever, args=(path,))
        child.start()
        deadline = time.monotonic() + 20
        while reader.num_inserted < goal and child.is_alive():
            assert time.monotonic() < deadline
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        writer = attach(path)
        while number < writer.receipt(0).contiguous:
            segment = make_segment(number)
            contents += [(segment, index) for index in range(len(segment.records))]
            number += 1
        assert len(contents) == writer.num_inserted >= goal
        live = decode(reader.sample(2000, np.random.default_rng(kill)))
        assert live == {key: expect(*contents[key]) for key in range(writer.first_key, writer.num_inserted)}
        writer.close()


@pytest.mark.parametrize("second", STEPS)
@pytest.mark.parametrize("first", STEPS)
def test_second_crash_after_a_first_at_any_step_loses_no_more(path, first, second):
    rng = np.random.default_rng([STEPS.index(first), STEPS.index(second)])
    writer, stored, number = create(path), {}, 0
    for _ in range(30):  # From the twelfth segment on, each insert evicts another, and the arena wraps.
        segment = make_segment(number)
        number += 1
        keys = range(writer.num_inserted, writer.num_inserted + len(segment.records))
        assert writer.insert(segment) is InsertOutcome.STORED
        stored |= {key: expect(segment, index) for index, key in enumerate(keys)}
    writer.close()
    for step in (first, second):
        segment, doomed = make_segment(number), attach(path, steps=crash_at(step))
        keys = range(doomed.num_inserted, doomed.num_inserted + len(segment.records))
        with pytest.raises(Crash):
            doomed.insert(segment)
        doomed.close()
        if step == "leaves":  # It was committed.
            stored |= {key: expect(segment, index) for index, key in enumerate(keys)}
            number += 1
    writer = attach(path)
    assert writer.receipt(0).contiguous == number
    live = decode(open_reader(path).sample(2000, rng))
    assert live == {key: stored[key] for key in range(writer.first_key, writer.num_inserted)}
    assert writer.insert(make_segment(number)) is InsertOutcome.STORED
    writer.close()


def attach_for_ever(path):
    """Recovers repeatedly."""
    while True:
        attach(path).close()


def test_killed_recovery_is_repeated(path):
    writer, naive = create(path), NaiveStore()
    for number in range(20):
        assert writer.insert(make_segment(number)) is naive.insert(make_segment(number))
    writer.close()
    reader, rng = open_reader(path), np.random.default_rng(0)
    for kill in range(10):
        nodes = Sizes(40, 4000, 3).offsets(SCHEMA.table)[3]
        write_number(path, CELLS_OFFSET + 8 * TORN, 1)
        for node in (1, 2, 3):  # A crash during an update may leave wrong sums.
            write_number(path, nodes + 8 * node, 1e9, "<d")
        child = FORK.Process(target=attach_for_ever, args=(path,))
        child.start()
        time.sleep(0.002 * kill)  # The kill may hit any step.
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        writer = attach(path)
        assert_same(writer, reader, naive, rng)
        writer.close()
