"""Tests shapes and bounds of policy and critics, the running mean, and the checks of custom networks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.dpg import SCHEMA, D, K
from torch import nn

from apex.algorithms.parameters import flatten_parameters, load_parameters
from apex.config import Config, DpgConfig
from apex.config.algorithm_choice import choose_algorithm
from apex.dpg.networks import MOST_ROWS, ActorCritic, Normalizer, make_network
from apexreplay.errors import UsageError


class Own(nn.Module):
    """A user's network; a test may replace its parts."""

    def __init__(self, policy=None, critics=None):
        super().__init__()
        self.policy = policy or nn.Sequential(nn.Flatten(), nn.Linear(D, K), nn.Tanh())
        self.critics = critics or OwnCritics()


class OwnCritics(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D + K, 3)

    def forward(self, observation, action):
        return self.linear(torch.cat([observation.flatten(1), action], 1)).T


class Shared(Own):
    def __init__(self):
        super().__init__()
        self.critics.borrowed = self.policy


class Failing(nn.Module):
    def forward(self, *inputs):
        raise ValueError("no such layer")


class Counting(OwnCritics):
    def __init__(self):
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))


class OneAnswer(OwnCritics):
    def forward(self, observation, action):
        return super().forward(observation, action)[0]


def make_own(schema):
    return Own()


def make_shared(schema):
    return Shared()


def make_wide(schema):
    return Own(policy=nn.Sequential(nn.Flatten(), nn.Linear(D, K + 1), nn.Tanh()))


def make_unbounded(schema):
    return Own(policy=nn.Sequential(nn.Flatten(), nn.Linear(D, K, bias=False), nn.Linear(K, K), nn.Threshold(5.0, 5.0)))


def make_one_answer(schema):
    return Own(critics=OneAnswer())


def make_trouble(schema):
    raise KeyError("width")


def make_failing(schema):
    return Own(policy=Failing())


def make_counting(schema):
    return Own(critics=Counting())


def make_q_network(schema):
    return nn.Linear(D, K)


def make(config=None, factory="", seed=1, schema=SCHEMA):
    return make_network(config or DpgConfig(), factory, schema, seed=seed)


@pytest.mark.parametrize("num_critics", [1, 2])
def test_papers_network_has_the_published_size(num_critics):
    network = make(DpgConfig(num_critics=num_critics))
    observation = 100 * torch.randn(9, 1, D)
    action = network(observation)
    assert action.shape == (9, K)
    assert (action.abs() <= 1).all()
    assert network.critics(observation, action).shape == (num_critics, 9)
    assert network.policy.hidden1.out_features == 300
    assert network.policy.hidden2.out_features == 200
    assert network.critics.hidden1.weight.shape == (num_critics, D + K, 400)
    assert network.critics.hidden2.weight.shape == (num_critics, 400, 300)
    assert network.normalizer is None


def test_critics_are_independent_networks():
    network = make(DpgConfig(num_critics=2))
    observation, action = torch.randn(5, 1, D), torch.rand(5, K)
    first, second = network.critics(observation, action)
    assert not torch.allclose(first, second)
    with torch.no_grad():
        for parameter in network.critics.parameters():
            parameter[1] += 1.0
    assert torch.equal(network.critics(observation, action)[0], first)


def test_parameters_depend_only_on_the_seed():
    before = torch.get_rng_state()
    assert np.array_equal(flatten_parameters(make(seed=3)), flatten_parameters(make(seed=3)))
    assert not np.array_equal(flatten_parameters(make(seed=3)), flatten_parameters(make(seed=4)))
    assert torch.equal(before, torch.get_rng_state())


def test_initial_actions_are_near_0():
    assert make()(torch.randn(100, 1, D)).abs().max() < 0.2


ALL = torch.ones(100, dtype=torch.bool)  # rows that are usable


def test_running_mean_ignores_unusable_and_overflowing_rows():
    normalizer, rows = Normalizer((1, D)), torch.randn(8, 1, D)
    normalizer.update(rows, ALL[:8], torch.tensor(True))
    mean = normalizer.mean.clone()
    rows[3] = 1e6
    usable = torch.arange(8) != 3
    normalizer.update(rows, usable, torch.tensor(True))
    assert (normalizer.mean - mean).abs().max() < 1.0
    before = [normalizer.mean.clone(), normalizer.variance.clone()]
    rows[3] = 1e20
    normalizer.update(rows, ALL[:8], torch.tensor(True))
    assert all(map(torch.equal, before, [normalizer.mean, normalizer.variance]))


def test_running_mean_equals_the_mean_of_all_rows():
    normalizer, rows = Normalizer((1, D)), torch.randn(60, 1, D) * torch.tensor([1.0, 100.0, 0.5]) + 7
    for part in rows.split([10, 1, 29, 20]):
        normalizer.update(part, ALL[: len(part)], torch.tensor(True))
    assert torch.allclose(normalizer.mean, rows.mean(0), rtol=1e-4)
    assert torch.allclose(normalizer.variance, rows.var(0, correction=0), rtol=1e-3)
    assert normalizer.count == 60
    normalized = normalizer(rows)
    assert torch.allclose(normalized.mean(0), torch.zeros(1, D), atol=1e-4)
    assert torch.allclose(normalized.std(0, correction=0), torch.ones(1, D), atol=1e-3)


def test_mean_of_many_rows_forgets_old_ones():
    normalizer = Normalizer((1, D))
    normalizer.count.fill_(MOST_ROWS)
    normalizer.update(torch.ones(100, 1, D), ALL, torch.tensor(True))
    assert normalizer.count == MOST_ROWS
    assert 0.9e-4 < normalizer.mean[0, 0] < 1.1e-4


def test_constant_inputs_are_not_amplified_and_outliers_are_clipped():
    normalizer = Normalizer((1, 2))
    for _ in range(50):
        normalizer.update(torch.tensor([[[3.0, 0.0]], [[3.0, 1.0]]]), ALL[:2], torch.tensor(True))
    assert normalizer(torch.tensor([[[3.0, 1e9]]])).tolist() == [[[pytest.approx(0, abs=1e-2), 10.0]]]


def test_running_means_are_part_of_the_parameters():
    one, other = make(DpgConfig(normalize_observations=True)), make(DpgConfig(normalize_observations=True), seed=2)
    one.normalizer.update(torch.randn(8, 1, D), ALL[:8], torch.tensor(True))
    load_parameters(other, flatten_parameters(one))
    observation = torch.randn(4, 1, D)
    assert torch.equal(one(observation), other(observation))
    assert other.normalizer.count == 8


def test_custom_network_is_used():
    network = make(factory=f"{__name__}:make_own")
    assert isinstance(network, ActorCritic)
    assert network.critics(torch.zeros(4, 1, D), torch.zeros(4, K)).shape == (3, 4)


@pytest.mark.parametrize(
    ("factory", "names"),
    [
        ("make_q_network", "Linear, NoneType, NoneType"),
        ("make_trouble", "KeyError: 'width'"),
        ("make_failing", "policy of .*ValueError: no such layer"),
        ("make_counting", "num_calls"),
        ("make_shared", r"\b2\b"),
        ("make_wide", r"policy of .*float32\[2, 3\].*float32\[2, 2\]"),
        ("make_unbounded", r"-1 \.\.\. 1"),
        ("make_one_answer", r"critics of .*float32\[2\].*float32\[any, 2\]"),
    ],
)
def test_unusable_network_is_refused_by_its_name(factory, names):
    with pytest.raises(UsageError, match=rf"{factory}'.*{names}"):
        make(factory=f"{__name__}:{factory}")


def test_only_vectors_can_be_normalized():
    images = replace(SCHEMA, frame_shape=(84, 84), frame_dtype="uint8", stack=4)
    assert choose_algorithm(Config(), images) == "dpg"
    with pytest.raises(UsageError, match=r"dpg\.normalize_observations"):
        choose_algorithm(Config(dpg=DpgConfig(normalize_observations=True)), images)
