"""Tests the epsilon and noise ladders against the paper's formula, and the frequency of exploring actions."""

import numpy as np
import pytest

from apex.algorithms.exploration import add_noise, epsilon_greedy, epsilon_ladder, noise_ladder
from apexreplay.errors import UsageError


def make_q(num_streams, num_actions=4, best=2):
    q = np.zeros((num_streams, num_actions), np.float32)
    q[:, best] = 1
    return q


@pytest.mark.parametrize("num_actors", [2, 3, 8, 360])
def test_epsilon_ladder_equals_the_papers_formula(num_actors):
    expected = [0.4 ** (1 + 7.0 * i / (num_actors - 1)) for i in range(num_actors)]
    assert epsilon_ladder(num_actors, 0.4, 7.0).tolist() == pytest.approx(expected, rel=1e-12)


def test_epsilon_ladder_by_hand():
    assert epsilon_ladder(2, 0.4, 7.0).tolist() == pytest.approx([0.4, 0.00065536])
    assert epsilon_ladder(8, 0.5, 7.0).tolist() == [0.5**i for i in range(1, 9)]
    assert epsilon_ladder(1, 0.4, 7.0).dtype == epsilon_ladder(8, 0.4, 7.0).dtype == np.float64


def test_single_actor_gets_the_middle_of_the_epsilon_ladder():
    (epsilon,) = epsilon_ladder(1, 0.4, 7.0)
    assert epsilon == epsilon_ladder(3, 0.4, 7.0)[1] == pytest.approx(0.01619086)


@pytest.mark.parametrize("ladder", [epsilon_ladder, noise_ladder])
def test_ladder_of_no_actors_is_refused(ladder):
    with pytest.raises(UsageError, match=r"actor\.num_actors.*\b0\b"):
        ladder(0, 0.3, 1.0)


def test_noise_ladder_is_geometric():
    assert noise_ladder(3, 0.3, 1.0).tolist() == [0.3] * 3
    assert np.allclose(noise_ladder(3, 0.8, 0.25), [0.8, 0.4, 0.2])
    assert np.allclose(noise_ladder(1, 0.8, 0.25), [0.4])


def test_epsilon_0_chooses_the_lowest_of_equal_greedy_actions():
    q = np.array([[3, 1, 2], [1, 3, 3], [0, 0, 0]], np.float32)
    actions = epsilon_greedy(q, np.zeros(3), np.random.default_rng(0))
    assert actions.tolist() == [0, 1, 0]
    assert actions.dtype == np.int64


def test_epsilon_1_draws_every_action_equally_often():
    num_draws, num_actions = 40_000, 4
    actions = epsilon_greedy(make_q(num_draws, num_actions), np.ones(num_draws), np.random.default_rng(1))
    counts = np.bincount(actions, minlength=num_actions)
    chi2 = ((counts - num_draws / num_actions) ** 2 / (num_draws / num_actions)).sum()
    assert chi2 < 16.27  # the 0.999 quantile of chi squared with 3 degrees of freedom


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5])
def test_frequency_of_exploring_actions_follows_epsilon(epsilon):
    num_draws, num_actions = 40_000, 4
    actions = epsilon_greedy(make_q(num_draws, num_actions), np.full(num_draws, epsilon), np.random.default_rng(2))
    p = epsilon * (num_actions - 1) / num_actions
    four_sigma = 4 * (p * (1 - p) / num_draws) ** 0.5  # of a binomial's mean: exceeded once in 16,000
    assert (actions != 2).mean() == pytest.approx(p, abs=four_sigma)


def test_each_stream_explores_with_its_own_epsilon():
    epsilon = np.tile([0.0, 1.0], 5_000)
    actions = epsilon_greedy(make_q(10_000), epsilon, np.random.default_rng(3))
    assert (actions[0::2] == 2).all()
    assert (actions[1::2] == 2).mean() == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 5_000) ** 0.5)


def test_seed_explores_at_the_same_steps_for_any_q_values():
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
    share = (action[::2] == 0).mean()  # of the action that is allowed and not greedy; within four standard deviations
    assert abs(share - epsilon / 2) < 4 * (0.25 / 2_000) ** 0.5
    assert (share == 0) == (epsilon == 0)


def test_number_of_draws_depends_only_on_shapes():
    rngs = [np.random.default_rng(0) for _ in range(4)]
    for mask, rng in zip((MASK, MASK[::-1]), rngs[:2], strict=True):
        epsilon_greedy(np.zeros((2, 4), np.float32), np.ones(2), rng, mask)
    add_noise(np.zeros((3, 2), np.float32), np.zeros(3), rngs[2])
    add_noise(np.ones((3, 2), np.float32), np.ones(3), rngs[3])
    assert rngs[0].random() == rngs[1].random()
    assert rngs[2].random() == rngs[3].random()


def test_noise_has_its_deviation_and_is_clipped_to_the_actions():
    action = np.zeros((2, 40_000), np.float32)
    noisy = add_noise(action, np.array([0.0, 0.1]), np.random.default_rng(0))
    assert not noisy[0].any()
    assert noisy[1].std() == pytest.approx(0.1, rel=0.02)
    assert noisy.dtype == np.float32
    assert abs(add_noise(action, np.array([5.0, 5.0]), np.random.default_rng(0))).max() == 1
