"""The rows of the curves: who has said something has one, and a wall clock that jumps moves nothing but timestamps."""

from __future__ import annotations

import itertools
import time

import pytest

from apex.config import Config, RunConfig
from apex.learning.coordinator.metric_rows import MetricRows
from apex.runs.metrics.writer import MetricsWriter, read_curve
from apex.runs.status import RunStatus

DAY = 86_400.0


def make_status(clock=time.monotonic, **run):
    return RunStatus(Config(run=RunConfig(**run)), name="run", folder="runs/run", num_actors=4, clock=clock)


def hear(status, num_inserted, **more):
    status.hear(1, "replay", "host", 10, {"num_inserted": num_inserted, "store_incarnation": "7", **more})


def test_who_has_said_nothing_has_no_row():
    status = make_status()
    assert list(MetricRows(status).next()) == []
    hear(status, 42, rate="fast")
    (row,) = MetricRows(status).next()
    assert (row["role"], row["steps"]) == ("replay", 42)
    assert row["scalars"]["replay/num_inserted"] == 42
    status.hear_trainer({"updates": 5, "waiting": "for batches"})
    learner, _ = MetricRows(status).next()
    assert learner["scalars"]["learner/updates"] == 5
    assert "learner/waiting" not in learner["scalars"]


def test_a_histogram_that_is_none_does_not_take_the_learners_row_with_it():
    status = make_status()
    status.hear_trainer({"updates": 5})
    hear(status, 42, priority_histogram={"counts": "many"})
    rows = MetricRows(status).next()
    assert next(rows)["role"] == "learner"
    with pytest.raises(ValueError, match="histogram"):
        next(rows)


def test_a_wall_clock_that_jumps_neither_ends_a_run_nor_turns_its_curves_back(tmp_path, monkeypatch):
    """It jumps by days, to and fro, at every look; a run of 10 minutes has 1 minute behind it at the end."""
    jumps = itertools.cycle((0.0, 400 * DAY, -30 * DAY, 3_600.0, -3_600.0))
    monkeypatch.setattr(time, "time", lambda: 1e9 + next(jumps))
    now = [0.0]
    status = make_status(lambda: now[0], max_minutes=10.0)
    rows, writer = MetricRows(status), MetricsWriter(tmp_path)
    for second in range(60):
        now[0] = float(second)
        hear(status, 100 * second)
        status.hear_trainer({"updates": second})
        for row in rows.next():
            writer.accept(row)
        assert status.end_reason() == ""
        status.forget_silent(30.0)
        assert status.members
    writer.close()
    curve = read_curve(tmp_path / "curves" / "learner.jsonl")
    assert [row["scalars"]["learner/updates"] for row in curve] == list(range(60))
    assert [row["steps"] for row in curve] == list(range(0, 6_000, 100))
    now[0] = 600.0
    assert status.end_reason() == "reached 10 minutes"


def test_the_setting_is_told_as_a_text_when_it_changes():
    status, told = make_status(), []
    status.replay_endpoints = [{"experience": "tcp://..."}]
    rows = MetricRows(status)
    status.hear(2, "actor", "host", 11, {})
    for size, updates in [(10, 0), (20, 0), (60_000, 0), (60_000, 5), (60_000, 9)]:
        hear(status, size, size=size)
        status.hear_trainer({"updates": updates, "wait_share": 0.0})
        told.append(next(rows.next()).get("texts", {}).get("limited_by/setting"))
    assert told[1:3] == [None, None]
    assert told[4] is None
    assert told[0] == "actors: turn --actor.num-processes, --replay.min-size-to-sample"
    assert told[3].startswith("learner: turn --learner.batch-size")
