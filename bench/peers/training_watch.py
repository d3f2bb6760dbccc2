"""Decides when a training is evaluated, which policy is kept, and when the training ends."""

import csv
import sys
from collections.abc import Callable
from typing import TextIO

from zoo_settings import Evaluations

HEADER = ("seconds", "steps", "score")  # columns of the curve
REST = 9  # minimum ratio of training time to evaluation time


class Watch:
    """Runs after each step of a training: evaluates it sometimes, keeps the best policy, and ends it in time."""

    def __init__(
        self,
        evaluations: Evaluations,
        *,
        stop_score: float | None,
        limit_seconds: float,
        play: Callable[[int], float],
        keep: Callable[[], None],
        curve: TextIO,
        clock: Callable[[], float],
    ) -> None:
        """`play(episodes)` returns the mean raw score of games with an unused seed; `keep` saves the policy."""
        self._evaluations = evaluations
        self._stop_score = stop_score
        self._limit_seconds = limit_seconds
        self._play = play
        self._keep = keep
        self._curve, self._rows = curve, csv.writer(curve, lineterminator="\n")
        self._rows.writerow(HEADER)
        self._clock = clock
        self._next = clock() + evaluations.period_seconds
        self.best: float | None = None
        self.reached = False  # whether enough games have confirmed the stop score
        self.num_evaluations = 0
        self.evaluation_seconds = 0.0

    def goes_on(self, steps: int) -> bool:
        """Returns whether the training should continue after this number of steps."""
        now = self._clock()
        if now >= self._limit_seconds:
            return False
        if now >= self._next:
            self.evaluate(steps)
        return not self.reached

    def evaluate(self, steps: int) -> None:
        """Plays, and plays again to confirm the stop score; records the score of the games that count."""
        began = self._clock()
        score = self._play(self._evaluations.episodes)
        rest = REST * (self._clock() - began)
        if self._stop_score is not None and score >= self._stop_score:
            # Only these games count: the first ones were selected for their high score.
            score = self._play(self._evaluations.confirm_episodes)
            self.reached = score >= self._stop_score
        if self.best is None or score >= self.best:
            self.best = score
            self._keep()
        now = self._clock()
        self.num_evaluations += 1
        self.evaluation_seconds += now - began
        self._next = now + max(self._evaluations.period_seconds, rest)
        self._rows.writerow((round(now, 2), steps, score))
        self._curve.flush()
        print(f"{now:8.1f} s  {steps:>10,} steps  score {score:.1f}", file=sys.stderr, flush=True)
