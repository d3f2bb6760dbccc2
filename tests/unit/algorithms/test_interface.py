"""Tests which algorithm a configuration selects, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.builders import MASKED, PIXELS, VECTORS

from apex.algorithms.interface import METHODS, check_allowed, forget, make_algorithm
from apex.config import Config, LearnerConfig
from apex.dqn.algorithm import DqnAlgorithm
from apex.errors import ConfigError
from apexreplay.errors import UsageError


class Custom(DqnAlgorithm):
    """A user's algorithm."""

    name = "custom"


def make_nothing(config, schema):
    return object()


def make_trouble(config, schema):
    raise KeyError("gamma")


@pytest.mark.parametrize("name", ["", "dqn"])
def test_dqn_is_the_default_for_discrete_actions(name):
    assert type(make_algorithm(Config(algorithm=name), VECTORS)) is DqnAlgorithm


def test_munchausen_targets_are_refused_with_action_masks():
    with pytest.raises(UsageError, match=r"learner\.target 'munchausen'.*double_q"):
        make_algorithm(Config(learner=LearnerConfig(target="munchausen")), MASKED)


def test_random_shifts_are_refused_without_images():
    config = Config(learner=LearnerConfig(random_shift=4))
    with pytest.raises(UsageError, match=r"learner\.random_shift 4\b"):
        make_algorithm(config, VECTORS)
    make_algorithm(config, replace(PIXELS, frame_shape=(36, 36)))


def test_custom_algorithm_is_found_by_its_path():
    algorithm = make_algorithm(Config(algorithm=f"{__name__}:Custom"), VECTORS)
    assert algorithm.name == "custom"
    assert set(METHODS) <= set(dir(algorithm))


def test_an_own_algorithm_for_other_actions_is_refused():
    continuous = replace(VECTORS, num_actions=0, action_size=2)
    name = f"{__name__}:Custom"
    with pytest.raises(UsageError) as refused:
        make_algorithm(Config(algorithm=name), continuous)
    assert refused.value.problem.startswith(f"algorithm {name!r} learns discrete actions")
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("factory", "message"),
    [("make_nothing", "lacks .*make_update"), ("make_trouble", "KeyError: 'gamma'"), ("missing", "missing")],
)
def test_factory_that_returns_no_algorithm_is_refused(factory, message):
    with pytest.raises(UsageError, match=message):
        make_algorithm(Config(algorithm=f"{__name__}:{factory}"), VECTORS)


def test_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"\bdqn\b.*'dqm'"):
        Config(algorithm="dqm")


def test_epsilon_ladder_is_configured():
    name, ladder = make_algorithm(Config(), VECTORS).exploration(3)
    assert name == "epsilon"
    assert np.allclose(ladder, [0.4, 0.4**4.5, 0.4**8])
    assert make_algorithm(Config(), VECTORS).exploration(3).amounts[2] == pytest.approx(0.000655, rel=1e-3)


def test_forbidden_action_is_refused():
    mask = np.array([[True, False, True], [False, False, True]])
    check_allowed(np.array([0, 2]), mask)
    check_allowed(np.array([1, 1]), None)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        check_allowed(np.array([0, 1]), mask)


def test_only_a_recurrent_agent_forgets():
    forgotten = []
    forget(SimpleNamespace(forget=forgotten.append))
    forget(SimpleNamespace())
    assert forgotten == [None]
