"""What the curves of a run say, by its steps and by its clock; both go on through every life of the run."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apex.types import Role

EVALUATION = ("evaluator", "evaluator/score")  # role and tag: the mean raw score of each evaluation

TIMED_ROLES = (Role.LEARNER, Role.EVALUATOR)  # whose last rows tell how long a life was


class Series(NamedTuple):
    """One figure of a run, oldest first; neither seconds nor steps ever go back."""

    seconds: NDArray[np.float64]  # [N] since the run was started, pauses between its lives left out
    steps: NDArray[np.float64]  # [N] of all actors
    values: NDArray[np.float64]  # [N] finite


class RunHistory:
    """Reads the curves of a run, each file once."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._rows = cache(self._read)
        self._lives = self._find_lives()

    def series(self, role: str, tag: str) -> Series:
        """The figure `tag` of `role`; empty where there is none. Values that are not finite are left out."""
        points = [
            (self._elapsed(row["time"]), row["steps"], row["scalars"][tag])
            for row in self._rows(role)
            if row["scalars"].get(tag) is not None
        ]
        seconds, steps, values = np.array(points, np.float64).reshape(-1, 3).T
        return Series(np.maximum.accumulate(seconds), steps, values)

    def tags(self, role: str) -> set[str]:
        """All figures of a role."""
        return {tag for row in self._rows(role) for tag in row["scalars"]}

    @property
    def seconds(self) -> float:
        """How long the run has gone on, as far as its curves or its folder say."""
        last = [self._elapsed(rows[-1]["time"]) for role in TIMED_ROLES if (rows := self._rows(role))]
        return max([*last, self._run.elapsed_seconds])

    def _read(self, role: str) -> list[dict[str, Any]]:
        """The rows of a role. Steps that a resumed run has made again count as it made them last."""
        path = self._run.curves / f"{role}.jsonl"
        rows: list[dict[str, Any]] = []
        for row in read_curve(path) if path.exists() else []:
            if not {"steps", "time", "scalars"} <= set(row):
                continue
            while rows and rows[-1]["steps"] > row["steps"]:
                rows.pop()
            rows.append(row)
        return rows

    def _find_lives(self) -> list[tuple[float, float]]:
        """When each life began, in unix seconds, and how long the run had gone on before.

        The run's own note of that begins when its learner was up, so what the curves tell may be more.
        """
        times = [row["time"] for role in TIMED_ROLES for row in self._rows(role)]
        lives = [(_unix(self._run.manifest["started"]), 0.0)]
        for life in self._run.manifest.get("resumed", []):
            began, before = lives[-1]
            again = _unix(life["started"])
            last = max((time for time in times if began <= time < again), default=began)
            lives.append((again, max(float(life["elapsed_seconds"]), before + last - began)))
        return lives

    def _elapsed(self, time: float) -> float:
        """The run's clock at a unix time."""
        started, before = next((life for life in reversed(self._lives) if life[0] <= time), self._lives[0])
        return before + max(0.0, time - started)


def _unix(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
