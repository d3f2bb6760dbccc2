"""The CPU time and memory of a program and its children."""

import os
import subprocess
import sys
import time

import pytest
from support.clocks import Clock

from apex.runtime.resources import HostMeter, ResourceMeter, find_launcher

MIB = 2**20
CHILD = """
import sys, time
memory = bytearray(64 * 2**20)
memory[::4096] = b"x" * len(memory[::4096])
end = time.process_time() + 0.5
while time.process_time() < end:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def start_child():
    """A process that has used half a second of a core, and holds 64 MiB."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"done\n"
    return child


def test_the_processor_time_and_memory_of_a_child_count():
    clock = Clock()
    meter = ResourceMeter(clock=clock)
    before, own = meter.measure(), time.process_time()
    with start_child() as child:
        own = time.process_time() - own
        clock.now += 2.0
        usage = meter.measure()
        child.stdin.close()
    assert usage.cores >= 0.5 / 2
    # Includes the start of the interpreter and this process's own time; the kernel counts in units of 0.01 s.
    assert usage.cores < (1.5 + own) / 2
    assert 64 * MIB < usage.memory_bytes - before.memory_bytes < 96 * MIB


def test_a_child_that_was_there_before_counts_from_the_last_look_on():
    clock = Clock()
    with start_child() as child:
        meter = ResourceMeter(clock=clock)
        clock.now += 1.0
        usage = meter.measure()
        child.stdin.close()
    assert usage.cores < 0.4


def test_looks_once_in_a_period_at_most():
    clock = Clock()
    meter = ResourceMeter(clock=clock)
    clock.now += 0.9
    first = meter.measure()
    clock.now += 0.2
    assert meter.measure() is not first


def test_memory_that_processes_share_counts_once():
    """A program writes 512 MiB of shared memory, and its child reads them."""
    script = (
        "import mmap, os, sys; shared = mmap.mmap(-1, 512 << 20); shared.write(bytes(512 << 20)); child = os.fork()\n"
        "sum(shared[at] for at in range(0, len(shared), 4096)); print('read', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert [program.stdout.readline() for _ in range(2)] == 2 * [b"read\n"]
        memory = ResourceMeter(program.pid).measure().memory_bytes
        program.stdin.close()
    assert 512 * MIB < memory < 700 * MIB


def test_a_process_that_has_ended_uses_nothing():
    clock = Clock()
    child = start_child()
    meter = ResourceMeter(child.pid, clock=clock)
    child.communicate()
    clock.now += 1.0
    assert meter.measure() == (pytest.approx(0.0), 0)


def test_the_use_of_the_host_includes_programs_that_are_not_its_own():
    clock = Clock()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        own, other = HostMeter(os.getpid(), clock), HostMeter(idle.pid, clock)
        with start_child() as child:
            clock.now += 2.0
            uses = own.measure(), other.measure()
            assert own.measure() is uses[0]
            child.stdin.close()
        idle.stdin.close()
    assert [use.cores for use in uses] == [len(os.sched_getaffinity(0))] * 2
    assert all(use.busy >= 0.24 for use in uses)  # half a second in two; the kernel counts in units of 0.01 s
    assert uses[0].own >= 0.24
    assert uses[1].own < 0.24


def test_the_launcher_of_a_program_is_its_parent_but_not_process_1():
    assert find_launcher(os.getpid()) == (os.getppid() if os.getppid() > 1 else os.getpid())
    assert find_launcher(1) == 1
