"""Ticks are few and round, and labels short."""

from __future__ import annotations

import pytest

from apex.runs.plots.ticks import number_ticks, time_axis
from apex.runtime.text import number_text, time_text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 500, [0, 100, 200, 300, 400, 500]),
        (-21, 21, [-20, -10, 0, 10, 20]),
        (0, 1_230_000, [200_000 * i for i in range(7)]),
        (0.2, 0.9, [0.2, 0.4, 0.6, 0.8]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round_and_lie_within(low, high, ticks):
    assert number_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize("exponent", range(-4, 9))
@pytest.mark.parametrize("digits", [1.0, 1.01, 2.3, 4.99, 7.0, 9.99])
def test_there_are_never_many_ticks_nor_only_one(exponent, digits):
    high = digits * 10.0**exponent
    assert 3 <= len(number_ticks(0, high)) <= 7
    assert 2 <= len(time_axis(high + 1).ticks) <= 7


@pytest.mark.parametrize(
    ("high", "form", "labels"),
    [
        (21, "m:ss", ["0:00", "0:05", "0:10", "0:15", "0:20"]),
        (1_800, "m:ss", ["0:00", "5:00", "10:00", "15:00", "20:00", "25:00", "30:00"]),
        (5_400, "h:mm", ["0:00", "0:15", "0:30", "0:45", "1:00", "1:15", "1:30"]),
        (40_000, "h:mm", ["0:00", "2:00", "4:00", "6:00", "8:00", "10:00"]),
        (5 * 86_400, "days", ["0", "1", "2", "3", "4", "5"]),
    ],
)
def test_a_clock_names_the_times(high, form, labels):
    axis = time_axis(high)
    assert (axis.form, axis.labels) == (form, labels)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (475, "475"),
        (-20.5, "-20.5"),
        (0.6, "0.6"),
        (16, "16"),
        (999.6, "1k"),
        (12_500, "12.5k"),
        (200_000, "200k"),
        (1_234_567, "1.23M"),
        (2e9, "2G"),
        (3e-4, "3e-4"),
        (6.25e-5, "6.25e-5"),
        (1e-8, "1e-8"),
    ],
)
def test_numbers_have_three_digits_and_a_suffix(value, text):
    assert number_text(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (9.6, "0:10"), (61, "1:01"), (3_599.7, "1:00:00")])
def test_times_are_read_as_on_a_clock(seconds, text):
    assert time_text(seconds) == text
