"""Batches of skipped updates: their priorities for the replay memory, and files to inspect them."""

import logging
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from apex.learning.batch_ring import MAX_RETURN, ROW_FIELDS, SEQUENCE_FIELDS, Batch
from apexreplay.files.atomic_files import replace_file
from apexreplay.types import PriorityUpdate

FOLDER = "bad-batches"  # folder below the run folder
MAX_FILES = 5  # maximum number of files; a batch of Atari takes 29 MB

log = logging.getLogger("apex")


def set_aside(update: PriorityUpdate) -> PriorityUpdate:
    """Returns the priorities to send after a skipped update, so that bad transitions are rarely drawn again.

    Transitions whose |TD error| is above MAX_RETURN or not finite are bad. Their priority becomes 0, which the server
    raises to replay.min_priority. Unusable rows already have priority 0. If all other transitions are bad, the network
    is at fault, and no priority changes: the update is then empty, and only returns the sampler's credit.
    """
    sound = update.priorities <= MAX_RETURN  # False for NaN.
    if not (sound & (update.priorities > 0)).any():
        return update._replace(keys=update.keys[:0], priorities=update.priorities[:0])
    return update._replace(priorities=np.where(sound, update.priorities, np.float32(0)))


class SkippedBatches:
    """Writes the first few batches of skipped updates below the run folder, and logs the number of skipped updates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._warn_at = 1

    def keep(self, batch: Batch, td_errors: NDArray[np.float32], count: int) -> None:
        """Writes the batch of the `count`-th skipped update since the learner started, up to MAX_FILES files.

        Logs a warning for the first one, and again when the count has doubled. If writing fails, only logs an error.
        """
        if count >= self._warn_at:
            self._warn_at = 2 * count
            log.warning("skipped %d updates: loss or gradient was not finite; see the files in %s", count, self._folder)
        try:
            if self._folder.is_dir() and len(list(self._folder.glob("*.safetensors"))) >= MAX_FILES:
                return
            fields = {name: getattr(batch, name) for name in ("stacks", *ROW_FIELDS, "next_mask", *SEQUENCE_FIELDS)}
            arrays = {name: np.ascontiguousarray(field) for name, field in fields.items() if field is not None}
            name = f"{max(batch.version.tolist(), default=0):09d}-{batch.keys[0]:012d}.safetensors"
            replace_file(self._folder / name, safetensors.numpy.save({**arrays, "td_errors": td_errors.copy()}))
        except OSError as error:
            log.error("cannot write the batch of a skipped update: %s", error)
