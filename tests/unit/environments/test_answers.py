"""Tests the warnings about large observations and rewards: once each, and only in the first steps."""

import numpy as np
import pytest

from apex.environments.answers import NUM_CHECKED_STEPS, ScaleCheck

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
