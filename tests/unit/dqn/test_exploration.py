"""The epsilon ladder is the paper's, defined for one actor too; epsilon-greedy explores as often as it says."""

from __future__ import annotations

import numpy as np
import pytest

from apex.dqn.exploration import epsilon_greedy, epsilon_ladder
from apex.errors import UsageError


def make_q(num_streams, num_actions=4, best=2):
    q = np.zeros((num_streams, num_actions), np.float32)
    q[:, best] = 1
    return q


@pytest.mark.parametrize("num_actors", [2, 3, 8, 360])
def test_the_ladder_is_the_papers_formula(num_actors):
    expected = [0.4 ** (1 + 7.0 * i / (num_actors - 1)) for i in range(num_actors)]
    assert epsilon_ladder(num_actors, 0.4, 7.0).tolist() == pytest.approx(expected, rel=1e-12)


def test_two_actors_stand_at_the_two_ends():
    assert epsilon_ladder(2, 0.4, 7.0).tolist() == pytest.approx([0.4, 0.00065536])


def test_eight_actors_stand_at_the_whole_powers():
    assert epsilon_ladder(8, 0.5, 7.0).tolist() == [0.5**i for i in range(1, 9)]


def test_the_highest_actor_has_the_smallest_epsilon_and_no_two_have_the_same():
    assert (np.diff(epsilon_ladder(256, 0.4, 7.0)) < 0).all()


def test_a_single_actor_stands_in_the_middle_of_the_ladder():
    (epsilon,) = epsilon_ladder(1, 0.4, 7.0)
    assert epsilon == epsilon_ladder(3, 0.4, 7.0)[1] == pytest.approx(0.01619086)


def test_the_ladder_is_float64():
    assert epsilon_ladder(1, 0.4, 7.0).dtype == epsilon_ladder(8, 0.4, 7.0).dtype == np.float64


def test_refuses_a_ladder_of_no_actors():
    with pytest.raises(UsageError, match="num_actors must be >= 1 to have epsilons, got 0"):
        epsilon_ladder(0, 0.4, 7.0)


def test_epsilon_0_is_greedy_and_takes_the_lowest_of_equals():
    q = np.array([[3, 1, 2], [1, 3, 3], [0, 0, 0]], np.float32)
    actions = epsilon_greedy(q, np.zeros(3), np.random.default_rng(0))
    assert actions.tolist() == [0, 1, 0]
    assert actions.dtype == np.int64


def test_epsilon_1_draws_every_action_equally_often():
    num_draws, num_actions = 40_000, 4
    actions = epsilon_greedy(make_q(num_draws, num_actions), np.ones(num_draws), np.random.default_rng(1))
    counts = np.bincount(actions, minlength=num_actions)
    chi2 = ((counts - num_draws / num_actions) ** 2 / (num_draws / num_actions)).sum()
    assert chi2 < 16.27  # The 0.999 quantile of chi squared with 3 degrees of freedom.


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5])
def test_leaves_the_greedy_action_with_probability_epsilon_times_a_minus_1_over_a(epsilon):
    num_draws, num_actions = 40_000, 4
    actions = epsilon_greedy(make_q(num_draws, num_actions), np.full(num_draws, epsilon), np.random.default_rng(2))
    p = epsilon * (num_actions - 1) / num_actions
    four_sigma = 4 * (p * (1 - p) / num_draws) ** 0.5  # Of a binomial's mean: missed once in 16,000.
    assert (actions != 2).mean() == pytest.approx(p, abs=four_sigma)


def test_each_stream_explores_by_its_own_epsilon():
    epsilon = np.tile([0.0, 1.0], 5_000)
    actions = epsilon_greedy(make_q(10_000), epsilon, np.random.default_rng(3))
    assert (actions[0::2] == 2).all()
    assert (actions[1::2] == 2).mean() == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 5_000) ** 0.5)


def test_the_same_seed_explores_alike_whatever_the_network_says():
    epsilon, q = np.full(100, 0.5), make_q(100)
    first, second = np.random.default_rng(4), np.random.default_rng(4)
    epsilon_greedy(q, np.zeros(100), first)
    epsilon_greedy(-q, np.ones(100), second)
    assert np.array_equal(epsilon_greedy(q, epsilon, first), epsilon_greedy(q, epsilon, second))


MASK = np.array([[True, False, True, False], [False, False, False, True]])


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0])
def test_only_allowed_actions_are_chosen(epsilon):
    q = np.array([[1.0, 9.0, 2.0, 9.0], [9.0, 9.0, 9.0, -5.0]], np.float32)
    q, mask = np.tile(q, (2_000, 1)), np.tile(MASK, (2_000, 1))
    action = epsilon_greedy(q, np.full(4_000, epsilon), np.random.default_rng(0), mask)
    assert mask[np.arange(4_000), action].all()
    share = (action[::2] == 0).mean()  # of the action that is allowed and not greedy; four standard deviations
    assert abs(share - epsilon / 2) < 4 * (0.25 / 2_000) ** 0.5
    assert (share == 0) == (epsilon == 0)


def test_the_number_of_draws_does_not_depend_on_what_is_allowed():
    generators = [np.random.default_rng(0) for _ in range(2)]
    for mask, rng in zip((MASK, MASK[::-1]), generators, strict=True):
        epsilon_greedy(np.zeros((2, 4), np.float32), np.ones(2), rng, mask)
    assert generators[0].random() == generators[1].random()
