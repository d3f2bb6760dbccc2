"""The two linear layers that our own networks have for vectors, with their gradients written out."""

from __future__ import annotations

from torch import Tensor, nn

from apex.dqn.manual_backward.layers import linear, stop_where_silent


class VectorTorso:
    """The body of a `networks.VectorQNetwork`: a `written_layers.Body`."""

    def __init__(self, body: nn.Sequential) -> None:
        self._flatten = body[0]
        self._first, self._second = linear(body[1]), linear(body[3])

    def forward(self, stacks: Tensor) -> tuple[Tensor, ...]:
        """The states as rows, and what the layers give for them."""
        states = self._flatten(stacks.flatten(0, 1))
        first = self._first(states).relu_()
        return states, first, self._second(first).relu_()

    def backward(self, stacks: Tensor, passed: tuple[Tensor, ...], slopes: Tensor) -> None:
        """Leaves all gradients in their places."""
        states, first, second = (rows[: len(slopes)] for rows in passed)
        slopes = stop_where_silent(slopes, second)
        self._second.differentiate(first, slopes)
        self._first.differentiate(states, stop_where_silent(slopes @ self._second.weight, first))
