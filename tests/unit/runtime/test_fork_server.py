"""The fork server: a copy is a program like one that was started by itself, and nothing depends on the fork server."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import is_running
from support.waiting import DEADLINE, until

from apex.runtime.fork_server import ForkServer
from apex.runtime.lifecycle import FINISHED, Stop
from apex.runtime.supervisor import Program, supervise

pytestmark = pytest.mark.programs

FACTS = """
import json, os, sys, threading

def main():
    print(json.dumps({
        "argv": sys.argv, "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "nice": os.nice(0),
        "word": os.environ.get("WORD"), "path": os.environ.get("PATH"), "stdin": os.readlink("/proc/self/fd/0"),
        "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd > "2" and
            os.path.exists(f"/proc/self/fd/{fd}")),
        "command": open("/proc/self/cmdline").read().rstrip("\\0"), "loaded": "early" in sys.modules}))
    return 7
"""
SLEEPER = """
import time

def main():
    print("sleeps", flush=True)
    time.sleep(600)
"""
BROKEN = """
def main():
    raise RuntimeError("no such luck")
"""


@pytest.fixture
def modules(tmp_path):
    """Programs to start, in a folder that the fork server finds them in; returns its environment."""
    folder = tmp_path / "modules"
    folder.mkdir()
    for name, text in {"facts": FACTS, "sleeper": SLEEPER, "broken": BROKEN, "early": ""}.items():
        (folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture
def fork_server(modules):
    with ForkServer(modules, ["early"]) as fork_server:
        until(lambda: not fork_server.loading)
        yield fork_server


def command(module, *arguments):
    return (sys.executable, "-u", "-m", module, *arguments)


def start(fork_server, log, module, *arguments, environment=None, niceness=0):
    with log.open("ab") as output:
        return fork_server.start(
            command(module, *arguments), environment or dict(os.environ), niceness, output.fileno()
        )


def test_a_copy_has_all_that_a_program_of_its_own_has(fork_server, tmp_path):
    log = tmp_path / "log"
    process = start(fork_server, log, "facts", "--some", "words", environment={"WORD": "given"}, niceness=3)
    assert process.wait(DEADLINE) == 7
    assert process.poll() == 7
    facts = json.loads(log.read_text())
    assert facts == {
        "argv": ["facts", "--some", "words"],
        "pid": process.pid,
        "parent": os.getpid(),
        "session": process.pid,
        "nice": os.nice(0) + 3,
        "word": "given",
        "path": None,
        "stdin": "/dev/null",
        "files": [],
        "command": " ".join(command("facts", "--some", "words")),
        "loaded": True,
    }


def test_every_copy_writes_to_its_own_log_and_knows_nothing_of_the_others(fork_server, tmp_path):
    logs = [tmp_path / str(i) for i in range(3)]
    processes = [start(fork_server, log, "facts", str(i)) for i, log in enumerate(logs)]
    assert [process.wait(DEADLINE) for process in processes] == [7, 7, 7]
    assert [json.loads(log.read_text())["argv"][1] for log in logs] == ["0", "1", "2"]


def test_what_a_copy_raises_stands_in_its_log_and_is_a_failure(fork_server, tmp_path):
    process = start(fork_server, tmp_path / "log", "broken")
    assert process.wait(DEADLINE) == 1
    assert (tmp_path / "log").read_text().rstrip().endswith("RuntimeError: no such luck")


def test_a_signal_ends_a_copy_and_is_its_status(fork_server, tmp_path):
    process = start(fork_server, tmp_path / "log", "sleeper")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert process.wait(DEADLINE) == -signal.SIGKILL
    process.send_signal(signal.SIGKILL)  # Its number may be another's by now.


def test_copies_go_on_without_the_fork_server(fork_server, tmp_path):
    process = start(fork_server, tmp_path / "log", "sleeper")
    fork_server.close()
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == -signal.SIGTERM


def fork_server_of(pid):
    """The process id of the fork server that a process has started."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"apex.runtime.fork_server" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("there is no fork server")


def test_a_lost_fork_server_starts_nothing_and_says_so(fork_server, tmp_path, caplog):
    os.kill(fork_server_of(os.getpid()), signal.SIGKILL)
    assert start(fork_server, tmp_path / "log", "facts") is None
    assert "the fork server is lost" in caplog.text
    assert not fork_server.loading
    assert start(fork_server, tmp_path / "log", "facts") is None


def test_a_fork_server_that_cannot_load_is_waited_for_no_more(modules, tmp_path, caplog):
    with ForkServer(modules, ["nowhere"]) as fork_server:
        until(lambda: not fork_server.loading)
        assert start(fork_server, tmp_path / "log", "facts") is None
    assert "it ended while it loaded" in caplog.text


def test_a_fork_server_that_loads_for_ever_is_waited_for_no_more(modules, monkeypatch, caplog):
    monkeypatch.setattr("apex.runtime.fork_server.LOAD_SECONDS", 0.0)
    with ForkServer(modules, ["early"]) as fork_server:
        os.kill(fork_server_of(os.getpid()), signal.SIGSTOP)
        until(lambda: not fork_server.loading)
    assert "it has loaded for" in caplog.text


def test_a_fork_server_that_does_not_answer_is_waited_for_no_more(fork_server, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("apex.runtime.fork_server.FORK_SECONDS", 0.2)
    os.kill(fork_server_of(os.getpid()), signal.SIGSTOP)
    assert start(fork_server, tmp_path / "log", "facts") is None
    assert "no answer within" in caplog.text


def test_a_copy_that_nobody_knows_of_runs_nothing(fork_server, tmp_path, monkeypatch):
    """The answer came too late: the program was started the slow way by then."""
    monkeypatch.setattr(
        "apex.runtime.fork_server.ForkedProcess", lambda pid: (_ for _ in ()).throw(OSError(f"lost sight of {pid}"))
    )
    assert start(fork_server, tmp_path / "log", "sleeper") is None
    monkeypatch.undo()
    time.sleep(0.5)
    assert (tmp_path / "log").read_text() == ""


def test_a_fork_server_that_cannot_be_started_is_done_without(modules, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with ForkServer(modules, ["early"]) as fork_server:
        assert not fork_server.loading
        assert start(fork_server, tmp_path / "log", "facts") is None
    assert "the fork server is lost" in caplog.text


class UntilLogged(Stop):
    """A Stop that is requested once a log has some words."""

    def __init__(self, log, words):
        super().__init__()
        self._deadline = time.monotonic() + DEADLINE
        self._log, self._words = log, words

    @property
    def requested(self):
        assert time.monotonic() < self._deadline, "nothing was logged"
        return self._log.exists() and self._words in self._log.read_text()


@pytest.mark.parametrize("lost", [False, True])
def test_a_supervisor_starts_programs_with_a_fork_server_or_without(modules, tmp_path, lost):
    with ForkServer(modules, ["early"]) as fork_server:
        if lost:
            os.kill(fork_server_of(os.getpid()), signal.SIGKILL)
        program = Program(role="sleeper", command=command("sleeper"), copied=True)
        if lost:  # `python -m` runs no main() by itself.
            code = "import sleeper; sleeper.main()"
            program = Program(role="sleeper", command=(sys.executable, "-u", "-c", code), copied=True)
        stop = UntilLogged(tmp_path / "sleeper.log", "sleeps")
        ending = supervise([program], stop, logs=tmp_path, environment=modules, fork_server=fork_server)
    assert ending.status == FINISHED


LAUNCHER = """
import os, sys
from pathlib import Path
from apex.runtime.lifecycle import Stop
from apex.runtime.fork_server import ForkServer
from apex.runtime.supervisor import Program, supervise

with ForkServer({}, ["early"]) as server:
    command = (sys.executable, "-u", "-m", "sleeper")
    program = Program(role="sleeper", command=command, copied=True)
    supervise([program], Stop(), logs=Path(sys.argv[1]), fork_server=server)
"""


def test_a_copy_and_the_fork_server_end_with_a_supervisor_that_was_killed(modules, tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], env={**os.environ, **modules})
    try:
        log = tmp_path / "sleeper.log"
        until(lambda: log.exists() and "sleeps" in log.read_text())
        children = [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
        assert len(children) == 2
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: not any(map(is_running, children)))
