"""A run that goes on is held: nobody else gets it, no child of the holder keeps it, and the launcher's learner may."""

from __future__ import annotations

import multiprocessing
import os
import platform
import subprocess
import sys

import pytest
from support.waiting import DEADLINE

from apex.errors import UsageError
from apex.runs.lock import LOCK, hold
from apex.runtime.children import start_child, stop_children

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


def test_a_run_that_is_held_is_refused_by_name_and_is_free_again(tmp_path):
    who = f"process {os.getpid()} on {platform.node()}"
    with hold(tmp_path):
        with pytest.raises(UsageError) as refused, hold(tmp_path):
            pass
        assert str(refused.value) == f"{tmp_path}: this run is still running ({who}); stop it first"
    with hold(tmp_path):
        pass


def test_the_learner_of_the_launcher_that_holds_the_run_may_and_another_one_may_not(tmp_path):
    with hold(tmp_path):
        assert learn(tmp_path, "or parent").stdout == "held\n"
        assert "still running" in learn(tmp_path, "alone").stderr
        (tmp_path / LOCK).write_text("process 1 on another")  # Held by somebody who is not its parent.
        assert "still running (process 1 on another); stop it first" in learn(tmp_path, "or parent").stderr
    assert learn(tmp_path, "alone").stdout == "held\n"


def test_nobody_else_may_open_the_file_that_is_locked(tmp_path):
    """To lock a file takes the right to open it, no more."""
    with hold(tmp_path):
        assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600


def test_no_child_holds_it(tmp_path):
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


def test_a_folder_that_cannot_be_written_is_refused_with_the_cause(tmp_path):
    with (
        pytest.raises(UsageError, match=r"cannot lock the run with .*gone/run.lock: No such file"),
        hold(tmp_path / "gone"),
    ):
        pass
