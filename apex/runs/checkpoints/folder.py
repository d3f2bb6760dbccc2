"""All checkpoints of a run: which one is to go on from, what is wrong with the others, and which may go."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from apex.runs.checkpoints.checkpoint import (
    CheckpointError,
    LearnerState,
    ReplayPart,
    load_with_manifest,
    note_newest,
    parse_file,
    unseal_format,
    verify,
)
from apex.runs.checkpoints.paths import MANIFEST, NEWEST, checkpoint_paths
from apex.runtime.atomic_files import go_on

ASIDE = "damaged-"  # before the name of a checkpoint that was passed over

log = logging.getLogger("apex")


class Found(NamedTuple):
    """The newest checkpoint that is whole, if any, and what was passed over on the way to it."""

    path: Path | None
    state: LearnerState | None
    replay: list[ReplayPart]
    passed_over: list[str]  # sentences
    bad: list[Path]  # folders that are no whole checkpoint, and newer


def find_latest(folder: Path) -> Found:
    """Looks for the newest checkpoint below `folder` that is whole.

    What is bad or missing is logged as an error and passed over; raises CheckpointError where all that was ever
    finished is bad or gone.
    """
    passed_over: list[str] = []
    bad: list[Path] = []
    finished = False

    def pass_over(sentence: str) -> None:
        passed_over.append(sentence)
        log.error("%s; trying the checkpoint before it", sentence)

    noted = _read_newest(folder, pass_over)
    paths = checkpoint_paths(folder)
    if noted is not None and folder / f"{noted:09d}" not in paths:
        finished = True
        pass_over(f"{folder / f'{noted:09d}'}, which {NEWEST} names, is missing")
    for path in paths:
        try:
            state, manifest = load_with_manifest(path)
        except CheckpointError as error:
            # Without a manifest it was never finished, or was being removed; unless it is the one that was noted.
            finished |= (path / MANIFEST).exists() or int(path.name) == noted
            bad.append(path)
            pass_over(str(error))
            continue
        return Found(path, state, manifest.replay, passed_over, bad)
    if finished:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole; the newest: {passed_over[0]}. Put one back from a copy, or start a "
            "new run"
        )
    return Found(None, None, [], passed_over, bad)


def set_aside(folder: Path, found: Found) -> None:
    """Renames what was passed over: it is kept to be looked at, and counts as a checkpoint no more."""
    for path in found.bad:
        if (path / MANIFEST).exists():
            target = path.with_name(ASIDE + path.name)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(path, target)
            log.warning("%s was set aside as %s", path, target.name)
        else:
            shutil.rmtree(path, ignore_errors=True)
    if found.state is not None:
        note_newest(folder, found.state.num_updates)


def prune(folder: Path, keep: int, *, pause: Callable[[str], None] = go_on) -> None:
    """Removes all but the `keep` newest checkpoints; nothing while the newest is not whole. Policies stay."""
    checkpoints = checkpoint_paths(folder)
    finished = [path for path in checkpoints if (path / MANIFEST).exists()]
    if not finished:
        return
    try:
        verify(finished[0])
    except CheckpointError as error:
        log.error("%s; no older checkpoint is removed", error)
        return
    for path in checkpoints[checkpoints.index(finished[0]) :]:
        if path not in finished[:keep]:
            pause("remove a manifest")
            (path / MANIFEST).unlink(missing_ok=True)  # First: what is half removed is no checkpoint.
            pause("remove a checkpoint")
            shutil.rmtree(path, ignore_errors=True)


def _read_newest(folder: Path, pass_over: Callable[[str], None]) -> int | None:
    """The update of the newest checkpoint that was finished, as far as that is noted."""
    file = folder / NEWEST
    if not file.exists():
        if any((path / MANIFEST).exists() for path in checkpoint_paths(folder)):
            pass_over(f"{file} is missing: whether a newer checkpoint is gone cannot be told")
        return None
    try:
        return int(parse_file(file, lambda: unseal_format(file.read_bytes())["num_updates"]))
    except (CheckpointError, OSError) as error:
        pass_over(f"{error}: whether a newer checkpoint is gone cannot be told")
        return None
