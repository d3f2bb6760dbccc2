"""The loader passes decoded batches through shared memory; frames that do not decode are unusable."""

import fcntl
import itertools
import secrets
import socket
from dataclasses import replace

import numpy as np
import pytest
from support.builders import CONTINUOUS, MASKED, PIXELS, VECTORS, make_batch, make_frames, make_records, make_segment
from support.waiting import DEADLINE, until

from apex.config import ActorConfig, Config, LearnerConfig, ReplayConfig
from apex.learning.batch_ring import BatchPart, BatchRing
from apex.learning.batch_source import RemoteSource
from apex.learning.loader import LOOK_SECONDS, Loader, LoaderTask, StoreMonitor, load, run_loader
from apex.learning.random_shift import RandomShift
from apex.schema import unpack_mask
from apex.transport.run_codec import RunCodec
from apexreplay.frame_blob import make_blob, read_table
from apexreplay.process.children import start_child, stop_children
from apexreplay.process.lifecycle import POLL_SECONDS
from apexreplay.store.layout import StoreSettings
from apexreplay.store.location import remove, store_path
from apexreplay.store.writer import StoreWriter
from apexreplay.transport.endpoints import RequestReceiver
from apexreplay.transport.sockets import open_context

pytestmark = pytest.mark.programs
NO_SHIFT = RandomShift(0, np.random.default_rng(0))


class Arrivals:
    """Parts of a shard that arrive from its samplers."""

    def __init__(self, *parts):
        self.parts = list(parts)
        self.timeouts = []

    def receive(self, timeout):
        self.timeouts.append(timeout)
        return self.parts.pop(0) if self.parts else None


class Remote:
    """A loader whose parts all come from other hosts."""

    def __init__(self, ring, schema=PIXELS, shift=NO_SHIFT):
        self.ring = ring
        self.arrivals = [Arrivals() for _ in range(ring.num_shards)]
        self.sources = [RemoteSource(arrivals) for arrivals in self.arrivals]
        self.loader = Loader(schema, ring, shift)

    def send(self, *parts):
        """Lets parts arrive; returns whether the slot took a part."""
        for part in parts:
            self.arrivals[part.shard].parts.append(part)
        return self.fill()

    def fill(self):
        return self.loader.ready(0.0) and self.loader.fill(self.sources)


def expect(batch, part):
    assert batch.num_transitions == part.num_transitions
    assert batch.parts == [BatchPart(part.shard, part.store_incarnation, part.sampler, part.number)]
    for ours, theirs in [("keys", "key"), ("probability",) * 2, ("action",) * 2, ("version",) * 2, ("discount",) * 2]:
        np.testing.assert_array_equal(getattr(batch, ours), part.records[theirs])


@pytest.mark.parametrize("schema", [PIXELS, VECTORS, CONTINUOUS, MASKED])
def test_a_batch_arrives_whole(schema):
    part = make_batch(schema, sampler=3)._replace(store_incarnation=2**64 - 2)
    ring = BatchRing(schema, 4)
    assert Remote(ring, schema).send(part)
    batch = ring.receive(1.0)
    expect(batch, part)
    assert batch.action.dtype == np.dtype(schema.action_dtype)
    if schema.masked:
        np.testing.assert_array_equal(batch.next_mask, unpack_mask(part.records["next_mask"], schema.num_actions))
    else:
        assert batch.next_mask is None
    frames = make_frames(schema, schema.stack + 2)
    np.testing.assert_array_equal(batch.stacks[0, 0], frames[: schema.stack])
    np.testing.assert_array_equal(batch.stacks[1, 0], frames[2:])


def test_batch_is_handed_over_when_every_shard_has_a_part():
    parts = [make_batch(PIXELS, number=9 + shard, num_transitions=100 + shard) for shard in range(3)]
    parts = [
        part._replace(shard=shard, store_incarnation=2**64 - 1 - shard, records=part.records.copy())
        for shard, part in enumerate(parts)
    ]
    for part in parts:
        part.records["key"] += 10_000 * part.shard
        part.records["probability"] = 0.1 * (part.shard + 1)
    ring = BatchRing(PIXELS, 12, num_shards=3)
    remote = Remote(ring)
    for shard in (2, 0):
        assert remote.send(parts[shard])
    assert remote.loader.missing == [1]
    assert not remote.send(parts[2])  # This shard's part is filled.
    assert ring.receive(0.0) is None
    assert remote.send(parts[1])
    batch = ring.receive(0.0)
    assert batch.num_transitions == 100 + 101 + 102
    assert batch.parts == [BatchPart(shard, 2**64 - 1 - shard, 1, 9 + shard) for shard in range(3)]
    np.testing.assert_array_equal(batch.keys, np.concatenate([part.records["key"] for part in parts]))
    np.testing.assert_allclose(batch.probability, np.repeat([0.1, 0.2, 0.3], 4))
    np.testing.assert_array_equal(batch.stacks[:, :4], batch.stacks[:, 4:8])
    frames = make_frames(PIXELS, PIXELS.stack + 2)
    np.testing.assert_array_equal(batch.stacks[0, 8], frames[: PIXELS.stack])
    np.testing.assert_array_equal(batch.stacks[1, 8], frames[2:])


class AddOne:
    """Replaces a shift: adds 1 at each call."""

    def apply(self, stacks):
        stacks += 1


def test_complete_batch_is_shifted_once():
    stacks = []
    for shift in (NO_SHIFT, AddOne()):
        ring = BatchRing(PIXELS, 8, num_shards=2)
        remote = Remote(ring, shift=shift)
        for shard in range(2):
            remote.send(part_of(shard, 1))
        stacks.append(ring.receive(0.0).stacks.copy())
    np.testing.assert_array_equal(stacks[1], stacks[0] + 1)


def test_priorities_go_to_the_shard_of_each_part():
    ring = BatchRing(PIXELS, 8, num_shards=2)
    remote = Remote(ring)
    for shard in range(2):
        remote.send(make_batch(PIXELS, sampler=5 + shard, number=shard)._replace(shard=shard))
    batch = ring.receive(0.0)
    first, second = batch.updates(np.arange(8, dtype=np.float32))
    assert first[:4] == (0, 77, 5, 0)
    assert second[:4] == (1, 77, 6, 1)
    for update, priorities in ((first, [0, 1, 2, 3]), (second, [4, 5, 6, 7])):
        np.testing.assert_array_equal(update.keys, 1000 + np.arange(4))
        np.testing.assert_array_equal(update.priorities, priorities)
    ring.release(batch.slot)
    remote.send(make_batch(PIXELS, number=7))
    assert first.keys[0] == 1000  # The updates are copies.


def part_of(shard, number):
    return make_batch(PIXELS, number=number)._replace(shard=shard)


def test_received_parts_wait_for_other_shards_in_order():
    ring = BatchRing(PIXELS, 8, num_shards=2)
    remote = Remote(ring)
    remote.arrivals[0].parts = [part_of(0, 1), part_of(0, 2)]
    for number in (None, 3, 4):
        if number:
            remote.arrivals[1].parts.append(part_of(1, number))
        for _ in range(2):
            assert remote.loader.ready(0.0)
            load(remote.loader, remote.sources)
    numbers = [[part.number for part in ring.receive(0.0).parts] for _ in range(2)]
    assert numbers == [[1, 3], [2, 4]]


def test_a_loader_waits_for_a_missing_part_and_keeps_what_has_arrived():
    remote = Remote(BatchRing(PIXELS, 8, num_shards=2))
    assert remote.loader.ready(0.0)
    load(remote.loader, remote.sources)
    remote.send(part_of(0, 1))
    load(remote.loader, remote.sources)
    assert [sum(arrivals.timeouts) for arrivals in remote.arrivals] == [POLL_SECONDS] * 2


def test_never_overwrites_a_slot_that_was_not_released():
    parts = [make_batch(PIXELS, number=number) for number in range(3)]
    ring = BatchRing(PIXELS, 4, num_slots=2)
    remote = Remote(ring)
    assert [remote.send(part) for part in parts] == [True, True, False]
    assert not remote.loader.ready(0.0)
    assert not remote.loader.fill(remote.sources)
    first, second = ring.receive(1.0), ring.receive(1.0)
    assert ring.receive(0.0) is None
    ring.release(first.slot)
    assert remote.fill()
    assert second.parts[0].number == 1
    assert ring.receive(1.0).parts[0].number == 2


def test_bad_frames_make_only_their_transition_unusable():
    part = make_batch(PIXELS)
    table = read_table(part.blob, 24)
    frames = [part.blob[begin:end] for begin, end in itertools.pairwise(table)]
    frames[8] = b"\xff" * 20  # of the second transition of four
    ring = BatchRing(PIXELS, 4)
    remote = Remote(ring)
    assert remote.send(part._replace(blob=make_blob(frames)))
    batch = ring.receive(1.0)
    assert batch.usable.tolist() == [True, False, True, True]
    ring.release(batch.slot)
    remote.send(part)
    whole = ring.receive(1.0)
    for row in (0, 2, 3):
        np.testing.assert_array_equal(batch.stacks[:, row], whole.stacks[:, row])
    (update,) = batch.updates(np.full(4, 7.0, np.float32))
    assert update.priorities.tolist() == [7.0, 0.0, 7.0, 7.0]


def test_return_whose_square_overflows_is_unusable():
    part = make_batch(PIXELS)
    part.records["n_step_return"] = [1e15, 1.1e15, -3e38, 1.0]
    ring = BatchRing(PIXELS, 4)
    assert Remote(ring).send(part)
    batch = ring.receive(1.0)
    assert batch.usable.tolist() == [True, False, False, True]
    assert batch.n_step_return.tolist() == [np.float32(1e15), 0.0, 0.0, 1.0]


def test_another_process_fills_what_this_one_reads():
    ring = BatchRing(PIXELS, 4)

    def run(stop):
        remote = Remote(ring)
        remote.send(*(make_batch(PIXELS, number=number) for number in range(10)))
        while not stop.poll():
            if remote.loader.ready(0.05):
                remote.fill()

    child = start_child("loader", run)
    try:
        for number in range(10):
            batch = ring.receive(10.0)
            assert batch.parts[0].number == number
            ring.release(batch.slot)
    finally:
        stop_children([child])


class Direct:
    """A store at the path of a run, and a loader on the same host with a clock of the test."""

    settings = StoreSettings(capacity=1_000, max_bytes=100_000, num_streams=4, priority_exponent=1.0, min_priority=1e-6)

    def __init__(self, num_shards=1):
        self.run_id = secrets.randbits(60)
        self.path = store_path(self.run_id, num_shards - 1)
        self.config = Config(
            actor=ActorConfig(num_actors=4),
            replay=ReplayConfig(min_size_to_sample=4 * num_shards, capacity=1_000, num_shards=num_shards),
            learner=LearnerConfig(batch_size=4 * num_shards),
        )
        self.ring = BatchRing(PIXELS, 4 * num_shards, num_shards=num_shards)
        self.loader = Loader(PIXELS, self.ring, NO_SHIFT)
        self.now = 0.0
        self.monitor = self.make_monitor()

    def make_monitor(self):
        """Returns the first loader's monitor of the last shard."""
        task = LoaderTask(PIXELS, self.ring, self.run_id, self.config)
        return StoreMonitor(task, 0, self.config.replay.num_shards - 1, self.clock)

    def draw(self):
        """Whether a part is drawn into a slot."""
        return self.loader.ready(0.0) and self.loader.fill([self.monitor.source()])

    def clock(self):
        self.now += LOOK_SECONDS
        return self.now

    def make_store(self, *, store_incarnation=1, first=0):
        store = StoreWriter.create(self.path, PIXELS.table, self.settings, store_incarnation=store_incarnation)
        store.insert(make_segment(PIXELS, base=0, number=0, first=first))
        return store


@pytest.fixture
def direct():
    direct = Direct()
    yield direct
    remove(direct.path)


def test_loader_draws_from_a_local_store(direct):
    assert direct.monitor.source() is None
    store = direct.make_store(store_incarnation=9)
    assert direct.draw()
    batch = direct.ring.receive(1.0)
    assert batch.parts == [BatchPart(0, 9, direct.config.replay.num_samplers, 0)]
    records = make_records(PIXELS, 5)
    np.testing.assert_array_equal(batch.action, records["action"][batch.keys])
    np.testing.assert_array_equal(batch.stacks[1, :, -1, 0, 0], batch.keys + 1)  # A frame contains its number.
    store.close()


@pytest.mark.parametrize("is_here", [True, False])
def test_loader_asks_for_parts_only_if_the_memory_is_elsewhere(direct, is_here):
    """It asks the present host of the server, and finds a server that has moved. It listens on no port."""
    hosts = ["127.0.0.1"] if is_here else ["127.0.0.2", "127.0.0.3"]
    with socket.create_server(("127.0.0.1", 0)) as place:
        transport = replace(direct.config.transport, batches_port=place.getsockname()[1])
    task = LoaderTask(PIXELS, direct.ring, direct.run_id, replace(direct.config, transport=transport))
    codec = RunCodec(direct.run_id, PIXELS)
    store = direct.make_store() if is_here else None
    child = start_child("loader-0", run_loader, 0, task)
    try:
        until(lambda: direct.ring.loaders.seconds[0] > 0)  # The loader runs; no server has joined.
        for number, host in enumerate(hosts):
            with open_context() as context:
                receiver = RequestReceiver(context, f"tcp://{host}:{transport.batches_port}", codec)
                assert receiver.receive(0.2) == []
                direct.ring.hosts[0] = host
                if not is_here:
                    (client, size) = until(lambda server=receiver: server.receive(0.1), "requests")[0]
                    assert size == 4
                    receiver.answer(client, make_batch(PIXELS, number=number))
                batch = direct.ring.receive(DEADLINE)
                assert (batch.parts[0].number, bool(direct.ring.loaders.draws[0])) == (number, is_here)
                direct.ring.release(batch.slot)
                assert not is_here or receiver.receive(0.2) == []
    finally:
        stop_children([child])
    if store is not None:
        store.close()


def test_local_and_remote_shards_fill_one_batch():
    direct = Direct(num_shards=2)
    store = direct.make_store(store_incarnation=9)
    try:
        assert direct.loader.ready(0.0)
        remote = RemoteSource(Arrivals(part_of(0, 5), part_of(0, 6)))
        for _ in range(3):
            load(direct.loader, [remote, direct.monitor.source()])
        batch = direct.ring.receive(0.0)
        assert [(part.shard, part.number) for part in batch.parts] == [(0, 5), (1, 0)]
        np.testing.assert_array_equal(batch.stacks[1, 4:, -1, 0, 0], batch.keys[4:] + 1)
        np.testing.assert_array_equal(batch.keys[:4], 1000 + np.arange(4))
    finally:
        store.close()
        remove(direct.path)


def test_loader_keeps_its_store_until_a_new_store_replaces_it(direct):
    store = direct.make_store(store_incarnation=1)
    first = direct.monitor.source()
    store.close()
    assert direct.monitor.source() is first
    remove(direct.path)
    assert direct.monitor.source() is None
    store = direct.make_store(store_incarnation=2)
    assert direct.draw()
    assert direct.ring.receive(1.0).parts[0].store_incarnation == 2
    store.close()


def test_a_loader_leaves_the_memory_of_a_server_that_has_moved(direct):
    """A server that was stopped keeps its file. Draws from it would be the same for ever."""
    source = direct.monitor.source
    store = direct.make_store()
    first = source(b"")  # before the server has joined
    assert source(b"here") is first
    assert source(b"name") is first  # the same server by another name
    store.close()
    assert source(b"here") is first  # It may start again.
    assert source(b"there") is None
    assert direct.path.exists()
    assert source(b"there") is None
    store = StoreWriter.attach(direct.path, PIXELS.table, direct.settings)
    assert source(b"here") is not None  # It is back, with the same file.
    store.close()


def test_store_without_an_owner_is_not_opened(direct):
    direct.make_store().close()
    assert direct.monitor.source() is None


def test_restarted_loader_continues_its_numbers(direct):
    store = direct.make_store()
    for _ in range(2):
        assert direct.draw()
        direct.ring.release(direct.ring.receive(1.0).slot)
    direct.monitor = direct.make_monitor()
    assert direct.draw()
    assert direct.ring.receive(1.0).parts[0].number == 2
    store.close()


def test_one_slot_trains_one_is_ready_and_one_is_filled():
    ring = BatchRing(PIXELS, 4)
    remote = Remote(ring)
    for number in range(2):
        assert remote.send(make_batch(PIXELS, number=number))
    assert ring.receive(0.0).parts[0].number == 0
    assert remote.loader.ready(0.0)
    assert ring.receive(0.0).parts[0].number == 1


def test_incomplete_store_is_checked_again_later(direct):
    with open(direct.path, "wb") as half_made:
        fcntl.flock(half_made, fcntl.LOCK_EX)
        assert direct.monitor.source() is None
    direct.path.unlink()
    store = direct.make_store()
    assert direct.draw()
    store.close()
