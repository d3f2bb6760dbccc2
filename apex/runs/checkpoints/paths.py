"""Where a run's checkpoints lie, by their names alone: nothing here looks into one."""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = "manifest.json"  # of a checkpoint, written last: a folder without it is none
NEWEST = "newest.json"  # beside the checkpoints, names one of them


def checkpoint_paths(folder: Path) -> list[Path]:
    """Newest first, by updates; also those that are not whole."""
    paths = folder.iterdir() if folder.is_dir() else ()
    named = [path for path in paths if re.fullmatch(r"\d{9,}", path.name)]
    return sorted(named, key=lambda path: int(path.name), reverse=True)


def newest_update(folder: Path) -> int | None:
    """The update of the newest checkpoint that was finished, without a look into it; None if there is none."""
    return next((int(path.name) for path in checkpoint_paths(folder) if (path / MANIFEST).exists()), None)
