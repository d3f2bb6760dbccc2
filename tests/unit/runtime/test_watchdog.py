"""Signs of life: turns are seen by whoever watches, silence is measured fairly, and the protocol is systemd's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from support.clocks import Clock

from apex.runtime.lifecycle import Stop
from apex.runtime.watchdog import START_FACTOR, Listener, Pulse, Silence, is_traced, take_notifier


def look_every_second(silence, clock, seconds, heard=False, limit=10.0):
    """What each look of that many seconds says."""
    said = []
    for _ in range(seconds):
        clock.now += 1.0
        said.append(silence.look(heard, limit))
    return said


# --- silence ----------------------------------------------------------------------------------------------------------


def test_who_is_silent_for_the_limit_is_stuck_and_not_before():
    clock = Clock()
    silence = Silence(clock)
    silence.look(True, 10.0)
    assert look_every_second(silence, clock, 10) == [False] * 9 + [True]


def test_one_turn_begins_the_silence_anew():
    clock = Clock()
    silence = Silence(clock)
    silence.look(True, 10.0)
    look_every_second(silence, clock, 9)
    assert not silence.look(True, 10.0)
    assert look_every_second(silence, clock, 9) == [False] * 9


def test_before_its_first_turn_a_program_has_several_times_as_long():
    clock = Clock()
    silence = Silence(clock)
    limit = START_FACTOR * 10
    assert look_every_second(silence, clock, limit) == [False] * (limit - 1) + [True]


def test_a_watcher_that_was_stopped_itself_holds_that_time_against_nobody():
    clock = Clock()
    silence = Silence(clock)
    silence.look(True, 10.0)
    clock.now += 3600.0  # suspended, or in a debugger
    assert not silence.look(False, 10.0)
    assert look_every_second(silence, clock, 7) == [False] * 7
    assert look_every_second(silence, clock, 1) == [True]


def test_a_limit_of_zero_lets_everybody_be_silent_for_ever():
    clock = Clock()
    silence = Silence(clock)
    assert not any(look_every_second(silence, clock, 1_000, limit=0.0))


# --- turns ------------------------------------------------------------------------------------------------------------


def test_to_ask_whether_to_stop_is_a_turn():
    pulse = Pulse()
    stop = Stop(pulse.tick)
    assert [stop.poll() for _ in range(3)] == [False] * 3
    assert (stop.ticks, pulse.ticks) == (3, 3)


def test_turns_of_a_child_are_seen_by_its_parent():
    pulse = Pulse()
    if not (child := os.fork()):
        for _ in range(5):
            pulse.tick()
        os._exit(0)
    os.waitpid(child, 0)
    assert pulse.ticks == 5


# --- sd_notify --------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener():
    listener = Listener(8.0)
    yield listener
    listener.close()


def test_a_turn_is_heard_by_the_launcher_and_told_once_in_a_second_at_most(listener):
    clock = Clock()
    notify = take_notifier(dict(listener.environment), clock)
    assert not listener.heard()
    notify()
    assert listener.heard()
    notify()
    assert not listener.heard()
    clock.now += 1.0
    notify()
    assert listener.heard()


@pytest.mark.skipif(os.geteuid() != 0, reason="speaks as another user")
def test_the_signs_of_another_user_are_not_heard(listener):
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(b"WATCHDOG=1", "\0" + listener.environment["NOTIFY_SOCKET"][1:])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not listener.heard()


def test_where_the_limit_is_short_turns_are_told_four_times_within_it():
    listener, clock = Listener(1.0), Clock()
    notify = take_notifier(dict(listener.environment), clock)
    notify()
    assert listener.heard()
    clock.now += 0.25
    notify()
    assert listener.heard()
    listener.close()


def test_systemd_hears_that_the_program_is_ready_and_then_its_signs_of_life(tmp_path):
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address)
        systemd.settimeout(10.0)
        clock = Clock()
        environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "120000000"}
        notify = take_notifier(environment, clock)
        assert environment == {}  # What this program starts does not speak for it.
        notify()
        assert systemd.recv(100) == b"READY=1\nWATCHDOG=1"
        clock.now += 1.0
        notify()
        assert systemd.recv(100) == b"WATCHDOG=1"


def test_a_forked_child_does_not_speak_for_its_parent(listener):
    notify = take_notifier(dict(listener.environment))
    if not (child := os.fork()):
        notify()
        os._exit(0)
    os.waitpid(child, 0)
    assert not listener.heard()


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_program_that_nobody_watches_and_one_whose_watcher_is_gone_go_on(is_watched):
    listener = Listener(8.0)
    stop = Stop(take_notifier(dict(listener.environment) if is_watched else {}))
    listener.close()
    assert not stop.poll()
    assert stop.ticks == 1


def test_what_floods_the_watcher_does_not_block_the_program(listener):
    clock = Clock()
    notify = take_notifier(dict(listener.environment), clock)
    for _ in range(5_000):  # more than any queue of the kernel holds
        clock.now += 1.0
        notify()
    assert listener.heard()
    assert not listener.heard()


# --- debuggers --------------------------------------------------------------------------------------------------------

TRACE_ME = """
import ctypes, os, signal
ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # PTRACE_TRACEME: the parent holds this process at its next signal
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_process_that_a_debugger_holds_is_told_from_one_that_is_stopped():
    traced = subprocess.Popen([sys.executable, "-c", TRACE_ME])
    stopped = subprocess.Popen(["sleep", "600"])
    try:
        os.waitpid(traced.pid, os.WUNTRACED)
        stopped.send_signal(signal.SIGSTOP)
        assert is_traced(traced.pid)
        assert not is_traced(stopped.pid)
        assert not is_traced(2**22 + 1)  # nobody's
    finally:
        for process in (traced, stopped):
            process.kill()
            process.wait(10.0)
