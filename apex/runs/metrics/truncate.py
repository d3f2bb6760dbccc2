"""Sets aside the rows of a resumed run's curves beyond the step from which it goes on."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from apex.runtime.atomic_files import write_beside

CUT = "cut"  # the folder below `curves` for rows of steps that are made again

log = logging.getLogger("apex")


def cut_curves(folder: Path, steps: int) -> int:
    """Moves the rows of more than `steps` steps of each `ROLE.jsonl` to `cut/ROLE.jsonl`; returns how many there were.

    A file is replaced in one step, after its rows were added there; a crash in between leaves rows in both. A full disk
    leaves a curve as it is.
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
            log.error("%s keeps rows of steps that are made again: %s", path, error)
            continue
        num_rows += len(late)
    if num_rows:
        log.info("%d rows of curves beyond step %d were moved to %s", num_rows, steps, folder / CUT)
    return num_rows


def _steps(row: bytes) -> int:
    """The steps of a row; -1 for a row that a crash has torn, which is kept."""
    try:
        steps = json.loads(row)["steps"]
    except (KeyError, TypeError, ValueError):
        return -1
    return steps if isinstance(steps, int) else -1
