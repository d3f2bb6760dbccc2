"""A guard runs the ordered program, and ends it when the scheduler is gone."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.waiting import until

from apex.launch.ray.order import Order, Report
from apexreplay.errors import NEIGHBOUR_GONE, REFUSED

pytestmark = pytest.mark.covers_programs
ROLE = """
import pathlib, sys, time
home = pathlib.Path("home")
for path in sorted((home / "keys").iterdir()):
    print(path.name, oct(path.stat().st_mode & 0o777), path.read_text(), flush=True)
print("ready", flush=True)
if sys.argv[1] == "wait":
    time.sleep(100)
sys.exit(int(sys.argv[1]))
"""


def order(what, **changes):
    known = {
        "name": "role",
        "arguments": ["role", str(what)],
        "home": "home",
        "keys": {"role.secret": "hush"},
        "stuck_seconds": 0.0,
    }
    return Order(**{**known, **changes})


class Guards:
    """Guards in one folder; none outlives the test."""

    def __init__(self, folder):
        self.folder = folder
        self.running = []
        (folder / "role.py").write_text(ROLE)

    def start(self, line):
        paths = filter(None, [str(self.folder), os.environ.get("PYTHONPATH")])
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "apex.launch.guard"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},  # A program does not import from its folder.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.running.append(process)
        process.stdin.write(line.encode())
        process.stdin.flush()
        return process

    def programs(self):
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            try:
                arguments = (path.parent / "cmdline").read_bytes().split(b"\0")
                if os.readlink(path) == str(self.folder) and b"role" in arguments:
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def end(self):
        for process in self.running:
            process.kill()
            process.wait()
            process.stdout.close()
            with suppress(BrokenPipeError):
                process.stdin.close()


@pytest.fixture
def guards(tmp_path):
    guards = Guards(tmp_path)
    yield guards
    guards.end()


def finish(process):
    process.stdin.close()
    return process.wait(60), process.stdout.read().decode()


@pytest.mark.parametrize(("status", "kind"), [(0, None), (REFUSED, "refused"), (7, "exit")])
def test_a_program_gets_its_keys_and_the_guard_reports_its_end(guards, status, kind):
    process = guards.start(order(status).encode())
    assert process.wait(60) == status
    *lines, last = [Report.decode(line) for line in process.stdout]
    assert Report("role", "role.secret 0o600 hush") in lines
    assert (last.ending.status, last.ending.role) == (status, "role")
    failure = last.ending.failure
    assert (failure and failure.kind) == kind
    assert failure is None or (failure.detail, failure.times) == ("ready", 1)  # The scheduler decides on a restart.
    assert not (guards.folder / "home" / "keys").exists()
    assert "hush" in (guards.folder / "home" / "role.log").read_text()


def test_a_guard_ends_its_program_and_removes_its_keys_at_end_of_input(guards):
    process = guards.start(order("wait").encode())
    until(guards.programs, "program")
    status, _ = finish(process)
    assert status == NEIGHBOUR_GONE
    assert guards.programs() == []
    assert not (guards.folder / "home" / "keys").exists()


def test_a_guard_ends_its_program_if_its_output_is_closed(guards):
    process = guards.start(order("wait").encode())
    until(guards.programs, "program")
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == NEIGHBOUR_GONE
    assert guards.programs() == []


def test_the_program_of_a_killed_guard_ends(guards):
    process = guards.start(order("wait").encode())
    until(guards.programs, "program")
    process.kill()
    until(lambda: not guards.programs(), "end")


def test_a_guard_waits_until_the_earlier_guard_has_ended(guards):
    first = guards.start(order("wait").encode())
    (before,) = until(guards.programs, "program")
    second = guards.start(order(0, keys={"role.secret": "new"}).encode())
    time.sleep(0.5)  # The second guard must not begin.
    assert guards.programs() == [before]
    third = guards.start(order(0, keys={"role.secret": "late"}).encode())
    assert finish(third)[0] == NEIGHBOUR_GONE  # The third guard must not remove anything either.
    assert (guards.folder / "home" / "keys" / "role.secret").read_text() == "hush"
    finish(first)
    assert second.wait(60) == 0
    assert "role.secret 0o600 new" in second.stdout.read().decode()


@pytest.mark.parametrize("line", ["\n", '{"role": "actor"}\n', "\0\n"])
def test_a_guard_refuses_input_that_is_no_order(guards, line):
    status, output = finish(guards.start(line))
    assert status == REFUSED
    assert len(output.splitlines()) == 1
