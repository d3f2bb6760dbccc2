"""A line chart as inline SVG: it needs no library, no file and no script, and is sharp on every screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.runs.plots.ticks import number_ticks, time_axis
from apex.runs.report.html import Markup, tag
from apex.runtime.text import number_text

WIDE, NARROW = 440, 320  # of the drawing; the page scales it, and its letters
HEIGHT = 220
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 14, 38  # around the panel
MAX_POINTS = 400  # of a line: two for each bucket of steps or seconds, its lowest and its highest

XAxis = Literal["steps", "seconds"]


class ChartLine(NamedTuple):
    """A curve of the chart."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]  # finite
    style: str = "main"  # a class of the page's style sheet


def chart(
    lines: Sequence[ChartLine], axis: XAxis, label: str, *, width: int = NARROW, threshold: float | None = None
) -> Markup:
    """The lines over steps or seconds; `label` says to who cannot see it what it shows."""
    lines = [line for line in lines if len(line.x)]
    right = max((float(line.x[-1]) for line in lines), default=1.0) or 1.0
    low, high = _range(lines, threshold)
    across, down = (width - LEFT - RIGHT) / right, (HEIGHT - TOP - BOTTOM) / (high - low)

    def place(x: float, y: float) -> tuple[str, str]:
        return f"{LEFT + x * across:.1f}", f"{HEIGHT - BOTTOM - (y - low) * down:.1f}"

    parts = []
    for tick in number_ticks(low, high, 6):
        _, y = place(0, tick)
        text = number_text(tick).replace("-", "\N{MINUS SIGN}")
        parts.append(tag("line", x1=LEFT, x2=width - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", text, x=LEFT - 6, y=y, dy="0.35em", class_="at-left"))
    form, ticks, texts = time_axis(right, width // 70) if axis == "seconds" else ("", *_step_ticks(right, width // 70))
    for tick, text in zip(ticks, texts, strict=True):
        x, y = place(tick, low)
        parts.append(tag("text", text, x=x, y=y, dy="1.35em", class_="below"))
    name = f"wall clock ({form})" if axis == "seconds" else "steps"
    parts.append(tag("text", name, x=LEFT + (width - LEFT - RIGHT) / 2, y=HEIGHT - 4, class_="below axis"))
    if threshold is not None:
        _, y = place(0, threshold)
        parts.append(tag("line", x1=LEFT, x2=width - RIGHT, y1=y, y2=y, class_="threshold"))
        parts.append(tag("text", number_text(threshold), x=LEFT + 4, y=y, dy="-0.35em", class_="threshold-text"))
    for line in lines:
        points = [place(x, y) for x, y in zip(*thin(line.x, line.y), strict=True)]
        if len(points) == 1:
            parts.append(tag("circle", cx=points[0][0], cy=points[0][1], r=2.5, class_=f"dot {line.style}"))
        else:
            parts.append(tag("polyline", points=" ".join(map(",".join, points)), class_=f"curve {line.style}"))
    return tag("svg", *parts, viewBox=f"0 0 {width} {HEIGHT}", role="img", aria_label=label)


def thin(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """At most MAX_POINTS of the points, in their order: of each stretch the lowest and the highest."""
    if len(x) <= MAX_POINTS:
        return x.tolist(), y.tolist()
    kept: set[int] = set()
    for stretch in np.array_split(np.arange(len(x)), MAX_POINTS // 2):
        kept |= {int(stretch[y[stretch].argmin()]), int(stretch[y[stretch].argmax()])}
    order = sorted(kept)
    return x[order].tolist(), y[order].tolist()


def _range(lines: Sequence[ChartLine], threshold: float | None) -> tuple[float, float]:
    """From the lowest value to the highest, with some room; from 0 on where that is near."""
    values = [float(end) for line in lines for end in (line.y.min(), line.y.max())]
    values += [] if threshold is None else [threshold]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if 0 < low < 0.5 * high:
        low = 0.0
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return low if low == 0 else low - room, high + room


def _step_ticks(right: float, max_ticks: int) -> tuple[list[float], list[str]]:
    ticks = number_ticks(0, right, max_ticks)
    return ticks, [number_text(tick) for tick in ticks]
