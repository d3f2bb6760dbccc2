"""Tests n-step returns and discounts exactly against their definition; tests h, its inverse and its precision."""

import numpy as np
import pytest
import torch

from apex.algorithms.n_step import RESCALING_EPSILON, NStep, n_step_returns, rescale, restore

GAMMA = 0.5  # Its powers and their products with small integers are exact.


def returns_of(rewards, *, terminated=(), truncated=(), n=3, gamma=GAMMA):
    """One stream; `terminated` and `truncated` list the steps at which it was."""
    marks = np.zeros((2, len(rewards), 1), bool)
    marks[0, list(terminated)] = marks[1, list(truncated)] = True
    n_step = n_step_returns(np.array(rewards, float)[:, None], *marks, n, gamma)
    return NStep(*(field[:, 0] for field in n_step))


def naive_n_step(rewards, terminated, truncated, n, gamma):
    """Computes each start of each stream from the definition; returns (return, discount, m, complete)."""
    num_steps, num_streams = rewards.shape
    windows = {}
    for stream in range(num_streams):
        for t in range(num_steps):
            ends = [k for k in range(t, num_steps) if terminated[k, stream] or truncated[k, stream]]
            end = ends[0] + 1 if ends else num_steps
            m = min(n, end - t)
            total = sum(gamma**k * float(rewards[t + k, stream]) for k in range(m))
            discount = 0.0 if terminated[t + m - 1, stream] else gamma**m
            windows[t, stream] = (np.float32(total), np.float32(discount), m, bool(ends) or t + n <= num_steps)
    return windows


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 64])
def test_n_step_returns_equal_their_definition_exactly(n, num_steps, seed):
    rng = np.random.default_rng(seed)
    rewards = 10.0 ** rng.integers(-3, 4, (num_steps, 3))
    terminated, truncated = rng.random((2, num_steps, 3)) < rng.choice([0.0, 0.1, 0.4])
    n_step = n_step_returns(rewards, terminated, truncated, n, gamma=0.99)
    expected = naive_n_step(rewards, terminated, truncated, n, gamma=0.99)
    assert expected == {(t, e): tuple(field[t, e] for field in n_step) for t in range(num_steps) for e in range(3)}


def test_terminal_state_shortens_windows_and_sets_discount_0():
    n_step = returns_of([1, 10, 100, 1000], terminated=[3])
    assert n_step.n_step_return.tolist() == [1 + 5 + 25, 10 + 50 + 250, 100 + 500, 1000]
    assert n_step.discount.tolist() == [0.125, 0, 0, 0]
    assert n_step.length.tolist() == [3, 3, 2, 1]
    assert n_step.complete.all()


def test_time_limit_shortens_windows_and_still_bootstraps():
    n_step = returns_of([1, 10, 100, 1000], truncated=[3])
    assert n_step.n_step_return.tolist() == [1 + 5 + 25, 10 + 50 + 250, 100 + 500, 1000]
    assert n_step.discount.tolist() == [0.125, 0.125, 0.25, 0.5]
    assert n_step.complete.all()


def test_infinite_reward_after_the_end_is_ignored():
    assert returns_of([1, np.inf], terminated=[0, 1]).n_step_return.tolist() == [1, np.inf]


def test_no_steps_give_no_windows():
    assert [field.shape for field in n_step_returns(*np.zeros((3, 0, 4), bool), 3, GAMMA)] == [(0, 4)] * 4


def test_sums_are_rounded_once_from_float64():
    big, small = 2.0**24, 1.0  # float32 would lose each 1 that is added to 2^24.
    assert returns_of([big, small, small], terminated=[2], gamma=1.0).n_step_return[0] == big + 2


def test_n_step_returns_have_declared_dtypes():
    assert [field.dtype for field in returns_of([1])] == [np.float32, np.float32, np.int64, np.bool_]


# Value rescaling

VALUES = [0.0, 1e-6, 1e-3, 0.5, 1.0, 37.0, 1e4, 1e6]


def naive(x):
    return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + RESCALING_EPSILON * x


def test_h_equals_values_by_hand():
    assert rescale(np.array([3.0, -8.0, 0.0])) == pytest.approx([1 + 0.003, -2 - 0.008, 0.0])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("value", VALUES)
def test_h_and_its_inverse_are_precise_in_float32(value, sign):
    x = torch.tensor([sign * value], dtype=torch.float32)
    assert rescale(x).dtype is torch.float32
    assert rescale(x).item() == pytest.approx(float(naive(np.float64(sign * value))), rel=1e-5)
    assert restore(rescale(x)).item() == pytest.approx(sign * value, rel=1e-5)


def test_arrays_and_tensors_agree():
    x = np.linspace(-50, 50, 11)
    assert np.allclose(rescale(x), rescale(torch.from_numpy(x)).numpy(), rtol=1e-12)
    assert np.allclose(restore(x), restore(torch.from_numpy(x)).numpy(), rtol=1e-12)
    assert np.allclose(restore(rescale(x)), x, rtol=1e-12)
