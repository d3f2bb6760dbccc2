"""Segments whose bytes identify their place, a store for them, and its naive twin."""

import itertools
import struct
from collections import Counter
from pathlib import Path

import numpy as np

from apex.schema import Schema
from apexreplay.files.atomic_files import uninterrupted
from apexreplay.frame_blob import make_blob
from apexreplay.store.deduplication import InsertOutcome
from apexreplay.store.layout import StoreSettings
from apexreplay.store.priority_weights import MAX_STORED_PRIORITY
from apexreplay.store.reader import StoreReader
from apexreplay.store.writer import StoreWriter
from apexreplay.types import PriorityUpdate, Segment, Stream

SCHEMA = Schema(frame_shape=(16,), frame_dtype="uint8", stack=4, num_actions=9, n_step=3, codec="lz4")
MIN_PRIORITY = 0.5
SETTINGS = StoreSettings(capacity=40, max_bytes=4000, num_streams=3, priority_exponent=1.0, min_priority=MIN_PRIORITY)
STEPS = ["watermark", "evict", "bytes", "records", "row", "commit", "leaves"]


def write_number(path, offset, number, kind="<q"):
    """Changes 8 bytes of the file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack(kind, number))


def create(path: Path, *, store_incarnation=77, steps=uninterrupted, fill=None, **sizes):
    settings = SETTINGS._replace(**sizes)
    return StoreWriter.create(path, SCHEMA.table, settings, store_incarnation=store_incarnation, fill=fill, steps=steps)


def attach(path: Path, *, steps=uninterrupted, schema=SCHEMA, **sizes):
    return StoreWriter.attach(path, schema.table, SETTINGS._replace(**sizes), steps=steps)


def make_frame(actor_id, number, index):
    """Returns 0 ... 32 bytes, because the lengths of compressed frames differ."""
    return (f"{actor_id}:{number}:{index};".encode() * 8)[: (7 * number + 5 * index) % 33]


def make_frames(actor_id, number, count):
    return [make_frame(actor_id, number, index) for index in range(count)]


def make_segment(number, actor_id=0, incarnation=1, base=0, count=None, **fields):
    """Returns a segment of 1 ... 6 transitions with integer priorities, identified by stream and number."""
    rng = np.random.default_rng([actor_id, incarnation, number])
    count = int(rng.integers(1, 7)) if count is None else count
    num_frames = int(rng.integers(2, 12))
    records = np.zeros(count, SCHEMA.table.record)
    records["n_step_return"] = 10 * number + np.arange(count)
    records["discount"] = rng.random(count)
    records["priority"] = rng.integers(1, 6, count)
    records["action"] = np.arange(count)
    records["reward"] = number
    records["step_discount"] = 0.5
    records["next_frame"] = rng.integers(1, num_frames, count)
    records["frame"] = records["next_frame"] - rng.integers(1, np.minimum(3, records["next_frame"]) + 1)
    records["depth"] = 1 + rng.integers(0, np.minimum(4, records["frame"] + 1))
    records["next_depth"] = 1 + rng.integers(0, np.minimum(4, records["next_frame"] + 1))
    for name, value in fields.items():
        records[name] = value
    blob = make_blob(make_frames(actor_id, number, num_frames))
    return Segment(Stream(actor_id, incarnation), number, 1000 + number, records, blob, base)


def make_update(keys, priorities, store_incarnation=77):
    return PriorityUpdate(0, store_incarnation, 0, 0, np.array(keys, np.int64), np.array(priorities, np.float32))


def weigh(priority, exponent=1.0):
    return min(max(float(priority), MIN_PRIORITY), MAX_STORED_PRIORITY) ** exponent


class NaiveStore:
    """The naive store: a dictionary of all transitions, and an arena of words that each have the number of their last
    writer.
    """

    def __init__(self, capacity=40, max_bytes=4000, num_streams=3, **_):
        self.capacity, self.num_words, self.num_streams = capacity, max_bytes // 8, num_streams
        self.transitions = {}  # key -> [segment, index, priority]
        self.segments = []  # oldest first: (keys, words)
        self.num_inserted = self.next_word = 0
        self.streams = {}  # actor id -> (incarnation, base, numbers)

    def insert(self, segment, *, crash=False):
        """`crash`: stop after the eviction, before the first byte."""
        actor_id, incarnation = segment.stream
        if actor_id >= self.num_streams:
            return InsertOutcome.UNKNOWN_ACTOR
        known, base, numbers = self.streams.get(actor_id, (0, 0, frozenset()))
        if incarnation < known:
            return InsertOutcome.OLDER_INCARNATION
        if incarnation > known:
            base, numbers = 0, frozenset()
        base = max(base, segment.base)
        if segment.number < base or segment.number in numbers:
            return InsertOutcome.DUPLICATE
        if segment.number > self.contiguous(base, numbers) + 64:
            return InsertOutcome.TOO_FAR_AHEAD
        self._make_room(segment)
        if crash:
            return InsertOutcome.STORED
        self.streams[actor_id] = (incarnation, base, numbers | {segment.number})
        for index, record in enumerate(segment.records):
            self.transitions[self.num_inserted + index] = [segment, index, float(record["priority"])]
        self.num_inserted += len(segment.records)
        return InsertOutcome.STORED

    def _make_room(self, segment):
        count, num_words = len(segment.records), -(-len(segment.blob) // 8)
        first = self.next_word if self.next_word + num_words <= self.num_words else 0
        words = range(first, first + num_words)
        while len(self.transitions) + count > self.capacity:
            self._evict()
        while any(set(words) & set(others) for _, others in self.segments):
            self._evict()
        self.segments.append((range(self.num_inserted, self.num_inserted + count), words))
        self.next_word = words.stop

    def remove_gaps(self):
        """Places the blobs next to each other from the start of the arena, as restoring a snapshot does."""
        segments, self.segments, self.next_word = self.segments, [], 0
        for keys, words in segments:
            self.segments.append((keys, range(self.next_word, self.next_word + len(words))))
            self.next_word += len(words)

    def forget_last(self):
        """Removes the last segment, as after a crash between the eviction and the insert."""
        self.segments.pop()

    @property
    def bytes_used(self):
        """Returns the words from the oldest blob to the end of the newest, with skipped words."""
        return 8 * ((self.next_word - self.segments[0][1].start - 1) % self.num_words + 1) if self.segments else 0

    def _evict(self):
        keys, _ = self.segments.pop(0)
        for key in keys:
            del self.transitions[key]

    def update(self, keys, priorities):
        stale = 0
        for key, priority in zip(keys, priorities, strict=True):
            if key not in self.transitions:
                stale += 1
            elif priority >= 0:
                self.transitions[key][2] = priority
        return stale

    @staticmethod
    def contiguous(base, numbers):
        while base in numbers:
            base += 1
        return base

    def receipt(self, actor_id):
        """Returns incarnation, contiguous number, and the set of later numbers."""
        incarnation, base, numbers = self.streams.get(actor_id, (0, 0, frozenset()))
        contiguous = self.contiguous(base, numbers)
        return incarnation, contiguous, {number for number in numbers if number > contiguous}


def decode(drawn):
    """Returns all facts of each transition by key, with its frames; checks that copies are equal."""
    table = np.frombuffer(drawn.blob, "<u4", int.from_bytes(drawn.blob[:4], "little") // 4)
    frames = [drawn.blob[start:stop] for start, stop in itertools.pairwise(table)]
    assert table[-1] == len(drawn.blob)
    assert sum(drawn.records["num_frames"].tolist()) == len(frames)
    found, first = {}, 0
    for record in drawn.records:
        own = frames[first : first + record["num_frames"]]
        first += int(record["num_frames"])
        entry = (
            float(record["n_step_return"]),
            float(record["discount"]),
            int(record["version"]),
            int(record["action"]),
            own[record["frame"] + 1 - record["depth"] : record["frame"] + 1],
            own[record["next_frame"] + 1 - record["next_depth"] : record["next_frame"] + 1],
        )
        assert len(entry[4]) == record["depth"]
        assert len(entry[5]) == record["next_depth"]
        assert found.setdefault(int(record["key"]), entry) == entry
    return found


def expect(segment, index):
    """Returns the expected result of `decode` for a transition."""
    record = segment.records[index]
    frames = make_frames(segment.stream.actor_id, segment.number, int(record["next_frame"]) + 1)
    return (
        float(record["n_step_return"]),
        float(record["discount"]),
        segment.version,
        int(record["action"]),
        frames[record["frame"] + 1 - record["depth"] : record["frame"] + 1],
        frames[record["next_frame"] + 1 - record["next_depth"] :],
    )


def assert_same(writer, reader, naive, rng):
    """Asserts that the store agrees with the naive one in every respect.

    Weights are multiples of a half, so a draw from each quarter of a unit of their sum selects each transition exactly
    four times its weight.
    """
    assert (writer.num_inserted, writer.size) == (naive.num_inserted, len(naive.transitions))
    assert writer.first_key == naive.num_inserted - len(naive.transitions)
    assert writer.bytes_used == naive.bytes_used
    for actor_id in range(naive.num_streams):
        receipt = writer.receipt(actor_id)
        above = {receipt.contiguous + 1 + bit for bit in range(64) if receipt.bitmap >> bit & 1}
        assert (receipt.stream.incarnation, receipt.contiguous, above) == naive.receipt(actor_id)
    weights = {key: weigh(priority) for key, (_, _, priority) in naive.transitions.items()}
    total = sum(weights.values())
    drawn = reader.sample(int(4 * total) or 1, rng)
    if not weights:
        assert drawn is None
        return
    keys = drawn.records["key"].tolist()
    assert Counter(keys) == {key: 4 * weight for key, weight in weights.items()}
    assert drawn.records["probability"].tolist() == [weights[key] / total for key in keys]
    assert drawn.num_transitions == len(weights)
    assert decode(drawn) == {key: expect(segment, index) for key, (segment, index, _) in naive.transitions.items()}


def open_reader(path, **more):
    return StoreReader(path, SCHEMA.table, **more)
