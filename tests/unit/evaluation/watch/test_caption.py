"""The strip below a game: the picture itself stays as it is, and the action that is taken stands out."""

from __future__ import annotations

import numpy as np
import pytest

from apex.evaluation.watch.caption import CHOSEN, HEIGHT, Caption, Strip


def caption(*q, action=0, **changes):
    told = {"version": 12_345, "game": 1, "step": 7, "score": 3.0, **changes}
    return Caption(q=np.array(q, np.float32), action=action, **told)


def bars(strip_picture, num_actions):
    """Height of the bar of each action in pixels, and whether it is the chosen one's."""
    row = strip_picture[-HEIGHT:][44:82]
    left, right = 54, strip_picture.shape[1] - 10
    column = (right - left) / num_actions
    middles = [row[:, int(left + (action + 0.5) * column)] for action in range(num_actions)]
    background = strip_picture[-1, -1]
    return [(int((m != background).any(1).sum()), bool((m == CHOSEN).all(1).any())) for m in middles]


def test_the_picture_is_above_the_strip_untouched():
    picture = np.random.default_rng(0).integers(256, size=(420, 320, 3)).astype(np.uint8)
    whole = Strip("ALE/Pong-v5", 0.001, ["noop", "up"]).below(picture, caption(1.0, 2.0))
    assert whole.shape == (420 + HEIGHT, 320, 3)
    np.testing.assert_array_equal(whole[:420], picture)


def test_a_narrow_picture_gets_a_border_so_that_the_words_fit():
    picture = np.full((400, 100, 3), 255, np.uint8)
    whole = Strip("x", 0.0, ["0", "1"]).below(picture, caption(1.0, 2.0))
    assert whole.shape == (400 + HEIGHT, 320, 3)
    np.testing.assert_array_equal(whole[:400, 110:210], picture)


def test_the_bar_of_a_better_action_is_higher_and_the_taken_one_has_another_colour():
    strip = Strip("x", 0.0, ["0", "1", "2"])
    (low, _), (middle, taken), (high, other) = bars(
        strip.below(np.zeros((400, 400, 3), np.uint8), caption(1.0, 1.5, 2.0, action=1)), 3
    )
    assert 0 < low < middle < high
    assert (taken, other) == (True, False)


def test_bars_keep_the_scale_of_the_greatest_difference_so_far():
    strip, picture = Strip("x", 0.0, ["0", "1"]), np.zeros((400, 400, 3), np.uint8)
    alone = bars(strip.below(picture, caption(100.0, 101.0)), 2)[1][0]
    bars(strip.below(picture, caption(0.0, 10.0)), 2)
    after = bars(strip.below(picture, caption(100.0, 101.0)), 2)[1][0]
    assert after < alone / 3


@pytest.mark.parametrize("q", [(0.0, 0.0), (1e30, -1e30), (np.nan, np.nan)])
def test_equal_and_monstrous_values_are_drawn_too(q):
    assert Strip("x", 0.0, ["0", "1"]).below(np.zeros((400, 400, 3), np.uint8), caption(*q)).shape == (500, 400, 3)


def test_eighteen_actions_have_no_room_for_names():
    names = ["downrightfire"] * 18
    picture = np.zeros((420, 320, 3), np.uint8)
    named, bare = (Strip("x", 0.0, each).below(picture, caption(*range(18))) for each in (names, [""] * 18))
    np.testing.assert_array_equal(named, bare)
