"""The parameters whose evaluation was the best of a run, in all its lives."""

from __future__ import annotations

import logging
from pathlib import Path

from apex.checkpoint import CheckpointError, PolicyInfo, load_policy, save_policy
from apex.config import Config
from apex.types import Parameters, Schema

log = logging.getLogger("apex")


class BestPolicy:
    """The file that keeps them: only a better score, or one as good and newer, replaces it."""

    def __init__(self, path: Path, config: Config, schema: Schema) -> None:
        """What is at `path` already is the best of the run's earlier lives."""
        self._path = path
        self._config = config
        self._schema = schema
        self.score: float | None = None
        try:
            self.score = load_policy(path)[0].score if path.exists() else None
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
                save_policy(self._path, parameters.values, info)
            except OSError as error:
                log.error("the best policy was not kept: %s", error)
        return score
