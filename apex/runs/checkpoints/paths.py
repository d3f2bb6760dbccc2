"""Finds a run's checkpoints by their names alone: this module reads none of their files."""

import re
from pathlib import Path

MANIFEST = "manifest.json"  # last file written of a checkpoint: a folder without a manifest is not a checkpoint
BEST = "best.safetensors"  # file beside the checkpoints: the evaluator's best policy
NEWEST = "newest.json"  # file beside the checkpoints that names the newest one


def checkpoint_paths(folder: Path) -> list[Path]:
    """Returns the folders of all checkpoints, most updates first, including those that are not intact."""
    paths = folder.iterdir() if folder.is_dir() else ()
    named = [path for path in paths if re.fullmatch(r"\d{9,}", path.name)]
    return sorted(named, key=lambda path: int(path.name), reverse=True)


def newest_update(folder: Path) -> int | None:
    """Returns the update of the newest finished checkpoint, without reading it; None if there is none."""
    return next((int(path.name) for path in checkpoint_paths(folder) if (path / MANIFEST).exists()), None)


def has_policy(folder: Path) -> bool:
    """Returns whether the folder has a finished checkpoint or a best policy, without reading it."""
    return (folder / BEST).exists() or newest_update(folder) is not None
