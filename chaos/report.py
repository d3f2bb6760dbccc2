"""The output of `python -m chaos`: faults as they occur, and at the end a table of figures and bars."""

import json
import math
import sys
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from chaos.audit import Verdict


class Figure(NamedTuple):
    """One row of the table."""

    name: str
    value: float | None  # None: not measured
    unit: str = ""
    bar: str = ""  # such as "<= 2", ">= 80", "= 0"; "": no bar

    @property
    def reached(self) -> bool:
        """Whether the value meets the bar."""
        if not self.bar:
            return True
        relation, _, bound = self.bar.partition(" ")
        value = self.value
        if value is None:
            return False
        return {"<=": value <= float(bound), ">=": value >= float(bound), "=": value == float(bound)}[relation]


def audit_figures(verdict: Verdict, when: str) -> list[Figure]:
    """Returns the rows of the audit."""
    rows = [Figure(f"acknowledged, {when}", verdict.acknowledged, "transitions")]
    rows += [
        Figure(f"{name.replace('_', ' ')}, {when}", getattr(verdict, name), "", "= 0") for name in Verdict._fields[3:]
    ]
    return [row for row in rows if row.value or row.name.split(",")[0] in ("lost", "twice", "never sent")]


def recovery_figures(seconds: dict[str, list[float | None]], bars: dict[str, float]) -> list[Figure]:
    """Returns the median and the longest time of each role in seconds; the longest is None if one did not recover."""
    rows = []
    for role, times in sorted(seconds.items()):
        # A role that did not recover took longer than all others.
        came = [math.inf if time is None else time for time in times]
        bar = f"<= {bars[role]:g}" if role in bars else ""
        name = f"{role} back after kill -9"
        rows.append(Figure(f"{name}, median of {len(times)}", _if_ever(median(came)), "s", bar))
        rows.append(Figure(f"{name}, longest", _if_ever(max(came)), "s"))
    return rows


def _if_ever(seconds: float) -> float | None:
    return seconds if seconds < math.inf else None


class ScenarioReporter:
    """Prints tables, or one JSON object at the end; then, other messages go to standard error."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, sentence: str) -> None:
        """Prints one line."""
        print(sentence, file=sys.stderr if self._as_json else sys.stdout, flush=True)

    def end(self, head: dict[str, object], figures: Sequence[Figure], passed: bool) -> None:
        """The table."""
        if self._as_json:
            rows = [{**figure._asdict(), "reached": figure.reached} for figure in figures]
            print(json.dumps({**head, "passed": passed, "figures": rows}), flush=True)
            return
        width = max((len(figure.name) for figure in figures), default=0)
        for figure in figures:
            value = "never" if figure.value is None else f"{figure.value:,.2f}".removesuffix(".00")
            mark = "" if not figure.bar else "  reached" if figure.reached else "  MISSED"
            bar = f"  (bar {figure.bar})" if figure.bar else ""
            print(f"{figure.name:<{width}}  {value:>12} {figure.unit}{bar}{mark}")
        missed = [figure for figure in figures if not figure.reached]
        if missed:
            print(f"MISSED {len(missed)} bars: {'; '.join(f'{figure.name} {figure.bar}' for figure in missed)}")
        print("the audit passed" if passed else "the audit FAILED", flush=True)
