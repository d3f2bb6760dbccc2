"""What the curves of a run say once a second of the learner, of the replay servers and of what limits them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from apex.replay_memory.priority_histogram import merge
from apex.runs.metrics.writer import MetricRow
from apex.runs.status import RunStatus


class MetricRows:
    """Makes the rows of what the status knows now."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        self._histograms: list[Any] = []  # the last ones that were told, of each shard
        self._limit = ""  # the last one that was told

    def next(self) -> Iterator[MetricRow]:
        """A row of the learner's curves and one of replay's, as far as either has said anything.

        Raises ValueError for a histogram that is none. Times are for the eye: nothing is measured by them.
        """
        steps = self._status.num_steps
        if learner := _numbers("learner", self._status.learner):
            row = make_row("learner", steps, learner | self._status.scalars())
            limit = self._status.limited_by()
            told = f"{limit['part']}: turn {limit['setting']}" if limit is not None else self._limit
            if told != self._limit:
                self._limit = told
                row["texts"] = {"limited_by/setting": told}
            yield row
        replay = self._status.replay_status()
        if figures := _numbers("replay", replay):
            row = make_row("replay", steps, figures)
            histograms = replay["priority_histograms"]
            if histograms and histograms != self._histograms:  # They come with each heartbeat, and are seldom new.
                self._histograms = histograms
                row["histograms"] = {"replay/priority": merge(histograms)}
            yield row


def make_row(role: str, steps: int, scalars: dict[str, float]) -> MetricRow:
    """Figures by TensorBoard tag, with the time of day."""
    return {"role": role, "steps": steps, "time": time.time(), "scalars": scalars}


def evaluation_row(steps: int, result: dict[str, Any], best: float) -> MetricRow:
    """What the curves keep of an `evaluator.EvaluationResult`; `best`: the highest mean so far."""
    names = {"score": "mean", "score_median": "median", "score_low": "low", "score_high": "high"}
    names |= {"length": "length", "episodes": "episodes"}
    scalars = {f"evaluator/{tag}": result[name] for tag, name in names.items() if name in result}
    return make_row("evaluator", steps, scalars | {"evaluator/best_score": best})


def _numbers(part: str, figures: dict[str, Any]) -> dict[str, float]:
    """Those of the figures that are numbers, by TensorBoard tag."""
    return {
        f"{part}/{name}": value
        for name, value in figures.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
