"""Tests targets by hand, whole updates against a naive twin, and what an update must not change."""

import copy
import threading
from functools import partial

import numpy as np
import pytest
import torch
from support.dpg import CPU, SCHEMA, B, K, Twin, contents, make_batch
from support.dpg import make_step as make_step_of
from torch import nn

from apex.algorithms.graph_update import GpuSwitches
from apex.algorithms.optimizers import make_optimizer, set_learning_rate
from apex.config import Config, DpgConfig, LearnerConfig, NetworkConfig
from apex.dpg.algorithm import DpgAlgorithm
from apex.dpg.networks import ActorCritic
from apex.dpg.update import DpgUpdate

make_step = partial(make_step_of, DpgAlgorithm)


class Sum(nn.Module):
    """Critics with known values: scale * (sum of the observation + 10 * first number of the action)."""

    def __init__(self, *scales):
        super().__init__()
        self.scales = nn.Parameter(torch.tensor(scales))

    def forward(self, observation, action):
        return self.scales[:, None] * (observation.sum((1, 2)) + 10 * action[:, 0])


class Constant(nn.Module):
    def __init__(self, *values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, observation):
        return self.values.expand(len(observation), -1)


def make_by_hand(scales=(1.0,), played=(0.5, 0.0), **settings):
    config = DpgConfig(num_critics=len(scales), **settings)
    online = ActorCritic(Constant(0.25, 0.0), Sum(*(0.0 for _ in scales)), None)
    target = ActorCritic(Constant(*played), Sum(*scales), None)
    learner = LearnerConfig(optimizer="adam", num_threads=1)
    return DpgUpdate(learner, config, online, target, torch.optim.SGD(online.parameters(), lr=0.0)), online


ONE = {"n_step_return": [100.0] * B, "weights": [1.0] * B, "stacks": np.full((2, B, 1, 3), 2.0)}


def test_target_is_return_plus_discounted_target_value():
    """The target is 100 + 0.5 * (2 + 2 + 2 + 10 * 0.5); the online critic returns 0."""
    update, _ = make_by_hand()
    assert update(make_batch(**ONE, discount=[0.5] * B)).td_errors.tolist() == [105.5] * B


def test_terminal_state_has_value_0_but_a_truncated_one_has_not():
    update, _ = make_by_hand()
    td_errors = update(make_batch(**ONE, discount=[0.0, 0.9, 0.0, 0.9, 0.0, 0.9])).td_errors
    assert torch.allclose(td_errors, torch.tensor([100.0, 109.9] * 3))


def test_smaller_value_of_two_critics_counts():
    update, _ = make_by_hand(scales=(1.0, -1.0))
    assert update(make_batch(**ONE, discount=[1.0] * B)).td_errors.tolist() == [100.0 - 11.0] * B


def test_target_noise_is_clipped_and_the_action_stays_in_bounds():
    update, _ = make_by_hand(played=(0.9, 0.0), target_noise=1e6, target_noise_clip=0.4)
    td_errors = torch.cat([update(make_batch(**ONE, discount=[1.0] * B)).td_errors for _ in range(40)])
    first = (td_errors - 106) / 10  # number of the action that the target critic got
    assert sorted({round(value, 4) for value in first.tolist()}) == [0.5, 1.0]  # 0.9 - 0.4, and 0.9 + 0.4 as 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_critics": 2, "first_activation": "relu", "policy_learning_rate_share": 0.5},
        {"action_gradient_clip": 0.05},
        {"action_gradient_clip": 0.0},  # no bound
        {"normalize_observations": True},
    ],
)
@pytest.mark.parametrize("norm", [40.0, 0.1])
def test_five_updates_equal_a_naive_twins(settings, norm):
    update, online, target, _, config = make_step(learner={"max_gradient_norm": norm}, **settings)
    twin, target_twin = Twin(online, config.dpg, config.learner), Twin(target, config.dpg, config.learner)
    for seed in range(5):
        batch = make_batch(seed)
        td_errors, loss, policy_loss = twin.update(target_twin, batch)
        updated = update(batch)
        assert np.allclose(updated.td_errors, td_errors, rtol=1e-3, atol=1e-4)
        assert float(updated.figures["loss"]) == pytest.approx(loss, rel=1e-3)
        assert float(updated.figures["policy_loss"]) == pytest.approx(policy_loss, rel=1e-3, abs=1e-4)
    state = online.state_dict()
    for name, expected in twin.state().items():
        assert np.allclose(state[name].numpy(), expected, rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("settings", [{}, {"num_critics": 2, "target_noise": 0.2, "policy_period": 2}])
def test_a_second_thread_changes_no_result(settings, monkeypatch):
    threads = set()
    whole = DpgUpdate._differentiate_policy

    def spy(update, *arguments):
        threads.add(threading.current_thread().name.rpartition("_")[0] or "main")
        return whole(update, *arguments)

    monkeypatch.setattr(DpgUpdate, "_differentiate_policy", spy)
    states = []
    for num_threads in (1, 2):
        update, online, _, optimizer, _ = make_step(learner={"num_threads": num_threads}, **settings)
        assert update.torch_threads == 1
        torch.manual_seed(5)
        errors = [update(make_batch(seed)).td_errors for seed in range(5)]
        states.append([*errors, *contents(online, optimizer)])
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))
    assert threads == {"main", "policy"}


def test_a_custom_network_is_run_by_one_thread():
    config = Config(
        learner=LearnerConfig(num_threads=2),
        network=NetworkConfig(factory=f"{__name__}:make_partly"),
    )
    algorithm = DpgAlgorithm(config, SCHEMA)
    networks = algorithm.make_network(), algorithm.make_network()
    update = algorithm.make_update(*networks, algorithm.make_optimizer(networks[0]), CPU)
    assert update.torch_threads == 2


def test_figures_of_the_policy_stay_in_place_for_graphs():
    """The graph of a step without the policy shows the figures of the last step with it, whose memory it read."""
    update, *_ = make_step(policy_period=2)
    first, second, third = (update(make_batch(seed)).figures for seed in range(3))
    for name in ("policy_loss", "policy_gradient_norm", "action_saturation"):
        assert len({figures[name].data_ptr() for figures in (first, second, third)}) == 1
    alone, *_ = make_step(policy_period=2)
    values = [float(alone(make_batch(seed)).figures["policy_loss"]) for seed in range(3)]
    assert values[0] == values[1] != values[2] == float(third["policy_loss"])


@pytest.mark.parametrize(("period", "switch"), [(1, False), (2, False), (2, True)])
def test_a_delayed_policy_has_a_graph_for_each_step_if_switched(period, switch, monkeypatch):
    monkeypatch.setattr("apex.dpg.algorithm.GPU_SWITCHES", GpuSwitches(delayed_graphs=switch))
    algorithm = DpgAlgorithm(Config(dpg=DpgConfig(policy_period=period)), SCHEMA)
    online = algorithm.make_network()
    parts = online, algorithm.make_network(), algorithm.make_optimizer(online)
    update = algorithm.make_update(*parts, torch.device("cuda"))
    assert getattr(update, "_cycle", None) == (None if period == 2 and not switch else period)


def test_losses_of_policy_and_critics_do_not_mix():
    kept = {}
    for clip in (1e-9, 1.0):  # With the first value, the policy hardly learns.
        update, online, *_ = make_step(action_gradient_clip=clip)
        update(make_batch())
        kept[clip] = [parameter.grad.clone() for parameter in online.critics.parameters()]
        slopes = [float(parameter.grad.abs().max()) for parameter in online.policy.parameters()]
        assert max(slopes) < 1e-8 if clip < 1 else max(slopes) > 1e-4
    assert all(torch.equal(one, other) for one, other in zip(*kept.values(), strict=True))


@pytest.mark.parametrize("normalize", [False, True])
def test_row_with_weight_0_has_no_effect(normalize):
    states = []
    for value in (0.0, 1e4):
        update, online, *_ = make_step(normalize_observations=normalize)
        batch = make_batch(weights=[1, 1, 1, 1, 1, 0])
        batch.stacks[:, -1], batch.n_step_return[-1] = value, value
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


def test_non_finite_policy_gradient_also_keeps_the_critics():
    update, online, _, optimizer, _ = make_step()
    online.policy.register_forward_hook(lambda network, inputs, output: output * torch.inf)
    before = contents(online, optimizer)
    assert not update(make_batch()).finite
    assert all(torch.equal(one, other) for one, other in zip(before, contents(online, optimizer), strict=True))


def test_delayed_policy_learns_in_every_second_update():
    update, online, *_ = make_step(policy_period=2)
    moved = []
    for number in range(4):
        before = copy.deepcopy(online.state_dict())
        updated = update(make_batch(number))
        after = online.state_dict()
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        moved.append({part: any(name.startswith(part) for name in changed) for part in ("policy", "critics")})
        assert {"policy_loss", "action_saturation"} <= set(updated.figures)
    assert [each["policy"] for each in moved] == [True, False, True, False]
    assert all(each["critics"] for each in moved)


def test_share_of_saturated_actions_is_reported():
    update, online = make_by_hand()
    with torch.no_grad():
        online.policy.values.copy_(torch.tensor([0.98, -0.5]))
    assert float(update(make_batch(**ONE, discount=[0.5] * B)).figures["action_saturation"]) == 1 / K


class Partly(nn.Module):
    """Three layers, of which one is frozen and one is unused."""

    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.frozen, self.used, self.unused = (nn.Linear(num_inputs, num_outputs) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, *inputs):
        rows = torch.cat([part.flatten(1) for part in inputs], 1)
        return torch.tanh(self.used(rows) + self.frozen(rows))


class PartlyCritic(Partly):
    def forward(self, *inputs):
        return super().forward(*inputs).T


def make_partly(info):
    return ActorCritic(Partly(3, K), PartlyCritic(3 + K, 1), None)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_frozen_and_unused_parameters_do_not_change(optimizer):
    learner = LearnerConfig(optimizer=optimizer, num_threads=1, learning_rate=0.1)
    online, target = (ActorCritic(Partly(3, K), PartlyCritic(3 + K, 1), None) for _ in range(2))
    before = copy.deepcopy(online.state_dict())
    rule = make_optimizer(learner, online.critics.parameters(), list(online.policy.parameters()), 1.0)
    assert bool(DpgUpdate(learner, DpgConfig(num_critics=1), online, target, rule)(make_batch()).finite)
    changed = {name for name, tensor in online.state_dict().items() if not tensor.equal(before[name])}
    assert changed == {f"{part}.used.{name}" for part in ("policy", "critics") for name in ("weight", "bias")}


def test_rows_of_another_shape_are_refused():
    update, *_ = make_step()
    with pytest.raises(ValueError, match=r"discount .*\[6, 1\]"):
        update(make_batch(discount=np.zeros((B, 1))))


def test_policy_keeps_its_share_of_a_decaying_rate():
    _, _, _, optimizer, _ = make_step(policy_learning_rate_share=0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.0025]
    set_learning_rate(optimizer, 0.004)
    assert [group["lr"] for group in optimizer.param_groups] == [0.004, 0.001]
