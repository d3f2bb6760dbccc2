"""A running run is locked. Children of the holder do not hold the lock, and the launcher's learner may enter."""

import multiprocessing
import os
import platform
import subprocess
import sys

import pytest
from support.waiting import DEADLINE

from apex.runs.lock import LOCK, hold
from apexreplay.errors import ForeignFileError, UsageError
from apexreplay.process.children import start_child, stop_children

LEARNER = """
import sys
from pathlib import Path
from apex.runs.lock import hold
with hold(Path(sys.argv[1]), or_parent=sys.argv[2] == "or parent"):
    print("held")
"""


def learn(folder, whose):
    command = [sys.executable, "-c", LEARNER, str(folder), whose]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)


def test_a_locked_run_is_refused_until_it_is_released(tmp_path):
    with hold(tmp_path):
        with pytest.raises(UsageError) as refused, hold(tmp_path):
            pass
        holder = f"process {os.getpid()} on {platform.node()}"
        assert all(part in refused.value.problem for part in (str(tmp_path), holder))
    with hold(tmp_path):
        pass


def test_only_the_learner_of_the_holding_launcher_may_enter(tmp_path):
    with hold(tmp_path):
        assert learn(tmp_path, "or parent").stdout == "held\n"
        assert f"process {os.getpid()} on " in learn(tmp_path, "alone").stderr
        (tmp_path / LOCK).write_text("process 1 on another")  # not the learner's parent
        assert "(process 1 on another)" in learn(tmp_path, "or parent").stderr
    assert learn(tmp_path, "alone").stdout == "held\n"


def test_other_users_cannot_open_the_lock(tmp_path):
    """Any user who can open a file can lock it."""
    with hold(tmp_path):
        assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600


def test_a_child_does_not_hold_the_lock(tmp_path):
    ours, its = multiprocessing.Pipe()

    def stay(stop):
        its.send_bytes(b"up")
        while not stop.poll():
            stop.tick()
            ours.poll(0.05)

    with hold(tmp_path):
        child = start_child("idle", stay)
        assert ours.poll(DEADLINE)
    try:
        with hold(tmp_path):
            assert child.is_alive()
    finally:
        stop_children([child])


PLANTS = {
    "link to a file": lambda path: path.symlink_to(path.parents[2] / "precious"),
    "link to a new file": lambda path: path.symlink_to("../../new"),
    "link to a folder": lambda path: path.symlink_to("/etc"),
    "link to itself": lambda path: path.symlink_to(path),
    "link within the folder": lambda path: path.symlink_to("../curves"),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_run_folder_whose_files_lead_out_of_it_is_refused(tmp_path, name):
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    PLANTS[name](run / "logs" / "learner.log")
    if "itself" in name or "within" in name:
        with hold(run):
            return
    with pytest.raises(ForeignFileError) as refused, hold(run):
        pass
    assert str(run / "logs" / "learner.log") in refused.value.problem
    assert refused.value.remedy
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["learner.log", "logs", "run"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"gone/run\.lock") as refused, hold(tmp_path / "gone"):
        pass
    assert refused.value.remedy
