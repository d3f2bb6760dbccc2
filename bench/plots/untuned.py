"""The chart of the games that no setting was tuned on: each run as a point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ["#0072b2", "#d55e00", "#009e73"]  # of Okabe and Ito
MARKERS = ["o", "s", "^"]
INK, FAINT = "#444444", "#e4e4e4"


def draw_untuned(games: Sequence[str], scores: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Draws the points of each game in a row with an axis of its own, one above the other by system.

    scores: human-normalized scores by the name of the system, for each game those of its seeds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    rows = figure.subplots(len(games), squeeze=False)[:, 0]
    for row, (axes, game) in enumerate(zip(rows, games, strict=True)):
        for number, (name, each) in enumerate(scores.items()):
            points = [100 * score for score in each[row]]
            style = {"color": COLORS[number], "markersize": 7, "alpha": 0.8, "label": name}
            axes.plot(points, [number] * len(points), MARKERS[number], **style)
        for percent in (0, 100):  # random play and a human
            axes.axvline(percent, color=INK, linewidth=1, linestyle=(0, (5, 4)))
        axes.set_yticks([1], [game])
        axes.set_ylim(len(scores) - 0.3, -0.7)
        axes.grid(axis="x", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    rows[-1].set_xlabel("score of the final policy, % of the way from random play to a human", color=INK)
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(scores), frameon=False, labelcolor=INK)
    return figure
