"""Children never outlive their parent, tell how they ended, and answer through JSON only."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from support.waiting import DEADLINE

from apex.errors import ChildDiedError, UsageError
from apex.runtime.children import call_in_child, check_children, start_child, stop_children
from apex.runtime.lifecycle import Stop


def wait_until_stopped(stop, ready=None):
    if ready is not None:
        ready.set()
    while not stop.poll():
        time.sleep(0.01)


def ignore_everything(stop, ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    while True:
        time.sleep(0.05)


def start_ready(target, **options):
    """A child that has come to its target: before, a signal finds no handler of its own."""
    ready = multiprocessing.get_context("fork").Event()
    child = start_child("child", target, ready, **options)
    assert ready.wait(DEADLINE)
    return child


def fail(stop):
    raise RuntimeError("on purpose")


def refuse(stop):
    raise UsageError("no such thing")


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_child_ends_when_asked():
    child = start_ready(wait_until_stopped)
    check_children([child])
    stop_children([child])
    assert child.exitcode == 0


def test_a_child_that_does_not_listen_is_killed():
    child = start_ready(ignore_everything)
    stop_children([child], grace_seconds=0.3)
    assert child.exitcode == -signal.SIGKILL
    assert gone(child.pid)


def test_children_that_do_not_listen_share_one_grace():
    children = [start_ready(ignore_everything) for _ in range(5)]
    began = time.monotonic()
    stop_children(children, grace_seconds=1.0)
    assert time.monotonic() - began < 4.0  # One after the other they would take 5 s.
    assert [child.exitcode for child in children] == [-signal.SIGKILL] * 5


def test_how_a_child_ended_is_told():
    child = start_child("sampler-3", fail)
    child.join(DEADLINE)
    with pytest.raises(ChildDiedError, match="sampler-3 ended with status 1"):
        check_children([child])


def test_where_a_child_refused_the_role_refuses_too():
    child = start_child("loader-0", refuse)
    child.join(DEADLINE)
    with pytest.raises(UsageError, match="loader-0 process refused"):
        check_children([child])


def count(stop, at_turn):
    """Turns until it comes to what it should do."""
    faulthandler.disable()  # It would write where this process was killed into the report of the tests.
    for _ in range(100):
        assert not stop.poll()
    at_turn()


def check_until(children, stuck_seconds):
    """What the checks of a parent that turns raise in the end."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        check_children(children, stuck_seconds)
        time.sleep(0.01)
    pytest.fail("nothing was raised")


@pytest.mark.parametrize(
    "get_stuck",
    [
        lambda: os.kill(os.getpid(), signal.SIGSTOP),
        lambda: multiprocessing.get_context("fork").Event().wait(),
        lambda: [None for _ in iter(int, 1)],  # turns for ever, and asks nobody
    ],
    ids=["stopped", "deadlocked", "endless"],
)
def test_a_child_that_is_stuck_is_killed_and_named(get_stuck):
    child = start_child("sampler-3", count, get_stuck)
    cause = "sampler-3 had no heartbeat for .* s and was killed as stuck"
    with pytest.raises(ChildDiedError, match=cause):
        check_until([child], 0.3)
    assert gone(child.pid)
    with pytest.raises(ChildDiedError, match=cause):  # The first cause, however often one asks.
        check_children([child])


def test_a_child_that_makes_no_turn_is_spoken_of_before_it_is_killed(caplog):
    child = start_ready(wait_until_stopped, explain_seconds=0.2)
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE
    while not caplog.records and time.monotonic() < deadline:
        check_children([child], 600.0)
        time.sleep(0.01)
    assert caplog.records[0].getMessage() == "the parent of child waits for a heartbeat of the child (0 s)"
    stop_children([child], 0.0)


def test_a_child_that_waits_is_not_stuck():
    child = start_ready(wait_until_stopped)
    on_tick = time.monotonic()
    while time.monotonic() - on_tick < 0.8:
        check_children([child], 0.3)
        time.sleep(0.01)
    stop_children([child])
    assert child.exitcode == 0


def test_ctrl_c_is_the_parents_business():
    child = start_ready(wait_until_stopped)
    os.kill(child.pid, signal.SIGINT)
    child.join(0.3)
    check_children([child])
    stop_children([child])


def test_an_answer_comes_back_as_json():
    assert call_in_child("hello", lambda stop: {"a": [1, None, "x"]}, Stop()) == {"a": [1, None, "x"]}


def test_a_refusal_in_the_child_is_one_here():
    with pytest.raises(UsageError, match="no such thing"):
        call_in_child("hello", lambda stop: refuse(stop), Stop())


def test_a_child_without_an_answer_is_told():
    with pytest.raises(ChildDiedError, match="hello ended"):
        call_in_child("hello", lambda stop: os._exit(7), Stop())


def test_a_stop_ends_the_wait_for_an_answer():
    stop = Stop()
    stop.request()
    assert call_in_child("hello", lambda child_stop: wait_until_stopped(child_stop) or {}, stop) == {}


def test_a_parent_that_forgets_its_children_still_ends():
    program = (
        "import signal, time\n"
        "from apex.runtime.children import start_child\n"
        "start_child('child', lambda stop: [signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(100)])\n"
        "raise SystemExit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=DEADLINE).returncode == 3


def test_no_child_outlives_a_parent_that_was_killed():
    program = (
        "import time\n"
        "from apex.runtime.children import start_child\n"
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
