"""`spawn` starts a program with the given folder, environment and outputs."""

import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.waiting import DEADLINE, until

from apexreplay.process.child_setup import lower_priority
from apexreplay.process.spawn import PIPE, spawn


def test_a_program_has_the_folder_and_the_variables_it_was_given(tmp_path):
    with (tmp_path / "output").open("wb") as output:
        process = spawn(
            ["sh", "-c", "pwd; echo $FRUIT; echo wrong >&2"],
            output=output,
            environment={"FRUIT": "plum"},
            cwd=tmp_path.parent,
        )
    assert process.wait(10) == 0
    assert (tmp_path / "output").read_text() == f"{tmp_path.parent}\nplum\nwrong\n"


def test_a_program_that_cannot_be_started_is_refused(tmp_path, monkeypatch):
    (tmp_path / "here").write_text("#!/bin/sh\n")
    (tmp_path / "here").chmod(0o755)
    assert spawn(["./here"], cwd=tmp_path).wait(10) == 0
    monkeypatch.chdir(tmp_path)
    assert spawn(["./here"]).wait(10) == 0
    (tmp_path / "odd").write_text("#!/no/such/shell\n")
    (tmp_path / "odd").chmod(0o755)
    for name in ("no-such-program", "./absent", "./odd"):
        with pytest.raises(FileNotFoundError, match=name):
            spawn([name])
    with pytest.raises(PermissionError, match=str(tmp_path)):
        spawn([str(tmp_path)])
    with pytest.raises(OSError, match="Invalid argument"):
        spawn(["./here"], cores=[1_000_000])


def test_settings_of_the_process_are_those_of_the_program():
    """A session of its own, cores, niceness, no ignored signals, and only the standard files."""
    core = min(os.sched_getaffinity(0))
    command = ["sh", "-c", "cat /proc/$$/stat /proc/$$/status; ls /proc/$$/fd"]
    with spawn(command, output=PIPE, cores=[core], niceness=3) as process:
        stat, *lines = process.stdout.read().decode().splitlines()
    fields = stat.rpartition(")")[2].split()
    status = dict(line.split(":\t") for line in lines if ":\t" in line)
    assert int(fields[3]) == process.pid
    assert int(fields[16]) == os.getpriority(os.PRIO_PROCESS, 0) + 3
    assert status["Cpus_allowed_list"] == str(core)
    own = re.search(r"^SigIgn:\t(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    by_python = sum(1 << each - 1 for each in (signal.SIGPIPE, signal.SIGXFSZ))
    assert int(status["SigIgn"], 16) == int(own[1], 16) & ~by_python
    assert [line for line in lines if line.isdecimal()] == ["0", "1", "2"]


def test_a_program_ends_with_the_process_that_started_it():
    script = "from apexreplay.process.spawn import spawn; print(spawn(['sleep', '100']).pid)"
    with spawn([sys.executable, "-c", script], output=PIPE) as parent:
        pid = int(parent.stdout.read())
    assert until(lambda: not is_running(pid))


def test_a_program_ends_with_the_thread_that_started_it():
    with ThreadPoolExecutor(1) as threads:
        process = threads.submit(spawn, ["sleep", "100"]).result()
    assert process.wait(DEADLINE) == -signal.SIGKILL


def test_a_start_runs_no_python_code_of_the_parent():
    """In a fork, locks of other threads may be held forever, and finalizers run twice."""
    script = (
        "import os; from apexreplay.process.spawn import spawn; "
        "os.register_at_fork(after_in_child=lambda: print('fork', flush=True)); "
        "spawn(['echo', 'program'], output=1).wait()"
    )
    with spawn([sys.executable, "-c", script], output=PIPE) as parent:
        assert parent.stdout.read() == b"program\n"


def is_running(pid):
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("leader", "written"), [(100, ["7"]), (99, ["7"]), (1, [])])
def test_only_an_own_session_gets_a_lower_priority(monkeypatch, leader, written):
    """100 is this process, 99 its parent; else, the session is that of a shell."""
    values, nice = [], []
    for name, value in (("getpid", 100), ("getppid", 99)):
        monkeypatch.setattr(f"os.{name}", lambda value=value: value)
    monkeypatch.setattr("os.getsid", lambda pid: leader)
    monkeypatch.setattr("os.nice", nice.append)
    monkeypatch.setattr("pathlib.Path.write_text", lambda path, text: values.append(text))
    lower_priority(7)
    assert (nice, values) == ([7], written)
