"""The table that compares runs with several seeds."""

from collections.abc import Sequence
from statistics import median


def make_table(title: str, seeds: Sequence[int], columns: dict[str, list[float]]) -> list[str]:
    """Returns a table in Markdown: a row for each seed, and the median, lowest and highest value of each column."""
    rows = [(f"seed {seed}", row) for seed, row in zip(seeds, zip(*columns.values(), strict=True), strict=True)]
    rows += [
        (name, tuple(map(of, columns.values()))) for name, of in (("median", median), ("lowest", min), ("highest", max))
    ]
    lines = [
        [title, *columns],
        ["---"] * (1 + len(columns)),
        *([name, *(f"{x:.4g}" for x in row)] for name, row in rows),
    ]
    return [f"| {' | '.join(line)} |" for line in lines]
