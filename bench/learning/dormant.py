"""The third table: how many units of Ape-X's networks are dormant, by the number of updates."""

from collections.abc import Sequence

from bench.learning.comparison import values_of_seeds
from bench.learning.records import Record
from bench.learning.tasks import SYSTEMS, TASKS

UPDATES = (8_000, 16_000, 32_000)
CAPTION = "Percentage of dormant units in the layer that has most of them, by number of updates:"
COLUMNS = (
    *("task", "system", "seeds", "score of the final policy"),
    *(f"at {count:,}" for count in UPDATES),
    *("at the last multiple of 8,000", "highest from 8,000 on"),
)


def render_dormant(records: Sequence[Record]) -> str:
    """Returns the table, or "" if no record has shares of dormant units."""
    known = [record for record in records if record.dormant_shares]
    groups = [
        [record for record in known if (record.task, record.system) == (task, system)]
        for task in TASKS
        for system in SYSTEMS
    ]
    rows = [_row(sorted(group, key=lambda record: record.seed)) for group in groups if group]
    return "\n".join([CAPTION, "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows]) if rows else ""


def _row(seeds: Sequence[Record]) -> str:
    shares = [{name: 100 * share for name, share in (record.dormant_shares or {}).items()} for record in seeds]
    last = [str(max(int(name) for name in each if name != "highest")) for each in shares]
    cells = [
        TASKS[seeds[0].task].name,
        SYSTEMS[seeds[0].system],
        ", ".join(str(record.seed) for record in seeds),
        values_of_seeds([record.final_score.mean if record.final_score else None for record in seeds]),
        *(values_of_seeds([each.get(str(count)) for each in shares]) for count in UPDATES),
        values_of_seeds([each[name] for each, name in zip(shares, last, strict=True)]),
        values_of_seeds([each["highest"] for each in shares]),
    ]
    return f"| {' | '.join(cells)} |"
