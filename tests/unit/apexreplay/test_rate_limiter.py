"""The rate limiter keeps the ratio, never blocks both sides, and starts again after a resume."""

import dataclasses

import numpy as np
import pytest

from apexreplay.rate_limiter import RateLimiter

# 2 samples an insert, from 100 on, and a slack of 0.1 * 2 * 100 = 20 samples.
LIMITER = RateLimiter(100, 2.0, 0.1, True)


def test_limits_begin_at_the_minimum_and_hold_inserts_only_if_configured():
    assert not LIMITER.may_sample(99, 0)
    assert LIMITER.may_sample(100, 0)
    assert LIMITER.rebased(0, 10**9).may_insert(99, 0)
    assert dataclasses.replace(LIMITER, inserts_wait=False).may_insert(10**9, 0)
    free = RateLimiter(100, 0.0, 0.1, True)
    assert (free.may_sample(99, 0), free.may_sample(100, 10**9), free.may_insert(10**9, 0)) == (False, True, True)


@pytest.mark.parametrize(
    ("num_inserted", "num_sampled", "may_sample", "may_insert"),
    [
        (100, 20, True, True),
        (100, 21, False, True),  # above 2 * (100 - 100) + 20
        (110, 40, True, True),
        (110, 41, False, True),
        (110, 0, True, True),
        (111, 0, True, False),  # below 2 * (111 - 100) - 20
        (111, 2, True, True),
    ],
)
def test_cases_by_hand(num_inserted, num_sampled, may_sample, may_insert):
    assert LIMITER.may_sample(num_inserted, num_sampled) == may_sample
    assert LIMITER.may_insert(num_inserted, num_sampled) == may_insert


@pytest.mark.parametrize("seed", range(5))
def test_never_do_both_sides_wait(seed):
    rng = np.random.default_rng(seed)
    for _ in range(1000):
        limiter = RateLimiter(
            int(rng.integers(1, 1000)),
            float(rng.choice([0, 0.01, 0.6, 6, 300])),
            float(rng.choice([1e-9, 0.1, 5])),
            True,
        )
        if rng.random() < 0.5:
            limiter = limiter.rebased(int(rng.integers(0, 10**6)), int(rng.integers(0, 10**6)))
        x, y = int(rng.integers(0, 10**6)), int(rng.integers(0, 10**6))
        assert limiter.may_sample(x, y) or limiter.may_insert(x, y)


@pytest.mark.parametrize("batch", [1, 64, 512])
def test_alternating_inserts_and_samples_keep_the_ratio(batch):
    inserted = sampled = 0
    for _ in range(5_000):
        if LIMITER.may_insert(inserted, sampled):
            inserted += 5
        if LIMITER.may_sample(inserted, sampled):
            sampled += batch
    assert inserted > 1_000
    assert abs(sampled - 2 * (inserted - 100)) <= 20 + max(batch, 2 * 5)  # at most one insert or batch beyond


@pytest.mark.parametrize("num_sampled", [0, 10**9])
def test_a_resume_neither_blocks_nor_catches_up(num_sampled):
    resumed = LIMITER.rebased(5_000, num_sampled)
    assert resumed.may_sample(5_000, num_sampled)
    assert resumed.may_insert(5_000, num_sampled)
    assert resumed.may_sample(5_000, num_sampled + 20)
    assert not resumed.may_sample(5_000, num_sampled + 21)
    assert not resumed.may_insert(5_011, num_sampled)


def test_a_resume_with_an_empty_store_starts_at_the_minimum():
    resumed = LIMITER.rebased(3, 500)
    assert not resumed.may_sample(99, 500)
    assert resumed.may_sample(100, 520)
    assert not resumed.may_sample(100, 521)
