"""A network and an algorithm are built as a run does; tests/unit/environments/test_trial.py does so in a child."""

from dataclasses import replace

import pytest
import torch
from support.builders import MASKED, VECTORS
from support.linear_q import Agent, LinearQ

from apex.algorithms.trial import build
from apex.config import Config, LearnerConfig
from apexreplay.errors import UsageError


@pytest.fixture(autouse=True)
def _own_number_of_threads(monkeypatch):
    """Other tests of this process keep theirs."""
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)


class OneAction(Agent):
    def act(self, observation, mask, exploration, rng):
        return super().act(observation, mask, exploration, rng)[0]


class Indecisive(Agent):
    def decide(self, observation, mask, exploration, rng):
        raise KeyError("epsilon")


def own(monkeypatch, agent):
    algorithm = LinearQ(Config(), VECTORS)
    monkeypatch.setattr(algorithm, "make_agent", lambda network, *, bfloat16: agent(network))
    monkeypatch.setattr("apex.algorithms.trial.make_algorithm", lambda config, schema: algorithm)


@pytest.mark.parametrize("schema", [VECTORS, MASKED, replace(VECTORS, num_actions=0, action_size=3)])
def test_built_in_algorithms_are_accepted(schema):
    build(Config(), schema, "algorithm ''")


def test_an_exception_of_an_agent_is_refused_with_its_setting(monkeypatch):
    own(monkeypatch, Indecisive)
    with pytest.raises(UsageError) as refused:
        build(Config(), VECTORS, "algorithm 'own:Mine'")
    assert "algorithm 'own:Mine'" in refused.value.problem
    assert "KeyError: 'epsilon'" in refused.value.problem
    assert refused.value.remedy


def test_a_network_that_could_not_be_sent_is_refused(monkeypatch):
    algorithm = LinearQ(Config(), VECTORS)
    network = algorithm.make_network()
    network.register_buffer("mask", torch.full((2,), torch.inf))
    monkeypatch.setattr(algorithm, "make_network", lambda: network)
    monkeypatch.setattr("apex.algorithms.trial.make_algorithm", lambda config, schema: algorithm)
    with pytest.raises(UsageError, match="mask"):
        build(Config(), VECTORS, "algorithm 'own:Mine'")


def test_values_of_a_wrong_shape_are_refused(monkeypatch):
    own(monkeypatch, OneAction)
    with pytest.raises(UsageError, match=r"algorithm 'own:Mine'.*\[\(2,\), \(\), \(2,\)\]"):
        build(Config(), VECTORS, "algorithm 'own:Mine'")


def test_a_refusal_of_the_algorithm_keeps_its_words():
    with pytest.raises(UsageError, match=r"learner\.random_shift"):
        build(Config(learner=LearnerConfig(random_shift=4)), VECTORS, "network.factory ''")
