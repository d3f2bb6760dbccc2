"""One replay memory in R shards: a batch has a part from each, and importance weights are those of the whole, exactly.

The shards differ by hundreds in size and by millions in total priority: a weight that forgot the shard's share, or took
another shard's total, would be far off.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.builders import VECTORS, make_records, make_segment

from apex.algorithms.losses import importance_weights
from apex.learning.batch_ring import BatchRing
from apex.learning.batch_source import LocalSource
from apex.learning.loader import Loader
from apex.learning.random_shift import RandomShift
from apex.replay_memory.batch_drawer import BatchDrawer, DrawSettings
from apex.replay_memory.rate_limiter import RateLimiter
from apex.replay_memory.sampler_counters import SamplerCounters
from apex.replay_memory.store.layout import StoreSettings
from apex.replay_memory.store.reader import StoreReader
from apex.replay_memory.store.writer import StoreWriter

PART = 64  # transitions of a batch from each shard
SIZES, SCALES = (3, 700, 90), (1e3, 1e-3, 1.0)
EXPONENT = 0.6


class Shards:
    """R stores, what each has by the definition, and one loader that draws from them all."""

    def __init__(self, folder, num_shards):
        generator = np.random.default_rng(num_shards)
        self.priorities = [scale * generator.uniform(1, 10, n) for n, scale in zip(SIZES, SCALES, strict=True)][
            :num_shards
        ]
        self.ring = BatchRing(VECTORS, PART * num_shards, num_shards=num_shards)
        self.loader = Loader(VECTORS, self.ring, RandomShift(0, np.random.default_rng(0)))
        self.sources = []
        for shard, priorities in enumerate(self.priorities):
            path = folder / f"store-{shard}"
            store = StoreWriter.create(
                path,
                VECTORS,
                StoreSettings(
                    capacity=1_000,
                    max_bytes=100_000,
                    num_streams=num_shards,
                    priority_exponent=EXPONENT,
                    min_priority=1e-6,
                ),
                store_incarnation=shard + 1,
            )
            records = make_records(VECTORS, len(priorities), priority=priorities)
            store.insert(make_segment(VECTORS, len(priorities), actor_id=shard, number=0, base=0, records=records))
            settings = DrawSettings(shard, num_shards, PART, 10**9, RateLimiter(1, 0.0, 0.1, False))
            rng = np.random.default_rng([7, shard])
            drawer = BatchDrawer(StoreReader(path, VECTORS), SamplerCounters(1), 0, settings, rng)
            self.sources.append(LocalSource(drawer))

    @property
    def weights(self):
        """What the leaves hold, by the definition."""
        return [np.float64(p.astype(np.float32)) ** EXPONENT for p in self.priorities]

    @property
    def naive_probability(self):
        """P(i) by shard and key: 1/R * leaf / root of its own shard."""
        return [weights / weights.sum() / len(self.weights) for weights in self.weights]

    def draw(self):
        """A batch, and the shard of each of its rows."""
        assert self.loader.ready(0.0)
        assert self.loader.fill(self.sources)
        batch = self.ring.receive(1.0)
        self.ring.release(batch.slot)
        return batch, np.repeat([part.shard for part in batch.parts], PART)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_probability_and_number_of_transitions_are_those_of_the_whole_memory(tmp_path, num_shards):
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
        np.testing.assert_allclose(ours, weights / weights.max(), rtol=1e-6)  # Over the whole batch, not its parts.


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_transitions_are_drawn_as_often_as_their_probability_says(tmp_path, num_shards):
    """Stratified draws vary less than independent ones, whose counts have a variance of n P at most."""
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
def test_the_weighted_mean_of_anything_is_its_mean_over_the_whole_memory(tmp_path, num_shards):
    """With the full correction, exponent 1: E[f / (N P)] = mean of f. The tolerance is 5 standard errors."""
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
    assert tolerance < 0.05 * expected  # Else it would not see a share that is wrong.
    assert abs(np.mean(means) - expected) <= tolerance
