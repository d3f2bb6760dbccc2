"""Heartbeats and the detection of stuck processes."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from support.clocks import Clock

from apexreplay.process.lifecycle import Stop
from apexreplay.process.watchdog import START_FACTOR, Listener, Pulse, StuckDetector, is_traced, take_notifier


class Process:
    """A watched process, and the clock of its watcher."""

    def __init__(self):
        self.beats = 0
        self.clock = Clock()
        self.detector = StuckDetector(lambda: self.beats, clock=self.clock)

    def beat(self):
        self.beats += 1
        return self.detector.check(10.0)

    def check_every_second(self, seconds, limit=10.0):
        """Returns the results of one check per second without a heartbeat."""
        found = []
        for _ in range(seconds):
            self.clock.now += 1.0
            found.append(self.detector.check(limit))
        return found


def test_a_process_is_stuck_at_the_limit_and_not_before():
    process = Process()
    process.beat()
    assert process.check_every_second(10) == [False] * 9 + [True]


def test_a_heartbeat_restarts_the_measurement():
    process = Process()
    process.beat()
    process.check_every_second(9)
    assert not process.beat()
    assert process.check_every_second(9) == [False] * 9


def test_the_first_heartbeat_may_take_several_times_the_limit():
    limit = START_FACTOR * 10
    assert Process().check_every_second(limit) == [False] * (limit - 1) + [True]


def test_time_in_which_the_watcher_was_suspended_does_not_count():
    process = Process()
    process.beat()
    process.clock.now += 3600.0  # suspended, or in a debugger
    assert not process.detector.check(10.0)
    assert process.check_every_second(7) == [False] * 7
    assert process.check_every_second(1) == [True]


def test_a_limit_of_zero_allows_any_silence():
    assert not any(Process().check_every_second(1_000, limit=0.0))


def test_polling_a_stop_is_a_heartbeat():
    pulse = Pulse()
    stop = Stop(pulse.tick)
    assert [stop.poll() for _ in range(3)] == [False] * 3
    assert (stop.ticks, pulse.count()) == (3, 3)


def test_a_parent_counts_the_heartbeats_of_its_child():
    pulse = Pulse()
    if not (child := os.fork()):
        for _ in range(5):
            pulse.tick()
        os._exit(0)
    os.waitpid(child, 0)
    assert pulse.count() == 5


@pytest.fixture
def listener():
    listener = Listener(8.0)
    yield listener
    listener.close()


def test_a_program_sends_at_most_one_heartbeat_per_second(listener):
    clock = Clock()
    notify = take_notifier(dict(listener.environment), clock)
    counts = []
    for clock.now in (0.0, 0.5, 1.0):
        notify()
        counts.append(listener.count())
    assert counts == [1, 1, 2]


def test_a_short_limit_gets_four_heartbeats():
    listener, clock = Listener(1.0), Clock()
    notify = take_notifier(dict(listener.environment), clock)
    for clock.now in (0.0, 0.25, 0.5, 0.75):
        notify()
    assert listener.count() == 4
    listener.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="sends as another user")
def test_heartbeats_of_another_user_do_not_count(listener):
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(b"WATCHDOG=1", "\0" + listener.environment["NOTIFY_SOCKET"][1:])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert listener.count() == 0


def test_systemd_receives_readiness_and_then_heartbeats(tmp_path):
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address)
        systemd.settimeout(10.0)
        clock = Clock()
        environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "120000000"}
        notify = take_notifier(environment, clock)
        assert environment == {}  # A program that this one starts must not send heartbeats for it.
        notify()
        assert systemd.recv(100) == b"READY=1\nWATCHDOG=1"
        clock.now += 1.0
        notify()
        assert systemd.recv(100) == b"WATCHDOG=1"


def test_a_forked_child_sends_no_heartbeat_for_its_parent(listener):
    notify = take_notifier(dict(listener.environment))
    if not (child := os.fork()):
        notify()
        os._exit(0)
    os.waitpid(child, 0)
    assert listener.count() == 0


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_program_continues_without_a_watcher(is_watched):
    listener = Listener(8.0)
    stop = Stop(take_notifier(dict(listener.environment) if is_watched else {}))
    listener.close()
    assert not stop.poll()
    assert stop.ticks == 1


def test_a_full_queue_of_heartbeats_does_not_block_the_program(listener):
    clock = Clock()
    notify = take_notifier(dict(listener.environment), clock)
    for _ in range(5_000):  # more than any queue of the kernel holds
        clock.now += 1.0
        notify()
    assert 0 < listener.count() == listener.count()


# --- debuggers --------------------------------------------------------------------------------------------------------

TRACE_ME = """
import ctypes, os, signal
ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # PTRACE_TRACEME: the parent holds this process at its next signal
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_traced_process_differs_from_a_stopped_one():
    traced = subprocess.Popen([sys.executable, "-c", TRACE_ME])
    stopped = subprocess.Popen(["sleep", "600"])
    try:
        os.waitpid(traced.pid, os.WUNTRACED)
        stopped.send_signal(signal.SIGSTOP)
        assert is_traced(traced.pid)
        assert not is_traced(stopped.pid)
        assert not is_traced(2**22 + 1)  # no such process
    finally:
        for process in (traced, stopped):
            process.kill()
            process.wait(10.0)
