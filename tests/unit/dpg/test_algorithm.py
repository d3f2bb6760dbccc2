"""Tests the decisions and values of a DPG agent, and which settings are refused for which actions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.builders import VECTORS
from support.dpg import SCHEMA, B, D, make_batch

from apex.algorithms.interface import make_algorithm
from apex.config import Config, DpgConfig
from apex.config.codec import from_dict
from apex.dpg.algorithm import DpgAlgorithm
from apexreplay.errors import UsageError

OBSERVATION = np.random.default_rng(0).normal(size=(4, 1, D)).astype(np.float32)


def make(**settings):
    algorithm = DpgAlgorithm(Config(dpg=DpgConfig(**settings)), SCHEMA)
    return algorithm, algorithm.make_agent(algorithm.make_network())


def rng():
    return np.random.default_rng(0)


def test_dpg_is_used_for_continuous_actions_only():
    assert type(make_algorithm(Config(), SCHEMA)) is DpgAlgorithm
    with pytest.raises(UsageError, match=r"'dqn'.*discrete.*continuous"):
        make_algorithm(Config(algorithm="dqn"), SCHEMA)
    with pytest.raises(UsageError, match=r"'dpg'.*continuous.*discrete"):
        make_algorithm(Config(algorithm="dpg"), VECTORS)


@pytest.mark.parametrize("branch", ["learner", "actor"])
def test_bfloat16_is_refused_with_dpg(branch):
    config = from_dict({branch: {"bfloat16": "on"}})
    with pytest.raises(UsageError, match=f"{branch}.bfloat16.*'on'.*float32"):
        make_algorithm(config, SCHEMA)
    make_algorithm(config, VECTORS)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"learner": {"target": "munchausen"}}, "learner.target"),
        ({"learner": {"centered_gradients": True}}, "learner.centered_gradients True"),
        ({"network": {"value_rescaling": True}}, "network.value_rescaling True"),
        ({"network": {"hidden": 7}}, "network.hidden 7"),
        ({"network": {"initialization": "balanced"}}, "network.initialization 'balanced'"),
        ({"actor": {"epsilon_base": 0.9}}, "actor.epsilon_base 0.9"),
    ],
)
def test_dqn_settings_are_refused_with_continuous_actions(changes, setting):
    with pytest.raises(UsageError, match=rf"{setting}.*DQN"):
        make_algorithm(from_dict(changes), SCHEMA)
    make_algorithm(from_dict(changes), VECTORS)


def test_agent_without_noise_executes_the_policy():
    _, agent = make()
    expected = agent.network(torch.from_numpy(OBSERVATION)).detach().numpy()
    assert np.array_equal(agent.act(OBSERVATION, None, 0.0, rng()), expected)
    assert np.array_equal(agent.decide(OBSERVATION, None, np.zeros(4), rng()).action, expected)


def test_decision_has_the_critics_values():
    _, agent = make(num_critics=2, normalize_observations=True)
    with torch.no_grad():
        agent.network.normalizer.mean += 0.5
    decision = agent.decide(OBSERVATION, None, np.array([0.0, 0.1, 0.5, 2.0]), rng())
    assert decision.action.shape == (4, 2)
    assert decision.action.dtype == np.float32
    assert abs(decision.action).max() <= 1
    with torch.no_grad():
        seen = agent.network.prepare(torch.from_numpy(OBSERVATION))
        greedy = agent.network.critics(seen, agent.network.policy(seen)).min(0).values
        q = agent.network.critics(seen, torch.from_numpy(decision.action)).mean(0)
    assert np.allclose(decision.state_value, greedy)
    assert np.allclose(agent.state_value(OBSERVATION, None), greedy)
    assert np.allclose(decision.value(decision.action), q)


def test_noise_is_constant_or_a_ladder():
    assert make()[0].exploration(4).name == "noise"
    assert make()[0].exploration(4).amounts.tolist() == [0.3] * 4
    assert np.allclose(make(noise=1.0, noise_ladder=0.1)[0].exploration(2).amounts, [1.0, 0.1])


def test_another_seed_gives_another_network():
    first = DpgAlgorithm(Config(), SCHEMA).make_network()
    other = DpgAlgorithm(replace(Config(), seed=2), SCHEMA).make_network()
    assert not torch.equal(first.policy.hidden1.weight, other.policy.hidden1.weight)


def test_algorithm_creates_the_configured_parts():
    algorithm, agent = make(num_critics=2)
    optimizer = algorithm.make_optimizer(agent.network)
    update = algorithm.make_update(agent.network, algorithm.make_network(), optimizer, torch.device("cpu"))
    assert update(make_batch()).td_errors.shape == (B,)
    exported = algorithm.make_exported(agent.network)
    assert (exported.module, exported.output) == (agent.network, "action")
