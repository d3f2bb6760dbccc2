"""Checks the saved files of a run before it is resumed: reads and verifies all of them before any program starts."""

from __future__ import annotations

import logging
import sys
from logging.handlers import BufferingHandler
from pathlib import Path

from apex.config import Config
from apex.errors import DamagedMemoryError, require
from apex.launch.resume import ACCEPT, OPTION
from apex.learning.run_save import snapshot_folder
from apex.replay_memory.recovery import require_snapshot
from apex.replay_memory.snapshots.folder import SnapshotFolder
from apex.replay_memory.snapshots.restore import require_room
from apex.replay_memory.store.file import is_whole, open_file, require_sound
from apex.replay_memory.store.layout import Regions, Store
from apex.replay_memory.store.location import store_path
from apex.runs.checkpoints.folder import Found, find_latest
from apex.runs.folder import RunFolder
from apex.types import Schema

log = logging.getLogger("apex")


def check_resume(folder: RunFolder, config: Config, *, accept: bool) -> list[str]:
    """Returns sentences for the user: what the run resumes from, and what was skipped and why.

    Reads and verifies all saved files. Raises UsageError if every saved file is damaged, or if the saved replay memory
    does not fit the configured sizes. Without `accept`, also raises UsageError if all checkpoints are missing, or if
    the replay memory that belongs to the newest checkpoint is missing.
    """
    said = BufferingHandler(sys.maxsize)
    said.setLevel(logging.WARNING)
    log.addHandler(said)
    try:
        found = find_latest(folder.checkpoints)
        shards = range(config.replay.num_shards)
        replay = [_survey_replay(folder, config, shard, found, accept=accept) for shard in shards]
    finally:
        log.removeHandler(said)
    lines = [f"skipped: {record.getMessage()}" for record in said.buffer]
    if found.state is None and folder.has_saved:
        gone = f"{folder.checkpoints} has no checkpoint, but the run had written one"
        require(accept, f"{OPTION} {folder.name}: {gone}. Restore it, or add {ACCEPT} to begin at update 0")
        lines.append(f"learner: starts at update 0; {gone}")
    elif found.state is None:
        lines.append("learner: starts at update 0; the run never finished a checkpoint")
    else:
        steps = found.state.progress.num_steps
        lines.append(f"learner: resumes at update {found.state.num_updates:,}, {steps:,} steps")
    return lines + replay


def _survey_replay(folder: RunFolder, config: Config, shard: int, found: Found, *, accept: bool) -> str:
    name = "replay" if config.replay.num_shards == 1 else f"replay {shard}"
    path = store_path(folder.run_id, shard)
    if path.exists() and not is_whole(path):
        log.warning("%s is incomplete: its creation was interrupted; the replay server will remove it", path)
    snapshots = snapshot_folder(folder.checkpoints, config.replay.num_shards, shard)
    sizes = config.replay.per_shard()
    max_bytes = sizes.max_bytes or sys.maxsize  # If 0, the replay server chooses the size from its free memory.
    regions = _open_memory(path, folder.schema, snapshots if config.checkpoint.replay else None)
    if regions is not None:
        store = Store(regions)
        made = store.capacity, store.max_bytes if sizes.max_bytes else 0
        require(
            made == (sizes.capacity, sizes.max_bytes),
            f"{path} was created with replay.capacity {made[0]} and replay.max_bytes {made[1]}, but the settings are "
            f"{sizes.capacity} and {sizes.max_bytes}: use the sizes of the file, or remove the file",
        )
        line = f"{name}: {store.size:,} transitions from {path}"
        newer = snapshots.newest() if config.checkpoint.replay else None
        if newer is not None and newer.end_key > store.num_inserted:
            more = newer.end_key - store.num_inserted
            line += f"; snapshot {newer.number} has {more:,} newer transitions, but is not used"
        return line
    snapshot = snapshots.load_latest() if config.checkpoint.replay else None
    saved = next((part for part in found.replay if part.shard == shard), None)
    if snapshot is not None:
        require_room(snapshots, snapshot, folder.schema, capacity=sizes.capacity, max_bytes=max_bytes)
        line = f"{name}: {snapshot.size:,} transitions of snapshot {snapshot.number}"
        if saved is not None and snapshot.number < saved.number:
            line += f"; the checkpoint was saved with snapshot {saved.number} ({saved.size:,} transitions)"
        return line
    if saved is not None:
        size = f"{saved.size:,} transitions"
        gone = f"{snapshots.path} has no snapshot; the checkpoint was saved with a snapshot of {size}"
        require(
            accept, f"{OPTION} {folder.name}: {gone}. Copy it back, or add {ACCEPT} to continue with an empty memory"
        )
        return f"{name}: starts with an empty memory; {gone}"
    if found.state is None and not folder.has_saved:
        return f"{name}: starts with an empty memory; the run never finished a snapshot"
    return f"{name}: no memory on this host; a server on another host resumes from its own --snapshots, or starts empty"


def _open_memory(path: Path, schema: Schema, snapshots: SnapshotFolder | None) -> Regions | None:
    """Opens the replay memory that is still in tmpfs; returns None if there is none, or if the server cannot use it."""
    if not path.exists() or not is_whole(path):
        return None
    try:
        regions = open_file(path, schema, writable=False)
        require_sound(path, regions)
    except DamagedMemoryError as error:
        require_snapshot(error, snapshots)
        log.warning("%s; the replay server will remove this file", error)
        return None
    return regions
