"""Layers with hand-written gradients, which are faster than autograd for small networks on a CPU.

Each layer refers to the parameters of the original module and to the tensors that store their gradients. Callers keep
the outputs of `forward` and pass them to `backward`.

Axes: N observations of a transition (s_t, s_{t+m}), B batch, D inputs and H units of a layer, F features, A actions.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from apex.dqn.networks import Head, QNetwork


class Linear(NamedTuple):
    """A linear layer."""

    weight: Tensor  # float32[H, D]
    bias: Tensor  # float32[H]
    weight_gradient: Tensor | None = None  # float32[H, D]; None in a network that is not trained
    bias_gradient: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """float32[B, D] -> float32[B, H]."""
        return torch.addmm(self.bias, inputs, self.weight.t())

    def differentiate(self, inputs: Tensor, output_gradient: Tensor) -> None:
        """Stores the gradients of weight and bias.

        output_gradient: gradient of the loss with respect to the outputs, float32[B, H].
        """
        torch.mm(output_gradient.t(), inputs, out=self.weight_gradient)
        torch.sum(output_gradient, 0, out=self.bias_gradient)

    def input_gradient(self, output_gradient: Tensor) -> Tensor:
        """Returns the gradient with respect to the inputs, float32[B, D]."""
        return output_gradient @ self.weight


class VectorTorso:
    """The body of a `networks.VectorQNetwork`."""

    def __init__(self, body: nn.Sequential) -> None:
        self._flatten = body[0]
        self._first, self._second = linear(body[1]), linear(body[3])

    def forward(self, stacks: Tensor) -> tuple[Tensor, ...]:
        """frame_dtype[N, B, S, *frame] -> outputs of each layer for N * B rows; the last is float32[N * B, F]."""
        states = self._flatten(stacks.flatten(0, 1))
        first = self._first(states).relu_()
        return states, first, self._second(first).relu_()

    def backward(self, stacks: Tensor, outputs: tuple[Tensor, ...], output_gradient: Tensor) -> None:
        """Stores the gradients of all parameters.

        outputs: result of `forward`. output_gradient: gradient of the loss with respect to the features of `stacks[0]`,
        float32[B, F]. The other features are not differentiated.
        """
        states, first, second = (rows[: len(output_gradient)] for rows in outputs)
        output_gradient = relu_backward(output_gradient, second)
        self._second.differentiate(first, output_gradient)
        self._first.differentiate(states, relu_backward(self._second.input_gradient(output_gradient), first))


class HiddenLayer(Protocol):
    """A linear layer of a head: `Linear`, or `bfloat16_layers.Bfloat16Linear`."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """See `Linear`."""

    def differentiate(self, inputs: Tensor, output_gradient: Tensor) -> None:
        """See `Linear.differentiate`."""

    def input_gradient(self, output_gradient: Tensor) -> Tensor:
        """See `Linear.input_gradient`."""


class _Head(NamedTuple):
    hidden: HiddenLayer
    output: Linear

    def backward(self, features: Tensor, hidden: Tensor, output_gradient: Tensor) -> Tensor:
        """Stores the gradients of the head's parameters; returns the gradient with respect to `features`."""
        self.output.differentiate(hidden, output_gradient)
        hidden_gradient = relu_backward(self.output.input_gradient(output_gradient), hidden)
        self.hidden.differentiate(features, hidden_gradient)
        return self.hidden.input_gradient(hidden_gradient)


class HeadOutputs(NamedTuple):
    """The outputs of the heads' layers."""

    advantage: Tensor  # float32[B, H], after the ReLU
    value: Tensor | None
    q: Tensor  # float32[B, A]


class Heads:
    """The heads of a `QNetwork`: one, or two if dueling."""

    def __init__(self, network: QNetwork, make_hidden: Callable[[nn.Linear], HiddenLayer] | None = None) -> None:
        """`make_hidden` returns the hidden layer of a head; None: `linear`."""
        self._advantage = _head(network.advantage, make_hidden or linear)
        self._value = None if network.value is None else _head(network.value, make_hidden or linear)

    def forward(self, features: Tensor) -> HeadOutputs:
        """float32[B, F] -> Q-values and the outputs that `backward` needs."""
        advantage = self._advantage.hidden(features).relu_()
        q = self._advantage.output(advantage)
        if self._value is None:
            return HeadOutputs(advantage, None, q)
        value = self._value.hidden(features).relu_()
        q += self._value.output(value) - q.mean(1, keepdim=True)
        return HeadOutputs(advantage, value, q)

    def backward(self, features: Tensor, outputs: HeadOutputs, action: Tensor, q_gradient: Tensor) -> Tensor:
        """Stores the gradients of all parameters; returns the gradient with respect to `features[:B]`, float32[B, F].

        action: int64[B]. q_gradient: gradient of the loss with respect to Q(s_t, a_t), float32[B]. Other Q-values, and
        rows of `features` and `outputs` after the first B, are not differentiated.
        """
        size, num_actions = len(action), outputs.q.shape[1]
        features, q_gradient = features[:size], q_gradient.unsqueeze(1)
        gradient = torch.zeros(size, num_actions).scatter_(1, action.unsqueeze(1), q_gradient)  # of A
        if self._value is None:
            return self._advantage.backward(features, outputs.advantage[:size], gradient)
        assert outputs.value is not None
        gradient -= q_gradient / num_actions  # Q = V + A - mean(A)
        feature_gradient = self._advantage.backward(features, outputs.advantage[:size], gradient)
        feature_gradient += self._value.backward(features, outputs.value[:size], q_gradient)
        return feature_gradient


def linear(layer: nn.Module) -> Linear:
    """Returns the parameters of a module and the tensors that store their gradients."""
    layer = cast(nn.Linear, layer)
    return Linear(layer.weight, layer.bias, layer.weight.grad, layer.bias.grad)


def relu_backward(output_gradient: Tensor, outputs: Tensor) -> Tensor:
    """Returns the gradient with respect to the inputs of a ReLU: 0 where the output is 0."""
    gradient: Tensor = torch.ops.aten.threshold_backward(output_gradient, outputs, 0)
    return gradient


def _head(head: Head, make_hidden: Callable[[nn.Linear], HiddenLayer]) -> _Head:
    return _Head(make_hidden(head.hidden), linear(head.output))
