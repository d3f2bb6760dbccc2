"""Tests of the layout of TensorBoard's page Custom Scalars."""

import re
from typing import get_args

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from apex.facts import Part
from apex.metric_tags import EPISODES, FAULTS, LENGTH, MEAN_SCORE, SCORE, score_tag
from apex.runs.metrics.tensorboard_layout import BOTTLENECK, GLANCE, LAYOUT
from apex.runs.metrics.writer import MetricRow, MetricsWriter

CHARTS = [(title, tag) for category in LAYOUT.values() for title, tags in category.items() for tag in tags]


def read_layout(folder):
    shown = EventAccumulator(str(folder / "tensorboard" / folder.name)).Reload()
    (event,) = shown.Tensors("custom_scalars__config__")
    return Layout.FromString(event.tensor_proto.string_val[0])


def test_tensorboard_reads_the_layout_with_the_overview_first(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.begin(0)
    writer.close()
    layout = read_layout(tmp_path)
    assert [category.title for category in layout.category] == list(LAYOUT)
    assert layout.category[0].title == GLANCE
    read = {chart.title: list(chart.multiline.tag) for chart in layout.category[0].chart}
    assert read == LAYOUT[GLANCE]


def test_resumed_run_has_one_layout(tmp_path):
    for steps in (0, 500):
        writer = MetricsWriter(tmp_path)
        writer.begin(steps)
        writer.accept(MetricRow("learner", steps + 100, {"learner/loss": 1.0}, 1.0))
        writer.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard" / tmp_path.name)).Reload()
    read = [Layout.FromString(e.tensor_proto.string_val[0]) for e in shown.Tensors("custom_scalars__config__")]
    assert [layout == read[0] for layout in read] == [True] * len(read)
    assert [event.step for event in shown.Scalars("learner/loss")] == [100, 600]


@pytest.mark.parametrize(("title", "tag"), CHARTS)
def test_chart_has_a_short_title_and_an_unambiguous_pattern(title, tag):
    assert len(title) <= 45  # A longer title takes two lines, and the charts of a row are no longer aligned.
    assert re.fullmatch(r"[a-z_]+/([a-z_]+\$|[a-z_]*)", tag)
    assert not tag.endswith(("_score", "_second"))  # Without $ it would also match longer tags.


def test_each_part_that_can_be_the_bottleneck_has_its_own_chart():
    charts = list(LAYOUT[BOTTLENECK].values())
    assert sorted(charts) == sorted([f"limited_by/{part}$"] for part in get_args(Part))
    assert not [tag for title, tag in CHARTS if tag.startswith("limited_by/") and [tag] not in charts]


def test_layout_shows_every_tag_of_the_actors_but_the_episodes():
    shown = re.compile("|".join(tag for _, tag in CHARTS))
    tags = (EPISODES, FAULTS, LENGTH, MEAN_SCORE, SCORE, score_tag(0, 0.4, "epsilon"))
    assert {tag for tag in tags if not shown.match(tag)} == {EPISODES}
