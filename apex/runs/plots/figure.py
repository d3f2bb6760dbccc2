"""The picture of `apex plot`: score against steps and against wall clock, a band for the seeds of each group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex.errors import ConfigError, require
from apex.runs.plots.aggregate import Axis, CurveGroup, band
from apex.runs.plots.ticks import number_ticks, time_axis
from apex.runtime.text import number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (".png", ".svg")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe, Ito: for every eye
DASHES: tuple[Any, ...] = ("solid", (0, (6, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))  # once the colors are used up
PANELS: tuple[Axis, ...] = ("steps", "seconds")
DPI = 200
_INK, _SOFT, _FAINT = "#262626", "#6b6b6b", "#e6e6e6"
_STYLE: dict[Any, Any] = {  # The same data gives the same file.
    "font.family": ["DejaVu Sans"],
    "font.size": 10.5,
    "svg.hashsalt": "apex",
    "text.parse_math": False,  # A $ in a name is a dollar.
    "axes.edgecolor": _SOFT,
    "text.color": _INK,
}


def check_picture(path: Path) -> None:
    """Raises ConfigError where `save_picture` could not write `path`."""
    require(path.suffix.lower() in KINDS, f"--out must end in {' or '.join(KINDS)}, got {path}")
    require(path.parent.is_dir(), f"--out {path}: there is no folder {path.parent}")
    require(not path.is_dir(), f"--out {path} is a folder")


def save_picture(path: Path, groups: Sequence[CurveGroup], title: str, threshold: float | None) -> None:
    """Writes the picture; raises ConfigError where it cannot be written."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        figure = draw(groups, title, threshold)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        try:
            figure.savefig(path, dpi=DPI, metadata=metadata, facecolor="white")
        except OSError as error:
            raise ConfigError(f"--out: cannot write {path}: {error.strerror}") from error


def draw(groups: Sequence[CurveGroup], title: str, threshold: float | None) -> Figure:
    """Two panels with one score axis, a legend below the title, and below the panels how to read them."""
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
        handles = [_draw_group(axes, group, axis, number) for number, group in enumerate(groups)]
        _frame(axes)
        _tick_x(axes, axis, max(float(getattr(curve, axis)[-1]) for group in groups for curve in group.curves))
    low, high = _score_range(groups, threshold)
    panels[0].set_ylim(low, high)
    ticks = [tick for tick in number_ticks(low, high) if low <= tick <= high]
    panels[0].set_yticks(ticks, [number_text(tick).replace("-", "\N{MINUS SIGN}") for tick in ticks])
    panels[0].set_ylabel("score: mean of an evaluation's full games" if _all_evaluated(groups) else "score", color=_INK)
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
    figure.text(0.075, 0.14 / height, _how_to_read(groups), fontsize=8.5, color=_SOFT, va="bottom")
    return figure


def _draw_group(axes: Axes, group: CurveGroup, axis: Axis, number: int) -> Any:
    color, dashes = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
    x, median, low, high, first_end = band(group.curves, axis)
    there = x <= first_end
    if len(group.curves) > 1:
        axes.fill_between(x[there], low[there], high[there], color=color, alpha=0.18, linewidth=0, zorder=10 + number)
        late = x >= first_end
        axes.fill_between(x[late], low[late], high[late], color=color, alpha=0.08, linewidth=0, zorder=10 + number)
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
    for curve in group.curves:  # Where each seed ends.
        end = getattr(curve, axis)[-1], curve.scores[-1]
        axes.plot(*end, "o", color=color, markersize=3.6, markeredgecolor="white", markeredgewidth=0.7, zorder=90)
    return line


def _frame(axes: Axes) -> None:
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_SOFT, length=0, pad=5, labelcolor=_INK)
    axes.tick_params(axis="x", length=3.5)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _tick_x(axes: Axes, axis: Axis, end: float) -> None:
    end = end or 1.0
    axes.set_xlim(0, 1.02 * end)
    if axis == "steps":
        ticks = number_ticks(0, end)
        axes.set_xticks(ticks, [number_text(tick) for tick in ticks])
        axes.set_xlabel("steps (agent decisions)", color=_INK, labelpad=5)
    else:
        form, ticks, labels = time_axis(end)
        axes.set_xticks(ticks, labels)
        axes.set_xlabel(f"wall clock ({form})", color=_INK, labelpad=5)


def _score_range(groups: Sequence[CurveGroup], threshold: float | None) -> tuple[float, float]:
    scores = [
        float(score) for group in groups for curve in group.curves for score in (min(curve.scores), max(curve.scores))
    ]
    scores += [] if threshold is None else [threshold]
    low, high = min(scores), max(scores)
    if low > 0 and low < 0.4 * high:
        low = 0.0  # Scores that are counted from nothing begin there.
    margin = 0.06 * ((high - low) or abs(high) or 1.0)
    return (low if low == 0 else low - margin), high + margin


def _draw_threshold(panels: Sequence[Axes], threshold: float) -> None:
    for axes in panels:
        axes.axhline(threshold, color=_SOFT, linewidth=1.1, linestyle=(0, (5, 3)), zorder=5)
    panels[-1].annotate(
        number_text(threshold),
        (1, threshold),
        (5, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        fontsize=9.5,
        color=_SOFT,
    )


def _how_to_read(groups: Sequence[CurveGroup]) -> str:
    if all(len(group.curves) == 1 for group in groups):
        return "One seed each. A dot ends it."
    words = "Line: median of the seeds; band: lowest to highest seed; a dot ends a seed."
    if any(len({getattr(curve, axis)[-1] for curve in group.curves}) > 1 for group in groups for axis in PANELS):
        words += " Dotted, pale: a seed that has ended keeps its last score."
    return words


def _all_evaluated(groups: Sequence[CurveGroup]) -> bool:
    return not any(group.note for group in groups)
