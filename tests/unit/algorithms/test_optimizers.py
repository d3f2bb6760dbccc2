"""Tests DQN's RMSProp against a float64 twin, Adam against torch, and the schedule of the learning rate."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from apex.algorithms.optimizers import (
    center_gradients,
    learning_rate_at,
    make_optimizer,
    restore_optimizer,
    set_learning_rate,
)
from apex.config import LearnerConfig

PAPER = {"learning_rate": 6.25e-5, "rmsprop_decay": 0.95, "optimizer_epsilon": 1.5e-7}


def rmsprop(parameters, **settings):
    return make_optimizer(LearnerConfig(optimizer="rmsprop", **{**PAPER, **settings}), parameters)


def adam(parameters, **settings):
    return make_optimizer(LearnerConfig(optimizer="adam", **settings), parameters)


def parameter(values=(1.0,)):
    return nn.Parameter(torch.tensor(values, dtype=torch.float32))


class NaiveRMSProp:
    """The formula for one array in float64."""

    def __init__(self, values, learning_rate, rmsprop_decay, optimizer_epsilon):
        self.values = np.array(values, np.float64)
        self.lr, self.decay, self.epsilon = learning_rate, rmsprop_decay, optimizer_epsilon
        self.mean = np.zeros_like(self.values)
        self.mean_square = np.zeros_like(self.values)

    def step(self, gradient):
        gradient = np.asarray(gradient, np.float64)
        self.mean = self.decay * self.mean + (1 - self.decay) * gradient
        self.mean_square = self.decay * self.mean_square + (1 - self.decay) * gradient**2
        self.values -= self.lr * gradient / np.sqrt(self.mean_square - self.mean**2 + self.epsilon)


def step(optimizer, parameters, gradients):
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = None if gradient is None else torch.as_tensor(gradient, dtype=torch.float32)
    optimizer.step()


@pytest.mark.parametrize("settings", [PAPER, {"learning_rate": 0.1, "rmsprop_decay": 0.5, "optimizer_epsilon": 0.01}])
@pytest.mark.parametrize("seed", range(5))
def test_rmsprop_matches_its_definition_over_many_steps(settings, seed):
    rng = np.random.default_rng(seed)
    shapes = [(3, 4), (5,), ()]
    starts = [rng.normal(size=shape) for shape in shapes]
    parameters = [nn.Parameter(torch.tensor(start, dtype=torch.float32)) for start in starts]
    twins = [NaiveRMSProp(start, **settings) for start in starts]
    optimizer = rmsprop(parameters, **settings)
    for _ in range(50):
        gradients = [rng.normal(size=shape) * 10.0 ** rng.integers(-5, 2) for shape in shapes]
        step(optimizer, parameters, gradients)
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.step(gradient)
    for each, twin, start in zip(parameters, twins, starts, strict=True):
        moved = np.abs(twin.values - start).max()
        assert np.abs(each.detach().numpy() - twin.values).max() < 1e-3 * moved


def test_first_rmsprop_step_equals_values_by_hand():
    # E[g] = 0.05, E[g^2] = 0.05 and the variance 0.05 - 0.0025 = 0.0475, so epsilon is negligible.
    x, small = parameter([0.0]), parameter([0.0])
    optimizer = rmsprop([x])
    step(optimizer, [x], [[1.0]])
    assert x.item() == pytest.approx(-6.25e-5 / 0.0475**0.5, rel=1e-4)
    state = {name: value.item() for name, value in optimizer.state_dict()["state"][0].items()}
    assert state == {"mean": pytest.approx(0.05), "mean_square": pytest.approx(0.05)}
    # With epsilon outside the root, the step of a small gradient would be a thousand times as long.
    step(rmsprop([small], learning_rate=1.0), [small], [[1e-7]])
    assert small.item() == pytest.approx(-1e-7 / 1.5e-7**0.5, rel=1e-4)


def test_constant_gradient_leaves_no_negative_variance():
    """E[g^2] - E[g]^2 then tends to 0, and float32 rounds it to either side, by far more than this epsilon."""
    x = parameter(np.linspace(0.1, 1000.0, 500))
    optimizer = rmsprop([x], optimizer_epsilon=1e-12)
    gradient = torch.linspace(0.1, 1000.0, 500)
    for _ in range(600):
        step(optimizer, [x], [gradient])
        assert x.isfinite().all()


def test_parameter_without_gradient_does_not_change():
    x, y = parameter([1.0]), parameter([1.0])
    optimizer = rmsprop([x, y])
    step(optimizer, [x, y], [None, [1.0]])
    assert x.item() == 1.0
    assert y.item() != 1.0
    step(optimizer, [x, y], [None, None])
    assert x.item() == 1.0


def test_centering_subtracts_each_units_mean_and_skips_biases():
    weight, bias, unused = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (2,), (4, 4)))
    image = nn.Parameter(torch.zeros(2, 1, 2, 2).to(memory_format=torch.channels_last))
    weight.grad = torch.tensor([[1.0, 2.0, 6.0], [-1.0, 0.0, 1.0]])
    bias.grad = torch.tensor([1.0, 2.0])
    image.grad = torch.arange(8.0).view(2, 1, 2, 2).to(memory_format=torch.channels_last)
    center_gradients([weight, bias, unused, image])
    assert weight.grad.tolist() == [[-2, -1, 3], [-1, 0, 1]]
    assert bias.grad.tolist() == [1, 2]
    assert image.grad.flatten().tolist() == [-1.5, -0.5, 0.5, 1.5] * 2
    assert unused.grad is None


def test_channels_last_parameters_take_the_same_steps():
    gradient = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).reshape(2, 3, 4, 4) - 40
    plain = nn.Parameter(torch.ones(2, 3, 4, 4))
    last = nn.Parameter(torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    for x in (plain, last):
        step(rmsprop([x]), [x], [gradient])
    assert torch.equal(plain, last)
    assert last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("make", [rmsprop, adam])
def test_restored_optimizer_takes_the_same_steps(make):
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(20, 3))
    x = parameter([1.0, 2.0, 3.0])
    optimizer = make([x])
    for gradient in gradients[:10]:
        step(optimizer, [x], [gradient])
    y = nn.Parameter(x.detach().clone())
    restored = make([y])
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for gradient in gradients[10:]:
        step(optimizer, [x], [gradient])
        step(restored, [y], [gradient])
    assert torch.equal(x, y)


@pytest.mark.parametrize("make", [rmsprop, adam])
def test_restored_state_gets_own_memory_format_and_rate(make):
    last = nn.Parameter(torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    optimizer = make([last], learning_rate=0.1)
    step(optimizer, [last], [np.arange(96.0).reshape(2, 3, 4, 4)])
    plain = nn.Parameter(last.detach().clone(memory_format=torch.contiguous_format))
    restored = make([plain], learning_rate=0.2)
    restore_optimizer(restored, copy.deepcopy(optimizer.state_dict()))
    assert restored.param_groups[0]["lr"] == 0.2
    averages = [(restored.state[plain][name], value) for name, value in optimizer.state[last].items() if value.dim()]
    assert len(averages) == 2
    for own, saved in averages:
        assert torch.equal(own, saved)
        assert own.is_contiguous()


def test_adam_uses_the_configured_settings():
    # First step: both averages are corrected to g and g^2, so the step is lr * g / (|g| + epsilon).
    x = parameter([0.0])
    optimizer = adam([x], learning_rate=0.1, adam_beta1=0.8, adam_beta2=0.9, optimizer_epsilon=1.0)
    step(optimizer, [x], [[1.0]])
    assert x.item() == pytest.approx(-0.1 / 2)
    # Second, with g = 0: averages 0.8 * 0.2 and 0.9 * 0.1, corrected by 1 - 0.8^2 and 1 - 0.9^2.
    step(optimizer, [x], [[0.0]])
    mean, mean_square = 0.16 / 0.36, 0.09 / 0.19
    assert x.item() == pytest.approx(-0.05 - 0.1 * mean / (mean_square**0.5 + 1), rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_adam_equals_torchs_in_every_bit_and_in_its_state(seed):
    """On a CPU, where the fused kernel is called directly. Some parameters have no gradient in some steps."""
    rng = np.random.default_rng(seed)
    starts = [rng.normal(size=shape).astype(np.float32) for shape in [(3, 4), (5,), ()]]
    settings = {"learning_rate": 1e-2, "adam_beta1": 0.8, "adam_beta2": 0.99, "optimizer_epsilon": 1e-5}
    own, theirs = ([nn.Parameter(torch.from_numpy(start.copy())) for start in starts] for _ in range(2))
    optimizer = adam(own, **settings)
    twin = torch.optim.Adam(theirs, lr=1e-2, betas=(0.8, 0.99), eps=1e-5, fused=True)
    for _ in range(20):
        gradients = [None if rng.random() < 0.2 else rng.normal(size=start.shape) for start in starts]
        step(optimizer, own, gradients)
        step(twin, theirs, gradients)
        assert all(torch.equal(one, other) for one, other in zip(own, theirs, strict=True))
    states = optimizer.state_dict()["state"], twin.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for one, other in zip(*(state.values() for state in states), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(one[name].dtype == other[name].dtype for name in one)


def test_adam_on_a_gpu_runs_torchs_capturable_step(monkeypatch):
    x = parameter([1.0])
    optimizer = adam([x])
    (group,) = optimizer.param_groups
    group["capturable"] = True  # as `make_optimizer` sets it for parameters on a GPU
    called = []
    monkeypatch.setattr(type(optimizer), "_step_on_gpu", lambda self: called.append(self))
    step(optimizer, [x], [[1.0]])
    assert called == [optimizer]
    assert x.item() == 1.0


def test_learning_rate_is_constant_or_decays_linearly():
    assert [learning_rate_at(LearnerConfig(learning_rate=0.5), number) for number in (0, 10**9)] == [0.5, 0.5]
    falls = LearnerConfig(learning_rate=0.5, final_learning_rate_share=0.2, learning_rate_updates=4)
    rates = [learning_rate_at(falls, number) for number in range(7)]
    assert rates == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1])


def test_learning_rate_decays_until_the_runs_limit_if_it_has_one():
    falls = LearnerConfig(
        learning_rate=0.5, final_learning_rate_share=0.2, learning_rate_updates=4, learning_rate_until_limit=True
    )
    assert [learning_rate_at(falls, 4, share) for share in (0.0, 0.5, 1.0)] == pytest.approx([0.5, 0.3, 0.1])
    assert learning_rate_at(falls, 2, None) == pytest.approx(0.3)


def test_learning_rate_warms_up_while_it_decays():
    rises = LearnerConfig(learning_rate=0.4, learning_rate_warmup=4)
    assert [learning_rate_at(rises, number) for number in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    both = LearnerConfig(
        learning_rate=0.4, learning_rate_warmup=2, learning_rate_updates=4, final_learning_rate_share=0.5
    )
    assert [learning_rate_at(both, number) for number in range(6)] == pytest.approx([0.2, 0.35, 0.3, 0.25, 0.2, 0.2])


@pytest.mark.parametrize("make", [rmsprop, adam])
def test_step_has_the_length_of_the_learning_rate(make):
    """RMSProp's and Adam's steps are proportional to the rate."""
    steps = []
    for rate in (None, 3e-3):
        x = parameter([0.0, 0.0])
        optimizer = make([x], learning_rate=1e-3)
        if rate is not None:
            set_learning_rate(optimizer, rate)
        step(optimizer, [x], [[1.0, -2.0]])
        steps.append(x.detach())
    torch.testing.assert_close(steps[1], 3 * steps[0])


def test_rmsprop_takes_the_same_steps_with_a_rate_in_a_tensor():
    rng = np.random.default_rng(0)
    one, other = parameter([1.0, 2.0, 3.0]), parameter([1.0, 2.0, 3.0])
    plain, captured = rmsprop([one]), rmsprop([other])
    (group,) = captured.param_groups
    group["lr"] = kept = torch.tensor(group["lr"])
    for rate in np.geomspace(1e-2, 1e-5, 20):
        gradient = rng.normal(size=3)
        set_learning_rate(plain, rate)
        set_learning_rate(captured, rate)
        step(plain, [one], [gradient])
        step(captured, [other], [gradient])
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    assert group["lr"] is kept  # A graph reads the same tensor.


class OnGpu(nn.Parameter):
    """A parameter that claims to be on a GPU, where a captured step keeps numbers but reads tensors at each replay."""

    is_cuda = True


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_scheduled_rate_on_a_gpu_is_one_tensor(optimizer):
    falls = LearnerConfig(optimizer=optimizer, learning_rate=0.5, learning_rate_updates=9)
    made = make_optimizer(falls, [OnGpu(torch.zeros(2))])
    (group,) = made.param_groups
    kept = group["lr"]
    set_learning_rate(made, 0.25)
    assert group["lr"] is kept
    assert kept.item() == 0.25
    (group,) = make_optimizer(replace(falls, learning_rate_updates=0), [OnGpu(torch.zeros(2))]).param_groups
    assert group["lr"] == 0.5
    assert not isinstance(group["lr"], torch.Tensor)


def test_restored_rate_has_the_kind_of_the_own_device():
    falls = LearnerConfig(optimizer="rmsprop", learning_rate=0.5, learning_rate_updates=9)
    on_cpu, on_gpu = make_optimizer(falls, [parameter()]), make_optimizer(falls, [OnGpu(torch.zeros(1))])
    states = on_cpu.state_dict(), on_gpu.state_dict()
    restore_optimizer(on_cpu, states[1])
    restore_optimizer(on_gpu, states[0])
    assert isinstance(on_gpu.param_groups[0]["lr"], torch.Tensor)
    assert isinstance(on_cpu.param_groups[0]["lr"], float)
