"""Writer, reader and snapshots agree with the naive twin after any sequence of operations, crashes and damage."""

import shutil
import tempfile
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.steps import Crash, crash_at
from support.store_builders import (
    SCHEMA,
    SETTINGS,
    STEPS,
    NaiveStore,
    assert_same,
    attach,
    create,
    make_segment,
    make_update,
    open_reader,
)

from apexreplay.errors import DamagedMemoryError
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.restore import restore
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store.deduplication import InsertOutcome
from apexreplay.store.file import open_file

pytestmark = pytest.mark.no_cover  # Coverage would double the time; the tests of each module measure it.

RUN = 0xABC
SIZES = [
    {"capacity": 40, "max_bytes": 4000},  # both limits evict
    {"capacity": 23, "max_bytes": 100_000},  # only transitions
    {"capacity": 60, "max_bytes": 1_201},  # only bytes, and no multiple of 8
]
ACTORS = st.integers(0, 3)  # The store has no actor 3.
NUMBERS = st.sampled_from([0, 0, 0, 0, 0, 1, 2, -1, -3, 30, 70])  # counted from the next number of the stream


class Store(RuleBasedStateMachine):
    """A store that may be full, restarted, restored or damaged at any time, and its naive twin."""

    @initialize(sizes=st.sampled_from(SIZES))
    def begin(self, sizes):
        self.place = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.path, self.folder = self.place / "store", SnapshotFolder(self.place / "snapshots")
        self.sizes, self.rng = sizes, np.random.default_rng(0)
        self.incarnation = 77
        self.streams = {}  # actor id -> (incarnation, next number)
        self.saved = None  # the twin in the newest snapshot
        self._use(create(self.path, **sizes), NaiveStore(**sizes))

    def _use(self, writer, naive):
        self.writer, self.naive, self.reader = writer, naive, open_reader(self.path)
        options = {"run_id": RUN, "num_drawn": lambda: 0, "file_bytes": 600}
        self.snapshotter = SnapshotWriter(self.path, SCHEMA.table, self.folder, **options)

    def _next_segment(self, actor_id, ahead, behind, restarts=False):
        incarnation, next_number = self.streams.get(actor_id, (1, 0))
        if restarts:
            incarnation, next_number = incarnation + 1, 0
        number = max(0, next_number + ahead)
        self.streams[actor_id] = incarnation, max(next_number, number + 1) if ahead < 30 else next_number
        return make_segment(number, actor_id, incarnation, base=max(0, number - behind))

    @rule(actor_id=ACTORS, ahead=NUMBERS, behind=st.integers(0, 80), restarts=st.sampled_from([False] * 9 + [True]))
    def insert(self, actor_id, ahead, behind, restarts):
        segment = self._next_segment(actor_id, ahead, behind, restarts)
        assert self.writer.insert(segment) is self.naive.insert(segment)

    @rule(actor_id=ACTORS)
    def insert_a_segment_of_an_earlier_life(self, actor_id):
        incarnation, number = self.streams.get(actor_id, (1, 0))
        segment = make_segment(number, actor_id, incarnation - 1)
        assert self.writer.insert(segment) is self.naive.insert(segment)

    @rule(
        keys=st.lists(st.integers(-50, 10), max_size=6),
        priority=st.sampled_from([0.0, 0.25, 1.0, 2.0, 3.5, -1.0, np.nan]),
    )
    def set_priorities(self, keys, priority):
        keys = [self.naive.num_inserted + key for key in keys]
        priorities = [priority] * len(keys)
        update = make_update(keys, priorities, self.incarnation)
        assert self.writer.update_priorities(update) == self.naive.update(keys, priorities)

    @rule(actor_id=ACTORS, step=st.sampled_from(STEPS))
    def crash_during_an_insert(self, actor_id, step):
        segment = self._next_segment(actor_id, 0, 80)
        self.writer.close()
        doomed = attach(self.path, steps=crash_at(step), **self.sizes)
        word = self.naive.next_word
        try:
            assert doomed.insert(segment) is self.naive.insert(segment) is not InsertOutcome.STORED
        except Crash:
            if step == "leaves":  # It was committed.
                assert self.naive.insert(segment) is InsertOutcome.STORED
            elif step != "watermark":  # Room had been made for it.
                self.naive.insert(segment, crash=True)
                self.naive.forget_last()
            if step in ("evict", "bytes"):
                self.naive.next_word = word  # Its bytes had not been begun.
        doomed.close()
        self._use(attach(self.path, **self.sizes), self.naive)

    @rule()
    def start_the_server_again(self):
        self.writer.close()
        self._use(attach(self.path, **self.sizes), self.naive)

    @rule()
    def save(self):
        snapshot = self.snapshotter.take()
        assert (snapshot is None) == (not self.naive.transitions)
        if snapshot is not None:
            self.saved = deepcopy(self.naive)

    @rule()
    def lose_the_memory(self):
        self.writer.close()
        self.path.unlink()
        self.incarnation += 1
        options = {"run_id": RUN, "store_incarnation": self.incarnation}
        restored = restore(self.folder, self.path, SCHEMA.table, SETTINGS._replace(**self.sizes), **options)
        assert (restored is None) == (self.saved is None)
        if restored is None:
            writer = create(self.path, store_incarnation=self.incarnation, **self.sizes)
            return self._use(writer, NaiveStore(**self.sizes))
        self._use(restored, deepcopy(self.saved))
        self.naive.remove_gaps()

    @precondition(lambda self: self.naive.transitions)
    @rule(where=st.sampled_from(["record", "frames", "row"]), pick=st.integers(0, 10_000), bit=st.integers(0, 7))
    def damage_the_memory(self, where, pick, bit):
        self.writer.close()
        regions = open_file(self.path, SCHEMA.table, writable=True)
        key = self.naive.num_inserted - 1 - pick % len(self.naive.transitions)
        segment, _, _ = self.naive.transitions[key]
        record = regions.records[key % self.sizes["capacity"] :][:1]
        if where == "record":
            data = record.view(np.uint8)[: -record["unused"].nbytes or None]
        elif where == "frames":
            start = int(record["segment"][0]) % regions.sizes.arena_bytes
            data = np.frombuffer(regions.arena, np.uint8)[start : start + len(segment.blob)]
        else:
            data = regions.streams.reshape(-1).view(np.uint8)
        data[pick % len(data)] ^= 1 << bit
        with pytest.raises(DamagedMemoryError, match=str(self.path)):
            attach(self.path, **self.sizes)
        self.lose_the_memory()

    @invariant()
    def store_equals_its_twin(self):
        assert_same(self.writer, self.reader, self.naive, self.rng)

    def teardown(self):
        self.writer.close()
        shutil.rmtree(self.place)


@pytest.mark.timeout(600)  # It takes seconds of CPU, which is long on a busy machine.
def test_store_equals_its_twin_after_any_operations():
    run_state_machine_as_test(
        Store,
        settings=settings(
            max_examples=30,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
