"""Rows of labelled items for a terminal of any width, and numbers in few characters."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Group
from rich.text import Text

from apex.runtime.text import clean, known

LABEL_WIDTH = 12  # columns of the labels in a wide terminal
WIDE = 60  # columns from which labels have a column of their own
SPARKLINE_WIDTH = 30
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


class Row(NamedTuple):
    """One row of the picture; where the height is short, those of the highest rank go first."""

    rank: int
    text: Text


class RowLayout:
    """Lays labelled items out in rows of one width."""

    def __init__(self, width: int, ascii_only: bool) -> None:
        self.wide = width >= WIDE
        self._lines: list[Row] = []
        self._width = width
        self._ascii_only = ascii_only

    def blank(self) -> None:
        """An empty row, the first to go."""
        if self._lines and self._lines[-1].text.plain:
            self._add("", rank=9, style="")

    def flow(self, label: str, items: Sequence[str], *, rank: int, style: str = "") -> None:
        """Items beside each other, in as many rows as they need; the style is the first item's."""
        items = [clean(item) for item in items if item]
        if not items:
            return
        gap, indent = ("   ", LABEL_WIDTH) if self.wide else ("  ", 0)
        row = Text(self._head(label), style="dim").append(items[0], style=f"not dim {style}")
        for item in items[1:]:
            if len(row) + len(gap) + len(item) > self._width:
                self._append(row, rank)
                rank += 1  # What stands further back matters less.
                row = Text(" " * indent + item)
            else:
                row.append(gap + item, style="not dim")
        self._append(row, rank)

    def wrap(self, label: str, words: str, *, rank: int, style: str) -> None:
        """A sentence in as many rows as it needs."""
        head = self._head(label)
        rows = textwrap.wrap(head + clean(words), self._width, subsequent_indent=" " * (LABEL_WIDTH * self.wide))
        for i, row in enumerate(rows):
            text = Text(row, style=style)
            if i == 0:
                text.stylize("not bold dim", 0, len(head))
            self._append(text, rank)

    def bar(self, part: Any, whole: Any, length: int = 20) -> str:
        """How full something is; "" when that is not known."""
        part, whole = known(part), known(whole)
        if part is None or not whole:
            return ""
        fraction = min(1.0, max(0.0, part / whole))
        full, empty = ("#", ".") if self._ascii_only else ("█", "░")
        filled = round(length * fraction)
        return f"{full * filled}{empty * (length - filled)} {fraction:.0%}" if self.wide else f"{fraction:.0%}"

    def sparkline(self, values: Sequence[float]) -> str:
        """The course of the values from their lowest to their highest; "" for fewer than two."""
        length = min(len(values), SPARKLINE_WIDTH if self.wide else max(1, self._width - 2))
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
        surplus = max(0, len(self._lines) - max(1, height))
        order = sorted(range(len(self._lines)), key=lambda i: (-self._lines[i].rank, -i))
        dropped = set(order[:surplus])
        return Group(*(line.text for i, line in enumerate(self._lines) if i not in dropped))

    def _head(self, label: str) -> str:
        if self.wide:
            return clean(label).ljust(LABEL_WIDTH - 1) + " "
        return clean(label) + " " if label else ""

    def _add(self, words: str, *, rank: int, style: str) -> None:
        self._append(Text(words, style=style), rank)

    def _append(self, text: Text, rank: int) -> None:
        text.no_wrap, text.overflow = True, "crop" if self._ascii_only else "ellipsis"
        self._lines.append(Row(rank, text))
