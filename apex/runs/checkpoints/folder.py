"""Finds the checkpoint from which a run is resumed, sets damaged checkpoints aside, and removes old ones."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from apex.errors import CheckpointError
from apex.runs.checkpoints.checkpoint import (
    LearnerState,
    ReplayPart,
    load_with_manifest,
    note_newest,
    sealed_folder,
    verify,
)
from apex.runs.checkpoints.paths import MANIFEST, NEWEST, checkpoint_paths, newest_update
from apexreplay.files.atomic_files import Steps, uninterrupted
from apexreplay.files.sealed_folder import require_readable

ASIDE = "damaged-"  # name prefix of a damaged checkpoint that was renamed

log = logging.getLogger("apex")


class Found(NamedTuple):
    """The newest intact checkpoint, if any, and the checkpoints that were skipped because they are not intact."""

    path: Path | None
    state: LearnerState | None
    replay: list[ReplayPart]
    passed_over: list[str]  # why checkpoints were skipped, one sentence for each problem
    bad: list[Path]  # newer folders that are not intact checkpoints


def find_latest(folder: Path) -> Found:
    """Finds the newest intact checkpoint below `folder`.

    Logs an error for each damaged or missing checkpoint and skips it. Raises CheckpointError if checkpoints were
    finished, but all of them are damaged or missing, or if one cannot be read: it may be intact.
    """
    passed_over: list[str] = []
    bad: list[Path] = []
    finished = False

    def pass_over(sentence: str) -> None:
        passed_over.append(sentence)
        log.error("%s; looking for the newest intact checkpoint", sentence)

    noted = _read_newest(folder, pass_over)
    paths = checkpoint_paths(folder)
    if noted is not None and folder / f"{noted:09d}" not in paths:
        finished = True
        pass_over(f"{folder / f'{noted:09d}'}, which {NEWEST} names, is missing")
    for path in paths:
        try:
            state, manifest = load_with_manifest(path)
        except CheckpointError as error:
            require_readable(error)
            # Without a manifest, writing or removal was interrupted. But a folder that newest.json names was finished.
            finished |= (path / MANIFEST).exists() or int(path.name) == noted
            bad.append(path)
            pass_over(str(error))
            continue
        return Found(path, state, manifest.replay, passed_over, bad)
    if finished:
        raise CheckpointError(
            f"no checkpoint in {folder} is intact (the newest: {passed_over[0]})",
            "restore one from a copy, or start a new run",
        )
    return Found(None, None, [], passed_over, bad)


def set_aside(folder: Path, found: Found) -> None:
    """Renames damaged checkpoints, so that they are kept but no longer used, and removes unfinished ones."""
    for path in found.bad:
        if (path / MANIFEST).exists():
            target = path.with_name(ASIDE + path.name)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(path, target)
            log.warning("renamed the damaged checkpoint %s to %s", path, target.name)
        else:
            shutil.rmtree(path, ignore_errors=True)
    if found.state is not None:
        note_newest(folder, found.state.num_updates)


def prune(folder: Path, keep: int, *, steps: Steps = uninterrupted) -> None:
    """Removes all but the `keep` newest checkpoints. If the newest is not intact, removes none. Policy files stay."""
    checkpoints = checkpoint_paths(folder)
    finished = [path for path in checkpoints if (path / MANIFEST).exists()]
    if not finished:
        return
    try:
        verify(finished[0])
    except CheckpointError as error:
        log.error("%s; keeping all older checkpoints", error)
        return
    for path in checkpoints[checkpoints.index(finished[0]) :]:
        if path not in finished[:keep]:
            sealed_folder(path, steps).keep(())


def _read_newest(folder: Path, pass_over: Callable[[str], None]) -> int | None:
    """Returns the update of the newest finished checkpoint; None if it is not recorded."""
    if not (folder / NEWEST).exists() and newest_update(folder) is None:
        return None
    try:
        return int(sealed_folder(folder).manifest(NEWEST)["num_updates"])
    except CheckpointError as error:
        pass_over(f"{error}, so the loss of a newer checkpoint would not be noticed")
        return None
