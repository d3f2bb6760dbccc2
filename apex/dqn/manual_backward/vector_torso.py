"""The two linear layers that our own networks have for vectors, with their gradients written out."""

from __future__ import annotations

from torch import Tensor, nn

from apex.dqn.manual_backward.layers import linear, relu_backward


class VectorTorso:
    """The body of a `networks.VectorQNetwork`: a `layers.Torso`."""

    def __init__(self, body: nn.Sequential) -> None:
        self._flatten = body[0]
        self._first, self._second = linear(body[1]), linear(body[3])

    def forward(self, stacks: Tensor) -> tuple[Tensor, ...]:
        """The states as rows, and what the layers give for them."""
        states = self._flatten(stacks.flatten(0, 1))
        first = self._first(states).relu_()
        return states, first, self._second(first).relu_()

    def backward(self, stacks: Tensor, passed: tuple[Tensor, ...], output_gradient: Tensor) -> None:
        """Leaves all gradients in their places."""
        states, first, second = (rows[: len(output_gradient)] for rows in passed)
        output_gradient = relu_backward(output_gradient, second)
        self._second.differentiate(first, output_gradient)
        self._first.differentiate(states, relu_backward(output_gradient @ self._second.weight, first))
