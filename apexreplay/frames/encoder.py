"""Encodes steps into the entries of a blob, and gives names to the arrays into which batches are decoded."""

from collections.abc import Callable, Mapping
from typing import Any

import cramjam
import numpy as np

from apexreplay.errors import UsageError, require
from apexreplay.item_kinds import Array
from apexreplay.tables import Entry, FieldCodec, Table


def _lz4(array: Array) -> bytes:
    flat = array if array.ndim else array.reshape(1)  # cramjam takes no array without dimensions.
    return bytes(cramjam.lz4.compress_block(flat.data, store_size=False))  # The table defines the length.


COMPRESS: dict[FieldCodec, Callable[[Array], bytes]] = {"lz4": _lz4, "raw": np.ndarray.tobytes}  # C-contiguous -> bytes


class StepEncoder:
    """Encodes the steps of a table."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._names = {name for name, _ in table.steps}

    def encode(self, step: Mapping[str, Any]) -> list[bytes]:
        """Returns the entries of a step. `step`: an array, or a number, for each field.

        Raises UsageError if a field is missing or unknown, or has another shape, a dtype that cannot be converted
        without loss of kind, or a float that is not finite.
        """
        if not isinstance(step, Mapping) or step.keys() != self._names:
            raise UsageError(f"a step of {self._table.name!r} has the fields {sorted(self._names)}, got {_names(step)}")
        return [COMPRESS[entry.codec](self._array(entry, step)) for entry in self._table.entries]

    def _array(self, entry: Entry, step: Mapping[str, Any]) -> Array:
        if entry.dtype.fields is None:
            (name,) = entry.names
            return _convert(name, step[name], entry.dtype, entry.shape)
        row = np.zeros((), entry.dtype)
        for name in entry.names:
            field = entry.dtype[name]
            row[name] = _convert(name, step[name], field.base, field.shape)
        return row


def fill_values(table: Table, record: Array, values: Mapping[str, Any]) -> None:
    """Sets the values of an item in its record. Raises UsageError as `StepEncoder.encode` does."""
    names = [name for name, _ in table.values]
    fits = isinstance(values, Mapping) and values.keys() == set(names)
    require(fits, f"an item of {table.name!r} has the values {names}, got {_names(values)}")
    for name, field in table.values:
        record[name] = _convert(name, values[name], np.dtype(field.dtype), field.shape)


def _names(fields: Any) -> str:
    return str(sorted(map(str, fields))) if isinstance(fields, Mapping) else f"a {type(fields).__name__}"


def _convert(name: str, value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"`{name}` must be {dtype}{list(shape)}: {error}") from error
    fits, is_same = array.shape == shape, array.dtype == dtype
    if fits and not is_same:
        fits = np.can_cast(array.dtype, dtype, "same_kind")
    if array.dtype.kind in "iub" and dtype.kind in "iu" and array.shape == shape and not is_same:
        limits = np.iinfo(dtype)
        fits = bool(((array >= limits.min) & (array <= limits.max)).all())  # Python's integers are int64.
    if not fits:  # `require` would make the sentence for each array that fits, too, which takes as long as the rest.
        raise UsageError(f"`{name}` must be {dtype}{list(shape)}, got {array.dtype}{list(array.shape)}")
    with np.errstate(over="ignore"):  # The check below refuses what has become infinite.
        converted = np.ascontiguousarray(array, dtype)
    if dtype.kind == "f" and not np.isfinite(converted).all():
        raise UsageError(f"`{name}` has a value that is not finite in {dtype}")
    return converted.reshape(shape)


def make_targets(table: Table, batch_size: int) -> list[Array]:
    """Returns arrays for `StackDecoder`: for each entry, dtype[V, B, W, *shape]."""
    views = len(table.item.positions), batch_size, table.item.width
    return [np.zeros((*views, *entry.shape), entry.dtype) for entry in table.entries]


def name_arrays(table: Table, targets: list[Array]) -> dict[str, Array]:
    """Returns the decoded fields by name: `NAME` [B, *shape] of single steps; `NAME` [B, W, *shape] of sequences, the
    oldest step first; `NAME` and `next_NAME` [B, W, *shape] of windows, the newest step last."""
    arrays: dict[str, Array] = {}
    for entry, target in zip(table.entries, targets, strict=True):
        for name in entry.names:
            # A copy of fields that are stored together: torch takes only strides that are multiples of an item.
            field = target if entry.dtype.fields is None else np.ascontiguousarray(target[name])
            if table.item.kind == "step":
                arrays[name] = field[0, :, 0]
            elif table.item.kind == "sequence":
                arrays[name] = field[0]
            else:
                arrays[name], arrays[f"next_{name}"] = field
    return arrays
