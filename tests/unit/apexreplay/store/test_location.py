"""Which memories a run can still use, which of them no other run may remove, and that other users cannot reach them."""

import fcntl
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.users import OWNER, STRANGER, as_user, in_own_tmpfs, needs_root
from support.waiting import until

from apexreplay.errors import DataError
from apexreplay.files.file_lock import FileLock
from apexreplay.server.open_store import reclaim
from apexreplay.store.location import (
    MEMORY,
    beside,
    claim_path,
    claim_run,
    counters_path,
    discard,
    find_old_files,
    find_stores,
    is_abandoned,
    is_same_run,
    is_wanted,
    memory_folder,
    memory_id,
    read_run_folder,
    remove,
    store_path,
)

RUN = 0xF00D5
NEEDS_NOTHING = 0  # bytes


@pytest.fixture
def store():
    """A memory without a server, in this user's folder."""
    path = store_path(RUN)
    path.touch(mode=0o600)
    yield path
    remove(path)
    claim_path(path).unlink(missing_ok=True)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_shards_of_one_run_know_each_other_by_name():
    assert is_same_run(store_path(7, 0), beside(store_path(7, 3)))
    assert not is_same_run(store_path(7, 0), store_path(8, 0))


def test_a_memory_is_known_by_this_boot_and_this_folder(tmp_path):
    assert memory_id() == memory_id()
    assert memory_id(tmp_path) != memory_id()


def test_a_store_is_wanted_while_its_counters_are_open(store):
    assert not is_wanted(store)
    counters_path(store).touch(mode=0o600)
    assert not is_wanted(store)
    with counters_path(store).open("rb") as held:  # as `SamplerCounters` has it
        fcntl.flock(held, fcntl.LOCK_SH)
        assert is_wanted(store)
        assert not discard(store)
    assert discard(store)


def test_a_claimed_run_keeps_its_memory_until_its_last_program_ends(store, run):
    with claim_run(RUN, run):
        with claim_run(RUN, run):  # The learner claims it beside the launcher.
            assert is_wanted(store)
        assert is_wanted(store)
        assert not discard(store)
    assert not is_wanted(store)
    assert discard(store)
    assert not claim_path(store).exists()


def test_a_claim_ends_without_a_trace_if_there_is_no_memory(run):
    with claim_run(RUN, run):
        assert claim_path(store_path(RUN)).exists()
    assert not claim_path(store_path(RUN)).exists()


def test_a_claim_is_repeated_if_its_file_was_removed_meanwhile(store, run):
    path = claim_path(store)
    path.touch()
    other = FileLock(path)  # as the removal by another run has it
    child = subprocess.Popen(
        [sys.executable, "-c", CLAIM.format(run=RUN, folder=str(run))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    until(lambda: str(path) in opened_by(child.pid), "wait for the lock", seconds=60.0)
    path.unlink()
    other.release()
    assert child.stdout.readline() == b"claimed\n"
    assert is_wanted(store)
    child.communicate(b"\n", timeout=60)
    assert not is_wanted(store)


def test_a_claim_reports_a_file_that_tmpfs_refuses(run):
    path = claim_path(store_path(RUN))
    path.mkdir()
    try:
        with pytest.raises(DataError, match=path.name), claim_run(RUN, run):
            pass
    finally:
        path.rmdir()


def opened_by(pid):
    """Returns the paths of the files that a process has opened."""
    paths = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            paths.append(os.readlink(descriptor))
    return paths


CLAIM = """
import sys
from pathlib import Path
from apexreplay.store.location import claim_run
with claim_run({run}, Path({folder!r})):
    print("claimed", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("name", ["run", "rün \udce9: o"])
def test_a_memory_is_abandoned_when_its_run_folder_is_gone(store, tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    assert not is_abandoned(store)  # Nothing is known: the learner is on another host.
    assert not read_run_folder(store)
    with claim_run(RUN, folder):
        pass
    assert read_run_folder(store) == str(folder)
    assert not is_abandoned(store)
    folder.rmdir()
    assert is_abandoned(store)
    other_root = claim_path(store).read_bytes().replace(b"-", b"-1", 1)
    claim_path(store).write_bytes(other_root)  # As if the run was in another container, which has this folder.
    assert not is_abandoned(store)


def unmount():
    disk = MEMORY / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(disk)], check=True)
    (disk / "run").mkdir()
    store = store_path(RUN)
    store.touch()
    with claim_run(RUN, disk / "run"):
        pass
    subprocess.run(["umount", str(disk)], check=True)
    assert not is_abandoned(store)
    disk.rmdir()
    assert not is_abandoned(store)


@needs_root
def test_a_memory_outlives_the_removal_of_a_disk(place):
    assert in_own_tmpfs(unmount) == ""


def test_a_memory_that_no_run_can_resume_is_abandoned(store):
    with claim_run(RUN, None):  # --single-process
        assert is_wanted(store)
    assert is_abandoned(store)
    assert is_abandoned(beside(store))  # never completed


def test_a_start_removes_what_no_run_can_use_and_keeps_the_rest(store, run):
    with claim_run(RUN, run):
        pass
    lonely = counters_path(store_path(RUN + 1))
    lonely.touch()
    partial = beside(store_path(RUN + 2))
    partial.touch()
    reclaim(store_path(1), NEEDS_NOTHING)
    assert [path.exists() for path in (store, lonely, partial)] == [True, False, False]
    run.rmdir()
    reclaim(store_path(RUN, 1), NEEDS_NOTHING)  # It is the memory of its own run.
    assert store.exists()
    reclaim(store_path(1), NEEDS_NOTHING)
    assert not store.exists()
    assert not claim_path(store).exists()


# --- short tmpfs ------------------------------------------------------------------------------------------------------

SIZE = 4 << 20  # bytes of each memory


def fill(run):
    """Makes the memories of three killed runs, of which the first was started last; also returns the free bytes."""
    stores = [store_path(run_id) for run_id in (31, 32, 33)]
    for age, path in enumerate(stores):
        with claim_run(31 + age, run):
            path.write_bytes(bytes(SIZE))
        os.utime(claim_path(path), (1_000_000 - age, 1_000_000 - age))
    return stores, os.statvfs(MEMORY).f_bavail * os.statvfs(MEMORY).f_frsize


def remove_the_oldest(run):
    stores, free = fill(run)
    reclaim(store_path(1), free - (1 << 20))
    assert [path.exists() for path in stores] == [True, True, True]
    reclaim(store_path(1), free + SIZE + 1)
    assert [path.exists() for path in stores] == [True, False, False]
    with claim_run(31, run):
        reclaim(store_path(1), free + 3 * SIZE - (1 << 20))
        assert stores[0].exists()


def remove_nothing_in_vain(run):
    stores, free = fill(run)
    reclaim(store_path(1), free + 4 * SIZE)
    assert [path.exists() for path in stores] == [True, True, True]
    store_path(1).touch()
    reclaim(store_path(1), free + SIZE)  # The memory of the run itself exists and needs no space.
    assert [path.exists() for path in stores] == [True, True, True]


@needs_root
@pytest.mark.parametrize("check", [remove_the_oldest, remove_nothing_in_vain])
def test_a_short_tmpfs_costs_the_oldest_memories_of_killed_runs(check, run):
    def in_small_tmpfs():
        subprocess.run(["mount", "-o", "remount,size=32m", "/dev/shm"], check=True)
        check(run)

    assert in_own_tmpfs(in_small_tmpfs) == ""


# --- other versions, other users, other containers --------------------------------------------------------------------


def test_files_of_earlier_versions_are_removed_unless_used():
    old = [MEMORY / f"apex-{RUN:016x}-0{suffix}" for suffix in (".replay", ".counters", ".board")]
    for path in old:
        path.touch()
    owner = FileLock(old[0])
    try:
        assert not set(old) & set(find_old_files())
        owner.release()
        assert set(old) <= set(find_old_files())
        reclaim(store_path(1), NEEDS_NOTHING)
        assert not any(path.exists() for path in old)
    finally:
        owner.release()
        for path in old:
            path.unlink(missing_ok=True)


def bind(path):
    socket.socket(socket.AF_UNIX).bind(str(path))


PLANTS = {
    "folders": lambda name: [os.mkdir(MEMORY / f"{name}{suffix}") for suffix in (".board", ".counters")],
    "links to themselves": lambda name: os.symlink(f"{name}.counters", MEMORY / f"{name}.counters"),
    "open files": lambda name: (MEMORY / f"{name}.board").touch(0o666),
    "pipe": lambda name: os.mkfifo(MEMORY / f"{name}.board", 0o666),
    "socket": lambda name: bind(MEMORY / f"{name}.counters"),
    "folder of the user": lambda name: os.mkdir(MEMORY / f"apex-{OWNER}"),
    "link as folder of the user": lambda name: os.symlink("/", MEMORY / f"apex-{OWNER}"),
}


def plant(make):
    os.umask(0)
    for name in ("apex-1-0", f"apex-{2:016x}-0"):
        (MEMORY / f"{name}.replay").touch(0o666)
        try:
            make(name)
        except FileExistsError:  # The folder of the user is there already.
            continue


def start_and_clean(folder):
    """The start of a run, `apex doctor --clean` and the end of the run, with one memory of a killed run."""
    own, killed = store_path(2), store_path(3)
    assert own.parent.stat().st_uid == OWNER
    assert not own.exists()
    with claim_run(3, folder):
        killed.touch(0o600)
    with claim_run(2, folder):
        reclaim(own, NEEDS_NOTHING)
        own.touch(0o600)
        assert killed.exists()
        for store in find_stores(own.parent):
            assert discard(store) == (store == killed)
        assert find_old_files() == []
        remove(own)
    assert list(own.parent.iterdir()) == []


@needs_root
@pytest.mark.parametrize("make", PLANTS.values(), ids=PLANTS)
def test_files_of_another_user_neither_stop_a_run_nor_are_removed(make):
    def meet():
        assert as_user(STRANGER, plant, make) == ""
        before = sorted(path for path in MEMORY.iterdir() if path.lstat().st_uid == STRANGER)
        assert len(before) > 2
        for uid in (OWNER, 0):
            assert as_user(uid, start_and_clean if uid else reclaim_as_root, Path("/")) == ""
        assert sorted(path for path in MEMORY.iterdir() if path.lstat().st_uid == STRANGER) == before

    assert in_own_tmpfs(meet) == ""


def reclaim_as_root(folder):
    reclaim(store_path(2), NEEDS_NOTHING)
    assert list(memory_folder().iterdir()) == []


@needs_root
def test_a_claim_holds_in_another_network_namespace(store, run):
    """As in containers with --ipc=host, which share /dev/shm, but not the network."""
    code = f"from apexreplay.store.location import discard, store_path; print(discard(store_path({RUN})))"
    command = ["unshare", "--net", sys.executable, "-c", code]
    with claim_run(RUN, run):
        assert subprocess.check_output(command, text=True, timeout=100) == "False\n"
    assert subprocess.check_output(command, text=True, timeout=100) == "True\n"
    assert not store.exists()
