"""Waiting for a condition, with a deadline."""

from __future__ import annotations

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
