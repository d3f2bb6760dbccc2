"""Writes files atomically, and seals JSON files, so that any change of them is noticed."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Is called before each step of a write or a read that a crash or another process can interrupt, with the step's name.
# Tests crash, or write, between two steps.
Steps = Callable[[str], object]


def uninterrupted(step: str) -> None:
    """The `Steps` of the product: does nothing."""


def replace_file(path: Path, data: bytes) -> None:
    """Replaces the file at `path` atomically: even after a crash it is the old file or the new one, never a mixture."""
    os.replace(write_beside(path, data), path)
    sync(path.parent)


def write_beside(path: Path, *parts: Any, drops_cache: bool = False) -> Path:
    """Writes buffers to a hidden file beside `path` and flushes it to disk; returns the path of that file.

    If this raises OSError, the file has been removed. `drops_cache`: also asks the kernel to drop the file from the
    page cache.
    """
    _create_folder(path.parent)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:  # "x" follows no link, which the author of a foreign folder may have planted.
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            if drops_cache:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return partial


def _create_folder(folder: Path) -> None:
    """Creates a folder and its missing parents, and flushes their names to disk."""
    if not folder.is_dir():
        _create_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(*parts: Any) -> str:
    """Returns the SHA-256 of the concatenated buffers, in hexadecimal."""
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part)
    return sha256.hexdigest()


def seal(fields: dict[str, Any]) -> bytes:
    """Returns `fields` and their SHA-256 as JSON. Equal fields give equal bytes, so `unseal` detects any change."""
    return json.dumps({**fields, "seal": digest(json.dumps(fields).encode())}, indent=2).encode() + b"\n"


def unseal(data: bytes) -> dict[str, Any]:
    """Returns the fields that `seal` encoded; raises ValueError if `data` was not sealed or has changed."""
    try:
        fields = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict) or "seal" not in fields:
        raise ValueError('it has no "seal" field')
    del fields["seal"]
    if seal(fields) != data:
        raise ValueError("it was changed after it was written: its SHA-256 differs")
    return fields
