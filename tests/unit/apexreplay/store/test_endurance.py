"""After many operations, a store equals a queue of segments, and every leaf equals its priority."""

import math
from collections import Counter, deque

import numpy as np
import pytest
from support.store_builders import (
    MIN_PRIORITY,
    SCHEMA,
    create,
    decode,
    expect,
    make_segment,
    make_update,
    open_reader,
    weigh,
)

from apexreplay.store.deduplication import InsertOutcome
from apexreplay.store.file import open_file

pytestmark = pytest.mark.no_cover  # Coverage would double the time; test_writer.py and test_reader.py measure it.

WILD = [np.nan, np.inf, -np.inf, -1, -1e-45, -0.0, 0, 1e-45, 1e-38, 3.4e38]  # denormal ones and huge ones among them


class Line:
    """A queue of segments over a ring of bytes: the oldest leave until the next one fits."""

    def __init__(self, capacity, max_bytes):
        self.capacity, self.num_bytes = capacity, max_bytes // 8 * 8
        self.segments = deque()  # (first key, segment, where its bytes begin and end in the ring)
        self.num_inserted = self.size = self.end = 0
        self.left = Counter()  # segments that had to leave, by cause

    def insert(self, segment):
        """Returns the keys that leave."""
        count, length = len(segment.records), -(-len(segment.blob) // 8) * 8
        begin = self.end if self.end + length <= self.num_bytes else 0
        self.end = begin + length
        gone = []
        while self.size + count > self.capacity:
            gone += self._leave("capacity")
        while any(begin < end and start < self.end for _, _, start, end in self.segments):
            gone += self._leave("bytes")
        self.segments.append((self.num_inserted, segment, begin, self.end))
        self.num_inserted += count
        self.size += count
        return gone

    def _leave(self, cause):
        first, segment, _, _ = self.segments.popleft()
        self.size -= len(segment.records)
        self.left[cause] += 1
        return range(first, first + len(segment.records))

    def contents(self):
        """Key -> what `decode` finds for it."""
        return {
            first + index: expect(segment, index)
            for first, segment, _, _ in self.segments
            for index in range(len(segment.records))
        }


def random_priorities(rng, count):
    """Returns priorities of ten decades; one in a hundred is invalid or out of range."""
    priorities = rng.random(count, np.float32) * np.float32(10) ** rng.integers(-4, 7, count).astype(np.float32)
    return np.where(rng.random(count) < 0.01, rng.choice(WILD, count), priorities).astype(np.float32)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("sizes", "causes"),
    [
        ({"capacity": 60, "max_bytes": 1_100}, {"capacity", "bytes"}),
        ({"capacity": 17, "max_bytes": 100_000}, {"capacity"}),
        ({"capacity": 1_000, "max_bytes": 1_203}, {"bytes"}),
    ],
)
def test_eviction_removes_only_the_oldest_whole_segments_needed(path, sizes, causes, seed):
    rng = np.random.default_rng(seed)
    writer, line = create(path, **sizes), Line(**sizes)
    reader = open_reader(path)
    for number in range(400):
        segment = make_segment(number, count=int(rng.integers(1, 16)), priority=1)
        assert writer.insert(segment) is InsertOutcome.STORED
        gone = line.insert(segment)
        assert gone == list(range(writer.first_key - len(gone), writer.first_key))
        assert (writer.num_inserted, writer.size) == (line.num_inserted, line.size)
        if number % 20 == 0:
            assert decode(reader.sample(4 * line.size, rng)) == line.contents()
    assert set(line.left) == causes
    writer.close()


def test_leaves_equal_priorities_after_a_million_operations(path):
    """Cyclic inserts, and priorities of live, overwritten and future keys; compares sometimes."""
    rng = np.random.default_rng(0)
    sizes = {"capacity": 5_003, "max_bytes": 14_005}
    segments = [make_segment(n, count=1 + n % 100, priority=random_priorities(rng, 1 + n % 100)) for n in range(300)]
    writer, reader, line = create(path, **sizes), open_reader(path), Line(**sizes)
    tree = open_file(path, SCHEMA.table, writable=False).tree
    priorities = {}  # of live keys
    refused = Counter()
    operations = number = 0

    def take(key, priority, otherwise):
        if priority >= 0:
            priorities[key] = priority
        else:
            refused["priority is negative" if priority < 0 else "priority is not a number"] += 1
            priorities[key] = otherwise

    def compare():
        leaves = np.zeros(writer.capacity)
        for key, priority in priorities.items():
            leaves[key % writer.capacity] = weigh(priority)
        np.testing.assert_array_equal(tree.weights(np.arange(writer.capacity)), leaves)
        tree.check()
        # Each of the 13 additions between a leaf and the root rounds by half a unit at most.
        assert tree.total == pytest.approx(math.fsum(leaves), rel=13 * 2**-53, abs=0)
        contents = line.contents()
        assert priorities.keys() == contents.keys()
        assert all(contents[key] == entry for key, entry in decode(reader.sample(512, rng)).items())

    while operations < 10**6:
        segment = segments[number % len(segments)]
        assert writer.insert(segment._replace(number=number, base=number)) is InsertOutcome.STORED
        for key in line.insert(segment):
            del priorities[key]
        for key, priority in enumerate(
            segment.records["priority"].tolist(), writer.num_inserted - len(segment.records)
        ):
            take(key, priority, MIN_PRIORITY)
        keys = rng.integers(line.num_inserted - line.size - 300, line.num_inserted + 20, 512)
        update = random_priorities(rng, 512)
        stale = writer.update_priorities(make_update(keys, update))
        for key, priority in zip(keys.tolist(), update.tolist(), strict=True):
            if key in priorities:
                take(key, priority, priorities[key])
            else:
                stale -= 1
        assert stale == 0
        operations += len(segment.records) + len(keys)
        number += 1
        if number % 500 == 0:
            compare()
    compare()
    assert writer.num_inserted > 15 * writer.capacity
    assert min(line.left["capacity"], line.left["bytes"]) > 100
    assert writer.refused == refused
    writer.close()
