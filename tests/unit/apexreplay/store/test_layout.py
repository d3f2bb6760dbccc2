"""The file of the store is allocated at once and has one owner; unsuitable files are refused."""

import json
import multiprocessing
import os
import resource
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.builders import CONTINUOUS, PIXELS
from support.small_disks import needs_mounts, run_on_a_small_disk
from support.store_builders import SCHEMA, SETTINGS, attach, create, make_segment, open_reader, write_number

from apex.schema import Schema
from apexreplay.errors import DamagedMemoryError, LostMemoryError, UsageError
from apexreplay.files.file_lock import FileLock
from apexreplay.process.children import start_child
from apexreplay.store import file
from apexreplay.store.file import require_processor
from apexreplay.store.layout import STORE_HEADER, Sizes, fixed_bytes, stored_record_dtype
from apexreplay.store.location import beside, has_owner, remove
from apexreplay.types import Stream

FORK = multiprocessing.get_context("fork")


def write_header(path, **fields):
    with path.open("r+b") as file:
        header = np.frombuffer(file.read(STORE_HEADER.itemsize), STORE_HEADER).copy()
        for name, value in fields.items():
            header[name] = value
        file.seek(0)
        file.write(header.tobytes())


def test_a_record_with_a_discrete_action_takes_56_bytes():
    assert stored_record_dtype(SCHEMA.table).itemsize == 56
    assert fixed_bytes(2_000_000, SCHEMA.table) == 2_000_000 * (56 + 8) + 2**22 * 8
    two_million = Sizes(2_000_000, 0, 0).file_bytes(SCHEMA.table) - 4096
    assert two_million == pytest.approx(fixed_bytes(2_000_000, SCHEMA.table), abs=3 * 4096)


def test_every_byte_is_allocated_at_once(path):
    create(path, capacity=1000, max_bytes=1_000_001).close()
    status = path.stat()
    assert status.st_size == Sizes(1000, 1_000_001, 3).file_bytes(SCHEMA.table)
    assert status.st_blocks * 512 >= status.st_size
    assert status.st_mode & 0o777 == 0o600


def test_file_without_space_is_refused_and_removed(path):
    with pytest.raises(UsageError, match=r"\b\d{17} bytes") as error:
        create(path, max_bytes=2**55)
    assert "max_bytes" in error.value.remedy
    assert not path.exists()


def test_failed_allocation_is_refused(path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(UsageError, match=r"needs \d+ bytes.*File too large"):
            create(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.exists()


@needs_mounts
def test_a_tmpfs_that_fills_after_the_check_is_refused(tmp_path):
    """A file of the full size whose pages tmpfs cannot provide, as `ftruncate` makes it, would end the writer later."""
    script = """
        import errno, os, sys
        sys.path.insert(0, "tests")
        from pathlib import Path
        from types import SimpleNamespace
        from support.store_builders import create
        from apexreplay.errors import UsageError
        os.fstatvfs = lambda descriptor: SimpleNamespace(f_bavail=2**30, f_frsize=4096)
        path = Path(os.environ["FOLDER"]) / "store"
        try:
            create(path, max_bytes=10**6)
        except UsageError as error:
            print(os.strerror(errno.ENOSPC) in error.problem, bool(error.remedy), path.exists())
    """
    assert run_on_a_small_disk(tmp_path, script).split() == ["True", "True", "False"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"capacity": 0}, r"capacity.*\b0\b"),
        ({"max_bytes": 7}, r"max_bytes.*\b7\b"),
        ({"num_streams": 0}, r"num_streams.*\b0\b"),
        ({"min_priority": 0.0}, r"min_priority 0\.0 .*priority_exponent 1\.0"),
        ({"min_priority": 1e-200, "priority_exponent": 2.0}, r"min_priority 1e-200"),
        ({"min_priority": 5e-324}, r"min_priority 5e-324 .*priority_exponent 1\.0"),
    ],
)
def test_sizes_below_1_are_refused(path, sizes, message):
    with pytest.raises(UsageError, match=message):
        create(path, **sizes)
    assert not path.exists()


def test_existing_or_impossible_path_is_refused(path):
    create(path).close()
    with pytest.raises(UsageError, match=str(path)) as error:
        create(path)
    assert error.value.remedy
    with pytest.raises(UsageError, match=r"cannot create .* Not a directory"):
        create(path / "below" / "store")
    with pytest.raises(UsageError, match=r"other: No such file"):
        attach(path.with_name("other"))


def test_a_second_owner_is_refused_while_the_first_lives(path):
    writer = create(path)
    writer.insert(make_segment(0))
    for action in (attach, remove):
        with pytest.raises(UsageError, match=str(path)) as error:
            action(path)
        assert error.value.remedy
    writer.close()
    writer.close()  # A second call does nothing.
    second = attach(path)
    assert second.size == writer.size
    second.close()


def read_on(stop, path, ready, done):
    reader = open_reader(path)
    assert reader.size == 0
    ready.set()
    done.wait(20)


def test_child_of_the_writer_does_not_keep_the_lock(path, monkeypatch):
    monkeypatch.setattr("apexreplay.store.writer.ATTACH_ATTEMPTS", 2)
    writer = create(path)
    ready, done = FORK.Event(), FORK.Event()
    child = start_child("reader", read_on, path, ready, done)
    assert ready.wait(20)
    with pytest.raises(UsageError, match="is in use"):
        attach(path)  # The child has not released the lock.
    writer.close()
    attach(path).close()
    done.set()
    child.join()
    assert child.exitcode == 0


def test_forgotten_lock_is_closed_in_the_child(path):
    path.touch()
    ownership = FileLock(path)
    FileLock.forget()  # As after a fork.
    assert not has_owner(path)
    other = os.open(path, os.O_RDWR)  # Reuses the number of the closed descriptor.
    ownership.release()
    assert os.fstat(other).st_ino == path.stat().st_ino
    os.close(other)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_removed_or_replaced_file_is_not_in_place(path, is_replaced):
    writer = create(path)
    writer.require_in_place()
    path.rename(path.with_name("elsewhere"))
    if is_replaced:
        path.touch()
    with pytest.raises(LostMemoryError, match=r"removed or replaced .*loginctl enable-linger"):
        writer.require_in_place()
    writer.close()


def test_a_store_that_cannot_be_filled_leaves_nothing(path):
    def refuse(regions):
        raise OSError("on purpose")

    with pytest.raises(OSError, match="on purpose"):
        create(path, fill=refuse)
    assert list(path.parent.iterdir()) == []
    create(path).close()  # The file has no owner.


def test_a_completed_or_unreadable_file_is_whole(path):
    path.write_bytes(b"half")
    assert not file.is_whole(path)
    path.unlink()
    create(path).close()
    assert file.is_whole(path)
    assert file.is_whole(path.parent)


def test_record_in_a_wrong_slot_is_damage(path):
    writer = create(path)
    writer.insert(make_segment(0, count=5))
    writer.close()
    offset = SETTINGS.sizes.offsets(SCHEMA.table)[2]
    offset += 2 * stored_record_dtype(SCHEMA.table).itemsize + stored_record_dtype(SCHEMA.table).fields["key"][1]
    write_number(path, offset, 40_002)
    with pytest.raises(DamagedMemoryError, match=r"\b1 of 5\b"):
        attach(path)


def test_weights_of_all_live_keys_are_returned(path):
    writer = create(path, priority_exponent=2.0)
    writer.insert(make_segment(0, count=3, priority=[1, 2, 3]))
    assert writer.weights(np.arange(3)).tolist() == [1.0, 4.0, 9.0]
    writer.close()


def test_store_appears_complete_and_with_an_owner(path):
    seen = []
    create(path, fill=lambda regions: seen.append((path.exists(), beside(path).exists(), has_owner(path)))).close()
    assert seen == [(False, True, True)]
    assert path.exists()
    assert not beside(path).exists()


def make_until_killed(path):
    create(path, fill=lambda regions: os.kill(os.getpid(), signal.SIGKILL))


def test_file_of_a_killed_creation_is_removed_by_the_next(path):
    child = FORK.Process(target=make_until_killed, args=(path,))
    child.start()
    child.join(20)
    assert child.exitcode == -signal.SIGKILL
    assert not path.exists()
    assert beside(path).exists()
    assert not has_owner(path)
    create(path).close()
    assert not beside(path).exists()
    beside(path).touch()
    assert remove(path)
    assert not list(path.parent.iterdir())
    assert not remove(path)


def test_a_folder_is_not_removed(path):
    with pytest.raises(UsageError, match=r"cannot remove .* Is a directory"):
        remove(path.parent)


def test_a_reader_outlives_the_name_of_the_file(path):
    writer = create(path)
    writer.insert(make_segment(0))
    reader = open_reader(path)
    writer.close()
    remove(path)
    assert reader.sample(4, np.random.default_rng(0)) is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"magic": 0}, r"not a replay memory"),
        ({"format": 9}, "format 9, .*format 4"),
        ({"schema": 1}, "schema .*schema "),
        ({"capacity": 2**40}, "is damaged"),
        ({"max_bytes": 0}, "is damaged"),
        ({"num_streams": -1}, "is damaged"),
    ],
)
def test_file_that_is_no_store_is_refused(path, fields, message):
    create(path).close()
    write_header(path, **fields)
    for open_it in (attach, open_reader):
        with pytest.raises(UsageError, match=message):
            open_it(path)


def test_refuses_a_file_that_is_too_short(path):
    path.write_bytes(b"ApeX")
    path.chmod(0o600)
    with pytest.raises(UsageError, match="it has 4 bytes"):
        open_reader(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("capacity", 41), ("max_bytes", 4001), ("num_streams", 4), ("priority_exponent", 0.6), ("draws_per_item", 2)],
)
def test_attach_with_other_sizes_is_refused(path, name, value):
    create(path).close()
    with pytest.raises(UsageError, match=rf"{name} {getattr(SETTINGS, name)}\b.*{value}"):
        attach(path, **{name: value})


def test_refuses_a_processor_that_may_reorder_stores():
    for machine in ("aarch64", "arm64", "riscv64", ""):
        with pytest.raises(UsageError, match="x86-64"):
            require_processor(machine)
    for machine in ("x86_64", "AMD64"):
        require_processor(machine)


def test_schema_round_trips_through_json():
    schema = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
    again = Schema.from_dict(json.loads(json.dumps(schema.to_dict())))
    assert again == schema
    assert again.frame_shape == (84, 84)  # JSON has lists instead of tuples.
    assert again.table.fingerprint == schema.table.fingerprint
    assert replace(schema, n_step=5).table.fingerprint != schema.table.fingerprint


def test_stream_has_the_same_shard_in_every_incarnation():
    assert [Stream(actor_id, incarnation=5).shard(3) for actor_id in range(5)] == [0, 1, 2, 0, 1]
    assert Stream(4, incarnation=6).shard(3) == 1


def test_writer_locks_its_file_despite_concurrent_owner_checks(path, monkeypatch):
    create(path).close()
    other = FileLock(path)  # Holds the lock longer than `has_owner` does.
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            other.release()

    monkeypatch.setattr("apexreplay.files.file_lock.time", SimpleNamespace(sleep=nap))
    store = attach(path)
    assert len(naps) == 3
    assert has_owner(path)
    store.close()


def test_a_schema_describes_its_actions_by_number_or_size():
    assert str(PIXELS.num_actions) in PIXELS.actions
    assert str(CONTINUOUS.action_size) in CONTINUOUS.actions
