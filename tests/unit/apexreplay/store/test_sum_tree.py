"""The sum-tree agrees with a plain list: sums are exact after any operation, and draws are proportional to weights."""

import itertools
import math

import numpy as np
import pytest
from support.builders import chi_square_bound

from apexreplay.store.sum_tree import SumTree

CAPACITIES = [1, 2, 3, 8, 37, 1000, 5000]


class NaiveSumTree:
    """A list of weights, with sums by the definition."""

    def __init__(self, capacity):
        self.weights = [0.0] * capacity

    def set(self, indices, weights):
        for index, weight in zip(indices, weights, strict=True):
            self.weights[index] = weight

    def find(self, target):
        running = itertools.accumulate(self.weights)
        return next(index for index, end in enumerate(running) if target < end)


def make_tree(weights, capacity=None):
    tree = SumTree(np.zeros(SumTree.num_nodes(capacity or len(weights))), capacity or len(weights))
    tree.set_range(0, np.array(weights, np.float64))
    return tree


def weights_of(tree):
    return tree.weights(np.arange(tree.capacity)).tolist()


def set_around(tree, key, weights):
    """Sets the weights of consecutive keys, each at key % capacity."""
    slot = key % tree.capacity
    room = tree.capacity - slot
    tree.set_range(slot, weights[:room])
    tree.set_range(0, weights[room:])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_random_operations_agree_with_a_list(capacity, seed):
    rng = np.random.default_rng(seed)
    tree, naive = make_tree([0.0] * capacity), NaiveSumTree(capacity)
    for _ in range(30):
        count = int(rng.integers(1, capacity + 1))
        weights = rng.integers(0, 10, count).astype(np.float64)
        if rng.random() < 0.5:
            indices = rng.integers(0, capacity, count)
            tree.set(indices, weights)
            naive.set(indices.tolist(), weights.tolist())
        else:
            start = int(rng.integers(0, capacity - count + 1))
            tree.set_range(start, weights)
            naive.set(range(start, start + count), weights.tolist())
        tree.check()
        assert tree.total == sum(naive.weights)
    assert weights_of(tree) == naive.weights
    if tree.total:
        targets = rng.integers(0, int(tree.total), 50) + 0.5
        assert tree.find(targets).tolist() == [naive.find(target) for target in targets]


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_every_unit_of_the_sum_leads_to_its_own_index(capacity):
    weights = np.arange(capacity) % 3
    targets = np.arange(weights.sum(), dtype=np.float64)  # The lower end of each range, the most difficult target.
    assert make_tree(weights).find(targets).tolist() == np.repeat(np.arange(capacity), weights).tolist()


def test_draws_are_in_proportion_to_the_weights():
    rng = np.random.default_rng(7)
    weights = rng.uniform(0.1, 3, 700)
    tree = make_tree(weights)
    draws = 200_000
    observed = np.bincount(tree.find(rng.random(draws) * tree.total), minlength=700)
    expected = draws * weights / weights.sum()
    assert ((observed - expected) ** 2 / expected).sum() < chi_square_bound(699)


def test_last_weight_of_a_repeated_index_counts():
    tree = make_tree([0.0] * 4)
    tree.set(np.array([2, 1, 2, 2]), np.array([1.0, 10.0, 100.0, 1000.0]))
    assert weights_of(tree) == [0, 10, 1000, 0]
    assert tree.total == 1010


def test_one_element_is_always_found():
    tree = make_tree([3.0])
    assert tree.find(np.array([0.0, 1.5, np.nextafter(3.0, 0)])).tolist() == [0, 0, 0]


def test_set_without_indices_changes_nothing():
    tree = make_tree([1.0, 2.0])
    tree.set(np.zeros(0, np.int64), np.zeros(0))
    tree.set_range(2, np.zeros(0))
    assert weights_of(tree) == [1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_find_returns_a_valid_index_for_a_half_written_tree(seed):
    rng = np.random.default_rng(seed)
    nodes = np.zeros(SumTree.num_nodes(3000))
    tree = SumTree(nodes, 3000)
    nodes[:] = rng.choice([0.0, 1.0, 1e6], len(nodes))  # Inconsistent sums, as during an update.
    indices = tree.find(rng.random(1000) * 1e9)  # Targets below, within and far above these sums.
    assert indices.min() >= 0
    assert indices.max() < 3000


def test_tree_of_a_killed_writer_is_rebuilt_from_its_leaves():
    nodes = np.zeros(SumTree.num_nodes(5))
    SumTree(nodes, 5).set_range(0, np.array([1.0, 2, 4, 8, 16]))
    nodes[1 : len(nodes) // 2] = 99
    tree = SumTree(nodes, 5)
    with pytest.raises(ValueError, match=r"node 1\b"):
        tree.check()
    tree.rebuild()
    tree.check()
    assert tree.total == 31


def test_a_weight_past_the_capacity_is_noticed():
    nodes = np.zeros(SumTree.num_nodes(3))
    nodes[-1] = 1
    with pytest.raises(ValueError, match="past the capacity 3"):
        SumTree(nodes, 3).check()


@pytest.mark.no_cover
def test_tree_after_ten_million_writes_equals_a_rebuilt_tree():
    """Updates at random, cyclic inserts and evictions; weights of 30 decades."""
    capacity, batch = 30_011, 512  # No power of two, no multiple of the batch.
    rng = np.random.default_rng(0)
    nodes, leaves = np.zeros(SumTree.num_nodes(capacity)), np.zeros(capacity)
    tree = SumTree(nodes, capacity)
    writes = key = 0
    while writes < 10**7:
        weights = rng.random(batch) * 10.0 ** rng.integers(-15, 16, batch)
        indices = rng.integers(0, capacity, batch)
        tree.set(indices, weights)
        leaves[indices] = weights
        writes += batch
        if rng.random() < 0.2:
            set_around(tree, key, np.zeros(batch))
            set_around(tree, key, weights)
            leaves[np.arange(key, key + batch) % capacity] = weights
            writes += 2 * batch
            key += batch
    assert key > 10 * capacity
    rebuilt = np.zeros(len(nodes))
    rebuilt[len(nodes) // 2 :][:capacity] = leaves
    SumTree(rebuilt, capacity).rebuild()
    np.testing.assert_array_equal(nodes, rebuilt)
    # Each of the 15 additions between a leaf and the root rounds by half a unit at most.
    assert tree.total == pytest.approx(math.fsum(leaves), rel=15 * 2**-53, abs=0)
    tree.set_range(0, np.ones(capacity))
    assert tree.total == capacity


def test_find_in_a_tree_without_weights_finds_weight_0():
    tree = make_tree([0.0] * 37)
    tree.set(np.array([5, 36]), np.array([3.0, 1e300]))
    tree.set(np.array([5, 36]), np.zeros(2))
    assert tree.total == 0
    assert tree.weights(tree.find(np.zeros(8))).tolist() == [0.0] * 8


def test_smallest_and_largest_weights_are_summed_and_found():
    smallest, largest = np.nextafter(0, 1), 1e300
    tree = make_tree([smallest] * 600)
    assert tree.total == 600 * smallest
    assert tree.find(np.arange(600) * smallest).tolist() == list(range(600))
    tree.set(np.array([0, 599]), np.array([largest, largest]))
    tree.check()
    assert tree.total == 2 * largest
    assert tree.find(np.array([0.5, 1.5]) * largest).tolist() == [0, 599]
    tree.set(np.array([0, 599]), np.array([smallest, smallest]))  # The large weights leave no rounding error.
    assert tree.total == 600 * smallest


@pytest.mark.parametrize("weight", [np.nan, np.inf, -1.0])
def test_invalid_weight_is_refused(weight):
    tree = make_tree([1.0, 2.0])
    with pytest.raises(ValueError, match="finite and non-negative"):
        tree.set(np.array([0, 1]), np.array([5.0, weight]))
    with pytest.raises(ValueError, match="finite and non-negative"):
        tree.set_range(0, np.array([weight, 5.0]))
    assert weights_of(tree) == [1, 2]


@pytest.mark.parametrize("index", [-1, 3])
def test_refuses_an_index_outside(index):
    tree = make_tree([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"0 to 2"):
        tree.set(np.array([0, index]), np.ones(2))
    with pytest.raises(ValueError, match=r"0 \.\.\. 2"):
        tree.set_range(index, np.ones(1))
    assert weights_of(tree) == [1, 2, 3]
