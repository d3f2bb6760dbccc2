"""What simulated writers send: the content of segments, with what a draw of each item must return."""

from typing import Any, NamedTuple

import numpy as np
from support.builders import VECTORS, make_records
from support.tables import Twin

from apexreplay.frame_blob import table_bytes
from apexreplay.item_kinds import Sequence, Window
from apexreplay.tables import Table, table

MAX_RECORDS = 8  # items in a segment
FRAME_BYTES = 16
PRIORITIES = [0.0, 0.5, 1.0, 3.0, 2e6]  # the first and the last are outside the limits of stored priorities
LABEL = {"label": "int64"}  # each item has the number of its segment
TABLES = {
    "steps": table("steps", {"x": ("float32", (4,))}, values=LABEL),
    "dictionary": table(
        "dictionary",
        {"image": ("uint8", (6, 6), "lz4"), "hint": ("uint16", (5,), "lz4"), "goal": ("float64", (2,)), "age": "int8"},
        values={**LABEL, "score": "float32", "id": "int32"},
        kept=("id",),
    ),
    "stacks": table("stacks", {"image": ("uint8", (6, 6), "lz4")}, item=Window(4, 3), values=LABEL),
    "windows": table(
        "windows",
        {"image": ("uint8", (5, 5), "lz4"), "speed": ("float32", (2,))},
        item=Window(3, 2),
        values={**LABEL, "action": ("float32", (2,))},
    ),
    "sequences": table(
        "sequences",
        {"image": ("uint8", (5, 5), "lz4"), "speed": ("float32", (2,))},
        item=Sequence(5, 2),
        values={**LABEL, "state": ("float32", (2,))},
    ),
    "queue": table("queue", {"x": ("float32", (4,))}, values=LABEL),
}
_BASE = [make_records(VECTORS, count) for count in range(MAX_RECORDS + 1)]
_OFFSETS = [
    (table_bytes(count + 1) + FRAME_BYTES * np.arange(count + 2, dtype="<u4")).astype("<u4").tobytes()
    for count in range(MAX_RECORDS + 1)
]


class Content(NamedTuple):
    """The content of a segment, which contains its label in every record."""

    records: np.ndarray
    blob: bytes
    items: list[dict[str, Any]]  # what a draw of each item returns, by name


def label_of(declared: Table) -> str:
    """Returns the value that has the label."""
    return "n_step_return" if declared is VECTORS.table else "label"


class Transitions:
    """A stream of the trainer's transitions. The label is in every frame, too."""

    def make(self, label, count):
        records = _BASE[count].copy()
        records["n_step_return"] = label
        values = (16 * label + np.arange(count + 1)).astype("<f4")  # exact below 2**24
        frames = np.repeat(values, FRAME_BYTES // 4).reshape(-1, 1, FRAME_BYTES // 4)
        names = [name for name, _ in VECTORS.table.values if name not in VECTORS.table.kept]
        items = [
            {"observation": frames[index], "next_observation": frames[index + 1]}
            | {name: record[name] for name in names}
            for index, record in enumerate(records)
        ]
        return Content(records, _OFFSETS[count] + frames.tobytes(), items)


class Steps(Twin):
    """A stream of a table of the library."""

    def make(self, label, count):
        first = len(self.items)
        while len(self.items) < first + count:
            priority = self.rng.choice(PRIORITIES)
            self.step(priority, label=label)
            self.item(priority, label=label)
            if len(self.items) < first + count and self.rng.random() < 0.1:
                self.end()
        cut, items = self.buffer.cut(), self.items[first:]
        cut.records["label"] = label  # A sequence may have begun before this segment.
        return Content(cut.records, cut.blob, [item | {"label": label} for item in items])
