"""Draws curves with matplotlib: the pictures of `apex plot`, and the SVG charts that `apex report` embeds in its page.

matplotlib is imported only in the functions that draw.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from apex.runs.history import Floats, Series
from apex.runs.plots.aggregate import Axis, CurveGroup, band
from apex.runtime.text import number
from apexreplay.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe-Ito palette
DASHES: tuple[Any, ...] = ("solid", (0, (6, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))
ENDED: Any = (0, (1, 1.6))  # dashes of a median where some curves have ended
PANELS: tuple[Axis, ...] = ("steps", "seconds")
DPI = 200
WIDE, NARROW, HEIGHT = 400, 320, 220  # size of a chart in points; the page scales the chart with its text
TIME_UNITS = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
INK, SOFT, GRID, PAPER, MAIN, FAINT = "#262626", "#6b6b6b", "#e6e6e6", "#ffffff", COLORS[0], "#e3b999"
# CSS variables of the page, each with one value for light and one for dark screens.
VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--line", PAPER: "--card", MAIN: "--main", FAINT: "--faint"}
_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 11,
    "path.simplify_threshold": 0.5,  # points; with this value, a curve of 100,000 noisy values has 45 kB
    "svg.hashsalt": "apex",  # The same data gives the same file.
    "text.parse_math": False,  # A $ in a name does not start a formula.
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "text.color": INK,
}
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


class Line(NamedTuple):
    """One line of a chart: one curve, or the median of the curves of several seeds with their range."""

    curves: Sequence[Series]  # at least one; none is empty
    color: str = MAIN
    width: float = 1.8  # points
    dashes: Any = "solid"  # a line style of matplotlib


def draw(
    figure: Figure, lines: Sequence[Line], axes: Sequence[Axis], threshold: float | None = None, max_ticks: int = 7
) -> list[Any]:
    """Draws the lines in one panel for each of `axes`, with a common y axis; returns an entry of a legend per line."""
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    curves = [curve for line in lines for curve in line.curves]
    entries: list[Any] = []
    for panel, axis in zip(panels, axes, strict=True):
        unit = _set_up(panel, axis, max(float(getattr(curve, axis)[-1]) for curve in curves), max_ticks)
        entries = [_draw_line(panel, line, axis, unit, layer) for layer, line in enumerate(lines)]
        if threshold is not None:
            panel.axhline(threshold, color=SOFT, linewidth=1.1, linestyle=(0, (5, 3)), zorder=5)
    _limit_values(panels[0], np.concatenate([curve.values for curve in curves]), threshold)
    if threshold is not None:
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        panels[-1].annotate(number(threshold), (1, threshold), (5, 0), color=SOFT, **place)
    return entries


def chart(lines: Sequence[Line], axis: Axis, label: str, *, width: int = NARROW, threshold: float | None = None) -> str:
    """Returns an SVG element that draws the lines over steps or seconds and needs no other file.

    Its colors are the page's VARIABLES. `label` describes the chart for screen readers and makes its ids unique.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.fonttype": "none", "svg.hashsalt": label}), io.StringIO() as file:
        figure = Figure(figsize=(width / 72, HEIGHT / 72), layout="constrained")
        draw(figure, lines, [axis], threshold, max_ticks=width // 60)
        figure.savefig(file, format="svg", transparent=True, metadata=_NO_METADATA)
        text = file.getvalue()
    start = f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(label)}">'
    content = text[text.index(">", text.index("<svg")) + 1 :]
    # The ids of SVG groups would repeat in every chart; nothing refers to them.
    content = re.sub(r' id="[\w.]+_\d+"', "", content)
    for color, variable in VARIABLES.items():
        content = content.replace(color, f"var({variable})")
    return start + content.strip()


def picture(groups: Sequence[CurveGroup], title: str, threshold: float | None) -> Figure:
    """Draws score against steps and against wall clock, a legend below the title, and an explanation at the bottom."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    longest = max(len(group.title) for group in groups)
    columns = next((number for number, width in ((4, 22), (3, 33), (2, 52)) if longest <= width), 1)
    columns = min(len(groups), columns)
    space = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1)  # inches
    figure = Figure(figsize=(10.4, 4.7 + 0.26 * -(-len(groups) // columns)), layout=space)
    lines = [
        Line(group.curves, COLORS[i % len(COLORS)], 2.1, DASHES[i // len(COLORS) % len(DASHES)])
        for i, group in enumerate(groups)
    ]
    entries = draw(figure, lines, PANELS, threshold)
    are_evaluations = not any(group.note for group in groups)
    figure.axes[0].set_ylabel("score: mean of the full games of an evaluation" if are_evaluations else "score")
    figure.legend(
        entries,
        [group.title for group in groups],
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        alignment="left",
        title=title,
        title_fontproperties={"size": 14, "weight": "bold"},
    )
    figure.supxlabel(_how_to_read(groups), x=0.014, ha="left", fontsize=8.5, color=SOFT)
    return figure


def save_picture(path: Path, groups: Sequence[CurveGroup], title: str, threshold: float | None) -> None:
    """Draws the picture and writes it to `path`; raises UsageError if it cannot be written."""
    import matplotlib

    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
    with matplotlib.rc_context(_STYLE):
        try:
            picture(groups, title, threshold).savefig(path, dpi=DPI, metadata=metadata, facecolor=PAPER)
        except OSError as error:
            raise UsageError(f"--out: cannot write {path}: {error.strerror}") from error


def _draw_line(panel: Axes, line: Line, axis: Axis, unit: float, layer: int) -> Any:
    """Draws median, range and a dot at the end of each curve; where some curves have ended, dotted and pale."""
    x, median, low, high, first_end = band(line.curves, axis)
    whole, rest, x = x <= first_end, x >= first_end, x / unit
    color, width, order = line.color, line.width, 40 + layer
    if len(line.curves) > 1:
        for part, alpha in ((whole, 0.18), (rest, 0.08)):
            panel.fill_between(x[part], low[part], high[part], color=color, alpha=alpha, linewidth=0, zorder=10 + layer)
        panel.plot(x[rest], median[rest], color=color, linewidth=0.7 * width, alpha=0.75, linestyle=ENDED, zorder=order)
    (drawn,) = panel.plot(x[whole], median[whole], color=color, linewidth=width, linestyle=line.dashes, zorder=order)
    for curve in line.curves:
        end = getattr(curve, axis)[-1] / unit, curve.values[-1]
        panel.plot(*end, "o", color=color, markersize=2 * width, markeredgecolor=PAPER, markeredgewidth=0.7, zorder=90)
    return drawn


def _set_up(axes: Axes, axis: Axis, end: float, max_ticks: int) -> float:
    """Sets up frame, grid, labels and ticks; returns the length of one x unit, in steps or seconds."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    unit, name = 1.0, "steps (agent decisions)"
    if axis == "seconds":
        unit, unit_name = next(each for each in TIME_UNITS if end >= 2 * each[0] or each[0] == 1)
        name = f"wall clock ({unit_name})"
    axes.set_xlim(0, 1.02 * (end / unit or 1.0))
    axes.set_xlabel(name, labelpad=5)
    for each, most in ((axes.xaxis, max_ticks), (axes.yaxis, 7)):
        each.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
        each.set_major_formatter(FuncFormatter(_tick))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, length=0, pad=5, labelcolor=axes.xaxis.label.get_color())
    axes.tick_params(axis="x", length=3.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return unit


def _tick(value: float, _: Any) -> str:
    """Returns a short label: 0.25, 475, 3,000, 50k, 1.2M."""
    text = f"{value / 1_000:g}k" if 10_000 <= abs(value) < 1_000_000 else number(value)
    return text.replace("-", "\N{MINUS SIGN}")


def _limit_values(axes: Axes, values: Floats, threshold: float | None) -> None:
    """Sets the y limits: all values and the threshold with a margin, and 0 if the lowest value is near 0."""
    shown = values if threshold is None else np.append(values, threshold)
    low, high = float(shown.min()), float(shown.max())
    if 0 < low < 0.4 * high:
        low = 0.0
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low if low == 0 else low - room, high + room)


def _how_to_read(groups: Sequence[CurveGroup]) -> str:
    if all(len(group.curves) == 1 for group in groups):
        return "One seed per curve; a dot marks its end."
    text = "Line: median of the seeds; band: lowest to highest seed; a dot marks the end of a seed."
    if any(len({getattr(curve, axis)[-1] for curve in group.curves}) > 1 for group in groups for axis in PANELS):
        text += " Dotted and pale: some seeds have ended and keep their last score."
    return text
