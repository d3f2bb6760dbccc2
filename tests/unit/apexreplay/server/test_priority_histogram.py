"""The histogram shows |TD error| of a sample of live transitions, for any exponent, and is renewed at intervals."""

import numpy as np
import pytest
from support.store_builders import create, make_segment, make_update
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apex.runs.metrics.writer import MetricRow, MetricsWriter
from apexreplay.server.priority_histogram import MOST_KEYS, PERIOD, PriorityHistogram
from apexreplay.store.priority_weights import MAX_STORED_PRIORITY
from apexreplay.wire.histogram import BINS_PER_DECADE


def make_store(path, *priorities, **sizes):
    """Inserts a segment of one transition for each priority."""
    writer = create(path, **{"min_priority": 1e-6, **sizes})
    for number, priority in enumerate(priorities):
        writer.insert(make_segment(number, count=1, base=number, priority=priority))
    return writer


def tally(histogram):
    """Returns the counts of non-empty bins by decade."""
    pairs = zip(histogram.edges, histogram.counts, strict=False)
    return {round(float(np.log10(edge)) * BINS_PER_DECADE) / BINS_PER_DECADE: count for edge, count in pairs if count}


@pytest.mark.parametrize("priority_exponent", [0.6, 1.0, 2.0])
def test_bins_are_of_td_errors_for_any_exponent(path, priority_exponent):
    priorities = [1.05, 1.05, 1.05, 0.011, 0.011, 120.0]
    writer = make_store(path, *priorities, priority_exponent=priority_exponent)
    histogram = PriorityHistogram(writer).newest()
    assert tally(histogram) == {-2.0: 2.0, 0.0: 3.0, 2.0: 1.0}
    assert histogram.edges[0] == pytest.approx(0.01)  # Neither end has an empty bin.
    assert histogram.edges[-1] == pytest.approx(100 * 10 ** (1 / BINS_PER_DECADE))
    assert len(histogram.counts) == 4 * BINS_PER_DECADE + 1
    writer.close()


def test_the_smallest_and_the_largest_have_bins(path):
    writer = make_store(path, 0, np.inf, min_priority=1e-30)
    histogram = PriorityHistogram(writer).newest()
    assert tally(histogram) == {-8.0: 1.0, 6.0: 1.0}
    assert histogram.edges[-1] > MAX_STORED_PRIORITY
    writer.close()


def test_only_what_lives_is_counted(path):
    writer = make_store(path, *[1.0] * 9, capacity=4)
    writer.update_priorities(make_update(range(9), [100.0] * 9))
    assert tally(PriorityHistogram(writer).newest()) == {2.0: 4.0}
    writer.close()


def test_histogram_of_a_sample_estimates_the_counts_of_all(path):
    writer = create(path, capacity=5 * MOST_KEYS, max_bytes=50_000_000, min_priority=1e-6)
    for number in range(500):  # The second half of the time, priorities are ten times as large.
        writer.insert(make_segment(number, count=100, base=number, priority=1.05 if number < 250 else 10.5))
    found = tally(PriorityHistogram(writer).newest())
    assert found == {0.0: 25_000.0, 1.0: 25_000.0}
    writer.close()


def test_new_histogram_is_computed_after_a_period(path):
    now = [100.0]
    writer = create(path, min_priority=1e-6)
    histogram = PriorityHistogram(writer, clock=lambda: now[0])
    assert histogram.newest() is None  # An empty store has no histogram.
    writer.insert(make_segment(0, count=2, priority=1.05))
    first = histogram.newest()
    assert tally(first) == {0.0: 2.0}
    writer.update_priorities(make_update([0, 1], [10.5, 10.5]))
    now[0] += PERIOD - 0.1
    assert histogram.newest() is first
    now[0] += 0.1
    assert tally(histogram.newest()) == {1.0: 2.0}
    writer.close()


def test_histogram_is_kept_while_no_live_key_has_a_weight(path):
    now, looked = [0.0], []

    def look(step):
        if step in ("bytes", "leaves") and histogram:  # first there is no live transition, then none with a weight
            now[0] += PERIOD
            looked.append(histogram[0].newest())

    histogram = []
    writer = create(path, capacity=2, min_priority=1e-6, steps=look)
    writer.insert(make_segment(0, count=2, priority=1.05))
    histogram.append(PriorityHistogram(writer, clock=lambda: now[0]))
    before = histogram[0].newest()
    writer.insert(make_segment(1, count=2, priority=10.5))
    assert looked == [before, before]
    writer.close()


def test_there_is_no_histogram_with_exponent_0(path):
    writer = make_store(path, 1.0, 5.0, priority_exponent=0.0)
    assert PriorityHistogram(writer).newest() is None
    writer.close()


def test_an_event_file_holds_it_as_it_was_sent(path, tmp_path):
    writer = make_store(path, 1.05, 1.05, 0.011)
    histogram = PriorityHistogram(writer).newest()
    metrics = MetricsWriter(tmp_path)
    metrics.accept(MetricRow("replay", 7, {}, histograms={"replay/priority": histogram}))
    metrics.close()
    (event,) = EventAccumulator(str(tmp_path / "tensorboard" / tmp_path.name)).Reload().Histograms("replay/priority")
    assert (event.step, event.histogram_value.num) == (7, 3)
    assert list(event.histogram_value.bucket_limit) == histogram.edges[1:]
    assert list(event.histogram_value.bucket) == histogram.counts
    writer.close()
