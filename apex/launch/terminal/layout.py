"""Rows of labelled items for a terminal of any width, and numbers in few characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console, Group
from rich.text import Text

from apex.runtime.text import clean

LABEL_WIDTH = 12  # columns of the labels in a wide terminal
WIDE = 60  # columns from which there is room for bars
SPARKLINE_WIDTH = 30
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


class Row(NamedTuple):
    """One row of the picture; where the height is short, those of the highest rank go first."""

    rank: int
    text: Text


class RowLayout:
    """Lays labelled items out in rows of one width; rich wraps what is longer."""

    def __init__(self, width: int, ascii_only: bool) -> None:
        self.wide = width >= WIDE
        self._rows: list[Row] = []
        self._console = Console(width=width)
        self._ascii_only = ascii_only

    def blank(self) -> None:
        """An empty row, the first to go."""
        if self._rows and self._rows[-1].text:
            self._rows.append(Row(9, Text()))

    def flow(self, label: str, items: Sequence[str], *, rank: int, style: str = "") -> None:
        """Items beside each other, in as many rows as they need; the style is the first item's."""
        items = [clean(item) for item in items if item]
        gap = "   " if self.wide else "  "
        if items:
            self._add(label, Text.assemble((items[0], style), *(gap + item for item in items[1:])), rank)

    def wrap(self, label: str, words: str, *, rank: int, style: str) -> None:
        """A sentence in as many rows as it needs."""
        self._add(label, Text(clean(words), style), rank)

    def _add(self, label: str, text: Text, rank: int) -> None:
        """Rows that stand further back matter less: the rank rises from one to the next."""
        width = self._console.width
        head = Text(f"{clean(label)} ".ljust(LABEL_WIDTH), "dim")[: width // 3]
        for i, line in enumerate(text.wrap(self._console, width - len(head))):
            self._rows.append(Row(rank + i, (head if i == 0 else Text(" " * len(head))) + line))

    def bar(self, part: float | None, whole: float, length: int = 20) -> str:
        """How full something is; "" when that is not known."""
        if part is None:
            return ""
        fraction = min(1.0, part / whole)
        full, empty = ("#", ".") if self._ascii_only else ("█", "░")
        filled = round(length * fraction)
        return f"{full * filled}{empty * (length - filled)} {fraction:.0%}" if self.wide else f"{fraction:.0%}"

    def sparkline(self, values: Sequence[float]) -> str:
        """The course of the values from their lowest to their highest; "" for fewer than two."""
        length = min(len(values), SPARKLINE_WIDTH if self.wide else max(1, self._console.width - 2))
        if len(values) < 2:
            return ""
        blocks = ASCII_BLOCKS if self._ascii_only else BLOCKS
        means = []
        for i in range(length):
            bucket = values[i * len(values) // length : (i + 1) * len(values) // length]
            means.append(sum(bucket) / len(bucket))
        low, high = min(means), max(means)
        return "".join(blocks[round(7 * (mean - low) / (high - low or 1.0))] for mean in means)

    def picture(self, height: int) -> Group:
        """What has been laid out, without the least important rows where `height` is short."""
        order = sorted(range(len(self._rows)), key=lambda i: (self._rows[i].rank, i))
        return Group(*(self._rows[i].text for i in sorted(order[: max(1, height)])))
