"""Removes from a resumed run's curves the rows beyond the step at which the run continues."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from apex.runtime.atomic_files import write_beside

CUT = "cut"  # subfolder of `curves` for rows of steps that are repeated

log = logging.getLogger("apex")


def cut_curves(folder: Path, steps: int) -> int:
    """Moves the rows beyond step `steps` from each `ROLE.jsonl` to `cut/ROLE.jsonl`; returns the number of moved rows.

    The rows are first appended to `cut/ROLE.jsonl`. Then `ROLE.jsonl` is replaced atomically. A crash between these
    two steps leaves the rows in both files. If the disk is full, a curve stays unchanged.
    """
    num_rows = 0
    for path in sorted(folder.glob("*.jsonl")):
        try:
            rows = path.read_bytes().splitlines(keepends=True)
            kept = [row for row in rows if _steps(row) <= steps]
            late = [row for row in rows if _steps(row) > steps]
            if not late:
                continue
            (folder / CUT).mkdir(exist_ok=True)
            with (folder / CUT / path.name).open("ab") as file:
                file.writelines(late)
            os.replace(write_beside(path, b"".join(kept)), path)
        except OSError as error:
            log.error("cannot remove the rows of repeated steps from %s: %s", path, error)
            continue
        num_rows += len(late)
    if num_rows:
        log.info("moved %d rows of curves beyond step %d to %s", num_rows, steps, folder / CUT)
    return num_rows


def _steps(row: bytes) -> int:
    """Returns the steps of a row; -1 for an incomplete row after a crash, which is kept."""
    try:
        steps = json.loads(row)["steps"]
    except (KeyError, TypeError, ValueError):
        return -1
    return steps if isinstance(steps, int) else -1
