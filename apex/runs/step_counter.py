"""How many steps a run has made, whatever becomes of its replay stores."""

from __future__ import annotations

import logging

from apex.config import ReplayConfig

log = logging.getLogger("apex")


class StepCounter:
    """Adds up what the stores of all shards have ever stored: a store that is made anew counts from 0 again."""

    def __init__(self, config: ReplayConfig) -> None:
        self.num_steps = 0  # transitions stored in this run
        self._config = config
        self._stores: dict[int, tuple[str, int]] = {}  # by shard: the store's incarnation, what it has counted
        self._steps_before = 0  # steps that the present stores do not count

    def count(self, shard: int, num_inserted: int, store_incarnation: str) -> None:
        """Steps go on where they were when a store is made anew, or begins with less than was stored before."""
        known, _ = self._stores.get(shard, ("", 0))
        self._stores[shard] = store_incarnation, num_inserted
        counted = sum(count for _, count in self._stores.values())
        if store_incarnation != known:
            if num_inserted == 0 < self.num_steps:
                name = self._config.shard_name(shard)
                log.warning("%s begins with an empty memory, although the run has %d steps", name, self.num_steps)
            self._steps_before = max(0, self.num_steps - counted)
        self.num_steps = max(self.num_steps, self._steps_before + counted)
