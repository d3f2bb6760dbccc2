"""Trees of tensors as safetensors, and files of tensors that show every changed bit. Nothing here is ever executed."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import safetensors.torch
from torch import Tensor

_NO_DIGEST = "0" * 64
_FIELD = b'"sha256":"'  # In the header's JSON no text in a value looks like this: there the quotes are escaped.


def encode(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """A safetensors file with text beside the tensors."""
    return safetensors.torch.save(tensors, metadata)


def decode(data: bytes, file_format: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The text, whose `format` must be `file_format`, and the tensors.

    Raises ValueError, KeyError, TypeError or SafetensorError for what is no such file.
    """
    header = json.loads(data[8 : _end_of_header(data)])
    metadata: dict[str, str] = header["__metadata__"]
    if metadata["format"] != str(file_format):
        raise ValueError(f"its format is {metadata['format']}, but this program reads {file_format}")
    return metadata, safetensors.torch.load(data)


def encode_sealed(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """The same with its own SHA-256 in it: taken over all bytes of the file while zeros stand in its place."""
    data = encode(tensors, {**metadata, "sha256": _NO_DIGEST})
    return data.replace(_FIELD + _NO_DIGEST.encode(), _FIELD + hashlib.sha256(data).hexdigest().encode(), 1)


def check_seal(data: bytes) -> None:
    """Raises ValueError unless these are the very bytes that `encode_sealed` gave."""
    at = data.find(_FIELD, 0, _end_of_header(data)) + len(_FIELD)
    if at < len(_FIELD):
        raise ValueError("it has no SHA-256 of its own")
    digest, blank = data[at : at + 64], data[:at] + _NO_DIGEST.encode() + data[at + 64 :]
    if hashlib.sha256(blank).hexdigest().encode() != digest:
        raise ValueError("its SHA-256 is not the one that was written")


def _end_of_header(data: bytes) -> int:
    """A safetensors file begins with a uint64 length, then that many bytes of JSON."""
    return 8 + int.from_bytes(data[:8], "little")


def pack(tree: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """`tree` as JSON, its tensors laid into `tensors`. JSON has neither tuples nor keys that are numbers: both are
    spelled out, so that `unpack` gives the very same tree."""
    if isinstance(tree, Tensor):
        while name in tensors:  # {"a.b": ..., "a": {"b": ...}}
            name += "'"
        tensors[name] = tree.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"dict": [[key, pack(value, tensors, f"{name}.{key}".strip("."))] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [pack(value, tensors, f"{name}.{i}") for i, value in enumerate(tree)]}
    if isinstance(tree, bool | int | float | str | None):
        return tree
    raise TypeError(f"{name} is {type(tree).__name__}: a checkpoint holds tensors, and what JSON can say")


def unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `pack`."""
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: unpack(entry, tensors) for key, entry in value}
    entries = [unpack(entry, tensors) for entry in value]
    return entries if kind == "list" else tuple(entries)
