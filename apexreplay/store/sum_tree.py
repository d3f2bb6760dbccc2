"""A sum-tree in an array, which may be shared memory: draws an index in proportion to its weight."""

import numpy as np
from numpy.typing import NDArray

SEARCHED_NODES = 512  # nodes of the level at which `find` starts: one binary search replaces nine steps down the tree
# `set` recomputes all sums above the lowest level with at most this many nodes per index. This is faster than
# recomputing single ancestors.
RECOMPUTED_NODES_PER_INDEX = 8


class SumTree:
    """A perfect binary tree in one array: the root is node 1, the children of i are 2i and 2i+1.

    Parents are always recomputed from their children, never adjusted by a difference, so that sums do not drift.
    One writer may call `set` while readers in other processes call `find`.
    """

    def __init__(self, nodes: NDArray[np.float64], capacity: int) -> None:
        """`nodes`, float64[num_nodes(capacity)], must be all 0 (an empty tree) or contain an existing tree."""
        self.capacity = capacity
        self._nodes = nodes
        self._siblings = nodes.view(np.complex128)  # Item i contains both children of node i, read at once.
        self._first_leaf = len(nodes) // 2
        # Views of (left children, right children, their sums), a tuple for each level: item k has 2**k sums.
        self._levels = [
            (nodes[2 * width : 4 * width : 2], nodes[2 * width + 1 : 4 * width : 2], nodes[width : 2 * width])
            for width in (1 << depth for depth in range(self._first_leaf.bit_length() - 1))
        ]

    @staticmethod
    def num_nodes(capacity: int) -> int:
        """Returns the length of the array: twice `capacity` rounded up to a power of two. Node 0 is unused."""
        return 2 << (capacity - 1).bit_length()

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._nodes[1])

    def weights(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns a copy of the weights at `indices`."""
        return self._nodes.take(indices + self._first_leaf)

    def set(self, indices: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Sets the weights at `indices`; if an index repeats, its last weight counts."""
        if len(indices) == 0:
            return
        if indices.view(np.uint64).max() >= self.capacity:  # A negative index becomes a huge uint64.
            raise ValueError(f"indices must be from 0 to {self.capacity - 1}")
        _check_weights(weights)
        nodes = indices + self._first_leaf
        self._nodes[nodes] = weights
        children = np.empty(len(nodes), np.complex128)
        left, right, sums = children.real, children.imag, np.empty(len(nodes))
        width = self._first_leaf
        while width > RECOMPUTED_NODES_PER_INDEX * len(nodes):
            width //= 2
            nodes >>= 1  # Repeated parents are recomputed: faster than np.unique, with the same result.
            self._siblings.take(nodes, out=children, mode="clip")  # mode="clip" avoids a buffer; all nodes are valid.
            np.add(left, right, out=sums)
            self._nodes[nodes] = sums
        self._recompute_levels(width)

    def set_range(self, start: int, weights: NDArray[np.float64]) -> None:
        """Sets the weights at `start`, `start` + 1, ...; several times faster than `set`."""
        if len(weights) == 0:
            return
        if start < 0 or start + len(weights) > self.capacity:
            raise ValueError(f"{start} ... {start + len(weights) - 1} must lie in 0 ... {self.capacity - 1}")
        _check_weights(weights)
        first = self._first_leaf + start
        self._nodes[first : first + len(weights)] = weights
        self._recompute_above(first, first + len(weights))

    def find(self, targets: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns for each target in [0, total) the index whose interval of the cumulative sum contains the target.

        The result is always a valid index, but its weight may be 0, because of rounding or a concurrent writer.
        """
        width = min(SEARCHED_NODES, self._first_leaf)
        sums = self._nodes[width : 2 * width].copy()
        running = np.cumsum(sums)
        nodes = np.minimum(running.searchsorted(targets, side="right"), width - 1)
        remaining = targets - (running - sums)[nodes]
        nodes += width
        left_sums = np.empty(len(nodes))
        go_right = np.empty(len(nodes), np.int64)  # 0 or 1; same type as `nodes`, so adding needs no cast
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

    def check(self, *, sums: bool = True) -> None:
        """Raises ValueError unless the invariants hold: valid weights, none past the capacity, exact `sums`."""
        leaves = self._nodes[self._first_leaf :]
        _check_weights(leaves)
        if leaves[self.capacity :].any():
            raise ValueError(f"a leaf past the capacity {self.capacity} has a weight")
        children = self._siblings[1 : self._first_leaf]
        wrong = np.flatnonzero(self._nodes[1 : self._first_leaf] != children.real + children.imag)
        if sums and wrong.size:
            raise ValueError(f"node {wrong[0] + 1} is not the sum of its children")

    def _recompute_levels(self, width: int) -> None:
        """Recomputes every node above the level of `width` nodes."""
        for left, right, sums in reversed(self._levels[: width.bit_length() - 1]):
            np.add(left, right, out=sums)

    def _recompute_above(self, first: int, stop: int) -> None:
        """Recomputes the ancestors of the nodes `first` ... `stop` - 1, which are on one level."""
        while first > 1:
            first, stop = first // 2, (stop + 1) // 2
            left, right = self._nodes[2 * first : 2 * stop : 2], self._nodes[2 * first + 1 : 2 * stop : 2]
            np.add(left, right, out=self._nodes[first:stop])


def _check_weights(weights: NDArray[np.float64]) -> None:
    if not (weights.min() >= 0 and weights.max() < np.inf):  # False for NaN, because the minimum is NaN.
        raise ValueError("weights must be finite and non-negative")
