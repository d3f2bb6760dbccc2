"""Draws curves with matplotlib: the files of `apex plot`, and the SVG charts that `apex report` embeds in its page.

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

from apex.errors import UsageError
from apex.runs.plots.aggregate import Axis, CurveGroup, Floats, band
from apex.runtime.text import number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe-Ito palette
DASHES: tuple[Any, ...] = ("solid", (0, (6, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))
PANELS: tuple[Axis, ...] = ("steps", "seconds")
DPI = 200
WIDE, NARROW, HEIGHT = 400, 320, 220  # size of a chart in points; the page scales the chart with its text
TIME_UNITS = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
INK, SOFT, LINE, MAIN, FAINT = "#262626", "#6b6b6b", "#e6e6e6", COLORS[0], "#e3b999"
# CSS variables of the page, each with one value for light and one for dark screens.
VARIABLES = {INK: "--ink", SOFT: "--soft", LINE: "--line", MAIN: "--main", FAINT: "--faint"}
_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "svg.hashsalt": "apex",  # The same data gives the same file.
    "text.parse_math": False,  # A $ in a name does not start a formula.
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "text.color": INK,
}
_FILE_STYLE = {**_STYLE, "font.size": 10.5}
_CHART_STYLE = {
    **_STYLE,
    "font.size": 11.5,
    "axes.labelcolor": SOFT,
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.5,  # points; with this value, a curve of 100,000 noisy values has 45 kB
}
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


class ChartLine(NamedTuple):
    """One curve of a chart."""

    x: Floats  # [N] steps or seconds
    y: Floats  # [N] finite values
    color: str = MAIN  # a key of VARIABLES
    width: float = 1.8  # points


def save_picture(path: Path, groups: Sequence[CurveGroup], title: str, threshold: float | None) -> None:
    """Draws the picture and writes it to `path`; raises UsageError if it cannot be written."""
    import matplotlib

    with matplotlib.rc_context(_FILE_STYLE):
        figure = draw(groups, title, threshold)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        try:
            figure.savefig(path, dpi=DPI, metadata=metadata, facecolor="white")
        except OSError as error:
            raise UsageError(f"--out: cannot write {path}: {error.strerror}") from error


def chart(
    lines: Sequence[ChartLine], axis: Axis, label: str, *, width: int = NARROW, threshold: float | None = None
) -> str:
    """Returns an SVG element that draws the lines over steps or seconds and needs no other file.

    Its colors are the page's VARIABLES. `label` describes the chart for screen readers and makes its ids unique.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_CHART_STYLE, "svg.hashsalt": label}), io.StringIO() as file:
        figure = Figure(figsize=(width / 72, HEIGHT / 72), layout="constrained")
        axes = figure.subplots()
        unit = _set_up(axes, axis, max(float(line.x[-1]) for line in lines), width // 60)
        for x, y, color, line_width in lines:
            axes.plot(x / unit, y, "o" * (len(x) == 1), color=color, linewidth=line_width, markersize=4)
        _limit_values(axes, np.concatenate([line.y for line in lines]), threshold)
        if threshold is not None:
            _draw_threshold([axes], threshold)
        figure.savefig(file, format="svg", transparent=True, metadata=_NO_METADATA)
        text = file.getvalue()
    start = f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(label)}">'
    content = text[text.index(">", text.index("<svg")) + 1 :]
    # The ids of SVG groups would repeat in every chart; nothing refers to them.
    content = re.sub(r' id="[\w.]+_\d+"', "", content)
    for color, variable in VARIABLES.items():
        content = content.replace(color, f"var({variable})")
    return start + content.strip()


def draw(groups: Sequence[CurveGroup], title: str, threshold: float | None) -> Figure:
    """Draws two panels with a common score axis, a legend below the title, and an explanation below the panels."""
    from matplotlib.figure import Figure

    longest = max(len(group.title) for group in groups)
    columns = min(
        len(groups), next(number for number, width in ((4, 22), (3, 33), (2, 52), (1, longest)) if longest <= width)
    )
    legend_inches = 0.26 * -(-len(groups) // columns)
    height = 4.7 + legend_inches
    figure = Figure(figsize=(10.4, height))
    panels = figure.subplots(1, 2, sharey=True)
    top = 1 - (0.6 + legend_inches) / height
    figure.subplots_adjust(left=0.075, right=0.955, top=top, bottom=0.98 / height, wspace=0.07)
    handles = []
    for axes, axis in zip(panels, PANELS, strict=True):
        unit = _set_up(axes, axis, max(float(getattr(curve, axis)[-1]) for group in groups for curve in group.curves))
        handles = [_draw_group(axes, group, axis, unit, number) for number, group in enumerate(groups)]
    _limit_values(panels[0], np.concatenate([curve.scores for group in groups for curve in group.curves]), threshold)
    all_evaluated = not any(group.note for group in groups)
    panels[0].set_ylabel("score: mean of the full games of an evaluation" if all_evaluated else "score")
    if threshold is not None:
        _draw_threshold(panels, threshold)
    figure.text(0.075, 1 - 0.16 / height, title, fontsize=14, fontweight="bold", va="top")
    figure.legend(
        handles,
        [group.title for group in groups],
        loc="upper left",
        bbox_to_anchor=(0.0712, 1 - 0.44 / height),
        ncols=columns,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.8,
        borderaxespad=0,
        labelspacing=0.4,
    )
    figure.text(0.075, 0.14 / height, _how_to_read(groups), fontsize=8.5, color=SOFT, va="bottom")
    return figure


def _draw_group(axes: Axes, group: CurveGroup, axis: Axis, unit: float, number: int) -> Any:
    color, dashes = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
    x, median, low, high, first_end = band(group.curves, axis)
    there, late, x = x <= first_end, x >= first_end, x / unit
    if len(group.curves) > 1:
        for part, alpha in ((there, 0.18), (late, 0.08)):
            axes.fill_between(x[part], low[part], high[part], color=color, alpha=alpha, linewidth=0, zorder=10 + number)
        axes.plot(
            x[late], median[late], color=color, linewidth=1.4, alpha=0.75, linestyle=(0, (1, 1.6)), zorder=40 + number
        )
    (line,) = axes.plot(
        x[there],
        median[there],
        color=color,
        linewidth=2.1,
        linestyle=dashes,
        solid_joinstyle="round",
        zorder=40 + number,
    )
    for curve in group.curves:  # Marks the end of each seed.
        end = getattr(curve, axis)[-1] / unit, curve.scores[-1]
        axes.plot(*end, "o", color=color, markersize=3.6, markeredgecolor="white", markeredgewidth=0.7, zorder=90)
    return line


def _set_up(axes: Axes, axis: Axis, end: float, max_ticks: int = 7) -> float:
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
        each.set_major_formatter(FuncFormatter(lambda value, _: number_text(value).replace("-", "\N{MINUS SIGN}")))
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, length=0, pad=5, labelcolor=axes.xaxis.label.get_color())
    axes.tick_params(axis="x", length=3.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return unit


def _limit_values(axes: Axes, values: Floats, threshold: float | None) -> None:
    """Sets the y limits: all values and the threshold with a margin, and 0 if the lowest value is near 0."""
    shown = values if threshold is None else np.append(values, threshold)
    low, high = float(shown.min()), float(shown.max())
    if 0 < low < 0.4 * high:
        low = 0.0
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low if low == 0 else low - room, high + room)


def _draw_threshold(panels: Sequence[Axes], threshold: float) -> None:
    for axes in panels:
        axes.axhline(threshold, color=SOFT, linewidth=1.1, linestyle=(0, (5, 3)), zorder=5)
    panels[-1].annotate(
        number_text(threshold),
        (1, threshold),
        (5, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        color=SOFT,
    )


def _how_to_read(groups: Sequence[CurveGroup]) -> str:
    if all(len(group.curves) == 1 for group in groups):
        return "One seed per curve; a dot marks its end."
    words = "Line: median of the seeds; band: lowest to highest seed; a dot marks the end of a seed."
    if any(len({getattr(curve, axis)[-1] for curve in group.curves}) > 1 for group in groups for axis in PANELS):
        words += " Dotted and pale: some seeds have ended and keep their last score."
    return words
