"""Tables of each kind, and a stream whose steps and items are kept as plain arrays."""

import numpy as np

from apexreplay.client.segment_buffer import SegmentBuffer
from apexreplay.client.writer import Writer
from apexreplay.item_kinds import Sequence, Single, Window
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
    "sequences of an image": table("t", {"image": ("uint8", (20, 16))}, item=Sequence(7), values={"score": "float32"}),
    "overlapping sequences": table(
        "t",
        {"image": ("uint8", (8, 8, 4), "lz4"), "action": "int64", "reward": "float32"},
        item=Sequence(6, 2),
        values={"state": ("float32", (3,))},
    ),
    "sequences side by side": table("t", {"x": ("float32", (3,))}, item=Sequence(5, 5)),
}


def draw_field(rng, field):
    dtype = np.dtype(field.dtype)
    return (rng.normal(size=field.shape) if dtype.kind == "f" else rng.integers(0, 100, field.shape)).astype(dtype)


class Twin:
    """A stream whose steps and items are kept as plain arrays."""

    def __init__(self, declared: Table, seed: int, writer: Writer | None = None) -> None:
        """The items go to a buffer of segments, or to `writer`."""
        self.table, self.rng = declared, np.random.default_rng(seed)
        self.buffer = SegmentBuffer(declared) if writer is None else writer
        self.steps: list[dict] = []
        self.ages: list[int] = []
        self.items: list[dict] = []  # by key: what a draw must return
        self.begun: list[tuple[int, dict]] = []  # first step and values of items that the buffer makes by itself
        self.covered = 0  # end of the steps that are in such an item
        self.age = 0

    def step(self, priority=1.0, **given):
        """Appends a step with the values of the item that begins with it, if there is one."""
        step, item = {name: draw_field(self.rng, field) for name, field in self.table.steps}, self.table.item
        period = 1 if isinstance(item, Single) else item.period if isinstance(item, Sequence) else 0
        values = self.draw_values() | given if period and self.age % period == 0 else None
        self.buffer.append(step, priority, values)
        self.steps.append(step)
        self.ages.append(self.age)
        if values is not None:
            self.begun.append((len(self.steps) - 1, values))
        if self.begun and len(self.steps) - self.begun[0][0] == item.width:
            self.complete(len(self.steps))
        self.age += 1

    def end(self):
        self.buffer.end_episode()
        if self.begun and self.covered < len(self.steps):
            self.complete(len(self.steps))
        self.begun, self.age = [], 0

    def complete(self, stop):
        """Expects the item that began first, with the steps below `stop`."""
        (first, values), *self.begun = self.begun
        self.expect(values, {"": (first, stop)})
        self.covered = stop

    def draw_values(self):
        return {name: draw_field(self.rng, field) for name, field in self.table.values}

    def fill(self, num_items):
        """Appends steps with items, in episodes of random length."""
        while len(self.items) < num_items:
            self.step()
            self.item()
            if len(self.items) < num_items and self.rng.random() < 0.1:
                self.end()

    def item(self, priority=1.0, **values):
        """Adds an item of any steps that it may have, unless the buffer makes the items by itself.

        Values that are not given are drawn.
        """
        item, values, stop = self.table.item, self.draw_values() | values, len(self.steps)
        if isinstance(item, Single) or (isinstance(item, Sequence) and item.period):
            return
        if isinstance(item, Window):
            span = int(self.rng.integers(1, item.span + 1))
            if self.ages[-1] < span:
                return
            self.buffer.add_item(priority, values, frame=-1 - span, next_frame=-1)
            views = {
                prefix: (max(last - item.stack, last - 1 - self.ages[last - 1]), last)
                for prefix, last in (("", stop - span), ("next_", stop))
            }
        else:
            back = int(self.rng.integers(0, min(self.ages[-1] + 1, 2)))
            num_steps = int(self.rng.integers(1, min(item.length - back, self.ages[-1 - back] + 1) + 1))
            self.buffer.add_item(priority, values, frame=-1 - back, num_steps=num_steps)
            views = {"": (stop - back - num_steps, stop - back)}
        self.expect(values, views)

    def expect(self, values, views):
        """Expects an item. `views`: first step and end of each of its arrays, by the prefix of their names."""
        expected = {name: value for name, value in values.items() if name not in self.table.kept}
        for prefix, (first, stop) in views.items():
            for name, field in self.table.steps:
                steps = [step[name] for step in self.steps[first:stop]]
                if isinstance(self.table.item, Single):
                    expected[name] = steps[0]
                    continue
                zeros = [np.zeros(field.shape, field.dtype)] * (self.table.item.width - len(steps))
                expected[prefix + name] = np.stack(
                    zeros + steps if isinstance(self.table.item, Window) else steps + zeros
                )
        self.items.append(expected)

    def check(self, keys, named):
        """Compares drawn items with the appended ones. `named`: arrays by name, with the axis of the items first."""
        for index, key in enumerate(np.asarray(keys).tolist()):
            for field, expected in self.items[key].items():
                np.testing.assert_array_equal(named[field][index], expected, err_msg=f"{field} of {key}")
                assert named[field].dtype == expected.dtype
