"""A sum-tree over an array that may lie in shared memory: draws an index in proportion to its weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Levels of up to this many nodes are summed up or searched whole: one pass costs less than 512 single steps.
SEARCHED_NODES = 512
RECOMPUTED_NODES_PER_INDEX = 8


class SumTree:
    """A perfect binary tree in one array: the root is node 1, the children of i are 2i and 2i+1.

    Parents are always recomputed from their children, never adjusted by a difference, so the sums carry no drift.
    One writer may call `set` while readers in other processes call `find`.
    """

    def __init__(self, nodes: NDArray[np.float64], capacity: int) -> None:
        """Lays the tree of `capacity` leaves over `nodes`: float64[num_nodes(capacity)], all 0 or an earlier tree."""
        self.capacity = capacity
        self._nodes = nodes
        self._siblings = nodes.view(np.complex128)  # Item i holds both children of node i: one fetch, not two.
        self._first_leaf = len(nodes) // 2
        # Views of (left children, right children, their sums), a tuple for each level: item k has 2**k sums.
        self._levels = [
            (nodes[2 * width : 4 * width : 2], nodes[2 * width + 1 : 4 * width : 2], nodes[width : 2 * width])
            for width in (1 << depth for depth in range(self._first_leaf.bit_length() - 1))
        ]

    @staticmethod
    def num_nodes(capacity: int) -> int:
        """Length of the array: twice the next power of two, as node 0 stands unused."""
        return 2 << (capacity - 1).bit_length()

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._nodes[1])

    def weights(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """The weights at `indices`, copied."""
        return self._nodes.take(indices + self._first_leaf)

    def set(self, indices: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Sets weights; where an index repeats, its last weight holds."""
        if len(indices) == 0:
            return
        if indices.view(np.uint64).max() >= self.capacity:  # A negative one is huge then: one pass, not two.
            raise ValueError(f"indices must be 0 ... {self.capacity - 1}")
        _check_weights(weights)
        nodes = indices + self._first_leaf
        self._nodes[nodes] = weights
        children = np.empty(len(nodes), np.complex128)
        left, right, sums = children.real, children.imag, np.empty(len(nodes))
        width = self._first_leaf
        while width > RECOMPUTED_NODES_PER_INDEX * len(nodes):
            width //= 2
            nodes >>= 1  # Parents that repeat are recomputed again: cheaper than np.unique, and the same.
            self._siblings.take(nodes, out=children, mode="clip")  # All nodes are inside; "clip" spares a buffer.
            np.add(left, right, out=sums)
            self._nodes[nodes] = sums
        self._recompute_levels(width)

    def set_range(self, start: int, weights: NDArray[np.float64]) -> None:
        """Sets the weights of `start`, `start` + 1, ..., which costs a fraction of `set`."""
        if len(weights) == 0:
            return
        if start < 0 or start + len(weights) > self.capacity:
            raise ValueError(f"{start} ... {start + len(weights) - 1} must lie in 0 ... {self.capacity - 1}")
        _check_weights(weights)
        first = self._first_leaf + start
        self._nodes[first : first + len(weights)] = weights
        self._recompute_above(first, first + len(weights))

    def find(self, targets: NDArray[np.float64]) -> NDArray[np.int64]:
        """For each target in [0, total), the index whose span of the running sum contains it.

        The answer is always an index of the tree, but its weight may be 0, by rounding or while a writer is at work.
        """
        width = min(SEARCHED_NODES, self._first_leaf)
        sums = self._nodes[width : 2 * width].copy()
        running = np.cumsum(sums)
        nodes = np.minimum(running.searchsorted(targets, side="right"), width - 1)
        remaining = targets - (running - sums)[nodes]
        nodes += width
        left_sums = np.empty(len(nodes))
        go_right = np.empty(len(nodes), np.int64)  # 0 or 1, of the type that `nodes` has: no cast to add it.
        while width < self._first_leaf:
            width *= 2
            nodes <<= 1
            self._nodes.take(nodes, out=left_sums, mode="clip")
            np.greater_equal(remaining, left_sums, out=go_right)
            left_sums *= go_right
            remaining -= left_sums
            nodes += go_right
        nodes -= self._first_leaf
        return np.minimum(nodes, self.capacity - 1, out=nodes)

    def rebuild(self) -> None:
        """Recomputes every sum from the leaves."""
        self._recompute_levels(self._first_leaf)

    def check(self) -> None:
        """Raises ValueError unless the invariants hold: good weights, none past the capacity, exact sums."""
        leaves = self._nodes[self._first_leaf :]
        _check_weights(leaves)
        if leaves[self.capacity :].any():
            raise ValueError(f"a leaf past the capacity {self.capacity} has a weight")
        children = self._siblings[1 : self._first_leaf]
        wrong = np.flatnonzero(self._nodes[1 : self._first_leaf] != children.real + children.imag)
        if wrong.size:
            raise ValueError(f"node {wrong[0] + 1} is not the sum of its children")

    def _recompute_levels(self, width: int) -> None:
        """Recomputes every node above the level of `width` nodes."""
        for left, right, sums in reversed(self._levels[: width.bit_length() - 1]):
            np.add(left, right, out=sums)

    def _recompute_above(self, first: int, stop: int) -> None:
        """Recomputes the ancestors of the nodes `first` ... `stop` - 1, which stand on one level."""
        while first > 1:
            first, stop = first // 2, (stop + 1) // 2
            left, right = self._nodes[2 * first : 2 * stop : 2], self._nodes[2 * first + 1 : 2 * stop : 2]
            np.add(left, right, out=self._nodes[first:stop])


def _check_weights(weights: NDArray[np.float64]) -> None:
    if not (weights.min() >= 0 and weights.max() < np.inf):  # A NaN is its own minimum, and fails here too.
        raise ValueError("weights must be finite and non-negative")
