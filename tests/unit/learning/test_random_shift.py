"""Tests random shifts against a naive twin: whole stacks move, borders repeat, a seed gives the same shifts."""

import numpy as np
import pytest

from apex.config import Config, LearnerConfig
from apex.learning.random_shift import RandomShift
from apex.schema import Part

BATCH, STACK, HEIGHT, WIDTH = 40, 3, 7, 5


def make_stacks(dtype="uint8"):
    """Returns stacks whose pixels all differ."""
    stacks = np.arange(2 * BATCH * STACK * HEIGHT * WIDTH) % 251
    return stacks.reshape(2, BATCH, STACK, HEIGHT, WIDTH).astype(dtype)


def naive(stack, down, right):
    """Returns the stack shifted by these numbers of pixels, computed pixel by pixel."""
    moved = np.empty_like(stack)
    for image, result in zip(stack, moved, strict=True):
        for y in range(HEIGHT):
            for x in range(WIDTH):
                result[y, x] = image[min(max(y - down, 0), HEIGHT - 1), min(max(x - right, 0), WIDTH - 1)]
    return moved


def shifted(pixels, *, seed=5, dtype="uint8"):
    stacks = make_stacks(dtype)
    RandomShift.configured(Config(seed=seed, learner=LearnerConfig(random_shift=pixels)), 0).apply(stacks)
    return stacks


def offsets(before, after, pixels):
    """Yields for each stack the only shift of at most `pixels` that turns `before` into `after`."""
    pairs = [(down, right) for down in range(-pixels, pixels + 1) for right in range(-pixels, pixels + 1)]
    for old, new in zip(before.reshape(-1, *before.shape[2:]), after.reshape(-1, *before.shape[2:]), strict=True):
        (found,) = (pair for pair in pairs if np.array_equal(naive(old, *pair), new))
        yield found


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_each_state_has_its_own_shift_and_repeats_the_border(dtype):
    found = list(offsets(make_stacks(dtype), shifted(2, dtype=dtype), 2))
    for axis in (0, 1):
        assert {pair[axis] for pair in found} == {-2, -1, 0, 1, 2}
    assert len(set(found)) > 15  # The directions are independent: otherwise there would be only 5 pairs.
    assert found[:BATCH] != found[BATCH:]  # The two states of a transition are shifted independently.


def test_shift_of_0_pixels_changes_nothing():
    np.testing.assert_array_equal(shifted(0), make_stacks())


def test_shifts_depend_on_seed_and_loader():
    np.testing.assert_array_equal(shifted(2), shifted(2))
    assert not np.array_equal(shifted(2), shifted(2, seed=6))
    other = make_stacks()
    RandomShift.configured(Config(seed=5, learner=LearnerConfig(random_shift=2)), 1).apply(other)
    assert not np.array_equal(shifted(2), other)


def test_shifts_differ_from_batch_to_batch():
    shift = RandomShift(2, np.random.default_rng(0))
    first, second = make_stacks(), make_stacks()
    shift.apply(first)
    shift.apply(second)
    assert not np.array_equal(first, second)


def test_only_images_of_a_frame_with_parts_are_shifted():
    parts = (Part("x", "float32", (2,)), Part("camera", "uint8", (36, 40, 3)), Part("cells", "uint8", (7, 7)))
    size = sum(part.num_bytes for part in parts)
    stacks = np.random.default_rng(0).integers(0, 256, (2, 3, 2, size), np.uint8)
    before = stacks.copy()
    RandomShift(2, np.random.default_rng(1), parts).apply(stacks)
    assert np.array_equal(stacks[..., :8], before[..., :8])
    assert np.array_equal(stacks[..., -49:], before[..., -49:])
    images = before[..., 8:-49].reshape(2, 3, 2, 36, 40, 3).copy()
    RandomShift(2, np.random.default_rng(1)).apply(images)
    assert np.array_equal(stacks[..., 8:-49].reshape(images.shape), images)
    assert not np.array_equal(stacks, before)


def test_all_channels_of_an_image_move_together():
    gray = np.random.default_rng(0).integers(0, 256, (2, 3, 2, 36, 40), np.uint8)
    colour = np.stack([gray, 255 - gray], -1)
    RandomShift(2, np.random.default_rng(1)).apply(gray)
    RandomShift(2, np.random.default_rng(1)).apply(colour)
    assert np.array_equal(colour[..., 0], gray)
    assert np.array_equal(colour[..., 1], 255 - gray)
