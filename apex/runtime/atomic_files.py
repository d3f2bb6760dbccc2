"""Files that are whole or not there, and small ones that show every changed bit."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger("apex")

COPY = ".copy"  # the suffix of what `write_twice` writes second


def go_on(step: str) -> None:
    """Does not pause: takes the next step at once."""


def replace_file(path: Path, data: bytes) -> None:
    """Replaces `path` on the disk: whatever happens, it is the old file or the new one, never half of it."""
    os.replace(write_beside(path, data), path)
    sync_folder(path.parent)


def write_beside(path: Path, data: bytes) -> Path:
    """Writes a file next to `path` and has its bytes reach the disk; nothing is left of it on a full one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return partial


def sync_folder(folder: Path) -> None:
    """Has the names in `folder` reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(fields: dict[str, Any]) -> bytes:
    """JSON with its own SHA-256. There is one text for the fields and no other: a changed bit is always seen."""
    digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    return json.dumps({**fields, "seal": digest}, indent=2).encode() + b"\n"


def unseal(data: bytes) -> dict[str, Any]:
    """The inverse of `seal`; raises ValueError for anything else."""
    fields = json.loads(data)
    if not isinstance(fields, dict) or "seal" not in fields:
        raise ValueError("it has no seal")
    del fields["seal"]
    if seal(fields) != data:
        raise ValueError("it is not what was written: its SHA-256 differs")
    return fields


def write_twice(path: Path, fields: dict[str, Any]) -> None:
    """Writes sealed fields to `path`, and then the same to a copy beside it; raises OSError."""
    data = seal(fields)
    replace_file(path, data)
    replace_file(path.with_name(path.name + COPY), data)


def read_twice(path: Path) -> dict[str, Any] | None:
    """What `write_twice` wrote, from the copy where the file is damaged or missing; None if neither is there.

    Either one that is damaged or missing is logged. Raises ValueError where none is whole.
    """
    files = (path, path.with_name(path.name + COPY))
    causes, whole = [], []
    for file in files:
        try:
            whole.append(unseal(file.read_bytes()))
        except FileNotFoundError:
            causes.append(f"{file} is missing")
        except (OSError, ValueError) as error:
            causes.append(f"{file} is damaged: {error}")
    if not whole:
        if any(file.exists() for file in files):
            raise ValueError("; ".join(causes))
        return None
    for cause in causes:
        log.error("%s; the other one of %s and %s is whole and is taken", cause, *(file.name for file in files))
    return whole[0]
