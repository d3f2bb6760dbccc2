"""Batches that no update could be made with: what the replay memory is told of them, and files to look at them."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from apex.learning.batch_ring import MAX_RETURN, Batch
from apex.runtime.atomic_files import replace_file
from apex.types import PriorityUpdate

FOLDER = "bad-batches"  # below the run's
MAX_FILES = 5  # a batch of Atari takes 29 MB

log = logging.getLogger("apex")


def set_aside(update: PriorityUpdate) -> PriorityUpdate:
    """The priorities that are sent after a skipped update, so that what was at fault is hardly drawn again.

    A transition whose |TD error| is not finite, or beyond MAX_RETURN, while others are below is itself at fault: its
    priority is 0, which the server raises to replay.min_priority. If none is sound, apart from rows that were unusable
    already and have 0, the network is at fault, and no priority changes: the update names one key that no transition
    has, and only gives the sampler its credit back.
    """
    sound = update.priorities <= MAX_RETURN  # False for NaN.
    if not (sound & (update.priorities > 0)).any():
        return update._replace(keys=np.full(1, -1, np.int64), priorities=np.zeros(1, np.float32))
    return update._replace(priorities=np.where(sound, update.priorities, np.float32(0)))


class SkippedBatches:
    """Writes the first few of them below the run's folder, and says how many there were."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._warn_at = 1

    def keep(self, batch: Batch, td_errors: NDArray[np.float32], count: int) -> None:
        """Takes one, the `count`-th of this life of the learner. A full disk does not end the run."""
        if count >= self._warn_at:
            self._warn_at = 2 * count
            log.warning(
                "%d updates were skipped: their loss or gradient was not finite; batches are in %s", count, self._folder
            )
        try:
            if self._folder.is_dir() and len(list(self._folder.glob("*.safetensors"))) >= MAX_FILES:
                return
            arrays = {
                name: np.ascontiguousarray(getattr(batch, name))
                for name in ("stacks", "keys", "probability", "action", "n_step_return", "discount", "version")
            }
            name = f"{max(batch.version.tolist(), default=0):09d}-{batch.keys[0]:012d}.safetensors"
            replace_file(self._folder / name, safetensors.numpy.save({**arrays, "td_errors": td_errors.copy()}))
        except OSError as error:
            log.error("the batch was not kept: %s", error)
