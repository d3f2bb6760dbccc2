"""Tables of each kind, and a stream whose steps and items are kept as plain arrays."""

import numpy as np

from apexreplay.client.segment_buffer import SegmentBuffer
from apexreplay.client.writer import Writer
from apexreplay.item_kinds import Single, Window
from apexreplay.tables import Table, table

TABLES = {
    "one raw field": table("t", {"x": ("float32", (3,))}),
    "one image": table("t", {"image": ("uint8", (20, 16))}),
    "image and numbers": table("t", {"image": ("uint8", (20, 16)), "action": "int64", "reward": "float32"}),
    "a dictionary": table(
        "t",
        {"rgb": ("uint8", (8, 8, 3), "lz4"), "goal": ("float64", (2,)), "hint": ("uint16", (300,)), "done": "uint8"},
        values={"score": "float32", "id": "int32", "mask": ("uint8", (3,))},
        kept=("id",),
    ),
    "windows of an image": table("t", {"image": ("uint8", (20, 16))}, item=Window(4, 3), values={"n_step": "float32"}),
    "windows of a dictionary": table(
        "t",
        {"rgb": ("uint8", (8, 8, 3), "lz4"), "depth_map": ("uint16", (200,)), "goal": ("float32", (2,)), "k": "int8"},
        item=Window(3, 5),
        values={"n_step": "float32", "action": ("float32", (2,))},
    ),
    "windows of raw fields": table("t", {"x": ("float32", (3,)), "y": "int64"}, item=Window(2, 1)),
}


def draw_field(rng, field):
    dtype = np.dtype(field.dtype)
    return (rng.normal(size=field.shape) if dtype.kind == "f" else rng.integers(0, 100, field.shape)).astype(dtype)


class WriterBuffer:
    """Gives a writer the calls of a buffer of segments."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self._step = writer, {}
        self._is_single = isinstance(writer.table.item, Single)
        self.end_episode = writer.end_episode

    def append(self, step):
        self._step = step
        if not self._is_single:
            self._writer.append(step)

    def add_item(self, priority, values, **frames):
        if self._is_single:
            self._writer.append(self._step, priority, values)
        else:
            self._writer.add_item(priority, values, **frames)


class Twin:
    """A stream whose steps and items are kept as plain arrays."""

    def __init__(self, declared: Table, seed: int, writer: Writer | None = None) -> None:
        """The items go to a buffer of segments, or to `writer`."""
        self.table, self.rng = declared, np.random.default_rng(seed)
        self.buffer = SegmentBuffer(declared) if writer is None else WriterBuffer(writer)
        self.steps: list[dict] = []
        self.ages: list[int] = []
        self.items: list[dict] = []  # by key: what a draw must return
        self.age = 0

    def step(self):
        step = {name: draw_field(self.rng, field) for name, field in self.table.steps}
        self.buffer.append(step)
        self.steps.append(step)
        self.ages.append(self.age)
        self.age += 1

    def end(self):
        self.buffer.end_episode()
        self.age = 0

    def fill(self, num_items):
        """Appends steps with items, in episodes of random length."""
        while len(self.items) < num_items:
            self.step()
            self.item()
            if self.rng.random() < 0.1:
                self.end()

    def item(self, priority=1.0, **values):
        """Adds an item of the newest step, or of any two steps that a window may have. Other values are drawn."""
        values = {name: draw_field(self.rng, field) for name, field in self.table.values} | values
        expected = {name: value for name, value in values.items() if name not in self.table.kept}
        if isinstance(self.table.item, Single):
            self.buffer.add_item(priority, values)
            self.items.append(expected | self.steps[-1])
            return
        span = int(self.rng.integers(1, self.table.item.span + 1))
        if self.ages[-1] < span:
            return
        self.buffer.add_item(priority, values, frame=-1 - span, next_frame=-1)
        for name, field in self.table.steps:
            for prefix, newest in (("", len(self.steps) - 1 - span), ("next_", len(self.steps) - 1)):
                stack = np.zeros((self.table.item.stack, *field.shape), field.dtype)
                for back in range(min(self.table.item.stack, self.ages[newest] + 1)):
                    stack[-1 - back] = self.steps[newest - back][name]
                expected[prefix + name] = stack
        self.items.append(expected)

    def check(self, keys, named):
        """Compares drawn items with the appended ones. `named`: arrays by name, with the axis of the items first."""
        for index, key in enumerate(np.asarray(keys).tolist()):
            for field, expected in self.items[key].items():
                np.testing.assert_array_equal(named[field][index], expected, err_msg=f"{field} of {key}")
                assert named[field].dtype == expected.dtype
