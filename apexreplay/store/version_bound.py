"""The oldest version that may be drawn: `max_version_lag` below the newest version that was stored."""

import numpy as np
from numpy.typing import NDArray

from apexreplay.store.layout import OLDEST_VERSION, Regions

_EXAMINED = 4_096  # items whose versions are compared at once


class VersionBound:
    """Finds items whose version is too old, and sets their weights to 0. Only the writer of the store uses it."""

    def __init__(self, regions: Regions, max_version_lag: int) -> None:
        """`max_version_lag`: -1: every version may be drawn."""
        self._regions = regions
        self._max_version_lag = max_version_lag

    def after(self, version: int) -> int:
        """Returns the oldest version that may be drawn once `version` is stored."""
        if self._max_version_lag < 0:
            return 0
        return max(int(self._regions.cells[OLDEST_VERSION]), version - self._max_version_lag)

    def first_key(self, keys: range, oldest: int) -> int:
        """Returns the first of the live keys whose version is at least `oldest`; a segment has one version."""
        versions, key = self._regions.records["version"], keys.start
        while oldest and key < keys.stop:
            slots = np.arange(key, min(key + _EXAMINED, keys.stop)) % self._regions.sizes.capacity
            fresh = np.flatnonzero(versions[slots] >= oldest)
            if len(fresh):
                return key + int(fresh[0])
            key += len(slots)
        return key

    def raise_to(self, oldest: int) -> None:
        """Makes `oldest` the oldest version, and sets the weights of live items that are older to 0."""
        regions = self._regions
        if oldest > regions.cells[OLDEST_VERSION]:
            regions.cells[OLDEST_VERSION] = oldest
            live = regions.live_slots()
            stale = live[regions.records["version"][live] < oldest]
            regions.tree.set(stale, np.zeros(len(stale)))

    def restart(self) -> None:
        """Sets the oldest version for the stored items: the last writer may have had another lag."""
        versions = self._regions.records["version"][self._regions.live_slots()]
        self._regions.cells[OLDEST_VERSION] = self.after(int(versions.max(initial=0)))

    def allows(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which of the live keys, int64[M], may be drawn."""
        oldest = self._regions.cells[OLDEST_VERSION]
        if not oldest:
            return np.ones(len(keys), np.bool_)
        allowed: NDArray[np.bool_] = self._regions.records["version"][keys % self._regions.sizes.capacity] >= oldest
        return allowed
