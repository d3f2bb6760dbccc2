"""The loader hands decoded samples over through shared memory, and drops what does not decode."""

from __future__ import annotations

import fcntl
import secrets

import numpy as np
import pytest
from support.builders import PIXELS, VECTORS, make_batch, make_frames, make_records, make_segment

from apex.config import ActorConfig, Config, LearnerConfig, ReplayConfig
from apex.frame_blob import make_blob
from apex.learning.batch_ring import BatchPart, BatchRing
from apex.learning.loader import LOOK_SECONDS, Loader, LocalSource, RemoteSource, fill
from apex.replay_memory.store.location import remove, store_path
from apex.replay_memory.store.writer import StoreWriter
from apex.runtime.children import start_child, stop_children

pytestmark = pytest.mark.programs


def expect(sample, batch):
    assert sample.num_transitions == batch.num_transitions
    assert sample.parts == [BatchPart(batch.shard, batch.store_incarnation, batch.sampler, batch.number)]
    for ours, theirs in [("keys", "key"), ("probability",) * 2, ("action",) * 2, ("version",) * 2, ("discount",) * 2]:
        np.testing.assert_array_equal(getattr(sample, ours), batch.records[theirs])


@pytest.mark.parametrize("schema", [PIXELS, VECTORS])
def test_a_batch_arrives_whole(schema):
    batch = make_batch(schema, sampler=3)._replace(store_incarnation=2**64 - 2)
    ring = BatchRing(schema, 4)
    assert Loader(schema, ring).send(batch, 0.0)
    sample = ring.receive(1.0)
    expect(sample, batch)
    frames = make_frames(schema, schema.stack + 2)
    np.testing.assert_array_equal(sample.stacks[0, 0], frames[: schema.stack])
    np.testing.assert_array_equal(sample.stacks[1, 0], frames[2:])


def test_a_batch_is_handed_over_when_it_has_a_part_from_each_shard():
    parts = [make_batch(PIXELS, number=9 + shard, num_transitions=100 + shard) for shard in range(3)]
    parts = [
        part._replace(shard=shard, store_incarnation=2**64 - 1 - shard, records=part.records.copy())
        for shard, part in enumerate(parts)
    ]
    for part in parts:
        part.records["key"] += 10_000 * part.shard
        part.records["probability"] = 0.1 * (part.shard + 1)
    ring = BatchRing(PIXELS, 12, num_shards=3)
    loader = Loader(PIXELS, ring)
    for shard in (2, 0):
        assert loader.send(parts[shard], 0.0)
    assert loader.missing == [1]
    assert not loader.send(parts[2], 0.0)  # It has one from there.
    assert ring.receive(0.0) is None
    assert loader.send(parts[1], 0.0)
    sample = ring.receive(0.0)
    assert sample.num_transitions == 100 + 101 + 102
    assert sample.parts == [BatchPart(shard, 2**64 - 1 - shard, 1, 9 + shard) for shard in range(3)]
    np.testing.assert_array_equal(sample.keys, np.concatenate([part.records["key"] for part in parts]))
    np.testing.assert_allclose(sample.probability, np.repeat([0.1, 0.2, 0.3], 4) / 3)
    np.testing.assert_array_equal(sample.stacks[:, :4], sample.stacks[:, 4:8])
    frames = make_frames(PIXELS, PIXELS.stack + 2)
    np.testing.assert_array_equal(sample.stacks[0, 8], frames[: PIXELS.stack])
    np.testing.assert_array_equal(sample.stacks[1, 8], frames[2:])


def test_new_priorities_go_to_the_shard_that_each_part_came_from():
    ring = BatchRing(PIXELS, 8, num_shards=2)
    loader = Loader(PIXELS, ring)
    for shard in range(2):
        loader.send(make_batch(PIXELS, sampler=5 + shard, number=shard)._replace(shard=shard), 0.0)
    sample = ring.receive(0.0)
    first, second = sample.updates(np.arange(8, dtype=np.float32))
    assert first[:4] == (0, 77, 5, 0)
    assert second[:4] == (1, 77, 6, 1)
    for update, priorities in ((first, [0, 1, 2, 3]), (second, [4, 5, 6, 7])):
        np.testing.assert_array_equal(update.keys, 1000 + np.arange(4))
        np.testing.assert_array_equal(update.priorities, priorities)
    ring.release(sample.slot)
    loader.send(make_batch(PIXELS, number=7), 0.0)
    assert first.keys[0] == 1000  # They outlive the slot.


class Arrivals:
    """Parts as they come by socket."""

    def __init__(self, *parts):
        self.parts = list(parts)
        self.timeouts = []

    def receive(self, timeout):
        self.timeouts.append(timeout)
        return self.parts.pop(0) if self.parts else None


def two_shards(**replay):
    return Config(
        actor=ActorConfig(num_actors=4),
        replay=ReplayConfig(min_size_to_sample=8, capacity=1_000, num_shards=2, **replay),
        learner=LearnerConfig(batch_size=8),
    )


def part_of(shard, number):
    return make_batch(PIXELS, number=number)._replace(shard=shard)


def test_parts_by_socket_wait_for_the_other_shards_and_keep_their_order():
    ring = BatchRing(PIXELS, 8, num_shards=2)
    loader = Loader(PIXELS, ring)
    remote = RemoteSource(Arrivals(part_of(0, 1), part_of(0, 2), part_of(1, 3), part_of(1, 4)), two_shards())
    for _ in range(8):
        if loader.ready(0.0):
            fill(loader, [None, None], remote)
    numbers = [[part.number for part in ring.receive(0.0).parts] for _ in range(2)]
    assert numbers == [[1, 3], [2, 4]]
    assert remote.num_dropped == 0


def test_beyond_their_credit_the_oldest_parts_are_dropped_and_counted():
    remote = RemoteSource(Arrivals(*(part_of(0, n) for n in range(6))), two_shards(num_samplers=2, batches_in_flight=2))
    assert [remote.take([1], 0.0) for _ in range(7)] == [None] * 7
    assert remote.num_dropped == 2
    assert [remote.take([0, 1], 0.0).number for _ in range(4)] == [2, 3, 4, 5]
    assert remote.take([0, 1], 0.0) is None


def test_only_the_first_loader_takes_what_comes_by_socket():
    ring = BatchRing(PIXELS, 8, num_shards=2)
    loader = Loader(PIXELS, ring)
    assert loader.ready(0.0)

    class Store:
        def step(self):
            raise AssertionError("drew a part of a batch that it cannot make whole")

    fill(loader, [Store(), None], None)
    assert loader.missing == [0, 1]


def test_never_overwrites_a_slot_that_was_not_released():
    batches = [make_batch(PIXELS, number=number) for number in range(4)]
    ring = BatchRing(PIXELS, 4, num_slots=2)
    loader = Loader(PIXELS, ring)
    assert [loader.send(batch, 0.0) for batch in batches[:3]] == [True, True, False]
    assert not loader.ready(0.0)
    first, second = ring.receive(1.0), ring.receive(1.0)
    assert ring.receive(0.0) is None
    ring.release(first.slot)
    assert loader.ready(0.0)
    assert loader.send(batches[2], 0.0)
    assert second.parts[0].number == 1
    assert ring.receive(1.0).parts[0].number == 2


def test_what_does_not_decompress_is_counted_and_dropped():
    batch = make_batch(PIXELS)
    broken = batch._replace(blob=make_blob([b"\xff" * 20] * 24))
    ring = BatchRing(PIXELS, 4)
    loader = Loader(PIXELS, ring)
    assert not loader.send(broken, 0.0)
    assert loader.num_undecodable == 1
    assert loader.send(batch, 0.0)
    expect(ring.receive(1.0), batch)


def test_another_process_fills_what_this_one_reads():
    ring = BatchRing(PIXELS, 4)
    batches = [make_batch(PIXELS, number=number) for number in range(10)]

    def fill(stop):
        loader = Loader(PIXELS, ring)
        waiting = list(batches)
        while not stop.requested:
            if waiting and loader.send(waiting[0], 0.05):
                waiting.pop(0)

    child = start_child("loader", fill)
    try:
        for number in range(10):
            sample = ring.receive(10.0)
            assert sample.parts[0].number == number
            ring.release(sample.slot)
    finally:
        stop_children([child])


class Direct:
    """A store in memory under a run's own name, and a loader beside it that has a clock of its own."""

    def __init__(self, num_shards=1):
        self.run_id = secrets.randbits(60)
        self.path = store_path(self.run_id, num_shards - 1)
        self.config = Config(
            actor=ActorConfig(num_actors=4),
            replay=ReplayConfig(min_size_to_sample=4 * num_shards, capacity=1_000, num_shards=num_shards),
            learner=LearnerConfig(batch_size=4 * num_shards),
        )
        self.ring = BatchRing(PIXELS, 4 * num_shards, num_shards=num_shards)
        self.loader = Loader(PIXELS, self.ring)
        self.now = 0.0
        self.source = LocalSource(self.loader, 0, num_shards - 1, self.config, PIXELS, self.run_id, clock=self.clock)

    def clock(self):
        self.now += LOOK_SECONDS
        return self.now

    def make_store(self, *, store_incarnation=1, first=0):
        store = StoreWriter.create(
            self.path,
            PIXELS,
            capacity=1_000,
            max_bytes=100_000,
            num_streams=4,
            priority_exponent=1.0,
            min_priority=1e-6,
            store_incarnation=store_incarnation,
        )
        store.insert(make_segment(PIXELS, base=0, number=0, first=first))
        return store


@pytest.fixture
def direct():
    direct = Direct()
    yield direct
    remove(direct.path)


def test_beside_a_replay_server_a_loader_draws_for_itself(direct):
    assert direct.source.sampler() is None
    store = direct.make_store(store_incarnation=9)
    assert direct.source.sampler().step(0.0)
    sample = direct.ring.receive(1.0)
    assert sample.parts == [BatchPart(0, 9, direct.config.replay.num_samplers, 0)]
    records = make_records(PIXELS, 5)
    np.testing.assert_array_equal(sample.action, records["action"][sample.keys])
    np.testing.assert_array_equal(sample.stacks[1, :, -1, 0, 0], sample.keys + 1)  # A frame says its own number.
    store.close()


def test_one_shard_beside_the_loader_and_another_elsewhere_make_one_batch():
    direct = Direct(num_shards=2)
    store = direct.make_store(store_incarnation=9)
    try:
        assert direct.loader.ready(0.0)
        arrivals = Arrivals(part_of(0, 5), part_of(0, 6))
        remote = RemoteSource(arrivals, direct.config)
        for _ in range(2):
            fill(direct.loader, [None, direct.source.sampler()], remote)
        sample = direct.ring.receive(0.0)
        assert [(part.shard, part.number) for part in sample.parts] == [(0, 5), (1, 0)]
        np.testing.assert_array_equal(sample.stacks[1, 4:, -1, 0, 0], sample.keys[4:] + 1)
        np.testing.assert_array_equal(sample.keys[:4], 1000 + np.arange(4))
    finally:
        store.close()
        remove(direct.path)


def test_a_loader_goes_on_while_the_writer_is_away_and_follows_it_to_a_new_store(direct):
    store = direct.make_store(store_incarnation=1)
    first = direct.source.sampler()
    store.close()
    assert direct.source.sampler() is first
    remove(direct.path)
    assert direct.source.sampler() is None
    store = direct.make_store(store_incarnation=2)
    assert direct.source.sampler().step(0.0)
    assert direct.ring.receive(1.0).parts[0].store_incarnation == 2
    store.close()


def test_what_a_crashed_replay_server_left_is_not_taken_for_a_living_one(direct):
    direct.make_store().close()
    assert direct.source.sampler() is None


def test_a_loader_that_is_started_again_goes_on_with_its_numbers(direct):
    store = direct.make_store()
    sampler = direct.source.sampler()
    for _ in range(2):
        assert sampler.step(0.0)
        direct.ring.release(direct.ring.receive(1.0).slot)
    again = LocalSource(Loader(PIXELS, direct.ring), 0, 0, direct.config, PIXELS, direct.run_id, clock=direct.clock)
    assert again.sampler().step(0.0)
    assert direct.ring.receive(1.0).parts[0].number == 2
    store.close()


def test_while_one_slot_is_trained_on_another_is_ready_and_a_third_is_filled():
    ring = BatchRing(PIXELS, 4)
    loader = Loader(PIXELS, ring)
    for number in range(2):
        assert loader.send(make_batch(PIXELS, number=number), 0.0)
    assert ring.receive(0.0).parts[0].number == 0
    assert loader.ready(0.0)
    assert ring.receive(0.0).parts[0].number == 1


def test_a_store_that_is_only_half_made_is_looked_at_again(direct):
    with open(direct.path, "wb") as half_made:
        fcntl.flock(half_made, fcntl.LOCK_EX)
        assert direct.source.sampler() is None
    direct.path.unlink()
    store = direct.make_store()
    assert direct.source.sampler().step(0.0)
    store.close()
