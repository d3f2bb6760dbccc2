"""Files of dead and live runs in tmpfs, and programs without a launcher."""

import os
from pathlib import Path

import pytest

from apex.launch.preflight.leftovers import (
    Leftovers,
    Orphan,
    bytes_to_come,
    find_leftovers,
    find_orphans,
)
from apexreplay.files.file_lock import FileLock
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.store.location import beside, claim_path, counters_path

pytestmark = pytest.mark.programs


def make_store(folder, name, num_bytes=4_096):
    path = folder / f"apex-{name}-0.replay"
    path.write_bytes(bytes(num_bytes))
    return path


def in_child(check):
    """Whether `check` holds in a child process."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def find(folder):
    return find_leftovers(memory=folder, processes=folder / "proc")


def test_a_killed_runs_store_is_kept_while_its_folder_exists(tmp_path):
    store, run = make_store(tmp_path, "a"), tmp_path / "run"
    counters_path(store).write_bytes(bytes(64))
    counters_path(store).with_name("apex-b-0.counters").touch()
    assert find(tmp_path) == Leftovers({}, {store: 4_096}, {}, [])
    run.mkdir()
    root = os.stat("/")
    claim_path(store).write_text(f"{root.st_dev}-{root.st_ino}:{tmp_path.stat().st_dev}:{run}")
    assert find(tmp_path) == Leftovers({}, {store: 4_096}, {}, [])
    run.rmdir()
    assert find(tmp_path) == Leftovers({store: 4_096}, {}, {}, [])
    assert store.exists()


def test_a_store_with_an_owner_is_in_use(tmp_path):
    store = make_store(tmp_path, "a")
    ownership = FileLock(store)
    try:
        assert find(tmp_path) == Leftovers({}, {}, {store: 4_096}, [])
    finally:
        ownership.release()
    assert find(tmp_path).in_use == {}


def test_an_unfinished_store_is_in_use_while_it_has_an_owner(tmp_path):
    store = beside(make_store(tmp_path, "a"))
    (tmp_path / "apex-a-0.replay").rename(store)
    ownership = FileLock(store)
    try:
        assert find(tmp_path) == Leftovers({}, {}, {store: 4_096}, [])
    finally:
        ownership.release()
    assert find(tmp_path) == Leftovers({store: 4_096}, {}, {}, [])


def test_a_store_that_a_loader_reads_is_in_use(tmp_path):
    store = make_store(tmp_path, "a")

    def load():
        counters = SamplerCounters(1, counters_path(store))  # It is open for as long as its process lives.
        return counters.num_drawn == 0 and find(tmp_path).in_use == {store: 4_096}

    assert in_child(load)
    assert store in find(tmp_path).kept


def test_other_files_are_ignored(tmp_path):
    (tmp_path / "psm_1234").write_bytes(b"1")
    assert find(tmp_path) == Leftovers({}, {}, {}, [])


@pytest.mark.parametrize(("own", "expected"), [(None, 30), ("apex-1-0", 30), ("apex-2-0", 30), ("apex-3-0", 137)])
def test_a_start_can_free_dead_and_kept_files_and_reuses_its_own(own, expected):
    dead, kept, alive, other = (Path(f"apex-{number}-0") for number in range(1, 5))
    leftovers = Leftovers({dead: 10}, {kept: 20}, {alive: 100, Path("apex-3-1"): 7, other: 1_000}, [])
    own = Path(own) if own else None
    assert bytes_to_come(leftovers, own) == expected


def test_the_memory_of_a_run_to_resume_counts_as_in_use(tmp_path):
    store, other = make_store(tmp_path, "a"), make_store(tmp_path, "b")
    found = find_leftovers(store, memory=tmp_path, processes=tmp_path / "proc")
    assert found == Leftovers({}, {other: 4_096}, {store: 4_096}, [])


def process(folder, pid, parent, *arguments):
    (folder / str(pid)).mkdir(parents=True)
    (folder / str(pid) / "cmdline").write_bytes("\0".join([*arguments, ""]).encode())
    (folder / str(pid) / "status").write_text(f"Name:\tpython\nPPid:\t{parent}\n")


def test_a_role_with_process_1_as_parent_is_an_orphan(tmp_path):
    process(tmp_path, 1, 0, "/sbin/init")
    process(tmp_path, 20, 1, "python", "-u", "-m", "apex.replay", "--learner", "127.0.0.1")
    process(tmp_path, 21, 30, "python", "-u", "-m", "apex.actor")
    process(tmp_path, 22, 1, "vi", "apex.actor.py")
    process(tmp_path, 30, 1, "apex", "train")
    (tmp_path / "31").mkdir()  # It ends during the search.
    assert find_orphans(tmp_path) == [Orphan(20, "apex.replay")]


def test_the_launcher_may_be_process_1_in_a_container(tmp_path):
    process(tmp_path, 1, 0, "python", "/usr/bin/apex", "train")
    process(tmp_path, 20, 1, "python", "-u", "-m", "apex.replay")
    assert find_orphans(tmp_path) == []
