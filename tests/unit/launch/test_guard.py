"""A guard stops when its scheduler is gone, and reports the lines of its logs."""

import dataclasses
import io
import os

import pytest
from support.builders import VECTORS
from support.run_builders import make_config

from apex.launch.guard import Lifeline, _require_first_limits
from apex.launch.ray.order import Report
from apex.runs.folder import RunFolder
from apex.runtime.logs import LogTail
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop


def test_a_guard_stops_after_the_end_of_its_input():
    reading, writing = os.pipe()
    stop = Lifeline(reading, io.StringIO(), Stop()).stop
    assert not stop.poll()
    os.write(writing, b"bytes after the order")
    assert not stop.poll()
    os.close(writing)
    assert stop.poll()
    os.close(reading)


def test_a_guard_reports_lines_and_configuration_until_a_signal(tmp_path):
    reading, writing = os.pipe()
    reports, signals = io.StringIO(), Stop()
    lifeline = Lifeline(reading, reports, signals)
    lifeline.logs.append(LogTail(tmp_path))
    (tmp_path / "role.log").write_text("one\n\x1btwo\nunfinished")
    lifeline.config_file = tmp_path / "config.toml"
    assert not lifeline.stop.poll()
    lifeline.config_file.write_text("seed = 1")
    assert not lifeline.stop.poll()
    assert not lifeline.stop.poll()
    assert [Report.decode(line) for line in reports.getvalue().splitlines()] == [
        Report("role", "one"),
        Report("role", " two"),
        Report(config_toml="seed = 1"),
    ]
    signals.request()
    assert lifeline.stop.poll()
    os.close(reading)
    os.close(writing)


def test_a_driver_on_another_host_must_ask_for_the_limits_of_the_run(tmp_path):
    asked = make_config(tmp_path, name="mine", learner={"batch_size": 0})
    sized = dataclasses.replace(
        asked,
        learner=dataclasses.replace(asked.learner, batch_size=64),
        run=dataclasses.replace(asked.run, tensorboard_port=7_000),
    )
    folder = RunFolder.create(sized, VECTORS)
    _require_first_limits(folder, dataclasses.replace(asked, run=dataclasses.replace(asked.run, folder="elsewhere")))
    for other in ({"max_minutes": 120.0}, {"stop_score": None}):
        with pytest.raises(UsageError, match=rf"run\.{next(iter(other))}"):
            _require_first_limits(folder, dataclasses.replace(asked, run=dataclasses.replace(asked.run, **other)))
