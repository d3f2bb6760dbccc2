"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

DEADLINE = 30.0  # seconds; only what fails waits that long


def until(get, what="end of the wait", seconds=DEADLINE):
    """Calls `get` until it returns something."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while time.monotonic() < deadline:
        if found := get():
            return found
        time.sleep(pause)  # What it waits for needs the core.
        pause = min(1.5 * pause, 0.1)
    pytest.fail(f"no {what} within {seconds} s")


def slowdown():
    """How many times as long as on an idle machine the start of a program takes: its seconds by its processor's."""
    began = time.monotonic()
    program = subprocess.Popen([sys.executable, "-c", "import torch"])
    _, program.returncode, used = os.wait4(program.pid, 0)
    return max(1.0, (time.monotonic() - began) / (used.ru_utime + used.ru_stime))
