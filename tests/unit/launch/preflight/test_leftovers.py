"""Files of dead and live runs in tmpfs, and programs without a launcher."""

import os
import tempfile
from pathlib import Path

import pytest

from apex.launch.preflight.leftovers import Leftovers, Orphan, bytes_to_come, find_leftovers, find_orphans
from apex.replay_memory.sampler_counters import SamplerCounters
from apex.replay_memory.store.location import beside, counters_path, is_wanted
from apex.runtime.file_lock import FileLock

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
    return find_leftovers(folder, folder / "proc")


def test_a_store_without_an_owner_is_dead(tmp_path):
    store = make_store(tmp_path, "a")
    counters_path(store).write_bytes(bytes(64))
    lonely = tmp_path / "apex-b-0.counters"
    lonely.write_bytes(bytes(64))
    assert find(tmp_path) == Leftovers({store: 4_096, counters_path(store): 64, lonely: 64}, {}, [])
    assert store.exists()


def test_a_store_with_an_owner_is_in_use(tmp_path):
    store = make_store(tmp_path, "a")
    counters_path(store).write_bytes(bytes(64))
    ownership = FileLock(store)
    try:
        assert find(tmp_path) == Leftovers({}, {store: 4_096}, [])
    finally:
        ownership.release()
    assert find(tmp_path).in_use == {}


def test_an_unfinished_store_is_in_use_while_it_has_an_owner(tmp_path):
    store = beside(make_store(tmp_path, "a"))
    (tmp_path / "apex-a-0.replay").rename(store)
    ownership = FileLock(store)
    try:
        assert find(tmp_path) == Leftovers({}, {store: 4_096}, [])
    finally:
        ownership.release()
    assert find(tmp_path) == Leftovers({store: 4_096}, {}, [])


def test_a_store_that_a_loader_reads_is_in_use(tmp_path):
    store = make_store(tmp_path, "a")

    def load():
        counters = SamplerCounters(1, counters_path(store))  # It is open for as long as its process lives.
        return counters.num_drawn == 0 and find(tmp_path).in_use == {store: 4_096}

    assert in_child(load)
    assert store in find(tmp_path).dead


def test_other_files_are_ignored(tmp_path):
    (tmp_path / "psm_1234").write_bytes(b"1")
    assert find(tmp_path) == Leftovers({}, {}, [])


def test_a_store_of_another_user_counts_as_in_use():
    with tempfile.TemporaryDirectory() as name:  # Unlike pytest's folder, other users can open it.
        folder = Path(name)
        store = make_store(folder, "a")
        counters_path(store).write_bytes(bytes(64))
        for path in (store, counters_path(store)):
            path.chmod(0)
        folder.chmod(0o755)

        def is_in_use():
            if os.geteuid() == 0:  # Root can open every file.
                os.seteuid(65_534)
            return is_wanted(store) and find(folder).in_use == {store: 4_096}

        assert in_child(is_in_use)


@pytest.mark.parametrize(("own", "expected"), [(None, 10), ("dead", 10), ("alive", 110), ("gone", 10)])
def test_a_start_frees_dead_files_and_reuses_its_own(own, expected):
    leftovers = Leftovers({Path("dead"): 10}, {Path("alive"): 100, Path("other"): 1_000}, [])
    assert bytes_to_come(leftovers, Path(own) if own else None) == expected


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
