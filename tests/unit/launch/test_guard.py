"""A guard stops when its scheduler is gone, and reports the lines of its logs."""

from __future__ import annotations

import io
import os

from apex.launch.guard import Lifeline
from apex.launch.ray.order import Report
from apex.launch.terminal.view import LogTail
from apex.runtime.lifecycle import Stop


def test_a_guard_stops_after_the_end_of_its_input():
    reading, writing = os.pipe()
    stop = Lifeline(reading, io.StringIO(), Stop()).stop
    assert not stop.poll()
    os.write(writing, b"bytes after the order")
    assert not stop.poll()
    os.close(writing)
    assert stop.poll()
    os.close(reading)


def test_a_guard_stops_after_a_signal_and_reports_log_lines(tmp_path):
    reading, writing = os.pipe()
    reports, signals = io.StringIO(), Stop()
    lifeline = Lifeline(reading, reports, signals)
    lifeline.logs.append(LogTail(tmp_path))
    (tmp_path / "role.log").write_text("one\n\x1btwo\nunfinished")
    assert not lifeline.stop.poll()
    assert [Report.decode(line) for line in reports.getvalue().splitlines()] == [
        Report("role", "one"),
        Report("role", " two"),
    ]
    signals.request()
    assert lifeline.stop.poll()
    os.close(reading)
    os.close(writing)
