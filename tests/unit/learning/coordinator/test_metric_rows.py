"""The rows of the curves: each part that reports has one, and a jump of the wall clock changes only timestamps."""

import itertools
import time

import numpy as np
from support.messages import make_heartbeat

from apex.config import ActorConfig, Config, ReplayConfig, RunConfig
from apex.facts import EndReason
from apex.learning.coordinator.metric_rows import MetricRows
from apex.learning.coordinator.state import RunState
from apex.runs.metrics.writer import MetricsWriter, read_curve
from apex.transport.messages.status import LearnerStatus
from apex.types import Exploration
from apexreplay.facts import Waiting
from apexreplay.wire.histogram import Histogram, bin_edges

DAY = 86_400.0


def make_state(clock=time.monotonic, **run):
    config = Config(run=RunConfig(**run), actor=ActorConfig(num_actors=4))
    exploration = Exploration("epsilon", np.full(4, 0.1))
    return RunState(config, name="run", folder="runs/run", exploration=exploration, clock=clock)


def beat(state, num_inserted, session=1, shard=0, **more):
    state.update(make_heartbeat("replay", session, shard=shard, num_inserted=num_inserted, **more))


def test_a_part_without_a_report_has_no_row():
    state = make_state()
    assert list(MetricRows(state).next()) == []
    beat(state, 42, num_drawn=84)
    (row,) = MetricRows(state).next()
    assert (row.role, row.steps) == ("replay", 42)
    assert row.scalars["replay/num_inserted"] == 42
    assert row.scalars["replay/samples_per_insert"] == 2
    state.update_learner(LearnerStatus(updates=5, waiting=Waiting("batches", have=3)))
    learner, _ = MetricRows(state).next()
    assert learner.scalars == {
        "learner/updates": 5,
        "learner/skipped_updates": 0,
        "learner/unusable_transitions": 0,
        "learner/refused_batches": 0,
        "learner/loaders_draw": 0,
        "refused/connections": 0,
    }  # Texts and unknown values have no curve.


def test_a_figure_can_be_omitted():
    state = make_state()
    beat(state, 42)
    (row,) = MetricRows(state, {"replay/busy_share"}).next()
    assert "replay/busy_share" not in row.scalars
    assert "replay/size" in row.scalars


def test_histograms_of_shards_are_added_if_one_is_new():
    config = Config(replay=ReplayConfig(num_shards=2), actor=ActorConfig(num_actors=4))
    state = RunState(config, name="run", folder="runs/run", exploration=Exploration("epsilon", np.full(4, 0.1)))
    rows = MetricRows(state)
    edges = bin_edges(64, 65)  # from 1 on
    seen = []
    for counts in ((1.0, 2.0), (1.0, 2.0), (1.0, 5.0)):
        for shard, count in enumerate(counts):
            beat(state, 42, session=shard, shard=shard, priority_histogram=Histogram([count], edges))
        (row,) = rows.next()
        assert (row.scalars["replay/num_inserted"], row.scalars["replay/num_inserted/shard-1"]) == (84, 42)
        seen.append({tag: histogram.counts for tag, histogram in row.histograms.items()})
    assert seen == [{"replay/priority": [3.0]}, {}, {"replay/priority": [6.0]}]


def test_a_jump_of_the_wall_clock_changes_neither_end_nor_curves(tmp_path, monkeypatch):
    """The wall clock jumps by days at each call. The run, limited to 10 minutes, has taken 1 minute at the end."""
    jumps = itertools.cycle((0.0, 400 * DAY, -30 * DAY, 3_600.0, -3_600.0))
    monkeypatch.setattr(time, "time", lambda: 1e9 + next(jumps))
    now = [0.0]
    state = make_state(lambda: now[0], max_minutes=10.0)
    rows, writer = MetricRows(state), MetricsWriter(tmp_path)
    for second in range(60):
        now[0] = float(second)
        beat(state, 100 * second)
        state.update_learner(LearnerStatus(updates=second))
        for row in rows.next():
            writer.accept(row)
        assert state.reached_limit() is None
        state.members.forget_silent(30.0)
        assert state.members
    writer.close()
    curve = read_curve(tmp_path / "curves" / "learner.jsonl")
    assert [row["scalars"]["learner/updates"] for row in curve] == list(range(60))
    assert [row["steps"] for row in curve] == list(range(0, 6_000, 100))
    now[0] = 601.0  # the first step came after 1 second
    assert state.reached_limit() == EndReason("minutes", 10.0)


def test_the_advice_is_in_a_row_when_it_changes():
    state, advice = make_state(), []
    state.members.replay_endpoints = [{"experience": "tcp://..."}]
    rows = MetricRows(state)
    state.update(make_heartbeat("actor", 2))
    for updates, waits in [(0, 0.0), (5, 0.0), (9, 0.0), (12, 0.9)]:
        beat(state, 60_000, size=60_000)
        state.update_learner(LearnerStatus(updates=updates, wait_share=waits))
        advice.append(next(rows.next()).texts.get("limited_by/setting"))
    assert advice[::2] == [None, None]
    assert advice[1].startswith("learner: ")
    assert "--learner.batch-size" in advice[1]
    assert advice[3].startswith("wire: ")
    assert "--replay.batches-in-flight" in advice[3]
