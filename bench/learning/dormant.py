"""A table of dormant units: how many Ape-X's networks have, by the number of updates."""

from collections.abc import Sequence

from bench.learning.comparison import values_of_seeds
from bench.learning.records import Record
from bench.learning.tasks import SYSTEMS

CAPTION = "Percentage of dormant units in the layer that has most of them, by number of updates: mean (each seed):"
COLUMNS = ("system", "8,000", "16,000", "last multiple of 8,000", "highest from 8,000 on")


def render_dormant(records: Sequence[Record]) -> str:
    """Returns the table, or "" if no record has shares of dormant units. records: those of one task."""
    known = [record for record in records if record.dormant_shares]
    groups = [[record for record in known if record.system == system] for system in SYSTEMS]
    rows = [_row(sorted(group, key=lambda record: record.seed)) for group in groups if group]
    return "\n".join([CAPTION, "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows]) if rows else ""


def _row(seeds: Sequence[Record]) -> str:
    shares = [{name: 100 * share for name, share in (record.dormant_shares or {}).items()} for record in seeds]
    last = [str(max(int(name) for name in each if name != "highest")) for each in shares]
    cells = [
        SYSTEMS[seeds[0].system],
        *(values_of_seeds([each.get(count) for each in shares]) for count in ("8000", "16000")),
        values_of_seeds([each[name] for each, name in zip(shares, last, strict=True)]),
        values_of_seeds([each["highest"] for each in shares]),
    ]
    return f"| {' | '.join(cells)} |"
