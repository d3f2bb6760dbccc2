"""When a guard ends its programs."""

from __future__ import annotations

import os

from apex.launch.guard import Lifeline
from apex.runtime.lifecycle import Stop


def test_a_guard_stops_when_its_input_ends_and_not_before():
    reading, writing = os.pipe()
    stop = Lifeline(reading, Stop()).stop
    assert not stop.poll()
    os.write(writing, b"words after the order")
    assert not stop.poll()
    os.close(writing)
    assert stop.poll()
    os.close(reading)


def test_a_guard_stops_by_a_signal():
    reading, writing = os.pipe()
    signals = Stop()
    stop = Lifeline(reading, signals).stop
    assert not stop.poll()
    signals.request()
    assert stop.poll()
    os.close(reading)
    os.close(writing)
