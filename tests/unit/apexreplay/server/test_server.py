"""The replay server stores segments once, sends receipts, and applies priorities; samplers keep to their credit."""

import resource

import numpy as np
import pytest
from support.builders import PIXELS, RUN, make_segment
from support.memory import open_memory

from apex.config import ActorConfig, Config, LearnerConfig, ReplayConfig
from apex.transport.hello import Route, Welcome
from apex.transport.run_codec import RunCodec
from apexreplay.errors import LostMemoryError, UsageError
from apexreplay.files.file_lock import FileLock
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.batch_drawer import BatchDrawer, DrawSettings
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.server.leases import LeaseTable, newest_incarnation
from apexreplay.server.open_store import reclaim
from apexreplay.server.server import ReplayServer
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store.deduplication import InsertOutcome
from apexreplay.store.file import open_file
from apexreplay.store.layout import StoreSettings
from apexreplay.store.location import beside, counters_path
from apexreplay.store.reader import StoreReader
from apexreplay.store.writer import StoreWriter
from apexreplay.transport.timing import (
    CREDIT_SECONDS,
    RECEIPT_REPEAT_SECONDS,
    RECEIPT_SECONDS,
    STREAM_LIFE_SECONDS,
)
from apexreplay.types import PriorityUpdate, Receipt, Stream

CODEC = RunCodec(RUN, PIXELS)
B = 4


class Scene:
    """A server and a sampler over one store, with a clock that the test sets."""

    def __init__(self, path, *, min_size=10, samples_per_insert=0.0, inserts_wait=False, in_flight=2):
        self.now = 0.0
        self.room = True
        self.answers_at_once = False
        self.batches = []
        self.store = StoreWriter.create(
            path,
            PIXELS.table,
            StoreSettings(capacity=1_000, max_bytes=100_000, num_streams=4, priority_exponent=1.0, min_priority=1e-6),
            store_incarnation=77,
        )
        limiter = RateLimiter(min_size, samples_per_insert, 0.1, inserts_wait)
        self.counters = SamplerCounters(1)
        self.server = ReplayServer(self.store, CODEC, self.counters, limiter, clock=self.clock)
        self.reader, self.settings = StoreReader(path, PIXELS.table), DrawSettings(0, 1, B, in_flight, limiter)
        self.drawer = self.make_drawer()

    def make_drawer(self):
        return BatchDrawer(self.reader, self.counters, 0, self.settings, np.random.default_rng(0), self.clock)

    def clock(self):
        return self.now

    def draw(self, drawer=None):
        """Draws a batch and sends it, as a sampler does; returns whether it did."""
        batch = (drawer or self.drawer).draw()
        if batch is None:
            return False
        if self.room:
            self.batches.append(batch)
        else:
            self.drawer.take_back()
        if self.answers_at_once:
            self.answer(batch)
        return self.room

    def insert(self, *numbers, actor_id=2, count=5, group=0, incarnation=7):
        segments = [
            make_segment(PIXELS, count, actor_id=actor_id, number=number, base=0, incarnation=incarnation)
            for number in numbers
        ]
        return each(self.server.insert([CODEC.encode_segment(segment._replace(group=group)) for segment in segments]))

    def answer(self, batch, priorities=None):
        priorities = np.ones(B, np.float32) if priorities is None else priorities
        update = PriorityUpdate(0, batch.store_incarnation, 0, batch.number, batch.records["key"], priorities)
        self.server.update_priorities([CODEC.encode_priorities(update)])


def each(messages):
    return [receipt for message in messages for receipt in message.each()]


def ids(messages):
    """Returns the group and the actor ids of each message."""
    return [(message.group, message.rows["actor_id"].tolist()) for message in messages]


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path / "store")


def test_each_stream_gets_one_receipt_per_burst(scene):
    assert scene.insert(0, 1) == [Receipt(Stream(2, 7), 77, 2, 0)]
    assert scene.insert(4) == [Receipt(Stream(2, 7), 77, 2, 0b10)]


def test_a_duplicate_is_stored_once_and_acknowledged_again(scene):
    scene.insert(0, 2)
    for number in (0, 2):  # Segment 1 is missing, so only the bitmap shows that segment 2 is stored.
        assert scene.insert(number) == [Receipt(Stream(2, 7), 77, 1, 0b1)]
    assert scene.store.num_inserted == 10
    assert scene.server.status().duplicate_segments == 2


def test_an_incarnation_that_no_lease_has_is_refused(tmp_path):
    """It would keep the stream from every later writer."""
    scene = Scene(tmp_path / "store")
    newest = newest_incarnation(3)
    server = ReplayServer(scene.store, CODEC, scene.counters, scene.settings.limiter, newest_incarnation=newest)
    for incarnation, stored in ((newest + 1, 0), (newest, 5)):
        segment = make_segment(PIXELS, 5, actor_id=2, number=0, base=0, incarnation=incarnation)
        server.insert([CODEC.encode_segment(segment)])
        assert scene.store.num_inserted == stored
    assert server.status().refusals == {"incarnation": 1}
    leases = LeaseTable(4, 30.0, 3)
    (stream,) = leases.claim(1, 1, 0.0)
    assert newest_incarnation(2) < stream.incarnation <= newest


def test_malformed_segments_are_counted_without_receipt(scene):
    segment = CODEC.encode_segment(make_segment(PIXELS, actor_id=99))
    assert scene.server.insert([[b"x"], [b"GET / HTTP/1.1" * 10], segment]) == []
    scene.server.update_priorities([[b"x"]])
    status = scene.server.status()
    assert status.refusals == {"length": 2, "magic": 1, "unknown actor": 1}
    assert status.refused == 4
    assert scene.store.num_inserted == 0


def test_receipts_are_repeated_while_a_stream_lives(scene):
    scene.insert(0)
    scene.insert(0, actor_id=1)
    scene.now += RECEIPT_SECONDS
    assert ids(scene.server.receipts()) == [(0, [1, 2])]
    scene.now += STREAM_LIFE_SECONDS - 1
    scene.insert(1)
    scene.now += 2
    assert ids(scene.server.receipts()) == [(0, [2])]


def test_receipts_are_repeated_while_inserts_wait(tmp_path):
    """The streams live on: what they send is not taken."""
    scene = Scene(tmp_path / "store", samples_per_insert=2.0, inserts_wait=True)
    scene.insert(0, 1, 2, 3)
    for _ in range(5):
        assert not scene.server.check_limiter()
        scene.now += STREAM_LIFE_SECONDS / 2
    assert not scene.server.check_limiter()
    assert ids(scene.server.receipts()) == [(0, [2])]
    assert scene.server.check_limiter(inserts_wanted=True)
    scene.now += STREAM_LIFE_SECONDS
    assert scene.server.check_limiter(inserts_wanted=True)
    assert ids(scene.server.receipts()) == []


def test_a_receipt_is_repeated_only_when_it_is_due(scene):
    scene.insert(0)
    assert ids(scene.server.receipts()) == []
    due = []
    for tick in range(1, 25):
        scene.now += RECEIPT_SECONDS / 2
        due += [tick for _ in scene.server.receipts()]
    assert due == [
        2,
        2 + 2 * RECEIPT_REPEAT_SECONDS / RECEIPT_SECONDS,
        2 + 4 * RECEIPT_REPEAT_SECONDS / RECEIPT_SECONDS,
    ]


def test_receipts_of_one_sender_are_one_message(scene):
    segments = [(3, 1), (0, 0), (2, 0), (1, 1)]  # actor id, group
    messages = [make_segment(PIXELS, 1, actor_id=actor_id)._replace(group=group) for actor_id, group in segments]
    assert ids(scene.server.insert([CODEC.encode_segment(each) for each in messages])) == [(0, [0, 2]), (1, [1, 3])]
    scene.now += RECEIPT_SECONDS
    assert ids(scene.server.receipts()) == [(0, [0, 2]), (1, [1, 3])]


def test_repeated_receipts_go_to_the_newest_sender_of_a_stream(scene):
    scene.insert(0, group=2, incarnation=8)
    assert scene.insert(5, group=1) == [Receipt(Stream(2, 8), 77, 1, 0)]  # An older sender learns that it is over.
    scene.now += RECEIPT_SECONDS
    assert ids(scene.server.receipts()) == [(2, [2])]


def test_nothing_is_drawn_before_the_minimum(scene):
    scene.insert(0)
    assert not scene.draw()
    assert scene.counters.waits_for == "inserts"
    scene.insert(1)
    assert scene.draw()
    assert scene.counters.waits_for == ""
    assert scene.batches[0].num_transitions == 10


def test_credit_limits_parts_in_flight_until_priorities_arrive(scene):
    scene.insert(0, 1)
    assert [scene.draw() for _ in range(3)] == [True, True, False]
    assert scene.counters.waits_for == "learner"
    scene.answer(scene.batches[0])
    assert [scene.draw() for _ in range(2)] == [True, False]
    scene.answer(scene.batches[2])  # A later answer also covers the batch before.
    assert [scene.draw() for _ in range(3)] == [True, True, False]


def test_an_idle_sampler_does_not_hide_that_others_wait_for_inserts():
    """Its clients have sent their requests to the others. Without draws, they send it none."""
    counters = SamplerCounters(4)  # rows 2 and 3 are free
    for row in (0, 1):
        counters.activate(row)
    cases = [
        ({"learner": True}, {"inserts": True}, "inserts"),
        ({"inserts": True}, {"inserts": True}, "inserts"),
        ({"learner": True}, {"learner": True}, "learner"),
        ({}, {"inserts": True}, ""),
        ({"learner": True}, {}, ""),
    ]
    for first, second, expected in cases:
        counters.note_wait(0, **first)
        counters.note_wait(1, **second)
        assert counters.waits_for == expected


def test_a_sampler_that_has_ended_waits_for_nothing(scene):
    assert not scene.draw()
    assert scene.counters.waits_for == "inserts"
    scene.drawer.close()
    assert scene.counters.waits_for == ""


def test_a_start_of_the_server_forgets_killed_samplers_and_no_others(scene):
    assert not scene.draw()
    scene.counters.deactivate()
    assert scene.counters.waits_for == ""
    assert not scene.draw()  # This one has not been killed.
    assert scene.counters.waits_for == "inserts"


def test_a_silent_learner_is_sent_one_batch_at_a_time(scene):
    scene.insert(0, 1)
    for _ in range(3):
        scene.draw()
    scene.now += CREDIT_SECONDS
    assert [scene.draw() for _ in range(2)] == [True, False]
    scene.now += CREDIT_SECONDS / 2
    assert not scene.draw()
    scene.now += CREDIT_SECONDS
    scene.room = False
    assert [scene.draw() for _ in range(3)] == [False] * 3  # Nobody is there who gets them,
    scene.room = True
    assert [scene.draw() for _ in range(2)] == [True, False]  # so the credit remains for another client.


def test_answers_to_unknown_batches_give_no_credit(scene):
    scene.insert(0, 1)
    scene.draw()
    batch = scene.batches[0]
    for stranger in (batch._replace(number=5), batch._replace(store_incarnation=78)):
        scene.answer(stranger)
    scene.counters.acknowledge(9, 0)
    assert scene.counters.in_flight(0) == 1


def test_batch_that_was_not_sent_does_not_count(scene):
    scene.insert(0, 1)
    scene.room = False
    assert not scene.draw()
    assert scene.counters.num_drawn == 0
    scene.room = True
    assert scene.draw()
    assert scene.batches[0].number == 0
    assert scene.counters.next_number(0) == 1


def test_new_priorities_decide_what_is_drawn(scene):
    scene.insert(0, 1)
    scene.draw()
    keys = np.arange(10)
    update = PriorityUpdate(0, 77, 0, 0, keys, np.where(keys == 3, 1e5, 0).astype(np.float32))
    scene.server.update_priorities([CODEC.encode_priorities(update)])
    scene.draw()
    assert (scene.batches[-1].records["key"] == 3).all()


def test_empty_priorities_return_credit_only(scene):
    scene.insert(0, 1)
    scene.draw()
    before = scene.store.weights(np.arange(10))
    update = PriorityUpdate(0, 77, 0, 0, np.zeros(0, np.int64), np.zeros(0, np.float32))
    scene.server.update_priorities([CODEC.encode_priorities(update)])
    assert scene.counters.in_flight(0) == 0
    assert (scene.store.weights(np.arange(10)) == before).all()
    assert (scene.server.status().stale_priorities, scene.server.status().refusals) == (0, {})


def test_the_replay_ratio_holds_samplers_and_inserts(tmp_path):
    scene = Scene(tmp_path / "store", samples_per_insert=2.0, inserts_wait=True, in_flight=1000)
    scene.insert(0, 1)
    drawn = 0
    while scene.draw():
        drawn += B
    assert drawn == B  # Slack: 0.1 * 2 * 10 = 2 transitions.
    scene.insert(2)
    while scene.draw():
        drawn += B
    assert drawn == 16  # The first multiple of B beyond 2 * 5 + 2.
    assert scene.server.check_limiter()
    scene.insert(3, 4)
    assert not scene.server.check_limiter()
    assert scene.server.status().inserts_wait


def test_inserts_continue_while_samples_of_another_shard_wait(tmp_path):
    scene = Scene(tmp_path / "store", samples_per_insert=2.0, inserts_wait=True)
    scene.insert(0, 1, 2, 3)
    assert not scene.server.check_limiter()
    assert scene.server.check_limiter(inserts_wanted=True)
    assert not scene.server.status().inserts_wait


def test_messages_for_another_shard_are_refused_and_counted(scene):
    """A stream has one de-duplication row, in the store of its own shard."""
    scene.insert(0, 1)
    scene.draw()
    wrong = CODEC.encode_segment(make_segment(PIXELS, number=2, base=0), shard=1)
    batch = scene.batches[0]
    update = PriorityUpdate(1, 77, 0, batch.number, batch.records["key"], np.ones(B, np.float32))
    assert scene.server.insert([wrong]) == []
    scene.server.update_priorities([CODEC.encode_priorities(update)])
    assert scene.server.status().refusals == {"shard": 2}
    assert scene.store.num_inserted == 10
    assert scene.counters.in_flight(0) == 1


def test_rates_are_of_the_last_ten_seconds(scene):
    scene.server.status()
    scene.insert(0, 1)
    scene.draw()
    scene.now += 2
    status = scene.server.status()
    assert status.inserts_per_second == status.inserted_steps_per_second == 5
    assert status.samples_per_second == B / 2
    assert status.num_drawn == B
    scene.now += 8
    assert scene.server.status().inserts_per_second == 1
    scene.now += 2
    assert scene.server.status().inserts_per_second == 0


def test_only_memories_that_no_run_can_use_are_removed(tmp_path):
    running = Scene(tmp_path / "apex-1-0.replay")
    killed = Scene(tmp_path / "apex-2-0.replay")
    killed.store.close()
    SamplerCounters(1, counters_path(tmp_path / "apex-4-0.replay"))
    restarting = Scene(tmp_path / "apex-4-0.replay")  # A learner draws from this memory, whose writer is restarting.
    restarting.store.close()
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    own = Scene(tmp_path / "apex-3-1.replay")  # The server of this memory was killed too, and restarts.
    own.store.close()
    cut_short, coming, own_coming = (beside(tmp_path / f"apex-{number}-0.replay") for number in (2, 5, 3))
    for path in (cut_short, coming, own_coming):
        path.touch()
    maker = FileLock(coming)
    reclaim(tmp_path / "apex-3-0.replay", 0)
    names = ["apex-1-0.replay", "apex-2-0.replay", own_coming.name, "apex-3-1.replay"]
    names += ["apex-4-0.counters", "apex-4-0.replay", coming.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "notes.txt"]
    maker.release()
    running.store.close()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_nothing_is_acknowledged_after_the_file_was_removed(tmp_path, is_replaced):
    scene = Scene(tmp_path / "store")
    scene.insert(0)
    (tmp_path / "store").unlink()
    if is_replaced:
        Scene(tmp_path / "store").store.close()
    with pytest.raises(LostMemoryError, match="store"):
        scene.insert(1)
    with pytest.raises(LostMemoryError):
        list(scene.server.receipts())


def make_welcome():
    config = Config(
        actor=ActorConfig(num_actors=4, segment_length=5),
        replay=ReplayConfig(capacity=1_000, max_bytes=100_000, min_size_to_sample=10, num_samplers=2),
        learner=LearnerConfig(batch_size=B),
    )
    facts = {"run_id": RUN, "schema": PIXELS, "num_parameters": 7, "memory": "", "replay": [], "streams": []}
    return Welcome(route=Route("host", 1), session=1, config=config, **facts)


def test_store_is_created_then_attached_then_restored(tmp_path, caplog):
    caplog.set_level("INFO")
    path, folder, welcome = tmp_path / "store", SnapshotFolder(tmp_path / "snapshots"), make_welcome()
    store, counters = open_memory(path, welcome, folder)
    store.insert(make_segment(PIXELS, number=0, base=0))
    counters.note_sent(1, 12)
    store.close()
    attached, counters = open_memory(path, welcome, folder)
    assert (attached.num_inserted, counters.num_drawn) == (5, 12)
    assert attached.store_incarnation == store.store_incarnation
    SnapshotWriter(path, PIXELS.table, folder, run_id=RUN, num_drawn=lambda: counters.num_drawn).take()
    attached.close()
    path.unlink()  # As after a restart of the host: old counters are not used.
    restored, counters = open_memory(path, welcome, folder)
    assert (restored.num_inserted, counters.num_drawn) == (5, 12)
    assert restored.store_incarnation != store.store_incarnation
    steps = ["allocating", "created", "attached", "allocating", "restored"]
    assert [record.getMessage().split()[0] for record in caplog.records] == steps
    restored.close()
    path.unlink()
    without, counters = open_memory(path, welcome)
    assert (without.num_inserted, counters.num_drawn) == (0, 0)
    without.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda regions: regions.records["key"].__setitem__(3, 9),
        lambda regions: regions.streams["contiguous"].__setitem__((2, 1), 1 << 40),
    ],
    ids=["record", "row"],
)
def test_damaged_store_is_removed_only_if_there_is_a_snapshot(tmp_path, caplog, damage):
    path, folder, welcome = tmp_path / "store", SnapshotFolder(tmp_path / "snapshots"), make_welcome()
    store, _ = open_memory(path, welcome, folder)
    store.insert(make_segment(PIXELS, number=0, base=0))
    whole = path.read_bytes()
    damage(open_file(path, PIXELS.table, writable=True))
    store.close()
    for snapshots in (None, folder):
        with pytest.raises(UsageError, match=r"\b1 of [58]\b"):
            open_memory(path, welcome, snapshots)
    damaged = path.read_bytes()
    path.write_bytes(whole)
    SnapshotWriter(path, PIXELS.table, folder, run_id=RUN, num_drawn=lambda: 12).take()
    path.write_bytes(damaged)
    restored, counters = open_memory(path, welcome, folder)
    assert (restored.num_inserted, counters.num_drawn) == (5, 12)
    assert restored.store_incarnation != store.store_incarnation
    assert (
        restored.insert(make_segment(PIXELS, number=1, base=0)) is InsertOutcome.STORED
    )  # A damaged row says: stored.
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    restored.close()


@pytest.mark.parametrize("num_bytes", [0, 8_192])
def test_incomplete_memory_is_removed_and_logged(tmp_path, caplog, num_bytes):
    path = tmp_path / "store"
    path.write_bytes(bytes(num_bytes))
    path.chmod(0o600)
    owner = FileLock(path)
    with pytest.raises(UsageError, match="not a replay memory"):
        open_memory(path, make_welcome())  # Another process has the lock.
    owner.release()
    store, _ = open_memory(path, make_welcome())
    assert store.num_inserted == 0
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert message.startswith(f"removed {path}")
    store.close()


def test_the_sampler_refuses_a_store_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"cannot open .*none"):
        StoreReader(tmp_path / "none", PIXELS.table)


def test_counters_remain_when_the_writer_restarts(tmp_path):
    """Otherwise, inserts would wait until all earlier samples are drawn again."""
    path = tmp_path / "apex-9-0.counters"
    before = SamplerCounters(2, path)
    before.note_sent(1, 500)
    after = SamplerCounters(2, path)
    assert after.num_drawn == 500
    after.activate(1)
    assert after.next_number(1) == 1  # The next batch of that sampler.
    assert after.in_flight(1) == 0


def test_answer_before_send_returns_gives_credit(scene):
    """A learner on the same host may answer so fast. Without the credit, the sampler would stop for CREDIT_SECONDS."""
    scene.insert(0, 1)
    scene.answers_at_once = True
    assert all(scene.draw() for _ in range(20))
    assert scene.counters.in_flight(0) == 0


def test_credit_returns_to_both_users_of_one_row(scene):
    """Two learners use one memory by mistake. The second does not take credit from the first permanently."""
    scene.insert(0, 1)
    other = None
    for _ in range(3):
        assert scene.draw()
        other = other or scene.make_drawer()
        for drawer in (other, other, other, scene.drawer, scene.drawer, scene.drawer):
            assert scene.draw(drawer)
            scene.answer(scene.batches[-1])
    assert scene.counters.in_flight(0) == 0


def test_malformed_messages_are_counted_and_logged_rarely(scene, caplog):
    unknown = CODEC.encode_segment(make_segment(PIXELS, actor_id=99))
    honest = CODEC.encode_segment(make_segment(PIXELS, number=0, base=0))
    receipts = each(scene.server.insert([[b"x"], unknown] * 100 + [honest]))
    assert [receipt.contiguous for receipt in receipts] == [1]
    assert scene.server.status().refused == 200
    assert len(caplog.records) == 7  # at 1, 2, 4 ... 64
    assert "refused 64 messages" in caplog.text


def test_sample_rate_after_a_restore_starts_at_zero(scene):
    scene.counters.continue_from(1_000_000)
    server = ReplayServer(scene.store, CODEC, scene.counters, RateLimiter(10, 0.0, 0.1, False), clock=scene.clock)
    scene.now += 1
    status = server.status()
    assert (status.num_drawn, status.samples_per_second) == (1_000_000, 0)


def test_counters_without_space_are_refused(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        with pytest.raises(UsageError, match=r"192 bytes .*apex-1-0\.counters"):
            SamplerCounters(2, tmp_path / "apex-1-0.counters")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
