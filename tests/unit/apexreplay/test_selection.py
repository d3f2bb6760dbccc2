"""Items that are selected in an order, and items that are too old, beside a naive list of all items."""

import numpy as np
import pytest
from support.builders import RUN

from apexreplay.client.segment_buffer import SegmentBuffer
from apexreplay.frame_blob import make_blob
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.batch_drawer import BatchDrawer, DrawSettings
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.sampling.selection import Selection
from apexreplay.server.server import ReplayServer
from apexreplay.store.layout import StoreSettings
from apexreplay.store.reader import StoreReader
from apexreplay.store.writer import StoreWriter
from apexreplay.tables import table
from apexreplay.types import PriorityUpdate, Segment, Stream
from apexreplay.wire.codec import Codec

NUMBERS = table("numbers", {"x": "int64"})
CODEC = Codec(RUN, NUMBERS)
SETTINGS = StoreSettings(capacity=60, max_bytes=100_000, num_streams=2, priority_exponent=0.6, min_priority=1e-3)
NO_LIMIT = RateLimiter(1, 0.0, 0.0, False)


class Numbers:
    """A store whose item with key k has x = k, and the versions of all items."""

    def __init__(self, path, **settings):
        self.path, self.settings = path, SETTINGS._replace(**settings)
        self.writer = StoreWriter.create(path, NUMBERS, self.settings, store_incarnation=7)
        self.reader = StoreReader(path, NUMBERS)
        self.versions: list[int] = []
        self.num_segments = 0

    def segment(self, count, version=0):
        buffer = SegmentBuffer(NUMBERS)
        for x in range(len(self.versions), len(self.versions) + count):
            buffer.append({"x": x})
        return Segment(Stream(0, 1), self.num_segments, version, *buffer.cut()[1:])

    def insert(self, count, version=0):
        self.writer.insert(self.segment(count, version))
        self.versions += [version] * count
        self.num_segments += 1

    def reopen(self, **settings):
        """Opens the store after its writer was killed."""
        self.settings = self.settings._replace(**settings)
        self.writer.close()
        self.writer = StoreWriter.attach(self.path, NUMBERS, self.settings)

    def drawer(self, counters, count, *selection):
        settings = DrawSettings(0, 1, count, 10**9, NO_LIMIT, Selection(*selection))
        return BatchDrawer(self.reader, counters, 0, settings, np.random.default_rng(1))


def keys_of(part):
    """Returns the keys of a batch, whose contents belong to them."""
    values = np.frombuffer(part.blob, "<i8", offset=len(part.blob) - 8 * len(part.records))
    np.testing.assert_array_equal(values, part.records["key"])
    return part.records["key"].tolist()


@pytest.mark.parametrize("lag", [-1, 0, 3])
@pytest.mark.parametrize("draws_per_item", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_queue_gives_each_item_a_number_of_times_in_order(tmp_path, draws_per_item, lag, seed):
    numbers, rng = Numbers(tmp_path / "t", max_version_lag=lag), np.random.default_rng(seed)
    counters, drawn, version = SamplerCounters(1, tmp_path / "c"), [], 0
    for _ in range(400):
        if rng.random() < 0.5:
            version += int(rng.integers(-1, 3)) if version else 1
            numbers.insert(int(rng.integers(1, 12)), version)
        if rng.random() < 0.1:  # The server was killed.
            numbers.reopen()
            counters = SamplerCounters(1, tmp_path / "c")
        drawer = numbers.drawer(counters, int(rng.integers(1, 20)), "queue", draws_per_item)
        part = drawer.draw()
        live = range(numbers.writer.first_key, len(numbers.versions))
        oldest = max(numbers.versions, default=0) - lag if lag >= 0 else -1
        left = [
            key
            for key in live
            for _ in range(draws_per_item)
            if numbers.versions[key] >= oldest and key >= (drawn[-1] if drawn else 0)
        ]
        done = drawn.count(drawn[-1]) if drawn and left and left[0] == drawn[-1] else 0
        expected = left[done : done + drawer.part_size]
        if len(expected) < drawer.part_size:
            assert part is None
            continue
        assert keys_of(part) == expected
        np.testing.assert_allclose(part.records["probability"], 1 / len(live))
        if rng.random() < 0.2:  # The client has gone; the next batch has these items.
            drawer.take_back()
        else:
            drawn += expected
    assert len(drawn) > 300
    assert max(drawn.count(key) for key in set(drawn)) == draws_per_item
    assert drawn == sorted(drawn)


def test_the_newest_items_are_given_again_and_again(tmp_path):
    numbers, counters = Numbers(tmp_path / "t", max_version_lag=1), SamplerCounters(1)
    drawer = numbers.drawer(counters, 10, "newest")
    assert drawer.draw() is None
    numbers.insert(9)
    assert drawer.draw() is None
    for _ in range(20):
        numbers.insert(8)
        newest = list(range(len(numbers.versions) - 1, len(numbers.versions) - 11, -1))
        assert keys_of(drawer.draw()) == keys_of(drawer.draw()) == newest
    numbers.insert(5, version=2)
    assert drawer.draw() is None  # The others are too old.
    assert numbers.writer.size == 5
    numbers.insert(4, version=0)
    numbers.insert(5, version=1)
    assert keys_of(drawer.draw()) == [*range(182, 177, -1), *range(173, 168, -1)]


@pytest.mark.parametrize("lag", [0, 2, 10])
def test_items_that_are_too_old_are_never_drawn(tmp_path, lag):
    numbers, rng = Numbers(tmp_path / "t", capacity=3_000, max_version_lag=lag), np.random.default_rng(lag)
    for newest in range(60):
        for _ in range(3):
            numbers.insert(int(rng.integers(1, 12)), max(0, newest - int(rng.integers(0, 4))))
        if newest % 20 == 7:
            numbers.reopen()
        oldest, versions = max(numbers.versions) - lag, np.array(numbers.versions)
        if lag < 3:  # Their leaves stay, whatever priorities they get.
            keys = np.arange(numbers.writer.first_key, len(versions))
            numbers.writer.update_priorities(PriorityUpdate(0, 7, 0, 0, keys, np.ones(len(keys), np.float32)))
        sample = numbers.reader.sample(64, rng)
        assert sample is not None
        assert (versions[sample.records["key"]] >= oldest).all()
        assert (sample.records["version"] == versions[sample.records["key"]]).all()
        assert versions[numbers.writer.first_key] >= oldest
    fresh = np.flatnonzero(versions >= oldest)
    drawn = np.concatenate([numbers.reader.sample(64, rng).records["key"] for _ in range(40)])
    assert set(drawn) == set(fresh)


def test_a_restart_may_change_which_versions_are_too_old(tmp_path):
    numbers, rng = Numbers(tmp_path / "t"), np.random.default_rng(1)
    for version in (1, 2, 6, 3, 4, 5):
        numbers.insert(10, version)
    for lag, versions in ((-1, {1, 2, 3, 4, 5, 6}), (2, {4, 5, 6}), (3, {4, 5, 6}), (-1, {1, 2, 3, 4, 5, 6})):
        numbers.reopen(max_version_lag=lag)
        assert set(numbers.reader.sample(500, rng).records["version"]) == versions


def test_inserts_do_not_wait_for_draws_from_items_that_are_all_too_old(tmp_path):
    """As after a trainer that began again with version 0. Both sides would wait for ever."""
    numbers, counters = Numbers(tmp_path / "t", max_version_lag=0), SamplerCounters(1)
    server = ReplayServer(numbers.writer, CODEC, counters, RateLimiter(1, 1.0, 0.1, True))
    assert server.check_limiter()
    numbers.insert(20, version=5)
    assert not server.check_limiter()
    for _ in range(4):
        numbers.insert(15, version=0)
    assert numbers.reader.sample(1, np.random.default_rng(1)) is None
    assert server.check_limiter()
    numbers.insert(1, version=5)
    assert not server.check_limiter()


def test_inserts_into_a_queue_wait_for_its_draws(tmp_path):
    numbers, counters, queue = Numbers(tmp_path / "t"), SamplerCounters(1), Selection("queue", 2)
    server = ReplayServer(numbers.writer, CODEC, counters, NO_LIMIT, queue=queue, segment=(20, 1_000))
    drawer, drawn = numbers.drawer(counters, 10, *queue), []
    for _ in range(30):
        while server.check_limiter():
            numbers.insert(20)
        assert numbers.writer.num_inserted - len(drawn) // 2 > 40
        drawn += keys_of(drawer.draw())
        drawer.confirm()
    assert drawn == [key for key in range(150) for _ in range(2)]


def test_inserts_wait_until_a_batch_cannot_be_taken_back(tmp_path):
    numbers, counters, queue = Numbers(tmp_path / "t"), SamplerCounters(1), Selection("queue", 1)
    server = ReplayServer(numbers.writer, CODEC, counters, NO_LIMIT, queue=queue, segment=(20, 1_000))
    drawer = numbers.drawer(counters, 40, *queue)
    while server.check_limiter():
        numbers.insert(20)
    for _ in range(3):  # The client of each batch is gone.
        keys = keys_of(drawer.draw())
        assert keys == list(range(40))
        assert not server.check_limiter()
        drawer.take_back()
    drawer.draw()
    drawer.confirm()
    assert server.check_limiter()
    assert SamplerCounters(1).num_given == 0
    assert counters.num_given == 40
    numbers.insert(20)
    drawer.draw()
    numbers.drawer(counters, 40, *queue)  # What a killed sampler process has drawn counts as given.
    assert counters.num_given == counters.num_drawn == 80


def test_a_queue_whose_inserts_wait_refuses_items_far_apart(tmp_path):
    for selection, num_steps, refusals in (
        (None, 12, {}),
        (Selection("queue", 1), 11, {}),
        (Selection("queue", 1), 12, {"steps": 1}),
    ):
        numbers = Numbers(tmp_path / f"{num_steps}{bool(selection)}")
        server = ReplayServer(numbers.writer, CODEC, SamplerCounters(1), NO_LIMIT, queue=selection)
        segment = numbers.segment(10)._replace(blob=make_blob([bytes(8)] * num_steps))
        server.insert([CODEC.encode_segment(segment)])
        assert (numbers.writer.num_inserted, server.status().refusals) == (10 * (not refusals), refusals)
