"""Tables: which fields a step has, and what an item takes from the steps of its stream.

A step is stored once. Its fields with the codec "lz4" are compressed one by one; its fields with the codec "raw" share
one row. Each compressed field and the row are an *entry* of the step. Items refer to steps by their numbers and have
values of their own. Axes: M items, V views of an item, W steps of a view.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from apexreplay.errors import UsageError, require
from apexreplay.item_kinds import KINDS, Item, Single

FieldCodec = Literal["lz4", "raw"]

LZ4_BYTES = 256  # size from which on a field of integers is compressed by default
MAX_FIELD_BYTES = 1 << 28  # offsets in a message have 32 bits
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_TAKEN = {"key", "priority", "probability", "segment", "unused", "version", "num_frames"}


@dataclass(frozen=True, slots=True)
class Field:
    """An array of every step. `dtype` is a NumPy type string, little-endian: "|u1", "<i8", "<f4"."""

    dtype: str
    shape: tuple[int, ...] = ()
    codec: FieldCodec = "raw"

    @property
    def num_bytes(self) -> int:
        """Size of one array in bytes, not compressed."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    @classmethod
    def of(cls, declared: Any) -> Self:
        """Returns the field of a declaration: a dtype, (dtype, shape), (dtype, shape, codec), or a dictionary of these.

        Without a codec, integers of at least LZ4_BYTES bytes are compressed. Raises UsageError.
        """
        parts = [declared]
        if isinstance(declared, Mapping):
            unknown = sorted(set(declared) - {"dtype", "shape", "codec"})
            require(not unknown and "dtype" in declared, f"a field has dtype, shape and codec, got {dict(declared)}")
            parts = [
                declared["dtype"],
                declared.get("shape", ()),
                *([declared["codec"]] if "codec" in declared else []),
            ]
        elif isinstance(declared, tuple | list):
            parts = list(declared)
        require(1 <= len(parts) <= 3, f"a field is a dtype, (dtype, shape) or (dtype, shape, codec), got {declared!r}")
        dtype = _scalar(parts[0])
        shape = parts[1] if len(parts) > 1 else ()
        require(isinstance(shape, tuple | list), f"a shape is a list of integers, got {shape!r}")
        shape = tuple(shape)
        sized = all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 2**24 for n in shape)
        require(sized and len(shape) <= 8, f"a shape has at most 8 positive integers, got {shape}")
        whole = cls(dtype.str, shape)
        require(
            whole.num_bytes <= MAX_FIELD_BYTES, f"a field has at most {MAX_FIELD_BYTES} bytes, got {whole.num_bytes}"
        )
        large = dtype.kind in "iu" and whole.num_bytes >= LZ4_BYTES
        codec: Any = parts[2] if len(parts) > 2 else "lz4" if large else "raw"
        require(codec in ("lz4", "raw"), f"a codec is lz4 or raw, got {codec!r}")
        return cls(dtype.str, shape, codec)


def _scalar(declared: Any) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(declared).newbyteorder("<")
    except TypeError as error:
        raise UsageError(f"{declared!r} is not a dtype of NumPy") from error
    is_plain = dtype.kind in "iuf" and dtype.itemsize <= 8
    require(
        is_plain, f"a dtype is an integer or a float of at most 64 bits, got {declared!r}", remedy="use uint8 for bool"
    )
    return dtype


class Entry(NamedTuple):
    """What each step has in the blob: one compressed field, or the row of all raw fields."""

    names: tuple[str, ...]
    dtype: np.dtype[Any]  # of a value of the field; of the row, with a field for each name
    shape: tuple[int, ...]
    codec: FieldCodec

    @property
    def num_bytes(self) -> int:
        """Size in bytes, not compressed."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def max_bytes(self) -> int:
        """Maximum size in the blob in bytes; for lz4, the bound that LZ4 guarantees."""
        return self.num_bytes + self.num_bytes // 255 + 16 if self.codec == "lz4" else self.num_bytes


@dataclass(frozen=True)
class Table:
    """The declaration of a table. Use `table` to make one: it checks the names and accepts short forms."""

    name: str
    steps: tuple[tuple[str, Field], ...]
    item: Item
    values: tuple[tuple[str, Field], ...]  # fields of an item, in its record; always raw
    kept: tuple[str, ...] = ()  # values that are stored, but not drawn
    description: str = ""  # what the dtypes do not say; tables with another description are other tables

    def to_dict(self) -> dict[str, Any]:
        """Returns the declaration as a dictionary that can be written as JSON."""
        return {
            "name": self.name,
            "steps": {name: asdict(field) for name, field in self.steps},
            "item": {"kind": self.item.kind, **asdict(self.item)},
            "values": {name: asdict(field) for name, field in self.values},
            "kept": list(self.kept),
            "description": self.description,
        }

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> "Table":
        """Returns the table from a result of `to_dict` or its JSON. Raises UsageError."""
        try:
            item = dict(saved["item"])
            return table(
                saved["name"],
                saved["steps"],
                item=KINDS[item.pop("kind")](**item),
                values=saved["values"],
                kept=tuple(saved["kept"]),
                description=saved["description"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"not the declaration of a table: {error}") from error

    @cached_property
    def fingerprint(self) -> int:
        """The first 32 bits of the declaration's SHA-256. Every message header contains this number."""
        text = json.dumps(self.to_dict(), separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The entries of each step, in their order in the blob: the row of the raw fields is the last."""
        raw = [(name, field) for name, field in self.steps if field.codec == "raw"]
        entries = [
            Entry((name,), np.dtype(field.dtype), field.shape, "lz4")
            for name, field in self.steps
            if field.codec == "lz4"
        ]
        if len(raw) == 1:
            ((name, field),) = raw
            entries.append(Entry((name,), np.dtype(field.dtype), field.shape, "raw"))
        elif raw:
            row = np.dtype([(name, field.dtype, field.shape) for name, field in raw])
            entries.append(Entry(tuple(name for name, _ in raw), row, (), "raw"))
        return tuple(entries)

    @cached_property
    def max_entry_bytes(self) -> int:
        """Maximum size of one entry in the blob, in bytes."""
        return max(entry.max_bytes for entry in self.entries)

    @cached_property
    def max_step_bytes(self) -> int:
        """Maximum size of one step in the blob in bytes, with the offsets of its entries."""
        return sum(entry.max_bytes + 4 for entry in self.entries)

    @cached_property
    def record(self) -> np.dtype[Any]:
        """The dtype of one item in a segment. References count the steps of the segment, from 0.

        `priority` is the item's first priority, before the exponent.
        """
        return np.dtype([("priority", "<f4"), *_fields(self.values), *self._references])

    @cached_property
    def batch_record(self) -> np.dtype[Any]:
        """The dtype of one item of a batch. References count from the item's first step, and its steps are adjacent.

        `num_frames`: steps of the item. `probability`: P(i) = leaf / root of the sum-tree when the item was drawn,
        divided by the number of shards. `version`: that of the item's segment.
        """
        drawn = [(name, field) for name, field in self.values if name not in self.kept]
        head = [("key", "<i8"), ("probability", "<f8"), *_fields(drawn), ("version", "<u4"), ("num_frames", "<u2")]
        return padded([*head, *self._references])

    @property
    def _references(self) -> list[Any]:
        depth = "<u2" if self.item.kind == "sequence" else "u1"
        return [*((name, "<u2") for name in self.item.positions), *((name, depth) for name in self.item.depths)]

    @cached_property
    def floats(self) -> tuple[str, ...]:
        """The names of the values that are floats, and of the priority."""
        return ("priority", *(name for name, field in self.values if np.dtype(field.dtype).kind == "f"))

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """The fields of `batch_record` that are equal in the stored record."""
        values = [name for name, _ in self.values if name not in self.kept]
        return ("key", "version", *values, *self.item.depths)


def padded(record: list[Any]) -> np.dtype[Any]:
    """Returns the dtype of the fields, padded to a multiple of 8 bytes for alignment by a field `unused`, always 0."""
    return np.dtype([*record, ("unused", "u1", (-np.dtype(record).itemsize % 8,))])


def _fields(values: Any) -> list[Any]:
    return [(name, field.dtype, field.shape) for name, field in values]


def table(
    name: str,
    steps: Mapping[str, Any],
    *,
    item: Item | None = None,
    values: Mapping[str, Any] | None = None,
    kept: tuple[str, ...] = (),
    description: str = "",
) -> Table:
    """Declares a table.

    `steps`: the fields of a step by name, each a dtype, (dtype, shape), (dtype, shape, codec) or a dictionary of these.
    `item`: what an item refers to, `Single()`, `Window(stack, span)` or `Sequence(length, period)`; None: one step.
    `values`: fields of an item that do not belong to one step, such as an n-step return, or a recurrent state at the
    start of a sequence; declared as those of steps.

    `kept`: names of values that are stored, but not sent in batches. `description`: what the dtypes do not say, such as
    the meaning of actions. Raises UsageError.
    """
    item = item or Single()
    for kind, declared in (("steps", steps), ("values", values or {})):
        require(isinstance(declared, Mapping), f"the {kind} of {name} must be fields by name, got {declared!r}")
    fields = [*steps, *(values or {})]
    for each in (name, *fields):
        require(_NAME.fullmatch(str(each)) is not None, f"a name has 1 to 40 of a-z, 0-9 and _, got {each!r}")
    names = [*fields, *(f"next_{each}" for each in steps if item.kind == "window")]
    twice = sorted({each for each in names if names.count(each) > 1})
    require(not twice, f"a batch would have two arrays with the name {', '.join(twice)}", remedy="rename a field")
    taken = sorted((_TAKEN | {*item.positions, *item.depths}) & set(values or {}))
    require(not taken, f"these names of values are taken: {', '.join(taken)}")
    require(len(steps) > 0, f"table {name!r} has no field of steps")
    unknown = sorted(set(kept) - set(values or {}))
    require(not unknown, f"`kept` names no values: {', '.join(unknown)}")
    raw = {key: _field(f"{name}.{key}", declared) for key, declared in (values or {}).items()}
    return Table(
        name,
        tuple((key, _field(f"{name}.{key}", declared)) for key, declared in steps.items()),
        item,
        tuple((key, Field(field.dtype, field.shape, "raw")) for key, field in raw.items()),
        tuple(kept),
        description,
    )


def _field(name: str, declared: Any) -> Field:
    try:
        return Field.of(declared)
    except UsageError as error:
        raise UsageError(f"{name}: {error.problem}", error.remedy) from error
