"""Saves a run: the learner's checkpoint, whose manifest names the newest snapshots of the replay memory.

The learner writes checkpoints; replay servers, possibly on other hosts, write snapshots, each at its own period. A
checkpoint can be combined with a newer snapshot, because experience does not depend on the learner. A snapshot that is
older than the named one is reported when the run is resumed.
"""

import logging
from pathlib import Path
from typing import Any

import torch

from apex.config import Config
from apex.errors import DivergedError
from apex.runs.checkpoints.checkpoint import LearnerState, ReplayPart, save_checkpoint
from apex.runs.checkpoints.folder import prune
from apex.runs.folder import RunFolder
from apex.types import Progress
from apexreplay.files.atomic_files import Steps, uninterrupted
from apexreplay.snapshots.folder import SnapshotFolder, shard_folder

REPLAY = "replay"  # folder of the snapshots, below the folder of the checkpoints

log = logging.getLogger("apex")


def snapshot_folder(checkpoints: Path, num_shards: int, shard: int) -> SnapshotFolder:
    """Returns the snapshot folder of a shard, as `apex replay --snapshots CHECKPOINTS/replay` uses it."""
    return SnapshotFolder(shard_folder(checkpoints / REPLAY, num_shards, shard))


def save_run(
    folder: RunFolder, state: dict[str, Any], progress: Progress, *, steps: Steps = uninterrupted
) -> Path | None:
    """Writes a checkpoint of the result of `Trainer.state`, and removes older ones; returns None if writing fails.

    A full disk does not end a run: older checkpoints are kept. Raises DivergedError if the state is not finite.
    """
    checkpoints, config = folder.checkpoints, folder.config
    names = {"online": "the network", "target": "the target network", "optimizer": "the optimizer's state"}
    for part, name in names.items():
        if not is_finite(state[part]):
            raise DivergedError(
                f"{name} is not finite at update {state['num_updates']}, so no checkpoint is written",
                "lower --learner.learning-rate, and resume from the last good checkpoint with --resume RUN "
                "--accept-changes",
            )
    try:
        learner = LearnerState(progress=progress, config=config, schema=folder.schema, **state)
        path = save_checkpoint(checkpoints, learner, _replay_parts(checkpoints, config), steps=steps)
        prune(checkpoints, config.checkpoint.keep, steps=steps)
    except OSError as error:
        log.error("no checkpoint at update %d: %s; older checkpoints are kept", state["num_updates"], error)
        return None
    folder.note_saved()
    return path


def is_finite(tree: Any) -> bool:
    """Returns whether every number in all tensors of a tree of dictionaries and lists is finite."""
    if isinstance(tree, torch.Tensor):
        return not tree.is_floating_point() or bool(torch.isfinite(tree).all())
    if isinstance(tree, dict):
        return all(map(is_finite, tree.values()))
    return not isinstance(tree, list | tuple) or all(map(is_finite, tree))


def _replay_parts(checkpoints: Path, config: Config) -> list[ReplayPart]:
    """Returns the newest snapshot of each shard on this host. Servers on other hosts keep their own snapshots."""
    num_shards = config.replay.num_shards
    newest = [snapshot_folder(checkpoints, num_shards, shard).newest() for shard in range(num_shards)]
    return [ReplayPart(shard, found.number, found.size) for shard, found in enumerate(newest) if found is not None]
