"""The parameters whose evaluation was the best of a run, in all its lives."""

from __future__ import annotations

import logging
from pathlib import Path

from apex.checkpoint import CheckpointError
from apex.config import Config
from apex.policies import PolicyInfo, find_best, load_policy, save_best
from apex.types import Parameters, Schema

log = logging.getLogger("apex")


class BestPolicy:
    """Keeps them in the folder of the checkpoints: only a better score, or one as good and newer, replaces them."""

    def __init__(self, folder: Path, config: Config, schema: Schema) -> None:
        """What is in `folder` already is the best of the run's earlier lives."""
        self._folder = folder
        self._config = config
        self._schema = schema
        self.score: float | None = None
        try:
            path = find_best(folder)
            self.score = None if path is None else load_policy(path)[0].score
        except CheckpointError as error:
            log.error("%s; the next evaluation's policy takes its place", error)

    def keep(self, score: float, parameters: Parameters | None) -> float:
        """Notes a mean score and keeps its parameters if it is the best so far; returns the best score."""
        if self.score is not None and score < self.score:
            return self.score
        self.score = score
        if parameters is not None:
            info = PolicyInfo(
                schema=self._schema,
                network=self._config.network,
                environment=self._config.environment,
                num_updates=parameters.version,
                score=float(score),
            )
            try:
                save_best(self._folder, parameters.values, info)
            except OSError as error:
                log.error("the best policy was not kept: %s", error)
        return score
