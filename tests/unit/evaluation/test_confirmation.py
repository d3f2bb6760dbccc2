"""Tests the rule that confirms a stop score: its looks by hand, its error, and the quantile that it uses."""

import pytest

from apex.evaluation.confirmation import judge, looks, students_quantile
from bench.confirmation import measure


def spread(mean, deviation, count):
    return [mean - deviation, mean + deviation] * (count // 2)


def test_looks_are_after_a_fifth_two_fifths_and_all_of_the_games():
    assert (looks(100), looks(250)) == ([20, 40, 100], [50, 100, 250])


# 20 games at 12 ± 1 and another 11: their mean is 11.952, its standard error 0.2234. The quantile of the first look is
# 3.8495, so the goal may be at most 11.0926.
@pytest.mark.parametrize(("goal", "verdict"), [(11.09, True), (11.10, None), (11.99, None), (12.01, False)])
def test_the_first_look_needs_a_clear_lead_and_ends_below_the_goal(goal, verdict):
    assert judge(spread(12.0, 1.0, 20), goal, 100) is verdict


# 40 games: 11.9756, 0.1581, 3.1604, so 11.476; 100 games: 11.9901, 0.1, 2.0809, so 11.782.
@pytest.mark.parametrize(
    ("count", "goal", "verdict"),
    [(40, 11.47, True), (40, 11.48, None), (40, 12.01, False), (100, 11.78, True), (100, 11.79, False)],
)
def test_later_looks_need_a_smaller_lead_and_the_last_one_decides(count, goal, verdict):
    assert judge(spread(12.0, 1.0, count), goal, 100) is verdict


def test_early_looks_do_not_trust_a_policy_that_has_hardly_failed():
    """Even 40 full scores may be those of a policy that fails in one game of 40."""
    few, enough = [500.0] * 16 + [499.0] * 4, [500.0] * 15 + [499.0] * 5
    assert [judge(scores, 475.0, 100) for scores in (few, enough)] == [None, True]
    assert judge([500.0] * 40, 475.0, 100) is None
    assert judge([500.0] * 100, 475.0, 100) is True
    assert judge([500.0] * 100, 500.0, 100) is True


def test_one_bad_game_counts_twice():
    """The interval of 99 games of 500 and one of 200 begins at 490.8; with another one of 200, at 485.3."""
    scores = [500.0] * 99 + [200.0]
    assert judge(scores, 485.0, 100) is True
    assert judge(scores, 486.0, 100) is False


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.9995, 20, 3.8495), (0.9985, 40, 3.1604), (0.98, 100, 2.0809), (0.975, 30, 2.0423)],
)
def test_quantiles_are_those_of_tables(probability, freedom, expected):
    assert students_quantile(probability, freedom) == pytest.approx(expected, abs=2e-3)


def test_chance_confirms_at_most_one_run_in_forty():
    """Tolerance: four standard deviations of a binomial's share of 4,000 runs."""
    figures = measure(4_000, ["normal", "bernoulli_80", "capped_22"])
    for name in ("normal", "bernoulli_80", "capped_22"):
        assert figures[f"{name}_confirmed"] < 0.025 + 4 * (0.025 * 0.975 / 4_000) ** 0.5
        assert figures[f"{name}_games"] < 80
