"""SAC's update: targets by hand, five updates against a naive twin, and what an update must not change."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from support.dpg import SCHEMA, B, K, contents, make_batch
from support.dpg import make_step as make_step_of
from support.sac import SacTwin, draw
from torch import nn

from apex.algorithms.optimizers import restore_optimizer
from apex.config import LearnerConfig, SacConfig
from apex.runs.checkpoints.checkpoint import LearnerState, load_checkpoint, save_checkpoint
from apex.sac.algorithm import SacAlgorithm
from apex.sac.networks import SoftActorCritic
from apex.sac.update import SacUpdate
from apex.types import Progress

make_step = partial(make_step_of, SacAlgorithm)


class Constant(nn.Module):
    """A policy with the same means and log standard deviations for all observations."""

    def __init__(self, *values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, observation):
        return self.values.expand(len(observation), -1)


class Sum(nn.Module):
    """Critics with known values: scale * (sum of the observation + 10 * first number of the action)."""

    def __init__(self, *scales):
        super().__init__()
        self.scales = nn.Parameter(torch.tensor(scales))

    def forward(self, observation, action):
        return self.scales[:, None] * (observation.sum((1, 2)) + 10 * action[:, 0])


def make_by_hand(scales=(1.0, 2.0), policy=(0.5, -0.25, -1.0, 0.5), temperature=0.5, lr=0.0, **sac):
    """Returns an update whose optimizer subtracts the gradient times `lr`, and its online network."""
    online = SoftActorCritic(Constant(*policy), Sum(0.0, 0.0), None, temperature=temperature)
    target = SoftActorCritic(Constant(9.0, 9.0, 9.0, 9.0), Sum(*scales), None, temperature=99.0)
    rule = torch.optim.SGD(online.parameters(), lr=lr)
    learner = LearnerConfig(num_threads=1, max_gradient_norm=1e9)
    return SacUpdate(learner, SacConfig(**sac), online, target, rule, action_size=K), online


ONE = {"n_step_return": [100.0] * B, "weights": [1.0] * B, "stacks": np.full((2, B, 1, 3), 2.0)}


def density(noise, means=(0.5, -0.25), logs=(-1.0, 0.5)):
    """Returns the actions and log densities of rows of noise, computed number by number from the definition."""
    actions, densities = [], []
    for row in noise.tolist():
        us = [mean + math.exp(log) * each for mean, log, each in zip(means, logs, row, strict=True)]
        normal = [-(each**2) / 2 - log - math.log(2 * math.pi) / 2 for each, log in zip(row, logs, strict=True)]
        actions.append([math.tanh(u) for u in us])
        densities.append(sum(normal) - sum(math.log(1 - math.tanh(u) ** 2) for u in us))
    return actions, densities


def test_target_is_the_soft_value_of_an_online_action():
    """The smaller target critic gives 2 + 2 + 2 + 10 a', the temperature is 0.5, and the online critics return 0."""
    update, _ = make_by_hand()
    batch = make_batch(**ONE, discount=[0.5] * B)
    actions, densities = density(draw(3, batch)[1])
    q = [min(6 + 10 * action[0], 2 * (6 + 10 * action[0])) for action in actions]
    expected = [100 + 0.5 * (value - 0.5 * log) for value, log in zip(q, densities, strict=True)]
    assert np.allclose(update(batch).td_errors, np.abs(expected), rtol=1e-5)


def test_terminal_state_has_neither_value_nor_entropy():
    update, _ = make_by_hand(temperature=7.0)
    td_errors = update(make_batch(**ONE, discount=[0.0, 0.9] * 3)).td_errors
    assert td_errors[::2].tolist() == [100.0] * 3
    assert (td_errors[1::2] - 100).abs().min() > 0.01


def test_priority_is_the_error_of_the_mean_value():
    update, online = make_by_hand()
    with torch.no_grad():
        online.critics.scales.copy_(torch.tensor([1.0, 4.0]))
    batch = make_batch(**ONE, discount=[0.0] * B)
    q = 2.5 * (6 + 10 * batch.action[:, 0])
    assert torch.allclose(update(batch).td_errors, (100 - q).abs())


def test_temperature_follows_the_gap_to_the_target_entropy():
    """d/d log alpha of -alpha * (log pi + target) is the same expression."""
    weights = [1.0, 0.5, 0.25, 0.5, 1.0, 0.0]
    update, online = make_by_hand(temperature=0.5, lr=1.0, target_entropy_scale=1.5)
    batch = make_batch(**{**ONE, "weights": weights}, discount=[0.5] * B)
    _, densities = density(draw(3, batch)[0])
    gap = sum(weight * (log - 1.5 * K) for weight, log in zip(weights, densities, strict=True)) / B
    update(batch)
    assert online.log_temperature.item() == pytest.approx(math.log(0.5) + 0.5 * gap, rel=1e-5)


@pytest.mark.parametrize(("logs", "rises"), [((-4.0, -4.0), True), ((0.5, 0.5), False)])
def test_temperature_rises_only_while_entropy_is_too_small(logs, rises):
    update, online = make_by_hand(policy=(0.0, 0.0, *logs), temperature=1.0, lr=0.1)
    update(make_batch(**ONE, discount=[0.5] * B))
    assert (online.log_temperature.item() > 0) == rises


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"first_activation": "relu", "policy_learning_rate_share": 0.5},
        {"normalize_observations": True},
        {"sac": {"initial_temperature": 0.05, "target_entropy_scale": 0.5}},
    ],
)
@pytest.mark.parametrize("norm", [40.0, 0.1])
def test_five_updates_equal_a_naive_twins(settings, norm):
    update, online, target, _, config = make_step(learner={"max_gradient_norm": norm}, **settings)
    twin, target_twin = SacTwin(online, config), SacTwin(target, config)
    for seed in range(5):
        batch = make_batch(seed)
        td_errors, (loss, policy_loss, _) = twin.update(target_twin, batch, draw(seed, batch))
        updated = update(batch)
        assert np.allclose(updated.td_errors, td_errors, rtol=1e-3, atol=1e-4)
        assert float(updated.figures["loss"]) == pytest.approx(loss, rel=1e-3)
        assert float(updated.figures["policy_loss"]) == pytest.approx(policy_loss, rel=1e-3, abs=1e-4)
    state = online.state_dict()
    assert state.keys() == twin.leaves.keys()
    for name, expected in twin.leaves.items():
        assert torch.allclose(state[name].double(), expected, rtol=1e-3, atol=1e-4), name


def test_target_network_stays_as_it_is():
    update, _, target, _, _ = make_step()
    before = copy.deepcopy(target.state_dict())
    update(make_batch())
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize("normalize", [False, True])
def test_row_with_weight_0_has_no_effect(normalize):
    states = []
    for value in (0.0, 1e4):
        update, online, *_ = make_step(normalize_observations=normalize)
        batch = make_batch(weights=[1, 1, 1, 1, 1, 0])
        batch.stacks[:, -1], batch.n_step_return[-1] = value, value
        torch.manual_seed(0)
        update(batch)
        states.append(online.state_dict())
    assert all(torch.allclose(states[0][name], states[1][name], atol=1e-6) for name in states[0])


@pytest.mark.parametrize("field", ["n_step_return", "stacks"])
def test_non_finite_update_changes_nothing(field):
    update, online, _, optimizer, _ = make_step(normalize_observations=True)
    update(make_batch(0))
    before = contents(online, optimizer)
    batch = make_batch(1)
    getattr(batch, field)[-1] = torch.nan
    assert not update(batch).finite
    assert all(torch.equal(one, other) for one, other in zip(before, contents(online, optimizer), strict=True))
    assert update(make_batch(2)).finite


def test_non_finite_policy_keeps_critics_and_temperature():
    update, online, _, optimizer, _ = make_step()
    whole = online.sample
    online.sample = lambda seen, noise: (whole(seen, noise)[0], whole(seen, noise)[1] * torch.inf)
    before = contents(online, optimizer)
    assert not update(make_batch(discount=[0.0] * B)).finite
    assert all(torch.equal(one, other) for one, other in zip(before, contents(online, optimizer), strict=True))


def test_figures_have_temperature_and_entropy():
    update, _ = make_by_hand(temperature=0.5)
    batch = make_batch(**ONE, discount=[0.5] * B)
    _, densities = density(draw(3, batch)[0])
    figures = update(batch).figures
    assert float(figures["temperature"]) == pytest.approx(0.5)
    assert float(figures["entropy"]) == pytest.approx(-np.mean(densities), rel=1e-5)


def test_rows_of_another_shape_are_refused():
    update, *_ = make_step()
    for name in ("discount", "weights"):
        with pytest.raises(ValueError, match=rf"{name} .*\[6, 1\]"):
            update(make_batch(**{name: np.zeros((B, 1))}))


def test_checkpoint_continues_the_temperature_and_its_averages(tmp_path):
    update, online, target, optimizer, config = make_step()
    for seed in range(3):
        update(make_batch(seed))
    saved = LearnerState(
        3, Progress(), config, SCHEMA, online.state_dict(), target.state_dict(), optimizer.state_dict(), rng={}
    )
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved))
    again, other, other_target, other_optimizer, _ = make_step(seed=2)
    other.load_state_dict(loaded.online)
    other_target.load_state_dict(loaded.target)
    restore_optimizer(other_optimizer, loaded.optimizer)
    averages = [rule.state[rule.param_groups[0]["params"][-1]] for rule in (optimizer, other_optimizer)]
    assert other_optimizer.param_groups[0]["params"][-1] is other.log_temperature
    assert averages[0] == averages[1]
    assert averages[0]["exp_avg"] != 0
    for step in (update, again):
        torch.manual_seed(4)
        step(make_batch(4))
    assert online.log_temperature == other.log_temperature != loaded.online["log_temperature"]
    assert all(map(torch.equal, contents(online, optimizer), contents(other, other_optimizer)))
