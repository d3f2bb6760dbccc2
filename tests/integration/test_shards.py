"""Batches from R shards have the importance weights of a single replay memory.

The sizes of the shards differ by a factor of 200 and their priorities by a factor of 10^6, so a weight that ignores the
shard's share, or uses another shard's total, is far off.
"""

import numpy as np
import pytest
from support.builders import VECTORS, make_records, make_segment

from apex.algorithms.losses import importance_weights
from apex.learning.batch_ring import BatchRing
from apex.learning.batch_source import LocalSource
from apex.learning.loader import Loader
from apex.learning.random_shift import RandomShift
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.batch_drawer import BatchDrawer, DrawSettings
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.store.layout import StoreSettings
from apexreplay.store.reader import StoreReader
from apexreplay.store.writer import StoreWriter

PART = 64  # transitions of a batch from each shard
SIZES, SCALES = (3, 700, 90), (1e3, 1e-3, 1.0)
EXPONENT = 0.6


class Shards:
    """R stores and a loader that draws from all of them."""

    def __init__(self, folder, num_shards):
        generator = np.random.default_rng(num_shards)
        sizes = zip(SIZES[:num_shards], SCALES[:num_shards], strict=True)
        self.priorities = [scale * generator.uniform(1, 10, n) for n, scale in sizes]
        self.ring = BatchRing(VECTORS, PART * num_shards, num_shards=num_shards)
        self.loader = Loader(VECTORS, self.ring, RandomShift(0, np.random.default_rng(0)))
        self.sources = []
        for shard, priorities in enumerate(self.priorities):
            path = folder / f"store-{shard}"
            limits = {"capacity": 1_000, "max_bytes": 100_000, "num_streams": num_shards, "min_priority": 1e-6}
            settings = StoreSettings(**limits, priority_exponent=EXPONENT)
            store = StoreWriter.create(path, VECTORS.table, settings, store_incarnation=shard + 1)
            records = make_records(VECTORS, len(priorities), priority=priorities)
            store.insert(make_segment(VECTORS, len(priorities), actor_id=shard, number=0, base=0, records=records))
            settings = DrawSettings(shard, num_shards, PART, 10**9, RateLimiter(1, 0.0, 0.1, False))
            rng = np.random.default_rng([7, shard])
            drawer = BatchDrawer(StoreReader(path, VECTORS.table), SamplerCounters(1), 0, settings, rng)
            self.sources.append(LocalSource(drawer))

    @property
    def weights(self):
        """The weights of the leaves, by the definition."""
        return [np.float64(p.astype(np.float32)) ** EXPONENT for p in self.priorities]

    @property
    def naive_probability(self):
        """P(i) by shard and key: 1/R * leaf / root of its own shard."""
        return [weights / weights.sum() / len(self.weights) for weights in self.weights]

    def draw(self):
        """Returns a batch and the shard of each row."""
        assert self.loader.ready(0.0)
        assert self.loader.fill(self.sources)
        batch = self.ring.receive(1.0)
        self.ring.release(batch.slot)
        return batch, np.repeat([part.shard for part in batch.parts], PART)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_probabilities_and_weights_are_those_of_the_whole_memory(tmp_path, num_shards):
    shards = Shards(tmp_path, num_shards)
    naive = shards.naive_probability
    assert sum(map(np.sum, naive)) == pytest.approx(1)
    for _ in range(20):
        batch, shard = shards.draw()
        expected = [naive[s][key] for s, key in zip(shard, batch.keys, strict=True)]
        np.testing.assert_allclose(batch.probability, expected, rtol=1e-12)
        assert batch.num_transitions == sum(SIZES[:num_shards])
        weights = np.array([(sum(SIZES[:num_shards]) * p) ** -0.4 for p in expected])
        ours = importance_weights(batch.probability, batch.num_transitions, 0.4)
        np.testing.assert_allclose(ours, weights / weights.max(), rtol=1e-6)  # maximum over the whole batch


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_transitions_are_drawn_in_proportion_to_their_probability(tmp_path, num_shards):
    """Counts of stratified draws vary less than those of independent draws, whose variance is at most n P."""
    shards = Shards(tmp_path, num_shards)
    counts = [np.zeros(len(p)) for p in shards.priorities]
    batches = 400
    for _ in range(batches):
        batch, shard = shards.draw()
        for s in range(num_shards):
            np.add.at(counts[s], batch.keys[shard == s], 1)
    for count, probability in zip(counts, shards.naive_probability, strict=True):
        expected = batches * PART * num_shards * probability
        assert (np.abs(count - expected) <= 5 * np.sqrt(expected) + 1).all()


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_weighted_means_equal_the_mean_over_the_whole_memory(tmp_path, num_shards):
    """With exponent 1, E[f / (N P)] is the mean of f. The tolerance is 5 standard errors."""
    shards = Shards(tmp_path, num_shards)
    rng = np.random.default_rng(5)
    f = [10.0**s * rng.uniform(1, 3, n) for s, n in enumerate(SIZES[:num_shards])]
    means = []
    for _ in range(300):
        batch, shard = shards.draw()
        values = np.array([f[s][key] for s, key in zip(shard, batch.keys, strict=True)])
        means.append((values / (batch.num_transitions * batch.probability)).mean())
    expected = np.concatenate(f).mean()
    tolerance = 5 * np.std(means) / np.sqrt(len(means))
    assert tolerance < 0.05 * expected  # small enough to notice a wrong share
    assert abs(np.mean(means) - expected) <= tolerance
