"""What a run that is resumed goes on from: all of it read and verified before anything is started."""

from __future__ import annotations

import logging
import sys
from logging.handlers import BufferingHandler
from pathlib import Path

from apex.config import Config
from apex.errors import require
from apex.launch.resume import ACCEPT, OPTION
from apex.learning.run_save import snapshot_folder
from apex.replay_memory.recovery import require_snapshot
from apex.replay_memory.snapshots.folder import SnapshotFolder
from apex.replay_memory.snapshots.restore import require_room
from apex.replay_memory.store.file import DamagedMemoryError, is_whole, open_file, require_sound
from apex.replay_memory.store.layout import Regions, Store
from apex.replay_memory.store.location import store_path
from apex.runs.checkpoints.folder import Found, find_latest
from apex.runs.folder import RunFolder
from apex.types import Schema

log = logging.getLogger("apex")


def check_resume(folder: RunFolder, config: Config, *, accept: bool) -> list[str]:
    """What the run will go on from, in sentences for the user: what was found, and what was passed over and why.

    All of it is read and verified here, before anything is started. Raises ConfigError where nothing that was saved is
    whole, where the replay memory would not fit its sizes, and, unless `accept`, where all checkpoints are gone or the
    replay memory that belongs to the newest is.
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
    lines = [f"passed over: {record.getMessage()}" for record in said.buffer]
    if found.state is None and folder.has_saved:
        gone = f"{folder.checkpoints} has no checkpoint, but one was written"
        require(accept, f"{OPTION} {folder.name}: {gone}. Put it back, or say {ACCEPT} to begin at update 0")
        lines.append(f"learner: begins at update 0; {gone}")
    elif found.state is None:
        lines.append("learner: no checkpoint was ever finished; it begins at update 0")
    else:
        steps = found.state.progress.num_steps
        lines.append(f"learner: goes on at update {found.state.num_updates:,}, {steps:,} steps")
    return lines + replay


def _survey_replay(folder: RunFolder, config: Config, shard: int, found: Found, *, accept: bool) -> str:
    name = "replay" if config.replay.num_shards == 1 else f"replay {shard}"
    path = store_path(folder.run_id, shard)
    if path.exists() and not is_whole(path):
        log.warning("%s: no replay memory, its making was cut short; the replay server removes it", path)
    snapshots = snapshot_folder(folder.checkpoints, config.replay.num_shards, shard)
    sizes = config.replay.per_shard()
    max_bytes = sizes.max_bytes or sys.maxsize  # 0: by what there is room for, which is not known here
    regions = _open_memory(path, folder.schema, snapshots if config.checkpoint.replay else None)
    if regions is not None:
        store = Store(regions)
        made = store.capacity, store.max_bytes if sizes.max_bytes else 0
        require(
            made == (sizes.capacity, sizes.max_bytes),
            f"{path} was made with replay.capacity {made[0]} and replay.max_bytes {made[1]}, but this is "
            f"{sizes.capacity} and {sizes.max_bytes}: use those, or remove it",
        )
        line = f"{name}: {store.size:,} transitions, still in {path}"
        newer = snapshots.newest() if config.checkpoint.replay else None
        if newer is not None and newer.end_key > store.num_inserted:
            line += f"; snapshot {newer.number} is newer by {newer.end_key - store.num_inserted:,}, and is not taken"
        return line
    snapshot = snapshots.load_latest() if config.checkpoint.replay else None
    saved = next((part for part in found.replay if part.shard == shard), None)
    if snapshot is not None:
        require_room(snapshots, snapshot, capacity=sizes.capacity, max_bytes=max_bytes)
        line = f"{name}: {snapshot.size:,} transitions of snapshot {snapshot.number}"
        if saved is not None and snapshot.number < saved.number:
            line += f"; the checkpoint was saved with snapshot {saved.number} of {saved.size:,}"
        return line
    if saved is not None:
        gone = f"{snapshots.path} has no snapshot, but the checkpoint was saved with one of {saved.size:,} transitions"
        require(accept, f"{OPTION} {folder.name}: {gone}. Put it back, or say {ACCEPT} to go on with an empty memory")
        return f"{name}: begins with an empty memory; {gone}"
    if found.state is None and not folder.has_saved:
        return f"{name}: no snapshot was ever finished; it begins with an empty memory"
    return f"{name}: nothing here; a replay server elsewhere goes on from its own --snapshots, or begins empty"


def _open_memory(path: Path, schema: Schema, snapshots: SnapshotFolder | None) -> Regions | None:
    """The replay memory that is still there; None where there is none, or the replay server will do without it."""
    if not path.exists() or not is_whole(path):
        return None
    try:
        regions = open_file(path, schema, writable=False)
        require_sound(path, regions)
    except DamagedMemoryError as error:
        require_snapshot(error, snapshots)
        log.warning("%s; the replay server removes it", error)
        return None
    return regions
