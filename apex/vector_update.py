"""The gradient step of our own networks for vectors, with the gradients written out.

So small a network computes for tens of microseconds a layer, and autograd wants several times that to keep account of
it. Here a step is 129 operations of torch, where it was 203 and autograd's account of them; s_t and s_{t+m} go through
the online network together, and gradients through s_t alone; all gradients lie side by side in one tensor.

Axes: B batch, D numbers of an observation, H units of a layer, A actions.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from apex.config import LearnerConfig
from apex.gradient_step import DeviceBatch, Figures, Updated
from apex.losses import double_q_errors, loss_and_slopes
from apex.networks import Head, QNetwork, VectorQNetwork


class _Linear(NamedTuple):
    """A linear layer: its parameters, in the module's own memory."""

    weight: Tensor  # float32[H, D]
    bias: Tensor  # float32[H]
    weight_gradient: Tensor | None = None  # likewise; None of a network that does not learn
    bias_gradient: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """float32[B, D] -> float32[B, H]."""
        return torch.addmm(self.bias, inputs, self.weight.t())

    def differentiate(self, inputs: Tensor, slopes: Tensor) -> None:
        """Leaves the gradients of both parameters in their places; `slopes`: of the loss by the outputs."""
        torch.mm(slopes.t(), inputs, out=self.weight_gradient)
        torch.sum(slopes, 0, out=self.bias_gradient)


class _Head(NamedTuple):
    """A hidden layer and a linear one."""

    hidden: _Linear
    output: _Linear


class _Network(NamedTuple):
    """What `networks.make_network` makes for vectors, layer by layer."""

    first: _Linear
    second: _Linear
    advantage: _Head
    value: _Head | None


class _Passed(NamedTuple):
    """What every layer of a network gave, which the way back needs."""

    first: Tensor  # float32[B, H], after the ReLU, as all of these
    second: Tensor
    advantage: Tensor
    value: Tensor | None
    q: Tensor  # float32[B, A]


class VectorUpdate:
    """The step of `update.EagerUpdate` for such a network on a CPU, but for the last bits of sums."""

    def __init__(
        self, config: LearnerConfig, online: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Takes networks that `is_for_vectors`; their parameters stay where they are from now on."""
        self._config = config
        self._optimizer = optimizer
        self._flatten = cast(nn.Sequential, online.body)[0]
        parameters = list(online.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        self._gradient = torch.zeros(sum(sizes))
        for parameter, part in zip(parameters, torch.split(self._gradient, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self._online, self._target = (_take_apart(cast(QNetwork, network)) for network in (online, target))

    @torch.no_grad()
    def __call__(self, batch: DeviceBatch) -> Updated:
        """Changes the online network, if loss and gradient are finite."""
        size = len(batch.action)
        states = self._flatten(batch.stacks.flatten(0, 1))
        passed = _forward(self._online, states)
        q, next_q = passed.q.chunk(2)
        next_q_target = _forward(self._target, states[size:]).q
        errors = double_q_errors(q, next_q, next_q_target, batch.action, batch.n_step_return, batch.discount)
        loss, slopes = loss_and_slopes(errors, batch.weights, kind=self._config.loss)
        _backward(self._online, states, passed, batch.action, slopes)
        norm = torch.linalg.vector_norm(self._gradient)
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        if finite:
            if norm > self._config.max_gradient_norm:
                self._gradient.mul_(self._config.max_gradient_norm / (norm + 1e-6))
            self._optimizer.step()
        td_errors = errors.abs()
        return Updated(td_errors, finite, Figures(loss, q.amax(1).mean(), td_errors.mean(), norm))


def is_for_vectors(network: nn.Module) -> bool:
    """Whether `networks.make_network` has made it, for vectors, and nothing of it is frozen."""
    return type(network) is VectorQNetwork and all(parameter.requires_grad for parameter in network.parameters())


def _take_apart(network: QNetwork) -> _Network:
    body = cast(nn.Sequential, network.body)
    value = None if network.value is None else _head(network.value)
    return _Network(_linear(body[1]), _linear(body[3]), _head(network.advantage), value)


def _head(head: Head) -> _Head:
    return _Head(_linear(head.hidden), _linear(head.output))


def _linear(layer: nn.Module) -> _Linear:
    assert isinstance(layer, nn.Linear)
    return _Linear(layer.weight, layer.bias, layer.weight.grad, layer.bias.grad)


def _forward(network: _Network, states: Tensor) -> _Passed:
    first = network.first(states).relu_()
    second = network.second(first).relu_()
    advantage = network.advantage.hidden(second).relu_()
    q = network.advantage.output(advantage)
    if network.value is None:
        return _Passed(first, second, advantage, None, q)
    value = network.value.hidden(second).relu_()
    q += network.value.output(value) - q.mean(1, keepdim=True)
    return _Passed(first, second, advantage, value, q)


def _backward(network: _Network, states: Tensor, passed: _Passed, action: Tensor, slopes: Tensor) -> None:
    """Leaves all gradients in their places.

    `action`: int64[B], and `slopes`: float32[B], of the loss by Q(s_t, a_t). The other values of Q, and the rows of
    `states` and `passed` after the first B, which are those of s_{t+m}, have none.
    """
    size, num_actions = len(action), passed.q.shape[1]
    slopes = slopes.unsqueeze(1)
    by_advantage = torch.zeros(size, num_actions).scatter_(1, action.unsqueeze(1), slopes)
    second = passed.second[:size]
    if network.value is None:
        by_second = _back_through(network.advantage, second, passed.advantage[:size], by_advantage)
    else:
        assert passed.value is not None
        by_advantage -= slopes / num_actions  # Q = V + A - mean A
        by_second = _back_through(network.advantage, second, passed.advantage[:size], by_advantage)
        by_second += _back_through(network.value, second, passed.value[:size], slopes)
    first = passed.first[:size]
    by_second = _stop_where_silent(by_second, second)
    network.second.differentiate(first, by_second)
    by_first = _stop_where_silent(by_second @ network.second.weight, first)
    network.first.differentiate(states[:size], by_first)


def _back_through(head: _Head, features: Tensor, hidden: Tensor, slopes: Tensor) -> Tensor:
    """Leaves the gradients of a head's parameters in their places; returns those by its features."""
    head.output.differentiate(hidden, slopes)
    by_hidden = _stop_where_silent(slopes @ head.output.weight, hidden)
    head.hidden.differentiate(features, by_hidden)
    return by_hidden @ head.hidden.weight


def _stop_where_silent(slopes: Tensor, outputs: Tensor) -> Tensor:
    """The way back through a ReLU: where its output is 0 nothing passes."""
    passed: Tensor = torch.ops.aten.threshold_backward(slopes, outputs, 0)
    return passed
