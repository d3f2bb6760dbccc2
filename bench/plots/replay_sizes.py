"""The chart of `python -m bench replay --sizes PNG`: times of a draw and an update by size of the replay memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from apexreplay.errors import require
from bench.replay_steps import StoreTimes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR = 3.0  # allowed ratio of the largest memory's time to the smallest's
COLORS = {"draw": "#0072b2", "update": "#d55e00"}  # colours of Okabe and Ito, which colour-blind people can distinguish
_INK, _FAINT = "#444444", "#e4e4e4"


def check_picture(path: Path) -> None:
    """Raises UsageError if `save_sizes` cannot write `path`; called before hours of measuring."""
    require(path.suffix == ".png", f"--sizes must name a .png, got {path}")
    require(path.parent.is_dir(), f"--sizes: folder {path.parent} does not exist")


def save_sizes(path: Path, times: Mapping[int, StoreTimes], batch_size: int) -> None:
    """Writes the chart of `times`, by number of slots, smallest first."""
    draw_sizes(times, batch_size).savefig(path, dpi=160)


def draw_sizes(times: Mapping[int, StoreTimes], batch_size: int) -> Figure:
    """Draws milliseconds over slots: a curve for each operation, and BAR times its first point as a line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = list(times)
    smallest = f"$2^{{{sizes[0].bit_length() - 1}}}$"
    highest = 0.0
    for place, name in enumerate(StoreTimes._fields):
        values = [getattr(each, name) for each in times.values()]
        label = f"{name}: {values[0]:.3f} to {values[-1]:.3f} ms, {values[-1] / values[0]:.1f}x"
        axes.plot(sizes, values, color=COLORS[name], marker="o", markersize=5, linewidth=2, label=label)
        bar = BAR * values[0]
        axes.axhline(bar, color=COLORS[name], linewidth=1, linestyle=(0, (5, 4)))
        # The bars' labels stand side by side, because both lines may be close together.
        axes.annotate(
            f"bar: {BAR:g}x of {smallest}, {name}",
            (0.01 + 0.24 * place, bar),
            (0, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=COLORS[name],
            fontsize=9,
        )
        highest = max(highest, bar, *values)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda slots, _: f"$2^{{{int(slots).bit_length() - 1}}}$"))
    axes.set_ylim(0, 1.12 * highest)
    axes.set_xlabel("slots of the replay memory", color=_INK)
    axes.set_ylabel(f"ms for {batch_size} transitions", color=_INK)
    axes.set_title(f"Draw {batch_size} transitions, update their priorities", loc="left", color=_INK)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_INK)
    axes.legend(loc="lower right", frameon=False, labelcolor=_INK)
    return figure
