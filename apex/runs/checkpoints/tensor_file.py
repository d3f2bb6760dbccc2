"""Stores trees of tensors as safetensors. Reading a file never executes code."""

import json
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from apexreplay.files.atomic_files import digest


def encode(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Returns a safetensors file with the tensors and `metadata`."""
    return safetensors.torch.save(tensors, metadata)


def decode(data: bytes, *formats: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Returns the metadata, whose `format` must be one of `formats`, and the tensors.

    Raises ValueError, KeyError or TypeError if `data` is not such a file.
    """
    header_end = 8 + int.from_bytes(data[:8], "little")  # A uint64 length, then that many bytes of JSON.
    metadata: dict[str, str] = json.loads(data[8:header_end])["__metadata__"]
    if metadata["format"] not in map(str, formats):
        raise ValueError(f"its format is {metadata['format']}, but this version reads only format {formats[0]}")
    try:
        return metadata, safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Returns the SHA-256 of names, types, shapes and values of contiguous tensors on the CPU."""
    parts: list[Any] = []
    for name, tensor in sorted(tensors.items()):
        parts += [f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), tensor.flatten().view(torch.uint8).numpy()]
    return digest(*parts)


def pack(tree: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Returns `tree` as JSON and adds its tensors to `tensors`.

    JSON has no tuples and no keys that are numbers. Both are encoded, so that `unpack` returns an equal tree.
    """
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
    raise TypeError(f"{name} is {type(tree).__name__}, but a checkpoint can hold only tensors and JSON values")


def unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns the tree that `pack` encoded."""
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: unpack(entry, tensors) for key, entry in value}
    entries = [unpack(entry, tensors) for entry in value]
    return entries if kind == "list" else tuple(entries)
