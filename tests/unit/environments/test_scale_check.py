"""Large observations and rewards are warned of once, and only in the first steps."""

from __future__ import annotations

import numpy as np
import pytest

from apex.environments.scale_check import NUM_STEPS, ScaleCheck

SMALL, LARGE = np.float32([1.0, -99.0]), np.float32([0.0, -101.0])


@pytest.mark.parametrize(
    ("frame", "reward", "clip_rewards", "told"),
    [
        (SMALL, -199.0, False, []),
        (LARGE, 0.0, False, ["an observation has the value 101"]),
        (SMALL, -201.0, False, ["a reward is -201"]),
        (SMALL, -201.0, True, []),
        (np.uint8([255]), 0.0, False, []),
    ],
)
def test_large_observations_and_rewards_are_logged_once(frame, reward, clip_rewards, told, caplog):
    check = ScaleCheck("game", clip_rewards=clip_rewards)
    for _ in range(3):
        check.look(frame, reward)
    assert [record.message.startswith(f"game: {text}") for record, text in zip(caplog.records, told, strict=True)] == [
        True
    ] * len(told)


def test_later_steps_are_not_checked(caplog):
    check = ScaleCheck("game", clip_rewards=False)
    for _ in range(NUM_STEPS):
        check.look(SMALL, 0.0)
    check.look(LARGE, 1e6)
    assert caplog.records == []
