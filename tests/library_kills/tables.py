"""A table of each kind. Every step and every item has the number of its writer and a counter, so that each is known."""

import numpy as np

from apexreplay.client.writer import Writer
from apexreplay.item_kinds import Sequence, Window
from apexreplay.tables import Table, table

KINDS: dict[str, Table] = {
    "steps": table("steps", {"writer": "int32", "counter": "int64"}),
    "dictionary": table(
        "dictionary",
        {"image": ("uint8", (16, 16)), "goal": ("float32", (2,)), "writer": "int32", "counter": "int64"},
        values={"mark": "int64"},
    ),
    "windows": table(
        "windows",
        {"image": ("uint8", (8, 8), "lz4"), "writer": "int32", "counter": "int64"},
        item=Window(3, 2),
        values={"writer_id": "int32", "number": "int64"},
    ),
    "sequences": table(
        "sequences",
        {"image": ("uint8", (8, 8), "lz4"), "writer": "int32", "counter": "int64"},
        item=Sequence(5),
        values={"writer_id": "int32", "number": "int64"},
    ),
    "queue": table("queue", {"writer": "int32", "counter": "int64"}),
}
TOML = {
    "steps": 'steps = { writer = "int32", counter = "int64" }\n',
    "dictionary": "steps.image = ['uint8', [16, 16]]\nsteps.goal = ['float32', [2]]\nsteps.writer = 'int32'\n"
    "steps.counter = 'int64'\nvalues.mark = 'int64'\n",
    "windows": "steps.image = ['uint8', [8, 8], 'lz4']\nsteps.writer = 'int32'\nsteps.counter = 'int64'\n"
    "values.writer_id = 'int32'\nvalues.number = 'int64'\nitem = { kind = 'window', stack = 3, span = 2 }\n",
    "sequences": "steps.image = ['uint8', [8, 8], 'lz4']\nsteps.writer = 'int32'\nsteps.counter = 'int64'\n"
    "values.writer_id = 'int32'\nvalues.number = 'int64'\nitem = { kind = 'sequence', length = 5 }\n",
    "queue": 'order = "queue"\nsteps = { writer = "int32", counter = "int64" }\n',
}
EPISODE = 50  # items of an episode; windows have one more step, the first


def append(writer: Writer, writer_id: int, counter: int) -> None:
    """Appends item `counter` of a writer."""
    step = {"writer": writer_id, "counter": counter}
    kind = writer.table.name
    if kind in ("steps", "queue"):
        writer.append(step)
    elif kind == "dictionary":
        image, goal = np.full((16, 16), counter % 251, np.uint8), np.full(2, counter % 1_000, np.float32)
        writer.append({**step, "image": image, "goal": goal}, values={"mark": -counter})
    else:
        image = np.full((8, 8), counter % 251, np.uint8)
        if counter % EPISODE == 0:
            writer.end_episode()
            if kind == "windows":
                writer.append({**step, "counter": -1, "image": image})
        writer.append({**step, "image": image})
        writer.add_item(values={"writer_id": writer_id, "number": counter})


def identify(declared: Table, fields: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the writer and the counter of each item. Raises AssertionError if an item has other contents."""
    if declared.name == "windows":
        writer, counter = fields["writer_id"], fields["number"]
        place = counter % EPISODE
        assert (fields["next_writer"][:, -1] == writer).all()
        assert (fields["next_counter"][:, -1] == counter).all()
        assert (fields["next_image"][:, -1, 0, 0] == counter % 251).all()
        assert (fields["counter"][:, -1] == np.where(place == 0, -1, counter - 1)).all()
        assert (fields["counter"][place > 2][:, 0] == counter[place > 2] - 3).all()
        assert (fields["image"][place < 2][:, 0] == 0).all()  # before the episode
        return writer, counter
    if declared.name == "sequences":
        writer, counter = fields["writer_id"], fields["number"]
        length = np.minimum(counter % EPISODE + 1, 5)[:, None]
        is_real, steps = np.arange(5) < length, counter[:, None] + 1 - length + np.arange(5)
        assert (fields["counter"] == np.where(is_real, steps, 0)).all()
        assert (fields["writer"] == np.where(is_real, writer[:, None], 0)).all()
        assert (fields["image"] == np.where(is_real, steps % 251, 0)[:, :, None, None]).all()
        return writer, counter
    writer, counter = fields["writer"], fields["counter"]
    if declared.name == "dictionary":
        assert (fields["image"] == (counter % 251)[:, None, None]).all()
        assert (fields["goal"] == (counter % 1_000)[:, None]).all()
        assert (fields["mark"] == -counter).all()
    return writer, counter
