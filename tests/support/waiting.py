"""Waits for a condition, with a deadline."""

import os
import subprocess
import sys
import time

import pytest

DEADLINE = 90.0  # seconds; only failing tests wait that long


def until(get, what="end of the wait", seconds=DEADLINE):
    """Calls `get` until it returns a true value."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while time.monotonic() < deadline:
        if found := get():
            return found
        time.sleep(pause)  # The condition may need this core.
        pause = min(1.5 * pause, 0.1)
    pytest.fail(f"no {what} within {seconds} s")


def slowdown():
    """Returns the slowdown of the start of a program relative to an idle machine: seconds per second of CPU time."""
    began = time.monotonic()
    program = subprocess.Popen([sys.executable, "-c", "import torch"])
    _, program.returncode, used = os.wait4(program.pid, 0)
    return max(1.0, (time.monotonic() - began) / (used.ru_utime + used.ru_stime))
