"""Where the ticks of an axis stand, and what is written at them: numbers in few characters, times as m:ss."""

from __future__ import annotations

import math
from typing import NamedTuple

from apex.runtime.text import number_text, time_text

MAX_TICKS = 7
_TIMES = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 21600, 43200)  # seconds
_DAY = 86_400.0


def number_ticks(low: float, high: float, max_ticks: int = MAX_TICKS) -> list[float]:
    """At most `max_ticks` round numbers from `low` to `high`, in steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / max_ticks))
    step = next(s for s in (power, 2 * power, 5 * power, 10 * power, 20 * power) if _count(low, high, s) <= max_ticks)
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class TimeAxis(NamedTuple):
    """An axis of seconds, to be read by people."""

    form: str  # of the labels: m:ss, h:mm or days
    ticks: list[float]  # seconds
    labels: list[str]


def time_axis(high: float, max_ticks: int = MAX_TICKS) -> TimeAxis:
    """At most `max_ticks` times from 0 to `high` seconds that a clock would name: every 10 s, 5 minutes, 2 hours."""
    step = next((s for s in _TIMES if _count(0, high, s) <= max_ticks), None)
    if step is None:
        days = number_ticks(0, high / _DAY, max_ticks)
        return TimeAxis("days", [_DAY * day for day in days], [number_text(day) for day in days])
    ticks = [float(step * number) for number in range(math.floor(high / step + 1e-9) + 1)]
    if high < 3600:
        return TimeAxis("m:ss", ticks, [time_text(tick) for tick in ticks])
    return TimeAxis("h:mm", ticks, [f"{tick // 3600:.0f}:{tick % 3600 // 60:02.0f}" for tick in ticks])


def _count(low: float, high: float, step: float) -> int:
    return math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) + 1
