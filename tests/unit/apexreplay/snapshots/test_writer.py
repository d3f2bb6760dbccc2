"""A snapshot of a store in use equals the store; damaged files are named and never used."""

import errno
import multiprocessing
import os
import re
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from support.steps import CallAt, Crash
from support.store_builders import (
    SCHEMA,
    SETTINGS,
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
)
from support.waiting import DEADLINE, until

from apexreplay.errors import SnapshotError, UsageError
from apexreplay.files.atomic_files import uninterrupted
from apexreplay.process.children import stop_children
from apexreplay.process.lifecycle import Stop
from apexreplay.server.open_store import open_store
from apexreplay.server.snapshot_process import SnapshotProcess, take_snapshots
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.restore import restore
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store.deduplication import InsertOutcome
from bench.snapshots import measure_snapshot

RUN = 0xABC
FORK = multiprocessing.get_context("fork")
FILE_STEPS = ["write a file", "rename a file", "write the manifest", "rename the manifest"]
FOLDER_STEPS = [*FILE_STEPS, "flush the folder", "remove a file"]


class Scene:
    """A store, its naive twin, and a folder of snapshots."""

    def __init__(self, place, *, steps=uninterrupted, folder_steps=uninterrupted, **sizes):
        self.place, self.settings = place, SETTINGS._replace(**sizes)
        self.path, self.folder = place / "store", SnapshotFolder(place / "snapshots", steps=folder_steps)
        self.writer, self.naive = create(self.path, **sizes), NaiveStore(**self.settings._asdict())
        self.numbers = [0, 0, 0]
        self.rng = np.random.default_rng(0)
        self.source = self.make_source(steps=steps)
        self.incarnation = 77

    def make_source(self, **more):
        options = {"run_id": RUN, "num_drawn": lambda: 1234, "file_bytes": 600, **more}
        return SnapshotWriter(self.path, SCHEMA.table, self.folder, **options)

    def insert(self, count=1):
        for _ in range(count):
            actor_id = int(self.rng.integers(0, 3))
            segment = make_segment(self.numbers[actor_id], actor_id)
            self.numbers[actor_id] += 1
            assert self.writer.insert(segment) is self.naive.insert(segment) is InsertOutcome.STORED
            keys = self.rng.integers(0, self.naive.num_inserted, 3).tolist()
            update = make_update(keys, [1.0, 2.0, 3.0], self.incarnation)
            assert self.writer.update_priorities(update) == self.naive.update(keys, [1.0, 2.0, 3.0])

    def restore(self, name="restored", folder=None, run_id=RUN, store_incarnation=78, schema=SCHEMA, **changes):
        self.drawn = []  # the number of items drawn before the snapshot, once it is known
        return restore(
            folder or self.folder,
            self.place / name,
            schema.table,
            self.settings._replace(**changes),
            run_id=run_id,
            store_incarnation=store_incarnation,
            note_drawn=self.drawn.append,
        )

    def go_on_with_the_snapshot(self):
        """Replaces the memory by a restored one, whose blobs have no gaps, and adapts the naive twin."""
        self.writer.close()
        self.path.unlink()
        self.incarnation += 1
        self.writer, self.source = self.restore("store", store_incarnation=self.incarnation), self.make_source()
        assert self.drawn == [1234]
        self.naive.remove_gaps()

    def check(self):
        assert_same(self.writer, open_reader(self.path), self.naive, self.rng)

    def files(self):
        return sorted(self.folder.path.iterdir())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [{}, {"max_bytes": 1200}, {"capacity": 23}])
def test_restored_store_equals_the_snapshot_and_continues(place, sizes, seed):
    scene = Scene(place, **sizes)
    scene.rng = np.random.default_rng(seed)
    for _ in range(8):
        for _ in range(int(scene.rng.integers(1, 4))):
            scene.insert(int(scene.rng.integers(1, 12)))
            scene.writer.count_steps(int(scene.rng.integers(100)))
            snapshot = scene.source.take()
            assert (snapshot.first_key, snapshot.end_key) == (scene.writer.first_key, scene.writer.num_inserted)
        num_steps = scene.writer.num_steps
        scene.go_on_with_the_snapshot()
        scene.check()
        assert scene.writer.num_steps == num_steps
        assert scene.writer.store_incarnation == scene.incarnation
        last = make_segment(scene.numbers[0] - 1, 0) if scene.numbers[0] else None
        assert last is None or scene.writer.insert(last) is InsertOutcome.DUPLICATE
    assert scene.naive.num_inserted > 3 * scene.settings.capacity


def test_snapshot_writes_new_files_and_removes_evicted_ones(place):
    scene = Scene(place)
    scene.insert(4)
    first = scene.source.take()
    before = {path: path.stat().st_mtime_ns for path in scene.files()}
    scene.insert(2)
    second = scene.source.take()
    kept = len(first.segments) - 1  # The last file is always new.
    assert second.segments[:kept] == first.segments[:kept]
    assert not {second.segments[kept]} & {*first.segments}
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())
    while scene.writer.first_key < second.end_key:
        scene.insert()
    third, fourth = scene.source.take(), scene.source.take()
    assert third.segments[:-1] == fourth.segments[:-1]
    assert third.segments[-1].name != fourth.segments[-1].name
    named = {third.state.name, fourth.state.name, *(file.name for file in third.segments + fourth.segments)}
    assert {path.name for path in scene.files()} == named | {"000000003.json", "000000004.json"}


def test_restored_store_reuses_the_files_of_its_snapshot(place):
    scene = Scene(place)
    scene.insert(5)
    first = scene.source.take()
    scene.go_on_with_the_snapshot()
    scene.insert()
    kept = len(first.segments) - 1
    assert scene.source.take().segments[:kept] == first.segments[:kept]


def test_snapshot_of_another_store_reuses_no_file(place):
    scene = Scene(place)
    scene.insert(5)
    scene.source.take()
    scene.writer.close()
    scene.path.unlink()
    scene.writer, scene.source = create(scene.path, store_incarnation=99), scene.make_source()
    scene.writer.insert(make_segment(0, 1))
    assert scene.source.take().first_key == 0
    assert scene.restore().num_inserted == scene.writer.num_inserted


def test_an_empty_store_has_no_snapshot(place):
    scene = Scene(place)
    assert scene.source.take() is None
    assert scene.restore() is None
    assert not scene.folder.path.exists()


@pytest.mark.parametrize("step", ["copy rows", "copy", "check", "copy weights"])
def test_snapshot_is_right_if_the_writer_continues_at_any_step(place, step):
    """The writer overwrites data that is being copied, at every step."""
    scene = Scene(place, max_bytes=2000)
    scene.insert(20)
    contents = {}
    calls = iter(range(1_000))

    def write(name):
        if name == step and next(calls) < 3:
            contents.update(scene.naive.transitions)
            scene.insert(2)
            contents.update(scene.naive.transitions)

    source = scene.make_source(steps=write)
    for round_number in range(6):
        calls = iter(range(1_000))
        scene.insert(3)
        snapshot = source.take()
        assert snapshot.size > 0
        restored = scene.restore(f"restored-{round_number}")
        reader = open_reader(place / f"restored-{round_number}")
        assert (restored.first_key, restored.num_inserted) == (snapshot.first_key, snapshot.end_key)
        keys = range(snapshot.first_key, snapshot.end_key)
        drawn = decode(reader.sample(2_000, scene.rng))
        assert drawn == {key: expect(*contents[key][:2]) for key in keys}
        for actor_id in range(3):  # Rows and keys belong to the same commit.
            numbers = {
                contents[key][0].number
                for key in range(snapshot.end_key)
                if key in contents and contents[key][0].stream.actor_id == actor_id
            }
            assert restored.receipt(actor_id).contiguous == max(numbers, default=-1) + 1


def test_snapshot_omits_weights_evicted_during_the_copy(place):
    scene = Scene(place)
    scene.insert(20)
    before = scene.writer.first_key
    snapshot = scene.make_source(steps=CallAt("copy weights", lambda: scene.insert(3))).take()
    assert snapshot.first_key == scene.writer.first_key > before
    restored = scene.restore()
    sample = open_reader(place / "restored").sample(1_000, scene.rng)
    weights = {key: weigh(scene.naive.transitions[key][2]) for key in range(snapshot.first_key, snapshot.end_key)}
    expected = [weights[key] / sum(weights.values()) for key in sample.records["key"].tolist()]
    assert sample.records["probability"].tolist() == pytest.approx(expected)
    restored.close()


def test_memory_overwritten_during_the_copy_keeps_the_older_snapshot(place):
    scene = Scene(place)
    scene.insert(8)
    before = scene.source.take()
    doomed = scene.make_source(steps=CallAt("copy", lambda: scene.insert(20)))
    scene.insert(8)
    with pytest.raises(SnapshotError, match="faster"):
        doomed.take()
    assert scene.folder.load_latest() == before


@pytest.mark.parametrize("nth", range(4))
@pytest.mark.parametrize("step", FOLDER_STEPS)
def test_crash_at_any_step_leaves_the_new_or_the_old_snapshot(place, step, nth):
    armed = []

    def crash(name):
        if armed and name == step:
            armed[0] -= 1
            if armed[0] < 0:
                raise Crash

    scene = Scene(place, folder_steps=crash)
    scene.insert(8)
    scene.source.take()
    scene.insert(2)
    snapshots = [scene.source.take()]
    scene.insert(4)
    armed.append(nth)
    try:
        snapshots.append(scene.source.take())
    except Crash:
        late = step in ("flush the folder", "remove a file")
        assert (scene.folder.newest().end_key == scene.writer.num_inserted) == late
    else:
        assert nth
    armed.clear()
    found = scene.folder.load_latest()
    assert found.end_key in (snapshots[0].end_key, scene.writer.num_inserted)
    assert scene.restore().num_inserted == found.end_key
    scene.insert(1)
    newest, again = scene.source.take(), scene.source.take()
    kept = {newest.state.name, again.state.name, *(file.name for file in newest.segments + again.segments)}
    assert {path.name for path in scene.files() if path.suffix != ".json"} == kept


def test_a_kill_after_a_restore_forgets_no_given_item(place):
    scene = Scene(place)
    scene.insert(6)
    scene.source.take()

    def die(step):
        if step == "write the manifest":  # The store is there already.
            os._exit(9)

    def open_again(**options):
        folder = SnapshotFolder(scene.folder.path, **options)
        return open_store(place / "again", SCHEMA.table, scene.settings, 1, run_id=RUN, snapshots=folder)

    process = FORK.Process(target=open_again, kwargs={"steps": die})
    process.start()
    process.join(DEADLINE)
    assert process.exitcode == 9
    store, counters = open_again()
    assert (store.num_inserted, counters.num_drawn) == (scene.writer.num_inserted, 1234)
    store.close()


def test_failed_restore_leaves_no_store(place):
    scene = Scene(place)
    scene.insert(8)
    scene.source.take()
    with pytest.raises(UsageError, match="max_bytes"):
        scene.restore(max_bytes=64)
    assert not list(place.glob("restored*"))
    (place / "restored-partial").write_bytes(b"what a killed one left")
    assert scene.restore().num_inserted == scene.writer.num_inserted


class Damage:
    """Two snapshots of one store, the second with more files, and the content of each transition."""

    def __init__(self, place):
        self.scene = Scene(place)
        self.contents = {}
        for count in (6, 3):
            self.scene.insert(count)
            self.contents.update(self.scene.naive.transitions)
            self.newest = self.scene.source.take()
        self.original = {path: path.read_bytes() for path in self.scene.files()}

    def mend(self):
        for path in self.scene.files():
            path.unlink()
        for path, data in self.original.items():
            path.write_bytes(data)

    def check(self, path, caplog):
        """Asserts that the restored transitions are right, that the file is named, and that some remain."""
        caplog.clear()
        restored = self.scene.restore()
        used = {self.newest.state.name, f"{self.newest.number:09d}.json"}
        used |= {file.name for file in self.newest.segments}
        assert path.name not in used or any(path.name in message for message in caplog.messages)
        reader = open_reader(self.scene.place / "restored")
        keys = range(restored.first_key, restored.num_inserted)
        assert len(keys) >= 3
        assert decode(reader.sample(1_000, np.random.default_rng(0))) == {
            key: expect(*self.contents[key][:2]) for key in keys
        }
        restored.close()
        (self.scene.place / "restored").unlink()
        if path.name not in used:
            assert restored.num_inserted == self.newest.end_key
        self.mend()


@pytest.mark.parametrize("is_truncated", [False, True])
def test_every_flipped_bit_and_truncation_is_noticed_and_logged(place, caplog, is_truncated):
    damage, rng = Damage(place), np.random.default_rng(0)
    for trial in range(100 if is_truncated else 200):
        path = list(damage.original)[trial % len(damage.original)]
        data = bytearray(damage.original[path])
        if is_truncated:
            del data[int(rng.integers(0, len(data))) :]
        else:
            bit = int(rng.integers(0, 8 * len(data)))
            data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        damage.check(path, caplog)


def test_a_missing_file_is_noticed_and_written_again(place, caplog):
    damage = Damage(place)
    for file in damage.newest.segments:
        path = damage.scene.folder.path / file.name
        path.unlink()
        damage.check(path, caplog)
    (damage.scene.folder.path / damage.newest.segments[1].name).unlink()
    damage.scene.source.take()
    assert "writing it again" in caplog.text
    assert damage.scene.restore().size == damage.scene.writer.size


@pytest.mark.parametrize("ending", [".json", ".state", ".segments"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EISDIR])
def test_a_restore_goes_on_without_a_damaged_but_no_unread_file(place, ending, code, monkeypatch):
    """A file that the disk cannot read may be intact, and would be removed after a restore of an older snapshot."""
    damage = Damage(place)
    folder, newest = damage.scene.folder, damage.newest
    names = {".json": f"{newest.number:09d}.json", ".state": newest.state.name, ".segments": newest.segments[-1].name}
    read = Path.read_bytes

    def fail(path):
        if path.name == names[ending]:
            raise OSError(code, os.strerror(code))
        return read(path)

    monkeypatch.setattr("pathlib.Path.read_bytes", fail)
    if code == errno.EISDIR:
        assert folder.load_latest().end_key < newest.end_key
        return
    with pytest.raises(SnapshotError, match=names[ending]) as refused:
        damage.scene.restore()
    assert refused.value.remedy.startswith("try again")
    monkeypatch.undo()
    assert folder.load_latest() == newest


@pytest.mark.parametrize("ending", [".json", ".state", ".segments"])
def test_one_lost_file_leaves_an_intact_snapshot(place, ending, caplog):
    """Nothing was stored between the two snapshots, and the newest snapshot is that of a restored store."""
    scene = Scene(place)
    scene.insert(6)
    before, newest = scene.source.take(), scene.source.take()
    scene.restore(f"again{ending}")  # The restored store continues with the same files, under a new number.
    manifest = f"{newest.number + 1:09d}.json"
    names = {".json": manifest, ".state": newest.state.name, ".segments": newest.segments[-1].name}
    (scene.folder.path / names[ending]).unlink()
    found = scene.folder.load_latest()
    assert found.size == before.size
    assert names[ending] in caplog.text or ending == ".json"  # An earlier manifest names the same files.


def test_missing_manifest_is_noticed(place, caplog):
    scene = Scene(place)
    scene.insert(4)
    first = scene.source.take()
    scene.insert(4)
    scene.source.take()
    (scene.folder.path / "000000002.json").unlink()
    assert scene.folder.load_latest() == first
    assert "000000002.json" in caplog.text


def test_full_disk_leaves_no_partial_snapshot(place):
    full = []

    def pause(name):
        if full and name == full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    scene = Scene(place, folder_steps=pause)
    scene.insert(6)
    scene.source.take()
    before = scene.files()
    for step in ("write a file", "write the manifest"):
        scene.insert(4)
        full[:] = [step]
        with pytest.raises(OSError, match="No space left"):
            scene.source.take()
        assert scene.files() == before
    full.clear()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # Simulates a disk with room for 100 bytes.
    try:
        with pytest.raises(OSError, match="File too large"):
            scene.source.take()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert scene.files() == before
    assert scene.source.take().end_key == scene.writer.num_inserted
    assert scene.restore().num_inserted == scene.writer.num_inserted


def test_a_failing_disk_loses_no_earlier_snapshot(place, caplog, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    scene = Scene(place)
    scene.insert(6)
    scene.source.take()
    before = scene.files()
    scene.insert(4)
    with monkeypatch.context() as patch:
        patch.setattr("apexreplay.files.sealed_folder.write_beside", fail)
        patch.setattr("pathlib.Path.read_bytes", fail)
        with pytest.raises(OSError, match="Input/output error"):
            scene.source.take()
    assert scene.files() == before
    assert re.search(r"000000001\.json: Input/output error", caplog.text)
    assert scene.folder.newest().number == 1
    assert scene.source.take().end_key == scene.writer.num_inserted


def test_restore_fails_if_every_snapshot_is_damaged(place, caplog):
    scene = Scene(place)
    scene.insert(5)
    snapshot = scene.source.take()
    manifest = scene.folder.path / "000000001.json"
    (scene.folder.path / snapshot.state.name).write_bytes(b"")
    with pytest.raises(SnapshotError, match=str(scene.folder.path)):
        scene.restore()
    manifest.write_bytes(manifest.read_bytes().replace(b'"format": 4', b'"format": 3'))
    with pytest.raises(SnapshotError, match=str(scene.folder.path)):
        scene.restore()
    assert re.search(r"000000001\.json.*\b3\b.*\b4\b", caplog.text)
    manifest.unlink()
    assert scene.restore() is None
    assert "no manifest" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": RUN + 1}, "another run id"),
        ({"priority_exponent": 0.5}, "priority_exponent 1.0, but the setting is 0.5"),
        ({"draws_per_item": 2}, "draws_per_item 0, .* 2"),
        ({"num_streams": 2}, "3 streams"),
        ({"capacity": 5}, "capacity 5"),
        ({"max_bytes": 100}, "max_bytes 100"),
    ],
)
def test_a_snapshot_that_does_not_fit_is_refused(place, changes, message):
    scene = Scene(place)
    scene.insert(8)
    scene.source.take()
    with pytest.raises(UsageError, match=message):
        scene.restore(**changes)
    assert not list(place.glob("restored*"))


def test_a_larger_store_takes_a_snapshot_too(place):
    scene = Scene(place)
    scene.insert(8)
    scene.source.take()
    larger = scene.restore(capacity=100, max_bytes=10_000, num_streams=7)
    assert larger.size == scene.writer.size
    assert larger.receipt(6).contiguous == 0


def insert_for_ever(path):
    writer = attach(path, capacity=5_000, max_bytes=400_000)
    number = writer.receipt(0).contiguous
    while True:
        writer.insert(make_segment(number))
        keys = range(writer.first_key, writer.num_inserted, 7)
        writer.update_priorities(make_update(keys, [1 + number % 3] * len(keys)))
        number += 1


@pytest.mark.no_cover
def test_snapshots_are_intact_while_another_process_writes(place):
    scene = Scene(place, capacity=5_000, max_bytes=400_000)
    scene.writer.close()
    child = FORK.Process(target=insert_for_ever, args=(scene.path,))
    child.start()
    try:
        source = scene.make_source(file_bytes=20_000)
        snapshots, deadline = [], time.monotonic() + 20
        while len(snapshots) < 20 or not snapshots[0].end_key < source.first_key:
            assert time.monotonic() < deadline
            snapshots += [taken] if (taken := source.take()) else []
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    contents, number = [], 0
    store = scene.restore(capacity=5_000, max_bytes=400_000)
    while number < store.receipt(0).contiguous:
        segment = make_segment(number)
        contents += [(segment, index) for index in range(len(segment.records))]
        number += 1
    assert len(contents) == store.num_inserted == snapshots[-1].end_key
    reader, drawn = open_reader(place / "restored"), {}
    for _ in range(10):
        drawn |= decode(reader.sample(5_000, scene.rng))
    keys = range(store.first_key, store.num_inserted)
    assert all(drawn[key] == expect(*contents[key]) for key in drawn)
    assert set(drawn) <= set(keys)
    assert len(drawn) > 0.99 * len(keys)


def test_snapshot_process_works_periodically_and_on_request(place):
    scene = Scene(place)
    scene.insert(8)
    snapshot_process = SnapshotProcess(scene.make_source, 0.05)
    try:
        until(lambda: (newest := scene.folder.newest()) is not None and newest.number >= 2)
        scene.insert(3)
        assert snapshot_process.take_last(10.0) == ""
        assert scene.folder.newest().end_key == scene.writer.num_inserted
    finally:
        stop_children([snapshot_process.process])
    assert snapshot_process.process.exitcode == 0
    assert snapshot_process.take_last(0.1)


def test_failed_snapshot_does_not_end_the_process(place):
    scene = Scene(place)
    scene.insert(8)
    scene.folder.path.write_text("a file where the folder should be")
    snapshot_process = SnapshotProcess(scene.make_source, 60.0)
    try:
        assert str(scene.folder.path) in snapshot_process.take_last(10.0)  # the cause
        scene.folder.path.unlink()
        assert snapshot_process.take_last(10.0) == ""
    finally:
        stop_children([snapshot_process.process])


def test_rest_is_called_after_each_file(place):
    scene, rests = Scene(place), []
    scene.insert(8)
    snapshot = scene.source.take(rest=rests.append)
    assert len(rests) == len(snapshot.segments) > 1
    assert min(rests) > 0


def test_rest_shows_signs_of_life_and_ends_with_a_request(monkeypatch):
    """Otherwise, the watchdog would kill the process during a rest."""
    monkeypatch.setattr("os.nice", lambda increment: None)
    stop, ticks, rested = Stop(), [], []
    pipe, end = multiprocessing.Pipe()

    class Slow:
        def take(self, rest):
            before = stop.ticks
            rest(0.1)
            ticks.append(stop.ticks - before)
            pipe.send_bytes(b"take")
            rest(1_000.0)
            stop.request()
            rest(1_000.0)
            rested.append(True)

    take_snapshots(stop, Slow, 0.0, end, poll_seconds=0.01)
    assert ticks[0] > 3
    assert rested == [True]
    pipe.close()
    end.close()


def test_a_requested_snapshot_does_not_rest(monkeypatch):
    """The server that asks for it is about to end."""
    monkeypatch.setattr("os.nice", lambda increment: None)
    stop = Stop()
    pipe, end = multiprocessing.Pipe()

    class Slow:
        def take(self, rest):
            rest(1_000.0)
            stop.request()

    pipe.send_bytes(b"take")
    take_snapshots(stop, Slow, 600.0, end, poll_seconds=0.01)
    assert pipe.recv_bytes() == b""
    pipe.close()
    end.close()


@pytest.mark.no_cover
def test_the_timing_of_a_small_store_has_every_figure(tmp_path):
    figures = measure_snapshot(tmp_path / "snapshots", num_transitions=20_000, seconds=0.2)
    assert figures["restored_transitions"] == 20_000
    assert all(value > 0 for value in figures.values())
