"""Tests the warnings about large observations and rewards, and which metrics of a game are read."""

import numpy as np
import pytest

from apex.environments.answers import MAX_NAME, NUM_CHECKED_STEPS, ScaleCheck, read_metrics
from apex.metric_tags import MAX_METRICS

SMALL, LARGE = np.float32([1.0, -99.0]), np.float32([0.0, -101.0])


@pytest.mark.parametrize(
    ("frame", "reward", "clip_rewards", "named"),
    [
        (SMALL, -199.0, False, []),
        (LARGE, 0.0, False, [("observations", "101")]),
        (SMALL, -201.0, False, [("rewards", "-201")]),
        (LARGE, -201.0, False, [("observations", "101"), ("rewards", "-201")]),
        (SMALL, -201.0, True, []),
        (np.uint8([255]), 0.0, False, []),
    ],
)
def test_large_observations_and_rewards_are_logged_once(frame, reward, clip_rewards, named, caplog):
    check = ScaleCheck("maze", clip_rewards=clip_rewards)
    for _ in range(3):
        check.check(frame, reward)
    for message, (kind, value) in zip(caplog.messages, named, strict=True):
        assert all(part in message for part in ("maze", kind, value))


def test_later_steps_are_not_checked(caplog):
    check = ScaleCheck("maze", clip_rewards=False)
    for _ in range(NUM_CHECKED_STEPS):
        check.check(SMALL, 0.0)
    check.check(LARGE, 1e6)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("info", "found"),
    [
        ({"is_success": True}, {"success": 1.0}),
        (
            {"is_success": np.float32(0), "metrics": {"laps": 3, "m/s": np.array([2.5])}},
            {"success": 0, "laps": 3, "m/s": 2.5},
        ),
        ({"is_success": None, "metrics": {"a": np.zeros(2), "b": "1", "c": [1], "d": 1j}}, {}),
        ({"metrics": {"a": np.nan, "b": -np.inf, "c": 10**400, "d": 1e300}}, {}),
        (
            {"metrics": {5: 1, "": 1, "a\n": 1, "T\u00fcr": 1, "x" * MAX_NAME: 1, "y" * (MAX_NAME + 1): 1}},
            {"x" * MAX_NAME: 1},
        ),
        ({"metrics": [1, 2]}, {}),
        ({}, {}),
        ("info", {}),
    ],
)
def test_only_finite_numbers_with_a_short_name_are_metrics(info, found):
    assert read_metrics(info) == found


def test_metrics_of_a_game_have_a_limit_and_success_comes_first():
    metrics = read_metrics({"metrics": {f"field_{i}": i for i in range(10 * MAX_METRICS)}, "is_success": False})
    assert list(metrics) == ["success", *(f"field_{i}" for i in range(MAX_METRICS - 1))]
