"""Files that are whole or not there, and manifests: sealed JSON, written last, with the SHA-256 of each file."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def go_on(step: str) -> None:
    """Does not pause: takes the next step at once."""


def replace_file(path: Path, data: bytes) -> None:
    """Replaces `path` on the disk: whatever happens, it is the old file or the new one, never half of it."""
    os.replace(write_beside(path, data), path)
    sync_folder(path.parent)


def write_beside(path: Path, data: bytes) -> Path:
    """Writes `data` to a file next to `path`, as `write_flushed` does, and returns where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    write_flushed(partial, data)
    return partial


def write_flushed(path: Path, *parts: Any, drops_cache: bool = False) -> None:
    """Writes buffers to a file and flushes it to the disk. Raises OSError; nothing is left of the file then.

    `drops_cache`: the kernel need not keep the file in memory.
    """
    try:
        with path.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            if drops_cache:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Flushes the names in `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(*parts: Any) -> str:
    """The SHA-256 of buffers as if they were one, in hexadecimal."""
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part)
    return sha256.hexdigest()


def check_digest(data: bytes, expected: str) -> bytes:
    """Returns `data`; raises ValueError unless its SHA-256 is the expected one."""
    if digest(data) != expected:
        raise ValueError("its SHA-256 is not the one that was written")
    return data


def seal(fields: dict[str, Any]) -> bytes:
    """JSON with its own SHA-256. The same fields always give the same bytes, so a changed bit always shows."""
    return json.dumps({**fields, "seal": digest(json.dumps(fields).encode())}, indent=2).encode() + b"\n"


def unseal(data: bytes) -> dict[str, Any]:
    """The inverse of `seal`; raises ValueError for anything else."""
    fields = json.loads(data)
    if not isinstance(fields, dict) or "seal" not in fields:
        raise ValueError("it has no seal")
    del fields["seal"]
    if seal(fields) != data:
        raise ValueError("it is not what was written: its SHA-256 differs")
    return fields
