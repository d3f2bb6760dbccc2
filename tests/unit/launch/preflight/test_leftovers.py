"""What is left in tmpfs, who goes on, and who has lost its launcher."""

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
    """Whether `check` holds in a process of its own."""
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


def test_a_store_without_an_owner_is_dead_and_its_board_with_it(tmp_path):
    store = make_store(tmp_path, "a")
    counters_path(store).write_bytes(bytes(64))
    lonely = tmp_path / "apex-b-0.board"
    lonely.write_bytes(bytes(64))
    assert find(tmp_path) == Leftovers({store: 4_096, counters_path(store): 64, lonely: 64}, {}, [])
    assert store.exists()


def test_a_store_with_an_owner_goes_on(tmp_path):
    store = make_store(tmp_path, "a")
    counters_path(store).write_bytes(bytes(64))
    ownership = FileLock(store)
    try:
        assert find(tmp_path) == Leftovers({}, {store: 4_096}, [])
    finally:
        ownership.release()
    assert find(tmp_path).in_use == {}


def test_a_store_in_the_making_goes_on_and_one_that_was_cut_short_is_dead(tmp_path):
    store = beside(make_store(tmp_path, "a"))
    (tmp_path / "apex-a-0.replay").rename(store)
    ownership = FileLock(store)
    try:
        assert find(tmp_path) == Leftovers({}, {store: 4_096}, [])
    finally:
        ownership.release()
    assert find(tmp_path) == Leftovers({store: 4_096}, {}, [])


def test_a_store_that_a_loader_draws_from_goes_on(tmp_path):
    store = make_store(tmp_path, "a")

    def load():
        counters = SamplerCounters(1, counters_path(store))  # It is open for as long as its process lives.
        return counters.num_drawn == 0 and find(tmp_path).in_use == {store: 4_096}

    assert in_child(load)
    assert store in find(tmp_path).dead


def test_other_files_are_not_looked_at(tmp_path):
    (tmp_path / "psm_1234").write_bytes(b"1")
    assert find(tmp_path) == Leftovers({}, {}, [])


def test_what_belongs_to_another_user_goes_on():
    with tempfile.TemporaryDirectory() as name:  # Unlike pytest's, this one can be opened to everybody.
        folder = Path(name)
        store = make_store(folder, "a")
        counters_path(store).write_bytes(bytes(64))
        for path in (store, counters_path(store)):
            path.chmod(0)
        folder.chmod(0o755)

        def look():
            if os.geteuid() == 0:  # To root every file is its own.
                os.seteuid(65_534)
            return is_wanted(store) and find(folder).in_use == {store: 4_096}

        assert in_child(look)


@pytest.mark.parametrize(
    ("own", "expected"),
    [(None, 10), ("dead", 10), ("alive", 110), ("gone", 10)],
)
def test_a_start_frees_what_is_dead_and_has_its_own_already(own, expected):
    leftovers = Leftovers({Path("dead"): 10}, {Path("alive"): 100, Path("other"): 1_000}, [])
    assert bytes_to_come(leftovers, Path(own) if own else None) == expected


def process(folder, pid, parent, *words):
    (folder / str(pid)).mkdir(parents=True)
    (folder / str(pid) / "cmdline").write_bytes("\0".join([*words, ""]).encode())
    (folder / str(pid) / "status").write_text(f"Name:\tpython\nPPid:\t{parent}\n")


def test_a_role_whose_parent_is_the_first_process_has_lost_its_launcher(tmp_path):
    process(tmp_path, 1, 0, "/sbin/init")
    process(tmp_path, 20, 1, "python", "-u", "-m", "apex.replay", "--learner", "127.0.0.1")
    process(tmp_path, 21, 30, "python", "-u", "-m", "apex.actor")
    process(tmp_path, 22, 1, "vi", "apex.actor.py")
    process(tmp_path, 30, 1, "apex", "train")
    (tmp_path / "31").mkdir()  # It ends while one looks.
    assert find_orphans(tmp_path) == [Orphan(20, "apex.replay")]


def test_in_a_container_the_launcher_may_be_the_first_process(tmp_path):
    process(tmp_path, 1, 0, "python", "/usr/bin/apex", "train")
    process(tmp_path, 20, 1, "python", "-u", "-m", "apex.replay")
    assert find_orphans(tmp_path) == []
