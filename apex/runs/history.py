"""Reads the curves of a run over its steps and its elapsed time. Both continue when the run is resumed."""

from __future__ import annotations

from array import array
from datetime import datetime
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.metric_tags import SCORE
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import iterate_curve
from apex.types import Role

EVALUATION = ("evaluator", "evaluator/score")  # role and tag of the mean raw score of each evaluation
ACTOR_SCORE = ("actor", SCORE)  # role and tag of the scores of the actor with the highest id, which explores least
TIMED_ROLES = (Role.LEARNER, Role.EVALUATOR)  # roles whose last rows show when the run stopped


Floats = NDArray[np.float64]


class Series(NamedTuple):
    """The values of one metric of a run, oldest first. Seconds and steps never decrease."""

    seconds: Floats  # [N] seconds that the run has taken; pauses before it was resumed do not count
    steps: Floats  # [N] steps of all actors (agent decisions)
    values: Floats  # [N] finite values


class _Rows:
    """The rows of a role by column: as dictionaries, those of a week would not fit into memory."""

    def __init__(self) -> None:
        self.times, self.steps = array("d"), array("q")  # of each row
        self.columns: dict[str, tuple[array[int], array[float]]] = {}  # tag -> numbers of rows, values

    def add(self, time: float, steps: int, scalars: dict[str, float | None]) -> None:
        """Adds a row in place of those with more steps, which it repeats. A value of None is not finite."""
        while self.steps and self.steps[-1] > steps:
            self._remove_last()
        for tag, value in scalars.items():
            if tag not in self.columns:
                self.columns[tag] = array("q"), array("d")
            if value is not None:
                numbers, values = self.columns[tag]
                numbers.append(len(self.times))
                values.append(value)
        self.times.append(time)
        self.steps.append(steps)

    def _remove_last(self) -> None:
        self.steps.pop()
        self.times.pop()
        for numbers, values in self.columns.values():
            if numbers and numbers[-1] == len(self.times):
                numbers.pop()
                values.pop()


class RunHistory:
    """Reads the curves of a run, each file once."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._rows = cache(self._read)
        self._starts = self._find_starts()

    def series(self, role: str, tag: str) -> Series:
        """Returns the finite values of `tag` of `role`; empty if there are none."""
        rows = self._rows(role)
        numbers, found = rows.columns.get(tag, (array("q"), array("d")))
        seconds = np.array([self._elapsed(rows.times[number]) for number in numbers], np.float64)
        steps = np.array([rows.steps[number] for number in numbers], np.float64)
        return Series(np.maximum.accumulate(seconds), steps, np.array(found))

    def tags(self, role: str) -> set[str]:
        """Returns the tags of all metrics of a role."""
        return set(self._rows(role).columns)

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken: by its curves or by its folder, whichever is more."""
        last = [self._elapsed(times[-1]) for role in TIMED_ROLES if (times := self._rows(role).times)]
        return max([*last, self._run.elapsed_seconds])

    def _read(self, role: str) -> _Rows:
        """Reads the rows of a role. If a resumed run repeated steps, only their last rows are returned."""
        rows = _Rows()
        for row in iterate_curve(self._run.curves / f"{role}.jsonl"):
            if {"steps", "time", "scalars"} <= set(row):
                rows.add(row["time"], row["steps"], row["scalars"])
        return rows

    def _find_starts(self) -> list[tuple[float, float]]:
        """Returns the Unix time of each start of the run, and the seconds that the run had taken before that start.

        The manifest counts time only after the learner has started, so the curves may show a longer time.
        """
        times = [time for role in TIMED_ROLES for time in self._rows(role).times]
        starts = [(_unix(self._run.manifest["started"]), 0.0)]
        for start in self._run.manifest.get("resumed", []):
            began, before = starts[-1]
            again = _unix(start["started"])
            last = max((time for time in times if began <= time < again), default=began)
            starts.append((again, max(float(start["elapsed_seconds"]), before + last - began)))
        return starts

    def _elapsed(self, time: float) -> float:
        """Returns the seconds that the run had taken at the Unix time `time`."""
        started, before = next((start for start in reversed(self._starts) if start[0] <= time), self._starts[0])
        return before + max(0.0, time - started)


def _unix(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
