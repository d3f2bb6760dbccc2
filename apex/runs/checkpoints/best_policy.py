"""Keeps the policy with the best evaluation score of a run, over all starts of the run."""

import logging
from dataclasses import fields
from pathlib import Path

from apex.config import Config
from apex.errors import CheckpointError
from apex.runs.checkpoints.policy_file import PlayedGames, PolicyInfo, find_best, read_policy, save_best
from apex.schema import Schema
from apex.transport.messages.results import EvaluationResult
from apex.types import Parameters

log = logging.getLogger("apex")


class BestPolicy:
    """Keeps the best policy in the folder of the checkpoints.

    A later one replaces it if its score is equal, higher, or confirmed.
    """

    def __init__(self, folder: Path, config: Config, schema: Schema) -> None:
        """A best policy that exists in `folder` is from earlier starts of the run."""
        self._folder = folder
        self._config = config
        self._schema = schema
        self.score: float | None = None  # score of the policy on disk
        # A better policy that could not be written yet.
        self._waiting: tuple[float, Parameters, PlayedGames | None] | None = None
        try:
            path = find_best(folder)
            info = None if path is None else read_policy(path)[0]
            is_trained = info and (info.num_updates or config.learner.init_from)
            self.score = info.score if info and is_trained else None  # Older versions kept untrained policies.
        except CheckpointError as error:
            log.error("%s; the policy of the next evaluation becomes the best policy", error)

    def keep(
        self, score: float, parameters: Parameters | None, games: PlayedGames | None = None, *, confirmed: bool = False
    ) -> float:
        """Keeps the parameters if their mean score is the best so far or `confirmed`; returns the best score.

        If a policy cannot be written, the next evaluation tries again, unless the policy of that evaluation is better.
        """
        waiting, known = self._waiting, self.best
        if parameters is not None and (confirmed or known is None or score >= known):
            waiting = score, parameters, games
        self._waiting = None if waiting is None or self._write(*waiting) else waiting
        return score if self.best is None else max(score, self.best)

    @property
    def best(self) -> float | None:
        """The score of the best policy so far: the one that could not be written yet, or else the one on disk.

        None: no policy.
        """
        return self.score if self._waiting is None else self._waiting[0]

    def _write(self, score: float, parameters: Parameters, games: PlayedGames | None) -> bool:
        info = PolicyInfo(
            schema=self._schema, config=self._config, num_updates=parameters.version, score=float(score), games=games
        )
        try:
            save_best(self._folder, parameters.values, info)
        except OSError as error:
            log.error("cannot write the best policy: %s; trying again after the next evaluation", error)
            return False
        self.score = score
        return True


def games_of(result: EvaluationResult) -> PlayedGames:
    """Returns the record of the games that an evaluation has played."""
    return PlayedGames(**{field.name: getattr(result, field.name) for field in fields(PlayedGames)})
