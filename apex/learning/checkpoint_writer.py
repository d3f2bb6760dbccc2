"""Writes checkpoints on a separate thread: the trainer copies its state, and continues during the write."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from apex.types import Progress
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import POLL_SECONDS, Wait

Snapshot = Callable[[], tuple[dict[str, Any], Callable[[], None]]]  # See `Trainer.snapshot`.


class CheckpointWriter:
    """Writes one checkpoint at a time. The next `begin`, `check` or `wait` raises the error of a failed write."""

    def __init__(self, write: Callable[[dict[str, Any], Progress], object]) -> None:
        """`write` writes a checkpoint; it is called on the writer's thread."""
        self._wait = Wait("learner")
        self._write = write
        # One torch thread: more would take cores from the trainer's threads.
        self._thread = ThreadPoolExecutor(1, "checkpoints", torch.set_num_threads, (1,))
        self._writing: Future[None] | None = None

    def begin(self, snapshot: Snapshot, progress: Progress) -> bool:
        """Takes a snapshot and starts to write it. While the previous one is being written, only returns False."""
        if self._writing is not None and not self._writing.done():
            self._wait.on(Waiting("checkpoint"))
            return False
        self._wait.over()
        self.wait()
        state, copied = snapshot()
        self._writing = self._thread.submit(self._finish, state, copied, progress)
        return True

    def check(self) -> None:
        """Raises the error of the last write, if it has failed."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self, tick: Callable[[], None] = lambda: None) -> None:
        """Waits for the current write, and calls `tick` meanwhile; raises its error, if it fails."""
        writing, self._writing = self._writing, None
        if writing is not None:
            while not writing.done():
                tick()
                wait([writing], POLL_SECONDS)
            writing.result()

    def close(self) -> None:
        """Waits for the current write and ends the thread. Raises nothing, to keep the error that has ended the run."""
        self._thread.shutdown()

    def _finish(self, state: dict[str, Any], copied: Callable[[], None], progress: Progress) -> None:
        copied()
        self._write(state, progress)
