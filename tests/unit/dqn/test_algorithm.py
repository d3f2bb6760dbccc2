"""Tests the decisions of a DQN agent, and the values that it expects of executed actions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.builders import VECTORS
from torch import nn

from apex.algorithms.parameters import flatten_parameters, load_parameters
from apex.config import Config, NetworkConfig
from apex.dqn.algorithm import DqnAgent, DqnAlgorithm
from apex.dqn.networks import make_network, q_values


class Showing(nn.Module):
    """Returns the observation as Q-values."""

    def forward(self, observation):
        return observation[:, 0]


Q = np.array([[[1.0, 5.0, 3.0]], [[4.0, 2.0, -1.0]]], np.float32)  # [E, S, A]
GREEDY = np.zeros(2)


def rng():
    return np.random.default_rng(0)


def test_decision_is_greedy_and_gives_values_of_executed_actions():
    decision = DqnAgent(Showing()).decide(Q, None, GREEDY, rng())
    assert decision.action.tolist() == [1, 0]
    assert decision.state_value.tolist() == [5, 4]
    assert decision.value(np.array([2, 1])).tolist() == [3, 2]
    assert decision.value(decision.action).dtype == np.float32


def test_state_value_and_act_equal_the_decision():
    agent = DqnAgent(Showing())
    assert agent.state_value(Q, None).tolist() == [5, 4]
    assert agent.act(Q, None, 0.0, rng()).tolist() == [1, 0]


def test_full_exploration_chooses_uniformly():
    action = DqnAgent(Showing()).act(np.repeat(Q, 3000, 0), None, 1.0, rng())
    assert np.allclose(np.bincount(action) / 6000, 1 / 3, atol=4 * (2 / 9 / 6000) ** 0.5)


@pytest.mark.parametrize("network", [NetworkConfig(), NetworkConfig(dueling=False)])
@pytest.mark.parametrize("frame_shape", [(5,), (84, 84)])
def test_values_on_one_thread_equal_the_networks(one_thread, frame_shape, network):
    schema = replace(VECTORS, frame_shape=frame_shape, frame_dtype="uint8", stack=4)
    module, other = (make_network(replace(network, width=0.5), schema, seed=seed) for seed in (1, 2))
    agent = DqnAgent(module)
    observation = np.random.default_rng(0).integers(0, 256, (3, 4, *frame_shape), np.uint8)
    for _ in range(2):
        assert agent.q_values(observation) == pytest.approx(q_values(module, observation), rel=1e-4, abs=1e-5)
        load_parameters(module, flatten_parameters(other))
    assert agent.q_values(observation) == pytest.approx(q_values(other, observation), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("frame_shape", [(5,), (84, 84)])
def test_values_in_bfloat16_are_close_to_the_networks(one_thread, frame_shape):
    schema = replace(VECTORS, frame_shape=frame_shape, frame_dtype="uint8", stack=4)
    module, other = (make_network(NetworkConfig(width=0.5), schema, seed=seed) for seed in (1, 2))
    agent = DqnAgent(module, bfloat16=True)
    observation = np.random.default_rng(0).integers(0, 256, (3, 4, *frame_shape), np.uint8)
    for expected in (module, other):
        load_parameters(module, flatten_parameters(expected))
        q = agent.q_values(observation)
        assert q.dtype == np.float32
        assert q == pytest.approx(q_values(expected, observation), abs=0.01)


def test_agent_puts_the_network_into_evaluation_mode():
    assert not DqnAgent(nn.Sequential(nn.Dropout(0.5))).network.training
    assert torch.is_inference_mode_enabled() is False


def test_masked_actions_are_neither_chosen_nor_valued():
    mask = np.array([[True, False, True], [False, False, True]])
    agent = DqnAgent(Showing())
    decision = agent.decide(Q, mask, GREEDY, rng())
    assert decision.action.tolist() == [2, 2]
    assert decision.state_value.tolist() == [3, -1]
    assert agent.state_value(Q, mask).tolist() == [3, -1]
    assert agent.act(Q, mask, 0.0, rng()).tolist() == [2, 2]


def test_algorithm_creates_the_configured_parts():
    config = Config()
    algorithm = DqnAlgorithm(config, VECTORS)
    assert algorithm.exploration(1).name == "epsilon"
    online = algorithm.make_network()
    agent = algorithm.make_agent(online)
    assert agent.q_values(np.zeros((2, *VECTORS.observation_shape), np.float32)).shape == (2, VECTORS.num_actions)
    optimizer = algorithm.make_optimizer(online)
    assert isinstance(optimizer, torch.optim.Optimizer)
    update = algorithm.make_update(online, algorithm.make_network(), optimizer, torch.device("cpu"))
    assert update.torch_threads >= 1
    exported = algorithm.make_exported(online)
    assert (exported.module, exported.output) == (online, "q")
