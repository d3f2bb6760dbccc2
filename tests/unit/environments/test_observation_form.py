"""Observations become frames without loss: their parts are found again, and images change only as configured."""

import re
from types import SimpleNamespace

import cv2
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from apex.config import EnvironmentConfig
from apex.environments.answers import BadAnswerError
from apex.environments.observation_form import read_observations
from apexreplay.errors import UsageError

ROOM = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (40, 36, 3), np.uint8),
        "map": spaces.Box(0, 1, (5, 4, 3), bool),
        "arm": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
        "goal": spaces.Tuple([spaces.Discrete(3, start=5), spaces.MultiDiscrete([2, 4]), spaces.MultiBinary(9)]),
        "task": spaces.Text(5),
        "ram": spaces.Box(0, 20, (3,), np.uint8),
    }
)


def read(space, **settings):
    return read_observations(SimpleNamespace(observation_space=space), EnvironmentConfig(id="my:Env", **settings))


def sample(space, seed=1):
    space.seed(seed)
    return space.sample()


def test_the_bytes_of_a_frame_are_those_of_the_parts():
    form, observation = read(ROOM), sample(ROOM)
    assert [(part.name, part.dtype, part.shape, part.most) for part in form.parts] == [
        ("arm", "float32", (4,), 255),
        ("camera", "uint8", (40, 36, 3), 255),
        ("goal.0", "int32", (1,), 2),
        ("goal.1", "int32", (2,), 5),
        ("goal.2", "bool", (9,), 1),
        ("map", "bool", (5, 4, 3), 255),
        ("ram", "uint8", (3,), 20),
    ]
    frame = form.to_frame(observation)
    assert (frame.dtype, frame.shape) == (np.uint8, form.shape)
    pieces = np.split(frame, np.cumsum([part.num_bytes for part in form.parts])[:-1])
    arm, camera, discrete, several, switches, plan, ram = pieces
    assert np.array_equal(arm.view(np.float32), observation["arm"].reshape(-1).astype(np.float32))
    assert np.array_equal(camera.reshape(40, 36, 3), observation["camera"])
    assert discrete.view(np.int32).tolist() == [observation["goal"][0] - 5]
    assert several.view(np.int32).tolist() == [observation["goal"][1][0], 2 + observation["goal"][1][1]]
    assert np.array_equal(np.unpackbits(switches, count=9, bitorder="little"), observation["goal"][2])
    assert np.array_equal(np.unpackbits(plan, count=60, bitorder="little").reshape(5, 4, 3), observation["map"])
    assert np.array_equal(ram, observation["ram"])
    assert form.change == "the text of task is ignored"


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        (spaces.Box(0, 255, (40, 50, 3), np.uint8), (40, 50, 3)),
        (spaces.Box(0, 255, (40, 50, 1), np.uint8), (40, 50)),
        (spaces.Box(0, 255, (40, 50), np.uint8), (40, 50)),
        (spaces.Box(0, 255, (3, 40, 50), np.uint8), (40, 50, 3)),
        (spaces.Box(0, 255, (4, 40, 40), np.uint8), (40, 40, 4)),
        (spaces.Box(0, 10, (7, 7, 3), np.uint8), (7, 7, 3)),
        (spaces.Box(0, 10, (20, 7, 7), np.uint8), (7, 7, 20)),
        (spaces.Box(0, 10, (7, 7, 20), np.uint8), (7, 7, 20)),
        (spaces.Box(0, 10, (10, 10, 10), np.uint8), (10, 10, 10)),
        (spaces.Box(0, 255, (128,), np.uint8), (128,)),
    ],
)
def test_images_and_grids_keep_their_values_with_the_channels_last(space, shape):
    form, observation = read(space), sample(space)
    assert (form.shape, form.dtype, form.stack, form.parts, form.change) == (shape, "uint8", 1, (), "")
    moved = (
        np.moveaxis(observation, 0, -1)
        if observation.shape != shape and observation.ndim == len(shape)
        else observation
    )
    assert np.array_equal(form.to_frame(observation), moved.reshape(shape))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(64),
        spaces.MultiBinary(64),
        spaces.Box(0, 10, (3,), np.uint8),
        spaces.Dict({"x": spaces.Box(-1, 1, (1_000,)), "y": spaces.Box(-1, 1, (2, 2), np.float64)}),
        spaces.Tuple([spaces.Discrete(30), spaces.Box(-1, 1, (34,))]),
    ],
)
def test_numbers_and_small_observations_become_one_vector(space):
    form, observation = read(space, frame_stack=3), sample(space)
    assert (form.dtype, form.stack, form.parts) == ("float32", 3, ())
    assert np.array_equal(form.to_frame(observation), spaces.flatten(space, observation))


@pytest.mark.parametrize("space", [spaces.Discrete(65), spaces.MultiBinary(65), spaces.Box(0, 1, (3, 3), bool)])
def test_nothing_else_is_stored_wider_than_it_came(space):
    (part,) = read(space).parts
    assert part.num_bytes <= np.asarray(sample(space)).nbytes


def test_images_are_cropped_made_gray_and_resized_in_this_order():
    space = spaces.Box(0, 255, (60, 50, 3), np.uint8)
    form = read(space, image_crop="10:50,5:45", grayscale=True, image_size=20)
    observation = sample(space)
    gray = cv2.cvtColor(np.ascontiguousarray(observation[10:50, 5:45]), cv2.COLOR_RGB2GRAY)
    assert np.array_equal(form.to_frame(observation), cv2.resize(gray, (20, 20), interpolation=cv2.INTER_AREA))
    assert (
        form.change == "RGB images of 60 x 50 are cropped to 40 x 40 and converted to grayscale and resized to 20 x 20"
    )


@pytest.mark.parametrize(
    ("shape", "is_image"), [((84, 84, 3), True), ((3, 40, 40), True), ((35, 90), False), ((90,), False)]
)
def test_images_of_floats_are_said_to_be_vectors(shape, is_image):
    floats = spaces.Box(0, 1, shape, np.float32)
    for space in (floats, spaces.Dict(picture=floats, level=spaces.Discrete(3))):
        assert (f"float32{list(shape)}" in read(space).change) == is_image
    both = spaces.Dict(left=floats, right=floats)
    assert ("left" in read(both).change and "right" in read(both).change) == is_image
    assert read(spaces.Box(0, 255, (84, 84, 3), np.uint8)).change == ""


def test_settings_of_images_leave_grids_alone():
    form = read(
        spaces.Dict({"a": spaces.Box(0, 9, (9, 9, 3), np.uint8), "b": ROOM["camera"]}), image_size=40, grayscale=True
    )
    assert [part.shape for part in form.parts] == [(9, 9, 3), (40, 40)]
    assert form.change == "RGB images of 40 x 36 in 'b' are converted to grayscale and resized to 40 x 40"


def test_a_crop_outside_of_the_image_is_refused():
    for crop in ("0:41,0:36", "5:5,0:36", "0:40,3:2"):
        with pytest.raises(UsageError, match=f"image_crop {crop} does not lie in images of 40 x 36"):
            read(ROOM["camera"], image_crop=crop)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"arm": np.full((2, 2), 2.0)}, r"\['arm'\]\[0\]\[0\] 2, which is outside"),
        ({"camera": np.zeros((40, 36), np.uint8)}, r"\['camera'\]"),
        ({"goal": (1, np.zeros(2, np.int64), np.zeros(9, np.int8))}, r"\['goal'\]\[0\]"),
    ],
)
def test_a_part_outside_of_its_space_is_named(change, named):
    with pytest.raises(BadAnswerError, match=named):
        read(ROOM).to_frame({**sample(ROOM), **change})


def test_a_number_that_is_not_finite_is_refused():
    space = spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (2,)), "image": ROOM["camera"]})
    with pytest.raises(BadAnswerError, match=r"not finite|outside"):
        read(space).to_frame({**sample(space), "x": np.array([0, np.inf], np.float32)})


@pytest.mark.parametrize("wrong", [np.full(128, 300), np.full(128, 0.5), np.zeros(1, np.uint8)])
def test_a_vector_of_bytes_outside_of_its_space_is_refused(wrong):
    form = read(spaces.Box(0, 255, (128,), np.uint8))
    assert form.to_frame(np.full(128, 200, np.uint8)).tolist() == [200] * 128
    with pytest.raises(BadAnswerError, match="returned the observation"):
        form.to_frame(wrong)


class Mission(gymnasium.Space):
    """A space of the user, whose values are texts."""

    def __init__(self):
        super().__init__(dtype=str)

    def contains(self, x):
        return isinstance(x, str)


def test_texts_of_any_space_are_ignored():
    space = spaces.Dict({"image": spaces.Box(0, 9, (7, 7, 3), np.uint8), "mission": Mission()})
    form = read(space)
    assert form.change == "the text of mission is ignored"
    assert [part.name for part in form.parts] == ["image"]
    observation = {"image": sample(space["image"]), "mission": "go"}
    assert np.array_equal(form.to_frame(observation), observation["image"].reshape(-1))


@pytest.mark.parametrize("shape", [(40, 50, 5), (2, 210, 160), (12, 210, 160), (12, 84, 84)])
def test_unusual_numbers_of_channels_are_refused(shape):
    with pytest.raises(UsageError, match=rf"images of shape {re.escape(str(list(shape)))}.*1, 3 or 4 channels"):
        read(spaces.Box(0, 255, shape, np.uint8))


def test_stacked_colour_images_are_refused_with_the_setting_that_stacks():
    for shape in ((4, 96, 96, 3), (4, 3, 96, 96), (96, 96, 3, 4)):
        with pytest.raises(UsageError) as refused:
            read(spaces.Box(0, 255, shape, np.uint8))
        assert "frame_stack" in refused.value.remedy
    assert read(spaces.Box(0, 255, (40, 40, 40, 2), np.uint8)).shape == (128_000,), "voxels are a vector"
    assert read(spaces.Box(0, 255, (2, 10, 10, 3), np.uint8)).shape == (600,), "a small one is a vector"


def test_images_of_small_values_are_spread_over_a_byte():
    space = spaces.Box(0, 10, (40, 50), np.uint8)
    form, observation = read(space), sample(space)
    frame = form.to_frame(observation)
    assert frame.dtype == np.uint8
    assert np.array_equal(frame, 25 * observation)
    assert np.array_equal(eval(form.code, {"np": np, "x": observation}), frame)
    assert form.change == "images of 40 x 50 are multiplied by 25"
    assert form.to_frame(np.full((40, 50), 200, np.uint8)).max() == 250  # beyond the declared space
    assert read(spaces.Box(0, 128, (40, 50), np.uint8)).change == ""


def test_gymnasium_flattens_as_before():
    env = gymnasium.make("FrozenLake-v1")
    form = read_observations(env, EnvironmentConfig(id="FrozenLake-v1"))
    assert form.to_frame(3).tolist() == np.eye(16)[3].tolist()
