"""The store agrees with a dictionary of all transitions: kept, evicted, duplicate, refused and drawn ones."""

import sys

import numpy as np
import pytest
from support.steps import Crash, crash_at
from support.store_builders import (
    MIN_PRIORITY,
    SETTINGS,
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
    weigh,
    write_number,
)

from apexreplay.store.deduplication import InsertOutcome
from apexreplay.store.layout import CELLS_OFFSET, FIRST_BYTE, FIRST_KEY
from apexreplay.store.priority_weights import MAX_STORED_PRIORITY
from apexreplay.types import Stream, group_of

WRITERS = []


@pytest.fixture(autouse=True)
def writers():
    """Closes the writers of `make_store` at the end of a test."""
    yield
    while WRITERS:
        WRITERS.pop().close()


def make_store(path, *segments, **sizes):
    """A writer and a reader of the same store."""
    writer = create(path, **sizes)
    WRITERS.append(writer)
    for segment in segments:
        assert writer.insert(segment) is InsertOutcome.STORED
    return writer, open_reader(path)


def weights_of(reader, rng=None):
    """Returns the drawn share of the sum by key."""
    sample = reader.sample(2000, rng or np.random.default_rng(0))
    return dict(zip(sample.records["key"].tolist(), sample.records["probability"].tolist(), strict=True))


def random_operation(rng, progress, writer, naive):
    """Applies one insert or update to both stores. It may be stale, repeated, out of order or invalid."""
    if rng.random() < 0.7:
        actor_id = int(rng.integers(0, 4))
        incarnation, highest = progress.get(actor_id, (1, 0))
        if rng.random() < 0.03:
            incarnation, highest = incarnation + 1, 0
        number = max(0, highest + int(rng.choice([0, 0, 0, 0, 0, 1, 2, -1, -3, 30, 70])))
        base = max(0, number - int(rng.integers(0, 80)))
        progress[actor_id] = incarnation, max(highest, number + 1) if number < highest + 30 else highest
        segment = make_segment(number, actor_id, incarnation - (rng.random() < 0.03), base)
        assert writer.insert(segment) is naive.insert(segment)
    else:
        keys = rng.integers(-5, naive.num_inserted + 5, 6).tolist()
        priorities = rng.choice([0, 0.25, 1, 2, 3.5, -1, np.nan], 6).tolist()
        assert writer.update_priorities(make_update(keys, priorities)) == naive.update(keys, priorities)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "sizes",
    [
        {"capacity": 40, "max_bytes": 4000},  # both bounds at work
        {"capacity": 23, "max_bytes": 100_000},  # transitions alone
        {"capacity": 500, "max_bytes": 1501},  # bytes alone, and no multiple of 8
    ],
)
def test_random_operations_agree_with_a_dictionary(path, sizes, seed):
    rng = np.random.default_rng(seed)
    (writer, reader), naive, progress = make_store(path, **sizes), NaiveStore(**sizes), {}
    for _ in range(40):
        for _ in range(12):
            random_operation(rng, progress, writer, naive)
        assert_same(writer, reader, naive, rng)
        if rng.random() < 0.1:
            writer.close()
            writer = attach(path, **sizes)
            assert_same(writer, reader, naive, rng)
    assert writer.num_inserted > 3 * writer.size  # The store has wrapped several times.


def test_a_store_in_order_refuses_segments_without_their_predecessor(path):
    writer, reader = make_store(path, in_order=True)
    numbers = [1, 0, 2, 1, 4, 3, 2, 4, 3, 4, 3, 6]
    outcomes = [writer.insert(make_segment(number, count=1)) for number in numbers]
    stored = [number for number, outcome in zip(numbers, outcomes, strict=True) if outcome is InsertOutcome.STORED]
    assert stored == list(range(5))
    assert (writer.num_duplicates, writer.refused) == (1, {"out of order": 6})
    assert writer.insert(make_segment(0, incarnation=2, count=1)) is InsertOutcome.STORED
    assert writer.insert(make_segment(7, incarnation=2, base=7, count=1)) is InsertOutcome.STORED
    assert reader.size == writer.receipt(0).contiguous - 1 == 7


def test_a_store_that_a_snapshot_has_set_back_takes_what_comes_again(path):
    """Segments 3 to 5 were acknowledged, and are lost: the writer does not send them again."""
    writer, _ = make_store(path, *[make_segment(number, count=1) for number in range(3)], in_order=True)
    window = [make_segment(number, base=5, count=1) for number in (6, 7, 8)]
    refused = [InsertOutcome.OUT_OF_ORDER] * 3
    assert [writer.insert(segment) for segment in window] == refused
    assert [writer.insert(segment) for segment in window] == [InsertOutcome.STORED] * 3
    assert writer.insert(make_segment(9, base=9, count=1)) is InsertOutcome.STORED
    assert writer.receipt(0).contiguous == 10


def test_counts_what_happened(path):
    writer, _ = make_store(path, *[make_segment(number, count=5) for number in range(9)])
    writer.insert(make_segment(8, count=5))
    writer.insert(make_segment(200))
    writer.insert(make_segment(0, actor_id=3))
    writer.insert(make_segment(0, incarnation=0))
    writer.update_priorities(make_update([0, 4, 5, 6, 7, 44, 45], [np.nan, 1, np.nan, -1, -2, 1, 1]))
    refused = {
        "too far ahead": 1,
        "unknown actor": 1,
        "older incarnation": 1,
        "priority is not a number": 1,
        "priority is negative": 2,
    }
    assert (writer.num_duplicates, writer.num_stale, writer.refused) == (1, 3, refused)
    assert (writer.num_inserted, writer.first_key) == (45, 5)
    assert (writer.capacity, writer.max_bytes) == (40, 4000)
    assert (writer.store_incarnation, writer.priority_exponent) == (77, 1.0)


def test_an_empty_store_has_nothing_to_draw(path):
    writer, reader = make_store(path)
    assert reader.sample(3, np.random.default_rng(0)) is None
    assert (reader.size, reader.num_inserted, writer.bytes_used) == (0, 0, 0)


def test_one_transition_is_a_whole_batch(path):
    writer, reader = make_store(path, make_segment(0, count=1), capacity=1)
    for number in range(1, 4):
        writer.insert(make_segment(number, count=1))
        sample = reader.sample(5, np.random.default_rng(0))
        assert sample.records["key"].tolist() == [number] * 5
        assert sample.records["probability"].tolist() == [1.0] * 5
        assert decode(sample) == {number: expect(make_segment(number, count=1), 0)}
    assert sample.num_transitions == 1


def test_bytes_are_counted_from_the_oldest_blob_to_the_newest(path):
    segments = [make_segment(number) for number in range(3)]
    writer, _ = make_store(path, *segments)
    assert writer.bytes_used == sum(-(-len(segment.blob) // 8) * 8 for segment in segments)


def test_a_draw_is_in_proportion_to_priority_to_the_exponent(path):
    rng = np.random.default_rng(5)
    priorities = rng.uniform(0.5, 40, 50).astype(np.float32)
    writer, reader = make_store(path, capacity=50, priority_exponent=0.6)
    for number in range(10):
        writer.insert(make_segment(number, count=5))
    writer.update_priorities(make_update(range(50), priorities))
    keys = np.concatenate([reader.sample(64, rng).records["key"] for _ in range(1500)])
    share = priorities.astype(np.float64) ** 0.6
    expected = len(keys) * share / share.sum()
    observed = np.bincount(keys, minlength=50)
    # 49 degrees of freedom: 96 is exceeded once in 10,000 if draws are independent, and less often in strata.
    assert ((observed - expected) ** 2 / expected).sum() < 96
    sample = reader.sample(64, rng).records
    assert sample["probability"].tolist() == pytest.approx((share / share.sum())[sample["key"]], rel=1e-12)


def test_each_of_b_equal_ranges_is_drawn_from_once(path):
    _, reader = make_store(path, *[make_segment(n, count=4, priority=2) for n in range(4)])
    for seed in range(5):
        keys = reader.sample(8, np.random.default_rng(seed)).records["key"]
        assert (keys // 2).tolist() == list(range(8))


def test_an_exponent_of_0_draws_uniformly(path):
    writer, reader = make_store(path, make_segment(0, count=5), priority_exponent=0.0)
    writer.update_priorities(make_update([1, 2, 3], [0, 1e30, np.inf]))
    assert weights_of(reader) == dict.fromkeys(range(5), 0.2)


@pytest.mark.parametrize(
    ("priority", "counts_as"),
    [
        (0, MIN_PRIORITY),
        (1e-30, MIN_PRIORITY),
        (np.inf, MAX_STORED_PRIORITY),
        (3e38, MAX_STORED_PRIORITY),
        (-0.0, MIN_PRIORITY),
    ],
)
def test_a_priority_beyond_its_bounds_is_clamped(path, priority, counts_as):
    writer, reader = make_store(path, make_segment(0, count=2, priority=MAX_STORED_PRIORITY / 1000))
    assert writer.update_priorities(make_update([1], [priority])) == 0
    shares = reader.sample(50_000, np.random.default_rng(0)).records
    total = counts_as + MAX_STORED_PRIORITY / 1000
    assert set(shares["probability"][shares["key"] == 1]) == {counts_as / total}
    assert set(shares["probability"][shares["key"] == 0]) == {MAX_STORED_PRIORITY / 1000 / total}
    assert writer.refused == {}


def test_transitions_with_the_smallest_priority_are_all_drawn(path):
    _, reader = make_store(path, make_segment(0, count=40, priority=0), min_priority=sys.float_info.min)
    assert weights_of(reader) == dict.fromkeys(range(40), 1 / 40)


@pytest.mark.parametrize("priority", [np.nan, -1.0, -np.inf])
def test_refused_priority_keeps_the_old_priority(path, priority):
    writer, reader = make_store(path, make_segment(0, count=4, priority=[1, 2, 3, 4]))
    writer.update_priorities(make_update([1, 2, 3], [priority, 10, priority]))
    assert weights_of(reader) == {0: 1 / 17, 1: 2 / 17, 2: 10 / 17, 3: 4 / 17}
    assert sum(writer.refused.values()) == 2


def test_invalid_initial_priority_counts_as_the_smallest(path):
    priorities = [np.nan, -5, np.inf, 0]
    writer, reader = make_store(path, make_segment(0, count=4, priority=priorities), min_priority=1e5)
    total = 3e5 + MAX_STORED_PRIORITY
    assert weights_of(reader) == {0: 1e5 / total, 1: 1e5 / total, 2: MAX_STORED_PRIORITY / total, 3: 1e5 / total}
    assert writer.refused == {"priority is not a number": 1, "priority is negative": 1}


def test_last_priority_of_a_repeated_key_counts(path):
    writer, reader = make_store(path, make_segment(0, count=2, priority=1))
    writer.update_priorities(make_update([1, 1, 0, 1], [10, 100, 1, 3]))
    assert weights_of(reader) == {0: 0.25, 1: 0.75}


def test_a_key_that_was_overwritten_is_counted_and_ignored(path):
    writer, reader = make_store(path, *[make_segment(n, count=5, priority=1) for n in range(3)], capacity=10)
    assert writer.update_priorities(make_update([0, 4, 5], [9, 9, 1])) == 2  # Slots of the live keys 10 and 14.
    assert weights_of(reader) == dict.fromkeys(range(5, 15), 0.1)


def test_priorities_for_another_store_are_all_stale(path):
    writer, reader = make_store(path, make_segment(0, count=2, priority=1))
    assert writer.update_priorities(make_update([0, 1], [9, np.nan], store_incarnation=76)) == 2
    assert weights_of(reader) == {0: 0.5, 1: 0.5}
    assert (writer.num_stale, writer.refused) == (2, {})


def test_new_incarnation_resets_the_row_of_its_stream(path):
    writer, _ = make_store(path, *[make_segment(number) for number in (0, 1, 3)])
    assert writer.receipt(0) == ((0, 1), 77, 2, 0b1)
    assert writer.insert(make_segment(1, incarnation=5)) is InsertOutcome.STORED
    assert writer.receipt(0) == ((0, 5), 77, 0, 0b1)
    assert writer.insert(make_segment(2, incarnation=1)) is InsertOutcome.OLDER_INCARNATION


def test_segments_acknowledged_by_an_earlier_store_are_not_expected(path):
    writer, _ = make_store(path, make_segment(103, base=100), make_segment(102, base=100))
    assert writer.receipt(0) == ((0, 1), 77, 100, 0b110)
    assert writer.insert(make_segment(104, base=102)) is InsertOutcome.STORED
    assert writer.receipt(0) == ((0, 1), 77, 105, 0)
    assert writer.insert(make_segment(101, base=100)) is InsertOutcome.DUPLICATE


def test_bitmap_covers_64_segments_after_the_missing_one(path):
    writer, _ = make_store(path, make_segment(64))
    assert writer.receipt(0) == ((0, 1), 77, 0, 1 << 63)
    assert writer.insert(make_segment(65)) is InsertOutcome.TOO_FAR_AHEAD
    for number in range(64):
        assert writer.insert(make_segment(number)) is InsertOutcome.STORED
    assert writer.receipt(0) == ((0, 1), 77, 65, 0)


@pytest.mark.parametrize("actor_id", [-1, 3])
def test_receipt_of_an_unknown_actor_is_refused(path, actor_id):
    writer, _ = make_store(path)
    with pytest.raises(ValueError, match=r"0 \.\.\. 2"):
        writer.receipt(actor_id)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"records": make_segment(0, count=41).records}, "41 records.* 40"), ({"blob": bytes(4001)}, "4001 bytes.* 4000")],
)
def test_refuses_a_segment_that_does_not_fit(path, fields, message):
    writer, reader = make_store(path, make_segment(0))
    with pytest.raises(ValueError, match=message):
        writer.insert(make_segment(5)._replace(**fields))
    assert decode(reader.sample(100, np.random.default_rng(0))).keys() == set(range(writer.size))
    assert writer.receipt(0).contiguous == 1


def test_blob_may_be_bytes_an_array_or_a_memoryview(path):
    segments = [make_segment(number) for number in range(3)]
    blobs = [segments[0].blob, np.frombuffer(segments[1].blob, np.uint8), memoryview(b"123" + segments[2].blob)[3:]]
    writer, reader = make_store(path)
    naive = NaiveStore(**SETTINGS._asdict())
    for segment, blob in zip(segments, blobs, strict=True):
        writer.insert(segment._replace(blob=blob))
        naive.insert(segment)
    assert_same(writer, reader, naive, np.random.default_rng(0))


def overwrite(writer, count):
    """Returns segments of 5 transitions, so that each insert evicts one segment."""
    first = writer.num_inserted // 5
    for number in range(first, first + count):
        assert writer.insert(make_segment(number, count=5)) is InsertOutcome.STORED


@pytest.mark.parametrize("count", [0, 1, 4, 8, 30])
@pytest.mark.parametrize("step", ["find", "copy records", "copy frames", "check"])
def test_transitions_overwritten_during_the_draw_are_drawn_again(path, step, count):
    writer, _ = make_store(path)
    overwrite(writer, 13)
    before = writer.num_inserted
    paused = []

    def pause(name):
        if name == step and not paused:
            paused.append(name)
            overwrite(writer, count)

    sample = open_reader(path, steps=pause).sample(200, np.random.default_rng(0))
    assert paused
    assert len(sample.records) == 200
    for key, entry in decode(sample).items():
        assert entry == expect(make_segment(key // 5, count=5), key % 5)
        assert key >= writer.first_key
    if count <= 4:  # Some earlier transitions have remained.
        assert (sample.records["key"] < before).any()


def test_uncommitted_transitions_are_not_drawn(path):
    """The leaves are read while keys 0 ... 4 are live; the records then are those of keys 10 ... 14."""

    def insert_all_but_the_commit(name):
        if name == "copy records" and not crashed:
            crashed.append(name)
            with pytest.raises(Crash):
                doomed.insert(make_segment(2, count=5))

    writer, crashed = create(path, capacity=10), []
    overwrite(writer, 2)
    writer.close()
    doomed = attach(path, capacity=10, steps=crash_at("commit"))
    sample = open_reader(path, steps=insert_all_but_the_commit).sample(100, np.random.default_rng(0))
    assert crashed
    assert set(sample.records["key"].tolist()) == set(range(5, 10))
    doomed.close()


def test_transitions_below_the_watermark_are_not_drawn(path):
    """The writer advances the first key, then the first byte. A reader may read between the two writes."""
    segments = [make_segment(number, count=5) for number in range(4)]
    _, reader = make_store(path, *segments)
    rng, two = np.random.default_rng(0), sum(-(-len(segment.blob) // 8) * 8 for segment in segments[:2])
    write_number(path, CELLS_OFFSET + 8 * FIRST_KEY, 5)
    assert set(reader.sample(200, rng).records["key"].tolist()) == set(range(5, 20))
    write_number(path, CELLS_OFFSET + 8 * FIRST_BYTE, two)
    assert set(reader.sample(200, rng).records["key"].tolist()) == set(range(10, 20))


@pytest.mark.parametrize("step", STEPS)
def test_reader_finds_only_intact_transitions_at_any_step_of_an_insert(path, step):
    looked = []

    def look(name):
        if name == step:
            sample = reader.sample(200, np.random.default_rng(len(looked)), max_attempts=100)
            assert sample is not None or reader.size <= 6
            for key, entry in decode(sample).items() if sample else ():
                assert entry == expect(*contents[key])
                assert reader.num_inserted - 40 <= key < reader.num_inserted
            looked.append(sample is not None)

    writer, contents = create(path, steps=look), {}
    reader = open_reader(path)
    for number in range(60):
        segment = make_segment(number)
        for index in range(len(segment.records)):
            contents[len(contents)] = (segment, index)
        writer.insert(segment)
    assert sum(looked) > 50


def test_draw_gives_up_if_everything_is_overwritten(path):
    def look(name):
        if name == "evict":
            samples.append(reader.sample(10, np.random.default_rng(0), max_attempts=3))

    samples = []
    writer = create(path, steps=look, capacity=6)
    reader = open_reader(path)
    writer.insert(make_segment(0, count=6))
    writer.insert(make_segment(1, count=6))
    assert samples == [None, None]
    assert reader.sample(10, np.random.default_rng(0), max_attempts=1) is not None


def test_a_probability_is_the_leaf_by_the_root(path):
    _, reader = make_store(path, make_segment(0, count=4, priority=[1, 2, 3, 10]))
    sample = reader.sample(64, np.random.default_rng(0))
    assert dict(zip(sample.records["key"], sample.records["probability"], strict=True)) == {
        key: weigh(priority) / 16 for key, priority in enumerate([1, 2, 3, 10])
    }


def test_probability_is_at_most_1_if_a_leaf_grows_after_reading_the_root(path):
    def grow(name):
        if name == "find":
            writer.update_priorities(make_update([0], [1000]))

    writer, _ = make_store(path, make_segment(0, count=1, priority=1))
    sample = open_reader(path, steps=grow).sample(1, np.random.default_rng(0))
    assert sample.records["probability"].tolist() == [1.0]


def test_steps_are_counted_beside_items(path):
    writer, reader = make_store(path)
    writer.count_steps(3)
    writer.count_steps(4)
    assert (writer.num_steps, reader.num_steps) == (7, 7)


def test_all_incarnations_of_streams_have_one_shard_and_one_group():
    for incarnation in (1, 9):
        streams = [Stream(actor_id, incarnation) for actor_id in (4, 3, 5)]
        assert [stream.shard(3) for stream in streams] == [1, 0, 2]
        assert group_of(streams) == 3
