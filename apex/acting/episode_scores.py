"""Collects the scores of the games that actors play."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apex.metric_tags import EPISODES, FAULTS, LENGTH, MEAN_SCORE, SCORE, score_tag
from apex.types import Exploration, Step, Stream


class EpisodeScores:
    """Scores of full games per actor: sums of unclipped rewards. A lost life does not end a game."""

    def __init__(self, streams: Sequence[Stream], exploration: Exploration, num_actors: int) -> None:
        self._streams = streams
        self._exploration = exploration  # amount of exploration of each stream
        self._num_actors = num_actors
        self._score = np.zeros(len(streams))
        self._length = np.zeros(len(streams), np.int64)
        self._finished: dict[int, list[tuple[float, int]]] = {}
        self._num_faults = 0

    def add(self, step: Step) -> None:
        """Adds one step of all streams; keeps the scores of games that ended."""
        self._score += step.reward
        self._length += 1
        ended = step.terminated | step.truncated
        for stream in np.flatnonzero(ended).tolist():
            game = float(self._score[stream]), int(self._length[stream])
            self._finished.setdefault(stream, []).append(game)
        if step.failed is not None:
            ended = ended | step.failed  # A game that was ended by a fault has no score.
            self._num_faults += int(step.failed.sum())
        self._score[ended] = 0
        self._length[ended] = 0

    def take(self) -> dict[str, float]:
        """Returns {TensorBoard tag: mean over the games since the last call}; empty if no game has ended."""
        scalars: dict[str, float] = {}
        for stream, games in sorted(self._finished.items()):
            score, length = np.mean(games, axis=0).tolist()
            actor_id = self._streams[stream].actor_id
            scalars[score_tag(actor_id, self._exploration.amounts[stream], self._exploration.name)] = score
            if actor_id == self._num_actors - 1:
                scalars |= {SCORE: score, LENGTH: length}
        if scalars:
            every = [score for games in self._finished.values() for score, _ in games]
            scalars |= {MEAN_SCORE: float(np.mean(every)), EPISODES: len(every)}
            if self._num_faults:
                scalars[FAULTS] = self._num_faults
        self._finished = {}
        return scalars
