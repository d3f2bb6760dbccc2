"""The parameters whose evaluation was the best of a run, in all its lives."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path

from apex.config import Config
from apex.runs.checkpoints.checkpoint import CheckpointError
from apex.runs.checkpoints.policy_file import PlayedGames, PolicyInfo, find_best, read_policy, save_best
from apex.transport.messages.results import EvaluationResult
from apex.types import Parameters, Schema

log = logging.getLogger("apex")


class BestPolicy:
    """Keeps them in the folder of the checkpoints: only a better score, or one as good and newer, replaces them."""

    def __init__(self, folder: Path, config: Config, schema: Schema) -> None:
        """What is in `folder` already is the best of the run's earlier lives."""
        self._folder = folder
        self._config = config
        self._schema = schema
        self.score: float | None = None  # of the policy that is kept
        # One that is better, and could not be written yet.
        self._waiting: tuple[float, Parameters, PlayedGames | None] | None = None
        try:
            path = find_best(folder)
            self.score = None if path is None else read_policy(path)[0].score
        except CheckpointError as error:
            log.error("%s; the next evaluation's policy takes its place", error)

    def keep(self, score: float, parameters: Parameters | None, games: PlayedGames | None = None) -> float:
        """Notes a mean score and keeps its parameters if it is the best so far; returns the best score.

        What the disk refuses is written with the next evaluation, unless that is better.
        """
        waiting, known = self._waiting, self.best
        if parameters is not None and (known is None or score >= known):
            waiting = score, parameters, games
        self._waiting = None if waiting is None or self._write(*waiting) else waiting
        return score if self.best is None else max(score, self.best)

    @property
    def best(self) -> float | None:
        """The best score of any policy that is here, on the disk or not yet."""
        return self.score if self._waiting is None else self._waiting[0]

    def _write(self, score: float, parameters: Parameters, games: PlayedGames | None) -> bool:
        info = PolicyInfo(
            schema=self._schema,
            network=self._config.network,
            environment=self._config.environment,
            num_updates=parameters.version,
            score=float(score),
            games=games,
        )
        try:
            save_best(self._folder, parameters.values, info)
        except OSError as error:
            log.error("the best policy was not kept: %s; it is tried again with the next evaluation", error)
            return False
        self.score = score
        return True


def games_of(result: EvaluationResult) -> PlayedGames:
    """Which games an evaluation has played."""
    return PlayedGames(**{field.name: getattr(result, field.name) for field in fields(PlayedGames)})
