"""Finds the policy of a run: its best one, its newest checkpoint, or a file of weights."""

import os
from pathlib import Path

from apex.runs.checkpoints.folder import find_latest
from apex.runs.checkpoints.paths import MANIFEST
from apex.runs.checkpoints.policy_file import find_best
from apex.runs.folder import RunFolder
from apexreplay.errors import UsageError, require


def find_policy(run: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None) -> Path:
    """Returns the file or folder that `load_policy` reads; raises UsageError if there is none."""
    is_path = isinstance(run, str | os.PathLike)
    require(is_path, f"run must be the result of apex.train, a path or a name, got {run!r}")
    path = Path(run)
    # A run folder may also have a number as its name and a manifest, but it has a folder of checkpoints too.
    is_checkpoint = path.name.isdecimal() and (path / MANIFEST).is_file() and not (path / "checkpoints").is_dir()
    if path.is_file() or is_checkpoint:
        require(checkpoint is None, f"{path} is a single policy, not a run", remedy="leave out checkpoint")
        return path
    folder = RunFolder.open(path)
    choice = None if checkpoint is None else os.fspath(checkpoint)
    best = find_best(folder.checkpoints) if choice in (None, "best") else None
    if best is not None:
        return best
    problem = f"{folder.path} has no best policy, because no evaluation was finished"
    require(choice != "best", problem, remedy="try --checkpoint last")
    if choice in (None, "last"):
        last = find_latest(folder.checkpoints).path
        if last is None:
            raise UsageError(f"{folder.path} has neither a best policy nor a checkpoint", "train the run for longer")
        return last
    named = (Path(choice or ""), folder.checkpoints / (choice or ""))
    for candidate in named:
        if candidate.exists():
            return candidate
    problem = f"--checkpoint must be best, last or a path, got {choice!r}: {named[0]} and {named[1]} do not exist"
    raise UsageError(problem)
