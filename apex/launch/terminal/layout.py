"""Lays out rows of labelled items, bars and sparklines for a terminal of any width."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console, Group
from rich.text import Text

from apexreplay.process.text import clean

LABEL_WIDTH = 12  # columns of the labels in a wide terminal
WIDE = 60  # minimum columns of a terminal for bars and wide gaps
SPARKLINE_WIDTH = 30
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


class Row(NamedTuple):
    """One row of the dashboard. If the terminal is too low, rows with the highest rank are dropped first."""

    rank: int
    text: Text


class RowLayout:
    """Lays out labelled items in rows of one width; wraps longer texts."""

    def __init__(self, width: int, ascii_only: bool) -> None:
        self.wide = width >= WIDE
        self._rows: list[Row] = []
        self._console = Console(width=width)
        self._ascii_only = ascii_only

    def blank(self) -> None:
        """Adds an empty row, which is dropped first."""
        if self._rows and self._rows[-1].text:
            self._rows.append(Row(9, Text()))

    def flow(self, label: str, items: Sequence[str], *, rank: int, style: str = "") -> None:
        """Adds items side by side; begins a row before an item that does not fit. `style` is that of the first item."""
        gap = "   " if self.wide else "  "
        lines: list[Text] = []
        for item in (clean(item) for item in items if item):
            if lines and len(lines[-1]) + len(gap) + len(item) <= self._console.width - len(self._head(label)):
                lines[-1].append(gap + item)
            else:
                lines.append(Text(item, "" if lines else style))
        if lines:
            self._add(label, Text("\n").join(lines), rank)

    def wrap(self, label: str, text: str, *, rank: int, style: str) -> None:
        """Adds a sentence in as many rows as it needs; "" adds none."""
        if text:
            self._add(label, Text(clean(text), style), rank)

    def _add(self, label: str, text: Text, rank: int) -> None:
        """Adds the rows of one label. The rank rises from row to row, so that the last row is dropped first."""
        head = self._head(label)
        for i, line in enumerate(text.wrap(self._console, self._console.width - len(head))):
            self._rows.append(Row(rank + i, (head if i == 0 else Text(" " * len(head))) + line))

    def _head(self, label: str) -> Text:
        return Text(f"{clean(label)} ".ljust(LABEL_WIDTH), "dim")[: self._console.width // 3]

    def bar(self, part: float | None, whole: float, length: int = 20) -> str:
        """Returns a bar and a percentage of `part` in `whole`; "" if `part` is None."""
        if part is None:
            return ""
        fraction = min(1.0, part / whole)
        full, empty = ("#", ".") if self._ascii_only else ("█", "░")
        filled = round(length * fraction)
        return f"{full * filled}{empty * (length - filled)} {fraction:.0%}" if self.wide else f"{fraction:.0%}"

    def sparkline(self, values: Sequence[float]) -> str:
        """Returns the values as a row of blocks, scaled from lowest to highest; "" for fewer than two values."""
        length = min(len(values), SPARKLINE_WIDTH if self.wide else max(1, self._console.width - 2))
        if len(values) < 2:
            return ""
        blocks = ASCII_BLOCKS if self._ascii_only else BLOCKS
        buckets = (values[i * len(values) // length : (i + 1) * len(values) // length] for i in range(length))
        means = [sum(bucket) / len(bucket) for bucket in buckets]
        low, high = min(means), max(means)
        return "".join(blocks[round(7 * (mean - low) / (high - low or 1.0))] for mean in means)

    def picture(self, height: int) -> Group:
        """Returns the `height` most important rows in their order."""
        order = sorted(range(len(self._rows)), key=lambda i: (self._rows[i].rank, i))
        return Group(*(self._rows[i].text for i in sorted(order[: max(1, height)])))
