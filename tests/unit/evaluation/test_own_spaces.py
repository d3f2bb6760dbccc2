"""Tests that a policy takes the environment's own observations and returns its own actions, for all pairs of spaces."""

import re
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from apex import UsageError
from apex.algorithms.interface import make_algorithm
from apex.config import Config, EnvironmentConfig, NetworkConfig
from apex.config.algorithm_choice import choose_algorithm
from apex.environments.factory import describe
from apex.evaluation.policy import Policy
from apex.runs.checkpoints.policy_file import PolicyInfo

VECTOR = spaces.Box(-2.0, 2.0, (3,), np.float64)
OBSERVATIONS = {
    "float32": spaces.Box(-1.0, 1.0, (2, 2), np.float32),
    "float64": VECTOR,
    "discrete": spaces.Discrete(5, start=2),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
    "multi-binary": spaces.MultiBinary(3),
    "dict": spaces.Dict({"where": VECTOR, "goal": spaces.Discrete(3), "bag": spaces.MultiBinary(2)}),
    "tuple": spaces.Tuple([spaces.Discrete(3), VECTOR]),
    "nested": spaces.Dict({"both": spaces.Tuple([VECTOR, spaces.Discrete(2)])}),
    "gray": spaces.Box(0, 255, (40, 40), np.uint8),
    "color": spaces.Box(0, 255, (50, 40, 3), np.uint8),
    "first": spaces.Box(0, 255, (3, 50, 40), np.uint8),
    "cells": spaces.Box(0, 10, (7, 7, 3), np.uint8),
    "planes": spaces.Box(0, 1, (6, 6, 4), bool),
    "ram": spaces.Box(0, 9, (70,), np.uint8),
    "many": spaces.MultiBinary(80),
    "camera": spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (50, 40, 3), np.uint8),
            "arm": VECTOR,
            "task": spaces.Text(5),
            "goal": spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)]),
        }
    ),
}
ACTIONS = {
    "discrete": spaces.Discrete(4),
    "start": spaces.Discrete(4, start=-2),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "grid": spaces.MultiDiscrete(np.array([[2, 2], [2, 2]]), start=np.array([[1, 0], [0, 5]])),
    "multi-binary": spaces.MultiBinary(3),
    "box": spaces.Box(np.float32([-2, 0]), np.float32([2, 10])),
    "box64": spaces.Box(-2.0, 3.0, (2, 2), np.float64),
}
IMAGES = ("gray", "color", "first", "cells", "ram")
PAIRS = list(zip(OBSERVATIONS, [*ACTIONS, *["start", "start", "grid"] * 3], strict=True))  # each space once


class Pair(gymnasium.Env):
    """Shows samples of a space; the reward depends on the action. A wrong type of action fails the step."""

    def __init__(self, observations, actions):
        self.observation_space, self.action_space = OBSERVATIONS[observations], ACTIONS[actions]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.samples = self.np_random.spawn(1)[0]
        return self._show(), {}

    def step(self, action):
        assert self.action_space.contains(action), (action, type(action))
        self.steps += 1
        reward = np.asarray(action, np.float64).reshape(-1) @ np.arange(1, 1 + np.size(action))
        return self._show(), float(reward), False, self.steps == 8, {}

    def _show(self):
        self.observation_space.seed(int(self.samples.integers(2**31)))
        return self.observation_space.sample()


def make_policy(environment):
    """A policy with random parameters whose actions depend on the observations."""
    schema = describe(environment, 3)
    network = {} if schema.action_size else {"hidden": 32, "body_hidden": 32, "width": 0.5}
    config = Config(environment=environment, network=NetworkConfig(**network))
    algorithm = make_algorithm(config, schema)
    module = algorithm.make_network()
    torch.manual_seed(3)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1 or name.endswith("bias"):  # A bias would prefer one action.
            torch.nn.init.normal_(parameter, std=1.0 if parameter.ndim > 1 else 0.0)
        if parameter.ndim == 4 or ("encoders" in name and parameter.ndim > 1):
            # Of positive numbers, such as pixels, the mean would decide.
            parameter.data -= parameter.data.mean(tuple(range(1, parameter.ndim)), keepdim=True)
    info = PolicyInfo(schema=schema, config=config, num_updates=5, score=None)
    return Policy(info, algorithm.make_agent(module), path=None)


def environment_of(observations, actions):
    args = {"observations": observations, "actions": actions}
    return EnvironmentConfig(id=f"{__name__}:Pair", args=args, image_size=40, frame_stack=2)


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_policy_plays_the_bare_environment_as_its_own(observations, actions):
    policy = make_policy(environment_of(observations, actions))
    bare, prepared = Pair(observations, actions), policy.make_environment()
    scores = []
    for seed in range(1, 9):
        policy.reset()
        own_seed = int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1  # as `make_environment` derives it
        (raw, _), (own, _), over = bare.reset(seed=own_seed), prepared.reset(seed=seed), False
        while not over:
            raw, reward, *_, over, _ = bare.step(policy(raw))
            own, expected, *_ = prepared.step(policy.act(own))
            assert reward == pytest.approx(expected, abs=1e-5)
            scores.append(reward)
    assert len(set(scores)) > 1  # The actions depend on the observations.


def algorithm_of(observations, actions):
    """The cell that docs/guide/choose.md should have for these spaces."""
    environment = environment_of(observations, actions)
    config, schema = Config(environment=environment), describe(environment, 3)
    try:
        return f"`{choose_algorithm(config, schema)}`"
    except UsageError:
        own = replace(config, network=NetworkConfig(factory="module:factory"))
        return f"`{choose_algorithm(own, schema)}`, needs `--network`"


def test_the_guide_names_the_algorithm_of_each_pair_of_spaces():
    page = (Path(__file__).parents[3] / "docs/guide/choose.md").read_text()
    header, _, *rows = re.findall(r"^\|(.+)\|(.+)\|(.+)\|(.+)\|$", page, re.MULTILINE)
    for observations, space in OBSERVATIONS.items():
        name, is_image = f"`{type(space).__name__}`", observations in IMAGES
        (row,) = (row for row in rows if name in row[0] and ("uint8" in row[0]) == is_image)
        for actions, action_space in ACTIONS.items():
            (cell,) = (row[i] for i in range(1, 4) if f"`{type(action_space).__name__}`" in header[i])
            assert cell.strip() == algorithm_of(observations, actions), (observations, actions)


@pytest.mark.parametrize(("observations", "actions"), PAIRS)
def test_policy_plays_a_vector_environment_with_batches(observations, actions):
    policy = make_policy(environment_of(observations, actions))
    single = make_policy(environment_of(observations, actions))
    games = SyncVectorEnv([lambda: Pair(observations, actions) for _ in range(3)])
    batch, _ = games.reset(seed=[4, 5, 6])
    chosen = policy(batch)
    assert games.action_space.contains(chosen) or ACTIONS[actions].dtype.kind == "f"
    for i in range(3):
        one = Pair(observations, actions).reset(seed=4 + i)[0]
        single.reset()
        assert np.allclose(single(one), chosen[i], atol=1e-5)
    assert len(games.step(chosen)[1]) == 3
    games.close()


def test_policy_of_atari_plays_what_gymnasium_shows():
    policy = make_policy(EnvironmentConfig(id="ALE/Pong-v5"))
    game = gymnasium.make("ALE/Pong-v5")
    observation, _ = game.reset(seed=1)
    prepared = policy.prepare(observation)
    assert (prepared.shape, prepared.dtype) == ((4, 84, 84), np.uint8)
    assert prepared[:3].max() == 0
    assert prepared[3].std() > 5
    policy.reset()
    for _ in range(6):
        action = policy(observation)
        assert type(action) is int
        observation, *_ = game.step(action)
    assert (policy.prepare(observation)[0] > 0).any()  # No frame is empty.
    game.close()


@pytest.mark.parametrize(
    ("observations", "value"),
    [
        ("float64", np.zeros(4)),
        ("float64", np.array([0.0, np.nan, 0.0])),
        ("float64", "text"),
        ("discrete", 7),
        ("dict", np.zeros(4)),
        ("dict", {"where": np.zeros(3)}),
        ("gray", np.zeros((40, 40))),
    ],
)
def test_observation_outside_the_space_is_refused(observations, value):
    policy = make_policy(environment_of(observations, "discrete"))
    with pytest.raises(UsageError) as error:
        policy(value)
    assert "Pair" in error.value.problem
    assert "Policy.act" in error.value.remedy


def test_prepared_frames_begin_anew_after_a_reset():
    policy = make_policy(environment_of("gray", "discrete"))
    frames = [np.full((40, 40), value, np.uint8) for value in (10, 20, 30)]
    shown = [policy.prepare(frame)[:, 0, 0].tolist() for frame in frames]
    policy.reset()
    assert [*shown, policy.prepare(frames[0])[:, 0, 0].tolist()] == [[0, 10], [10, 20], [20, 30], [0, 10]]


def test_some_environments_of_a_batch_begin_anew():
    policy = make_policy(environment_of("gray", "discrete"))
    batches = [np.array([value, value + 1], np.uint8)[:, None, None].repeat(40, 1).repeat(40, 2) for value in (10, 20)]
    policy.reset(np.array([True, False]))  # Nothing is remembered yet.
    assert policy.prepare(batches[0])[:, :, 0, 0].tolist() == [[0, 10], [0, 11]]
    policy.reset([True, False])
    assert policy.prepare(batches[1])[:, :, 0, 0].tolist() == [[0, 20], [11, 21]]
    for wrong in ([True], [[True], [False]], [1, 0], True):
        with pytest.raises(UsageError, match=r"bool\[2\]"):
            policy.reset(wrong)
    assert policy.prepare(batches[0])[:, :, 0, 0].tolist() == [[20, 10], [21, 11]]


def test_the_pair_that_reset_returns_is_answered_with_what_to_pass():
    policy = make_policy(environment_of("float64", "discrete"))
    with pytest.raises(UsageError) as error:
        policy(Pair("float64", "discrete").reset(seed=1))
    assert "the observation and an info: pass the first" in error.value.remedy
