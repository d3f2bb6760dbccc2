"""Curves of a run that goes on have each step once, in TensorBoard too; what was cut is kept beside them."""

from __future__ import annotations

import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apex.runs.metrics.truncate import cut_curves
from apex.runs.metrics.writer import MetricRow, MetricsWriter, read_curve


def write(folder, *steps):
    writer = MetricsWriter(folder)
    writer.begin(steps[0])
    cut_curves(folder / "curves", steps[0])
    for step in steps[1:]:
        writer.accept(MetricRow("learner", step, {"learner/loss": float(step)}, 1.0))
    writer.close()


def steps_of(path):
    return [row["steps"] for row in read_curve(path)]


def test_what_is_made_again_is_drawn_once(tmp_path):
    write(tmp_path, 0, 100, 200, 300)
    write(tmp_path, 200, 250, 350)
    assert steps_of(tmp_path / "curves" / "learner.jsonl") == [100, 200, 250, 350]
    assert steps_of(tmp_path / "curves" / "cut" / "learner.jsonl") == [300]
    events = EventAccumulator(str(tmp_path / "tensorboard" / tmp_path.name))
    events.Reload()
    assert [event.step for event in events.Scalars("learner/loss")] in ([100, 250, 350], [100, 200, 250, 350])


def test_a_torn_row_stays_and_nothing_is_cut_where_nothing_is_late(tmp_path):
    path = tmp_path / "learner.jsonl"
    path.write_bytes(json.dumps({"steps": 5}).encode() + b'\n{"steps": 7, "ti')
    assert cut_curves(tmp_path, 5) == 0
    assert path.read_bytes().endswith(b'{"steps": 7, "ti')
    assert not (tmp_path / "cut").exists()
