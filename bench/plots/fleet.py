"""The chart of `python -m bench fleet --plot SVG`: how near each part is to its bar, by number of hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bench.harness.report import ReportRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]  # of Okabe and Ito
INK, FAINT = "#444444", "#e4e4e4"


def draw_fleet(numbers: Sequence[int], figures: Mapping[str, float], lines: Sequence[ReportRow]) -> Figure:
    """Draws each figure that has a bar above 0 as a share of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, line in zip(COLORS, [line for line in lines if line.bar], strict=False):
        assert line.bar is not None
        shares = [figures[f"{number}_{line.name}"] * line.scale / line.bar for number in numbers]
        label = f"{line.label} (bar: {line.bar:g} {line.unit})"
        axes.plot(numbers, shares, color=color, marker="o", markersize=4, linewidth=2, label=label)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (5, 4)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(numbers, [f"{number:,}" for number in numbers])
    axes.minorticks_off()
    axes.set_xlabel("actor hosts", color=INK)
    axes.set_ylabel("share of the bar", color=INK)
    axes.set_title("What breaks first: a part above the dashed line", loc="left", color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, labelcolor=INK, fontsize=8)
    return figure
