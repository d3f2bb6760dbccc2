"""Tests the conversion of the agent's actions, 0 ... A - 1 or values in [-1, 1], for every kind of action space."""

import numpy as np
import pytest
from gymnasium import spaces
from support.environments import Counter, here, make, make_config

from apex.environments.factory import describe, make_environment
from apex.environments.single import AgentEnvironment
from apexreplay.errors import UsageError


class Recorder(Counter):
    """Keeps its actions; each reward is 1."""

    def __init__(self):
        super().__init__(length=1_000)
        self.actions = []
        RECORDERS.append(self)

    def step(self, action):
        assert self.action_space.contains(action), action
        self.actions.append(action)
        return super().step(1)


RECORDERS: list[Recorder] = []


class Arm(Recorder):
    action_space = spaces.Box(np.array([[-2.0, 0], [10, -1]]), np.array([[2.0, 1], [30, 1]]), dtype=np.float64)


class Precise(Recorder):
    action_space = spaces.Box(np.float32(-0.1), np.float32(0.3), (1,), np.float32)


class Pads(Recorder):
    action_space = spaces.MultiDiscrete([2, 3, 4], start=[0, 10, -1])


class Table(Recorder):
    action_space = spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]))


class Switches(Recorder):
    action_space = spaces.MultiBinary((2, 2))


class Endless(Counter):
    action_space = spaces.Box(-np.inf, 1, (2,))


class Largest(Counter):
    action_space = spaces.Box(np.finfo(np.float32).min, np.finfo(np.float32).max, (2,))


class Whole(Counter):
    action_space = spaces.Box(0, 5, (2,), np.int32)


class Empty(Counter):
    action_space = spaces.Box(0, 5, (0,))


class Vast(Counter):
    action_space = spaces.MultiDiscrete([1025])


class ManySwitches(Counter):
    action_space = spaces.MultiBinary(11)


class ManyActions(Counter):
    action_space = spaces.Discrete(65_537)


class Both(Counter):
    action_space = spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1)])


def convert(factory, actions):
    """Returns the environment's own action for each of the agent's actions."""
    environment = make(here(factory), 1)
    environment.reset()
    for action in actions:
        environment.step(action[None])
    return RECORDERS[-1].actions


def test_actions_are_scaled_to_the_bounds_and_shape_of_the_space():
    schema = describe(make_config(here(Arm)), 3)
    assert (schema.num_actions, schema.action_size, schema.masked) == (0, 4, False)
    actions = np.array([[-1, -1, -1, -1], [1, 1, 1, 1], [0, 0, 0, 0], [0.5, -0.5, 0.25, -1]], np.float32)
    converted = convert(Arm, actions)
    expected = [[[-2, 0], [10, -1]], [[2, 1], [30, 1]], [[0, 0.5], [20, 0]], [[1, 0.25], [22.5, -1]]]
    assert [action.tolist() for action in converted] == expected


def test_rounding_does_not_exceed_the_bounds():
    """`Recorder` refuses actions outside of its space."""
    rng = np.random.default_rng(0)
    edges = np.float32([-1, 1, np.nextafter(np.float32(1), np.float32(0))])[:, None]
    converted = convert(Precise, np.concatenate([edges, rng.uniform(-1, 1, (500, 1)).astype(np.float32)]))
    assert (converted[0], converted[1]) == (np.float32(-0.1), np.float32(0.3))


def test_pendulum_is_described_and_stepped():
    schema = describe(make_config("Pendulum-v1"), 5)
    assert (schema.frame_shape, schema.num_actions, schema.action_size) == ((3,), 0, 1)
    environment = make("Pendulum-v1", 3)
    environment.reset()
    step = environment.step(np.array([[-1], [0], [1]], np.float32))
    assert step.observation.shape == (3, 1, 3)
    assert step.observation.dtype == np.float32
    assert (step.played, step.action_mask, environment.action_mask) == (None, None, None)


@pytest.mark.parametrize(
    ("factory", "num_actions", "action", "expected"),
    [
        (Pads, 24, 0, [0, 10, -1]),
        (Pads, 24, 23, [1, 12, 2]),
        (Pads, 24, 7, [0, 11, 2]),  # The last value changes fastest: 7 = (0 x 3 + 1) x 4 + 3.
        (Table, 48, 47, [[1, 2], [3, 1]]),
        (Table, 48, 1, [[0, 0], [0, 1]]),
        (Switches, 16, 6, [[0, 1], [1, 0]]),
    ],
)
def test_each_combination_of_values_is_an_action(factory, num_actions, action, expected):
    schema = describe(make_config(here(factory)), 3)
    assert (schema.num_actions, schema.action_size) == (num_actions, 0)
    (converted,) = convert(factory, np.array([action]))
    assert converted.tolist() == expected


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        (Largest, r"1e\+09.*TransformAction"),
        (Endless, r"Box\(.*inf.*1e\+09.*TransformAction"),
        (Whole, "int32.*float32.*MultiDiscrete"),
        (Empty, r"\b0 values.*1,024"),
        (Vast, "1,025 .*1,024"),
        (ManySwitches, "2,048 combinations"),
        (ManyActions, "65537 .*65536"),
        (Both, "Tuple.*MultiBinary.*ActionWrapper"),
    ],
)
def test_unsupported_action_spaces_are_refused(factory, named):
    with pytest.raises(UsageError, match=f"environment.id '{here(factory)}'.*{named}"):
        describe(make_config(here(factory)), 3)


@pytest.mark.parametrize("action", [[1.01, 0, 0, 0], [np.nan, 0, 0, 0], [0, 0, 0], [[0, 0], [0, 0]]])
def test_invalid_actions_are_refused(action):
    environment = make(here(Arm), 1)
    environment.reset()
    with pytest.raises(ValueError, match=r"\b4 values.*\[-1, 1\]"):
        environment.step(np.array([action], np.float32))


def test_agent_environment_takes_scaled_actions():
    config = make_config(here(Arm))
    environment = AgentEnvironment(config, describe(config, 3))
    assert environment.action_space == spaces.Box(-1, 1, (4,), np.float32)
    environment.reset(seed=3)
    environment.step(environment.action_space.low)
    assert RECORDERS[-1].actions[0].tolist() == [[-2, 0], [10, -1]]
    environment.close()


def test_equal_seeds_give_equal_games_with_continuous_actions():
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (30, 2, 1)).astype(np.float32)
    games = [make_environment(make_config("Pendulum-v1"), 2, seed=5) for _ in "ab"]
    np.testing.assert_array_equal(*(game.reset() for game in games))
    for action in actions:
        one, two = (game.step(action) for game in games)
        np.testing.assert_array_equal(one.observation, two.observation)
        np.testing.assert_array_equal(one.reward, two.reward)
