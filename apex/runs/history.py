"""Reads the curves of a run over its steps and its elapsed time. Both continue when the run is resumed."""

from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.metric_tags import SCORE
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
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


class RunHistory:
    """Reads the curves of a run, each file once."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._rows = cache(self._read)
        self._starts = self._find_starts()

    def series(self, role: str, tag: str) -> Series:
        """Returns the finite values of `tag` of `role`; empty if there are none."""
        points = [
            (self._elapsed(row["time"]), row["steps"], row["scalars"][tag])
            for row in self._rows(role)
            if row["scalars"].get(tag) is not None
        ]
        seconds, steps, values = np.array(points, np.float64).reshape(-1, 3).T
        return Series(np.maximum.accumulate(seconds), steps, values)

    def tags(self, role: str) -> set[str]:
        """Returns the tags of all metrics of a role."""
        return {tag for row in self._rows(role) for tag in row["scalars"]}

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken: by its curves or by its folder, whichever is more."""
        last = [self._elapsed(rows[-1]["time"]) for role in TIMED_ROLES if (rows := self._rows(role))]
        return max([*last, self._run.elapsed_seconds])

    def _read(self, role: str) -> list[dict[str, Any]]:
        """Reads the rows of a role. If a resumed run repeated steps, only their last rows are returned."""
        rows: list[dict[str, Any]] = []
        for row in read_curve(self._run.curves / f"{role}.jsonl"):
            if not {"steps", "time", "scalars"} <= set(row):
                continue
            while rows and rows[-1]["steps"] > row["steps"]:
                rows.pop()
            rows.append(row)
        return rows

    def _find_starts(self) -> list[tuple[float, float]]:
        """Returns the Unix time of each start of the run, and the seconds that the run had taken before that start.

        The manifest counts time only after the learner has started, so the curves may show a longer time.
        """
        times = [row["time"] for role in TIMED_ROLES for row in self._rows(role)]
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
