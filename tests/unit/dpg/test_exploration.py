"""Claims about `apex.dpg.exploration`: the ladder of noise, and actions that stay actions."""

from __future__ import annotations

import numpy as np
import pytest

from apex.dpg.exploration import add_noise, noise_ladder
from apex.errors import UsageError


def test_without_a_ladder_all_have_the_papers_noise():
    assert noise_ladder(3, 0.3, 1.0).tolist() == [0.3] * 3


def test_a_ladder_is_geometric_and_one_actor_has_its_middle():
    assert np.allclose(noise_ladder(3, 0.8, 0.25), [0.8, 0.4, 0.2])
    assert np.allclose(noise_ladder(1, 0.8, 0.25), [0.4])
    with pytest.raises(UsageError, match="got 0"):
        noise_ladder(0, 0.3, 1.0)


def test_noise_has_its_deviation_and_stays_within_the_actions():
    action = np.zeros((2, 40_000), np.float32)
    noisy = add_noise(action, np.array([0.0, 0.1]), np.random.default_rng(0))
    assert not noisy[0].any()
    assert noisy[1].std() == pytest.approx(0.1, rel=0.02)
    assert noisy.dtype == np.float32
    assert abs(add_noise(action, np.array([5.0, 5.0]), np.random.default_rng(0))).max() == 1


def test_the_number_of_draws_depends_on_shapes_alone():
    one, other = np.random.default_rng(0), np.random.default_rng(0)
    add_noise(np.zeros((3, 2), np.float32), np.zeros(3), one)
    add_noise(np.ones((3, 2), np.float32), np.ones(3), other)
    assert one.random() == other.random()
