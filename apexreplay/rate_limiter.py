"""Limits the replay ratio: the number of transitions drawn per inserted transition."""

import dataclasses
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """Keeps the number of samples near a line with the slope `samples_per_insert`. Counts transitions, not batches.

    x: transitions inserted, y: transitions sampled. The line starts at (base_inserted, base_sampled), initially at
    (min_size_to_sample, 0):

        excess = y - base_sampled - samples_per_insert * (x - base_inserted)
        slack = tolerance_fraction * samples_per_insert * min_size_to_sample

    Samples wait while excess > slack. If `inserts_wait`, inserts wait while excess < -slack. Samples and inserts never
    wait at the same time. Until min_size_to_sample transitions are inserted, samples wait and inserts do not. If
    samples_per_insert is 0, there is no other limit.
    """

    min_size_to_sample: int
    samples_per_insert: float
    tolerance_fraction: float
    inserts_wait: bool
    base_inserted: int | None = None  # None: min_size_to_sample
    base_sampled: int = 0

    def may_sample(self, num_inserted: int, num_sampled: int) -> bool:
        """Returns whether the next batch may be drawn."""
        if num_inserted < self.min_size_to_sample:
            return False
        return self.samples_per_insert == 0 or self._excess(num_inserted, num_sampled) <= self._slack

    def may_insert(self, num_inserted: int, num_sampled: int) -> bool:
        """Returns whether the next segment may be stored."""
        if not self.inserts_wait or self.samples_per_insert == 0 or num_inserted < self.min_size_to_sample:
            return True
        return self._excess(num_inserted, num_sampled) >= -self._slack

    def rebased(self, num_inserted: int, num_sampled: int) -> Self:
        """Returns a limiter like this one whose line starts at these counts, so that earlier excess has no effect."""
        base_inserted = max(num_inserted, self.min_size_to_sample)
        return dataclasses.replace(self, base_inserted=base_inserted, base_sampled=num_sampled)

    @property
    def _slack(self) -> float:
        return self.tolerance_fraction * self.samples_per_insert * self.min_size_to_sample

    def _excess(self, num_inserted: int, num_sampled: int) -> float:
        base = self.min_size_to_sample if self.base_inserted is None else self.base_inserted
        return num_sampled - self.base_sampled - self.samples_per_insert * (num_inserted - base)
