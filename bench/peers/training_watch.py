"""When a training is evaluated, what is kept of it, and when it ends: by its score, or by the clock."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from typing import TextIO

from zoo_settings import Evaluations

HEADER = ("seconds", "steps", "score")  # of the curve
REST = 9  # times as long as an evaluation took, the training goes on undisturbed


class Watch:
    """Looks at a training after each of its steps: evaluates now and then, keeps the best, and ends it in time."""

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
        """`play(episodes)` returns the mean raw score of games by a seed never drawn before; `keep` the policy."""
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
        self.reached = False  # the stop score, in as many games as it takes
        self.num_evaluations = 0
        self.evaluation_seconds = 0.0

    def goes_on(self, steps: int) -> bool:
        """Whether the training should, after so many steps."""
        now = self._clock()
        if now >= self._limit_seconds:
            return False
        if now >= self._next:
            self.evaluate(steps)
        return not self.reached

    def evaluate(self, steps: int) -> None:
        """Plays, plays again where the stop score must be confirmed, and notes the score of the games that count."""
        began = self._clock()
        score = self._play(self._evaluations.episodes)
        rest = REST * (self._clock() - began)
        if self._stop_score is not None and score >= self._stop_score:
            score = self._play(self._evaluations.confirm_episodes)  # Alone: the first were chosen for being good.
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
