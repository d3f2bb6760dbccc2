"""Rates are measured over a window with several bursts."""

import pytest

from apexreplay.process.rates import WINDOW_SECONDS, Rates


def test_bursts_have_a_constant_rate():
    """A counter grows by 800 every 1.4 s. Between two measurements, 1 s apart, it grows by 800 or 0."""
    rates = Rates(0.0, 0)
    seen = [rates.measure(second, 800 * (second // 1.4))[0] for second in range(1, 60)]
    assert seen[12:] == pytest.approx([800 / 1.4] * len(seen[12:]), rel=1.4 / WINDOW_SECONDS)


def test_the_window_is_no_longer_than_it_must_be():
    rates = Rates(0.0, 0)
    for second in range(1, 101):
        rates.measure(second, 50 * second)
    assert [rates.measure(100 + second, 5_000)[0] for second in range(1, 12)] == pytest.approx(
        [45, 40, 35, 30, 25, 20, 15, 10, 5, 0, 0]
    )


def test_looks_far_apart_are_a_window_each():
    rates = Rates(0.0, 0, 0)
    assert rates.measure(60.0, 600, 6) == (10, 0.1)
    assert rates.measure(120.0, 600, 12) == (0, 0.1)


def test_a_counter_that_begins_anew_does_not_grow_backwards():
    rates = Rates(0.0, 1_000)
    assert rates.measure(1.0, 5) == (0,)
    assert rates.measure(11.0, 55) == (5,)


def test_no_time_at_all_is_no_infinite_rate():
    assert Rates(3.0, 0).measure(3.0, 1) == (1_000,)
