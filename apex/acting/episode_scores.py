"""Scores of the games that actors play while they explore."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apex.metric_tags import EPISODES, FAULTS, LENGTH, MEAN_SCORE, SCORE, score_tag
from apex.types import Step, Stream


class EpisodeScores:
    """Raw full-game scores, per actor: below the reward clip and the handling of lives."""

    def __init__(self, streams: Sequence[Stream], epsilons: NDArray[np.float64], num_actors: int) -> None:
        self._streams = streams
        self._epsilons = epsilons
        self._num_actors = num_actors
        self._score = np.zeros(len(streams))
        self._length = np.zeros(len(streams), np.int64)
        self._finished: dict[int, list[tuple[float, int]]] = {}
        self._num_faults = 0

    def add(self, step: Step) -> None:
        """Counts one step; notes the games that it ended."""
        self._score += step.reward
        self._length += 1
        ended = step.terminated | step.truncated
        for stream in np.flatnonzero(ended).tolist():
            game = float(self._score[stream]), int(self._length[stream])
            self._finished.setdefault(stream, []).append(game)
        if step.failed is not None:
            ended = ended | step.failed  # A game that was cut off by a fault has no score.
            self._num_faults += int(step.failed.sum())
        self._score[ended] = 0
        self._length[ended] = 0

    def take(self) -> dict[str, float]:
        """The means since the last call, by TensorBoard tag; empty if no game has ended."""
        scalars: dict[str, float] = {}
        for stream, games in sorted(self._finished.items()):
            score, length = np.mean(games, axis=0).tolist()
            actor_id = self._streams[stream].actor_id
            scalars[score_tag(actor_id, self._epsilons[stream])] = score
            if actor_id == self._num_actors - 1:
                scalars |= {SCORE: score, LENGTH: length}
        if scalars:
            every = [score for games in self._finished.values() for score, _ in games]
            scalars |= {MEAN_SCORE: float(np.mean(every)), EPISODES: len(every)}
            if self._num_faults:
                scalars[FAULTS] = self._num_faults
        self._finished = {}
        return scalars
