"""Histograms of several shards are added bin by bin."""

import msgspec
import pytest

from apexreplay.wire.histogram import MAX_BINS, Histogram, bin_edges, merge


def test_edges_grow_by_eight_to_a_decade_from_1e_minus_8_on():
    assert bin_edges(0, 1)[0] == 1e-8
    assert bin_edges(56, 72) == pytest.approx([10 ** (index / 8) for index in range(-8, 9)])


def test_shards_are_added_bin_by_bin():
    first, second = Histogram([1.0, 2.0], bin_edges(3, 5)), Histogram([10.0, 20.0, 40.0], bin_edges(4, 7))
    assert merge([first, second]) == Histogram([1.0, 12.0, 20.0, 40.0], bin_edges(3, 7))
    assert merge([first]) == first


def test_a_gap_between_shards_is_empty():
    whole = merge([Histogram([1.0], bin_edges(3, 4)), Histogram([2.0], bin_edges(6, 7))])
    assert whole == Histogram([1.0, 0.0, 0.0, 2.0], bin_edges(3, 7))


@pytest.mark.parametrize("edges", [[1e-30, 1.0], [1e29, 1e30]])
def test_each_accepted_histogram_can_be_merged(edges):
    accepted = msgspec.convert({"counts": [2.0**53], "edges": edges}, Histogram)
    whole = merge([accepted, Histogram([1.0], bin_edges(64, 65))])
    assert sum(whole.counts) == 2.0**53 + 1
    assert len(whole.counts) <= 3 * MAX_BINS
