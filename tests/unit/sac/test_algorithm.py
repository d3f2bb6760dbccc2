"""Decisions and values of a SAC agent, the exploration of its actors, and which settings are refused."""

import math

import numpy as np
import pytest
import torch
from support.builders import VECTORS
from support.dpg import SCHEMA, B, D, K, make_batch

from apex.algorithms.interface import make_algorithm
from apex.algorithms.trial import build
from apex.config import Config, DpgConfig, SacConfig
from apex.config.codec import from_dict
from apex.dpg.algorithm import DpgAlgorithm
from apex.sac.algorithm import SacAlgorithm
from apexreplay.errors import UsageError

OBSERVATION = np.random.default_rng(0).normal(size=(4, 1, D)).astype(np.float32)


def make(dpg=None, **settings):
    units = {"policy_units": 5, "policy_units_2": 4, "critic_units": 7, "critic_units_2": 6}
    config = Config(algorithm="sac", dpg=DpgConfig(**units, **(dpg or {})), sac=SacConfig(**settings))
    algorithm = SacAlgorithm(config, SCHEMA)
    network = algorithm.make_network()
    with torch.no_grad():
        for parameter in network.policy.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        network.policy.output.bias[K:] -= 1.5  # Samples stay where float32 distinguishes tanh from 1.
    return algorithm, algorithm.make_agent(network)


def rng():
    return np.random.default_rng(0)


def test_sac_is_chosen_by_its_name_for_continuous_actions_only():
    assert type(make_algorithm(Config(), SCHEMA)) is DpgAlgorithm
    assert type(make_algorithm(Config(algorithm="sac"), SCHEMA)) is SacAlgorithm
    with pytest.raises(UsageError, match=r"'sac'.*continuous.*discrete"):
        make_algorithm(Config(algorithm="sac"), VECTORS)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"learner": {"bfloat16": "on"}}, r"learner\.bfloat16.*SAC.*float32"),
        ({"learner": {"target": "munchausen"}}, r"learner\.target.*DQN"),
    ],
)
def test_settings_of_dqn_are_refused_with_sac(changes, problem):
    with pytest.raises(UsageError, match=problem):
        make_algorithm(from_dict({"algorithm": "sac", **changes}), SCHEMA)


def test_an_unknown_algorithm_is_refused_with_the_known_names():
    with pytest.raises(UsageError, match="empty, dqn, iqn, r2d2, dpg, sac or"):
        Config(algorithm="sack")


def test_agent_without_exploration_executes_tanh_of_the_mean():
    _, agent = make()
    with torch.no_grad():
        mean = agent.network.policy(torch.from_numpy(OBSERVATION))[:, :K]
        expected = torch.tanh(mean).numpy()
        assert np.array_equal(agent.network(torch.from_numpy(OBSERVATION)).numpy(), expected)
    assert np.array_equal(agent.act(OBSERVATION, None, 0.0, rng()), expected)
    assert np.array_equal(agent.decide(OBSERVATION, None, np.zeros(4), rng()).action, expected)


def test_exploration_1_samples_the_policy_and_2_doubles_its_deviation():
    """5 sigma of the mean and the standard deviation of N normal numbers: 5 / sqrt(N), and 5 / sqrt(2 N)."""
    _, agent = make()
    many = np.repeat(OBSERVATION[:1], 20_000, 0)
    with torch.no_grad():
        mean, log_deviation = (part[0].numpy() for part in agent.network.distribution(torch.from_numpy(many[:1])))
    for factor in (1.0, 2.0):
        action = agent.decide(many, None, np.full(len(many), factor), rng()).action
        normal = (np.arctanh(action.astype(np.float64)) - mean) / (factor * np.exp(log_deviation))
        assert abs(normal.mean(0)).max() < 5 / math.sqrt(len(many))
        assert abs(normal.std(0) - 1).max() < 5 / math.sqrt(2 * len(many))
        assert np.array_equal(agent.act(many, None, factor, rng()), action)


def test_decision_has_soft_state_values_and_the_critics_values():
    _, agent = make(dpg={"normalize_observations": True}, initial_temperature=0.25)
    with torch.no_grad():
        agent.network.normalizer.mean += 0.5
    decision = agent.decide(OBSERVATION, None, np.array([0.0, 0.1, 1.0, 2.0]), rng())
    assert decision.action.shape == (4, K)
    assert decision.action.dtype == np.float32
    with torch.no_grad():
        seen = agent.network.prepare(torch.from_numpy(OBSERVATION))
        mean, logs = agent.network.distribution(seen)
        entropy = torch.distributions.Normal(mean, logs.exp()).entropy() + torch.log(1 - torch.tanh(mean) ** 2)
        soft = agent.network.critics(seen, torch.tanh(mean)).amin(0) + 0.25 * entropy.sum(1)
        q = agent.network.critics(seen, torch.from_numpy(decision.action)).mean(0)
    assert np.allclose(decision.state_value, soft, atol=1e-5)
    assert np.allclose(agent.state_value(OBSERVATION, None), decision.state_value)
    assert np.allclose(decision.value(decision.action), q)


def test_actors_sample_the_policy_or_form_a_ladder_around_it():
    assert make()[0].exploration(4).name == "noise"
    assert make()[0].exploration(4).amounts.tolist() == [1.0] * 4
    assert np.allclose(make(noise=2.0, noise_ladder=0.25)[0].exploration(3).amounts, [2.0, 1.0, 0.5])


def test_algorithm_creates_parts_that_fit_together():
    algorithm, agent = make()
    optimizer = algorithm.make_optimizer(agent.network)
    update = algorithm.make_update(agent.network, algorithm.make_network(), optimizer, torch.device("cpu"))
    assert update(make_batch()).td_errors.shape == (B,)
    given = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(given) == sorted(id(parameter) for parameter in agent.network.parameters())
    exported = algorithm.make_exported(agent.network)
    assert (exported.module, exported.output) == (agent.network, "action")
    build(algorithm.config, SCHEMA, "--algorithm sac")
