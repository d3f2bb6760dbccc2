"""Tests masks of allowed actions: a mask belongs to the state of the next action, and an invalid one is a fault."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from support.environments import FACTORY, Counter, here, made_by_the_test, make, make_config

from apex.environments.answers import read_mask
from apex.environments.factory import describe
from apex.environments.single import AgentEnvironment
from apex.errors import EnvironmentFailure
from apexreplay.errors import UsageError


class Gates(Counter):
    """In step t of an episode only action t % 3 is allowed."""

    def __init__(self, length=3, end="terminated", faults=None):
        super().__init__(length, end, faults)

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        return observation, self.info()

    def step(self, action):
        *answer, info = super().step(action)
        return *answer, self.info() | info

    def info(self):
        mask = np.arange(3) == self.t % 3
        return {"action_mask": mask.astype(np.int8)}


def cut_gates():
    return Gates(end="truncated")


class Pads(Gates):
    action_space = spaces.MultiDiscrete([2, 3])

    def info(self):
        return {"action_mask": (np.array([0, 1], np.int8), np.array([1, 0, 1], np.int8))}


class Unstartable(Counter):
    def reset(self, *, seed=None, options=None):
        raise OSError("no such level")


def allowed(mask):
    return [np.flatnonzero(row).tolist() for row in mask]


def test_masks_are_part_of_the_schema():
    assert describe(make_config(here(Gates)), 3).masked
    assert describe(make_config("Taxi-v4"), 3).masked
    assert not describe(make_config("CartPole-v1"), 3).masked


def test_environment_that_cannot_be_reset_is_refused():
    with pytest.raises(UsageError, match=r"Unstartable'.*OSError: no such level"):
        describe(make_config(here(Unstartable)), 3)


@pytest.mark.parametrize("factory", [Gates, cut_gates])
def test_mask_belongs_to_its_state_and_final_mask_to_the_last(factory):
    environment = make(here(factory), 2)
    environment.reset()
    first = environment.action_mask
    assert allowed(first) == [[0], [0]]
    steps = [environment.step(np.zeros(2, np.int64)) for _ in range(4)]
    assert [allowed(step.action_mask) for step in steps] == [[[1]] * 2, [[2]] * 2, [[0]] * 2, [[1]] * 2]
    if factory is cut_gates:
        assert allowed(steps[2].final_mask) == [[0], [0]]  # 3 % 3
    assert allowed(first) == [[0], [0]]  # A returned mask never changes.
    assert environment.action_mask is steps[-1].action_mask


def test_tuple_of_masks_allows_combinations():
    environment = make(here(Pads), 1)
    environment.reset()
    assert allowed(environment.action_mask) == [[3, 5]]


def make_pads(num_envs):
    return SyncVectorEnv([Pads] * num_envs)


class Free(Gates):
    action_space = spaces.Box(-1, 1, (2,))


def make_free(num_envs):
    return SyncVectorEnv([Free] * num_envs)


def test_vector_environments_read_masks_as_single_ones_do():
    environment = make(here(make_pads), 2)
    environment.reset()
    assert allowed(environment.action_mask) == [[3, 5]] * 2
    for factory in (Free, make_free):  # Masks of continuous actions have no meaning.
        environment = make(here(factory), 2)
        environment.reset()
        assert environment.action_mask is None


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda mask: np.array(mask, bool)])
def test_discrete_mask_may_be_any_row_of_zeros_and_ones(kind):
    assert read_mask({"action_mask": kind([0, 1, 1])}, 3).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("info", "named"),
    [
        ({"action_mask": np.ones(2, np.int8)}, "array([1, 1], dtype=int8)"),
        ({"action_mask": np.array([0, 2, 0])}, "array([0, 2, 0])"),
        ({"action_mask": "110"}, "'110'"),
        ({"action_mask": np.zeros(3)}, "no action"),
    ],
)
def test_invalid_mask_is_a_fault(info, named, caplog):
    made = []

    def factory():
        made.append(Gates(length=100, faults={2: {"info": info}} if len(made) == 1 else {}))
        return made[-1]

    FACTORY.make = factory
    environment = make(here(made_by_the_test), 3)
    environment.reset()
    assert environment.step(np.zeros(3, np.int64)).failed is None
    step = environment.step(np.zeros(3, np.int64))
    assert step.failed.tolist() == [False, True, False]
    assert allowed(step.action_mask) == [[2], [0], [2]]
    assert "action_mask" in caplog.messages[0]
    assert named in caplog.messages[0]


def test_missing_mask_is_a_fault(caplog):
    class Forgetful(Gates):
        def info(self):
            return {} if self.t else super().info()

    FACTORY.make = lambda: Forgetful(length=100)
    environment = make(here(made_by_the_test), 1)
    environment.reset()
    assert environment.step(np.zeros(1, np.int64)).failed.tolist() == [True]
    assert "'action_mask'" in caplog.messages[0]
    with pytest.raises(EnvironmentFailure):
        play_on(environment, 20)


def play_on(environment, num_steps):
    return [environment.step(np.zeros(1, np.int64)) for _ in range(num_steps)]


def test_terminal_state_needs_no_mask():
    class Mute(Gates):
        def info(self):
            return {"action_mask": np.zeros(3)} if self.t == self.length else super().info()

    FACTORY.make = Mute
    environment = make(here(made_by_the_test), 1)
    environment.reset()
    steps = play_on(environment, 4)
    assert [step.terminated[0] for step in steps] == [False, False, True, False]
    assert all(step.failed is None for step in steps)


def test_agent_environment_gives_the_mask_in_info():
    config = make_config(here(Gates))
    environment = AgentEnvironment(config, describe(config, 3))
    _, info = environment.reset(seed=1)
    assert info["action_mask"].tolist() == [True, False, False]
    for _ in range(2):
        *_, info = environment.step(0)
    assert info["action_mask"].tolist() == [False, False, True]
    *_, terminated, _, _ = environment.step(0)
    assert terminated
    _, info = environment.reset()
    assert info["action_mask"].tolist() == [True, False, False]
