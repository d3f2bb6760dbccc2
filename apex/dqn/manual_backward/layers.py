"""Layers whose gradients are written out, which is faster than autograd for small networks on a CPU.

Each knows its parameters, in the module's own memory, and the places for their gradients. Callers keep the outputs.

Axes: B batch, D numbers that go into a layer, H units of it, F features, A actions.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from apex.dqn.networks import Head, QNetwork


class Linear(NamedTuple):
    """A linear layer."""

    weight: Tensor  # float32[H, D]
    bias: Tensor  # float32[H]
    weight_gradient: Tensor | None = None  # likewise; None of a network that does not learn
    bias_gradient: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """float32[B, D] -> float32[B, H]."""
        return torch.addmm(self.bias, inputs, self.weight.t())

    def differentiate(self, inputs: Tensor, output_gradient: Tensor) -> None:
        """Leaves the gradients of both parameters in their places; `output_gradient`: of the loss by the outputs."""
        torch.mm(output_gradient.t(), inputs, out=self.weight_gradient)
        torch.sum(output_gradient, 0, out=self.bias_gradient)


class VectorTorso:
    """The body of a `networks.VectorQNetwork`."""

    def __init__(self, body: nn.Sequential) -> None:
        self._flatten = body[0]
        self._first, self._second = linear(body[1]), linear(body[3])

    def forward(self, stacks: Tensor) -> tuple[Tensor, ...]:
        """frame_dtype[N, B, S, *F] -> what each layer gives for N * B rows, of which the last is float32[N * B, F]."""
        states = self._flatten(stacks.flatten(0, 1))
        first = self._first(states).relu_()
        return states, first, self._second(first).relu_()

    def backward(self, stacks: Tensor, passed: tuple[Tensor, ...], output_gradient: Tensor) -> None:
        """Leaves all gradients in their places.

        `passed`: what `forward` gave; `output_gradient`: float32[B, F], of the loss by the features of
        `stacks[0]`; the other features have none.
        """
        states, first, second = (rows[: len(output_gradient)] for rows in passed)
        output_gradient = relu_backward(output_gradient, second)
        self._second.differentiate(first, output_gradient)
        self._first.differentiate(states, relu_backward(output_gradient @ self._second.weight, first))


class PassedHeads(NamedTuple):
    """What the layers of the heads gave."""

    advantage: Tensor  # float32[B, H], after the ReLU
    value: Tensor | None
    q: Tensor  # float32[B, A]


class _Head(NamedTuple):
    hidden: Linear
    output: Linear


class Heads:
    """The heads of a `QNetwork`, one or, dueling, two."""

    def __init__(self, network: QNetwork) -> None:
        self._advantage = _head(network.advantage)
        self._value = None if network.value is None else _head(network.value)

    def forward(self, features: Tensor) -> PassedHeads:
        """float32[B, F] -> Q, and what its way back needs."""
        advantage = self._advantage.hidden(features).relu_()
        q = self._advantage.output(advantage)
        if self._value is None:
            return PassedHeads(advantage, None, q)
        value = self._value.hidden(features).relu_()
        q += self._value.output(value) - q.mean(1, keepdim=True)
        return PassedHeads(advantage, value, q)

    def backward(self, features: Tensor, passed: PassedHeads, action: Tensor, q_gradient: Tensor) -> Tensor:
        """Leaves all gradients in their places; returns the gradient by the first B features, float32[B, F].

        `action`: int64[B]. `q_gradient`: float32[B], of the loss by Q(s_t, a_t). The other values of Q, and the rows of
        `features` and `passed` after the first B, have none.
        """
        size, num_actions = len(action), passed.q.shape[1]
        features, q_gradient = features[:size], q_gradient.unsqueeze(1)
        by_advantage = torch.zeros(size, num_actions).scatter_(1, action.unsqueeze(1), q_gradient)
        if self._value is None:
            return _back_through(self._advantage, features, passed.advantage[:size], by_advantage)
        assert passed.value is not None
        by_advantage -= q_gradient / num_actions  # Q = V + A - mean A
        by_features = _back_through(self._advantage, features, passed.advantage[:size], by_advantage)
        by_features += _back_through(self._value, features, passed.value[:size], q_gradient)
        return by_features


def linear(layer: nn.Module) -> Linear:
    """A module's parameters, and the places of their gradients."""
    layer = cast(nn.Linear, layer)
    return Linear(layer.weight, layer.bias, layer.weight.grad, layer.bias.grad)


def relu_backward(output_gradient: Tensor, outputs: Tensor) -> Tensor:
    """The gradient by the inputs of a ReLU: 0 where its output is 0."""
    passed: Tensor = torch.ops.aten.threshold_backward(output_gradient, outputs, 0)
    return passed


def _head(head: Head) -> _Head:
    return _Head(linear(head.hidden), linear(head.output))


def _back_through(head: _Head, features: Tensor, hidden: Tensor, output_gradient: Tensor) -> Tensor:
    """Leaves the gradients of a head's parameters in their places; returns those by its features."""
    head.output.differentiate(hidden, output_gradient)
    by_hidden = relu_backward(output_gradient @ head.output.weight, hidden)
    head.hidden.differentiate(features, by_hidden)
    return by_hidden @ head.hidden.weight
