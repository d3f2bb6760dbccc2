"""One save of a run: the learner's checkpoint, and in its manifest the snapshots of the replay memory beside it.

The two parts are written by two processes, maybe on two hosts, each at its own period. Experience does not depend on
the learner, so a snapshot that is newer than the checkpoint belongs to it just as well; an older one is said to be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from apex.config import Config
from apex.errors import ApexError
from apex.replay_memory.snapshots.folder import SnapshotFolder, shard_folder
from apex.runs.checkpoints.checkpoint import LearnerState, ReplayPart, save_checkpoint
from apex.runs.checkpoints.folder import prune
from apex.runtime.atomic_files import go_on
from apex.runtime.lifecycle import HOPELESS
from apex.types import Progress, Schema

REPLAY = "replay"  # the snapshots' folder, below the checkpoints'

log = logging.getLogger("apex")


class DivergedError(ApexError, RuntimeError):
    """Training makes no progress any more: losses, gradients or parameters are not finite."""

    exit_status = HOPELESS


def snapshot_folder(checkpoints: Path, num_shards: int, shard: int) -> SnapshotFolder:
    """The snapshots of a shard, as `apex replay --snapshots CHECKPOINTS/replay` writes them."""
    return SnapshotFolder(shard_folder(checkpoints / REPLAY, num_shards, shard))


def save_run(
    checkpoints: Path,
    config: Config,
    schema: Schema,
    state: dict[str, Any],
    progress: Progress,
    *,
    pause: Callable[[str], None] = go_on,
) -> Path | None:
    """Writes a checkpoint of what `Trainer.state` gives, and removes older ones; None where the disk refuses.

    A full disk does not end a run: what is there stays. Raises DivergedError for a state that must not be kept.
    """
    names = {"online": "the network", "target": "the target network", "optimizer": "the optimizer's state"}
    for part, name in names.items():
        if not is_finite(state[part]):
            raise DivergedError(
                f"{name} is not finite at update {state['num_updates']}, and is not saved: lower "
                "--learner.learning-rate, and go on from the last good checkpoint with --resume RUN --accept-changes"
            )
    try:
        learner = LearnerState(progress=progress, config=config, schema=schema, **state)
        path = save_checkpoint(checkpoints, learner, _replay_parts(checkpoints, config), pause=pause)
        prune(checkpoints, config.checkpoint.keep, pause=pause)
        return path
    except OSError as error:
        log.error("no checkpoint at update %d: %s; the older ones stay", state["num_updates"], error)
        return None


def is_finite(tree: Any) -> bool:
    """Whether every number in all tensors of a tree of dictionaries and lists is finite."""
    if isinstance(tree, torch.Tensor):
        return not tree.is_floating_point() or bool(torch.isfinite(tree).all())
    if isinstance(tree, dict):
        return all(map(is_finite, tree.values()))
    return not isinstance(tree, list | tuple) or all(map(is_finite, tree))


def _replay_parts(checkpoints: Path, config: Config) -> list[ReplayPart]:
    """The newest snapshot of each shard that lies beside the checkpoint. Elsewhere its replay server keeps it."""
    num_shards = config.replay.num_shards
    newest = [snapshot_folder(checkpoints, num_shards, shard).newest() for shard in range(num_shards)]
    return [ReplayPart(shard, found.number, found.size) for shard, found in enumerate(newest) if found is not None]
