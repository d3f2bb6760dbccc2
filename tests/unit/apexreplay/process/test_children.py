"""Children end with their parent. The parent gets their exit statuses, and their results as JSON."""

import faulthandler
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from support.waiting import DEADLINE

from apexreplay.errors import ChildDiedError, ChildRefusedError, UsageError
from apexreplay.process import lifecycle
from apexreplay.process.children import call_in_child, check_children, start_child, stop_children
from apexreplay.process.lifecycle import Stop


def wait_until_stopped(stop, ready=None):
    if ready is not None:
        ready.set()
    while not stop.poll():
        time.sleep(0.01)


def ignore_everything(stop, ready):
    ready.set()
    while True:
        time.sleep(0.05)


def start_ready(target):
    """Starts a child and waits until it has its own signal handlers."""
    ready = multiprocessing.get_context("fork").Event()
    child = start_child("child", target, ready)
    assert ready.wait(DEADLINE)
    return child


def fail(stop):
    raise RuntimeError("on\npurpose, T\u00fcr" + 5_000 * "x")


def refuse(stop):
    raise UsageError("no such thing")


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_child_ends_when_its_parent_stops_it():
    child = start_ready(wait_until_stopped)
    check_children([child])
    stop_children([child])
    assert child.exitcode == 0


def test_a_child_that_ignores_the_request_is_killed():
    child = start_ready(ignore_everything)
    stop_children([child], grace_seconds=0.3)
    assert child.exitcode == -signal.SIGKILL
    assert gone(child.pid)


def test_children_share_one_grace_period():
    children = [start_ready(ignore_everything) for _ in range(5)]
    began = time.monotonic()
    stop_children(children, grace_seconds=1.0)
    assert time.monotonic() - began < 4.0  # One after the other, the stops would take 5 s.
    assert [child.exitcode for child in children] == [-signal.SIGKILL] * 5


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [(fail, ChildDiedError, "RuntimeError: on purpose, T\u00fcr"), (refuse, ChildRefusedError, "no such thing")],
)
def test_the_parent_raises_the_error_of_the_child_in_one_line(target, error, text):
    child = start_child("sampler-3", target)
    child.join(DEADLINE)
    with pytest.raises(error, match=rf"sampler-3.*{text}") as raised:
        check_children([child])
    assert len(str(raised.value)) < 2_100


def beat_and_then(stop, action):
    """Sends 100 heartbeats before the action."""
    faulthandler.disable()  # faulthandler would write the stack of this process to the tests' report.
    for _ in range(100):
        assert not stop.poll()
    action()


def check_until_error(children, stuck_seconds):
    """Checks the children until that raises an error."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        check_children(children, stuck_seconds)
        time.sleep(0.01)
    pytest.fail("nothing was raised")


@pytest.mark.parametrize(
    "action",
    [
        lambda: os.kill(os.getpid(), signal.SIGSTOP),
        lambda: multiprocessing.get_context("fork").Event().wait(),
        lambda: [None for _ in iter(int, 1)],  # never polls its stop
    ],
    ids=["stopped", "deadlocked", "endless"],
)
def test_a_stuck_child_is_killed_and_named(action):
    child = start_child("sampler-3", beat_and_then, action)
    with pytest.raises(ChildDiedError, match="sampler-3") as first:
        check_until_error([child], 0.3)
    assert gone(child.pid)
    with pytest.raises(ChildDiedError) as second:
        check_children([child])
    assert str(second.value) == str(first.value)


def test_a_silent_child_is_logged_before_it_is_killed(caplog, monkeypatch):
    monkeypatch.setattr(lifecycle, "EXPLAIN_SECONDS", 0.2)
    child = start_ready(wait_until_stopped)
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE
    while not caplog.records and time.monotonic() < deadline:
        check_children([child], 600.0)
        time.sleep(0.01)
    assert (caplog.records[0].msg.what, caplog.records[0].msg.subject) == ("child", "child")
    stop_children([child], 0.0)


def test_a_child_that_waits_is_not_stuck():
    child = start_ready(wait_until_stopped)
    began = time.monotonic()
    while time.monotonic() - began < 2.5:
        check_children([child], 1.0)
        time.sleep(0.01)
    stop_children([child])
    assert child.exitcode == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_child_ignores_signals_to_all_processes(signum):
    child = start_ready(wait_until_stopped)
    os.kill(child.pid, signum)
    child.join(0.3)
    check_children([child])
    stop_children([child])
    assert child.exitcode == 0


def test_a_program_of_a_child_ignores_an_ended_terminal_as_its_parent_does():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        child = start_child("child", lambda stop: subprocess.run(["sh", "-c", "kill -HUP $$"], check=True))
    finally:
        signal.signal(signal.SIGHUP, before)
    child.join(DEADLINE)
    assert child.exitcode == 0


def test_a_program_of_a_child_does_not_ignore_sigterm():
    child = start_child("child", lambda stop: subprocess.run(["sh", "-c", "kill -TERM $$; sleep 100"], check=True))
    child.join(DEADLINE)
    with pytest.raises(ChildDiedError, match="SIGTERM"):
        check_children([child])


def test_a_call_in_a_child_returns_its_result():
    assert call_in_child("hello", lambda stop: {"a": [1, None, "x"]}, Stop()) == {"a": [1, None, "x"]}


def test_children_that_have_ended_leave_no_descriptors():
    def count():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def start():
        call_in_child("child", lambda stop: {}, Stop())
        children = [start_ready(wait_until_stopped) for _ in range(2)]
        stop_children(children)
        stop_children(children)  # A second stop does nothing.

    start()
    before = count()
    for _ in range(3):
        start()
    assert count() == before


def test_a_call_in_a_child_raises_its_usage_error():
    with pytest.raises(UsageError, match="no such thing"):
        call_in_child("hello", lambda stop: refuse(stop), Stop())


def test_a_call_in_a_child_that_dies_raises_an_error():
    with pytest.raises(ChildDiedError, match="hello"):
        call_in_child("hello", lambda stop: os._exit(7), Stop())


def test_a_stop_ends_a_call_in_a_child():
    stop = Stop()
    stop.request()
    assert call_in_child("hello", lambda child_stop: wait_until_stopped(child_stop) or {}, stop) == {}


def test_a_parent_ends_without_stopping_its_children():
    program = (
        "import signal, time\n"
        "from apexreplay.process.children import start_child\n"
        "start_child('child', lambda stop: [signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(100)])\n"
        "raise SystemExit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=DEADLINE).returncode == 3


def test_a_child_ends_with_its_killed_parent():
    program = (
        "import time\n"
        "from apexreplay.process.children import start_child\n"
        "child = start_child('child', lambda stop: time.sleep(100))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait(DEADLINE)
    parent.stdout.close()
    deadline = time.monotonic() + DEADLINE
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(child)
