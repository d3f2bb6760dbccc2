"""The parent of one host's worker processes: collects the workers' figures, and receives parameters for all workers."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence

import numpy as np

from apex.acting.shared_parameters import SharedParameters
from apex.facts import Waiting
from apex.runtime.lifecycle import POLL_SECONDS, Stop
from apex.runtime.rates import Rates
from apex.transport.endpoints import ParameterSubscriber
from apex.transport.messages.status import ActorStatus


class WorkerFigures:
    """Figures of the worker processes for their parent: one row per worker in anonymous shared memory."""

    WORDS_BYTES = 2_000

    def __init__(self, num_workers: int) -> None:
        """Create this object before the fork."""
        # float64[workers, 2]: steps of each stream, seconds spent waiting
        self.rows = np.frombuffer(mmap.mmap(-1, 16 * num_workers), np.float64).reshape(num_workers, 2)
        self._words = [mmap.mmap(-1, self.WORDS_BYTES) for _ in range(num_workers)]

    def leave_words(self, row: int, words: str) -> None:
        """Records why a worker ends; the parent adds this text to its own error."""
        data = words.encode(errors="replace")[: self.WORDS_BYTES]
        self._words[row][: len(data)] = data

    @property
    def last_words(self) -> str:
        """The text of the first worker that recorded one; "" if none did."""
        every = (memory[:].rstrip(b"\0").decode(errors="replace") for memory in self._words)
        return next(filter(None, every), "")


class ActorHost:
    """The parent process of the workers: reports their status, and publishes parameters in shared memory."""

    def __init__(self, shared: SharedParameters, figures: WorkerFigures, sizes: Sequence[int]) -> None:
        """`sizes`: number of streams of each worker."""
        self._shared = shared
        self._figures = figures
        self._sizes = np.array(sizes)
        self._received = 0  # received bytes of parameters, shared by all workers
        self._rates = Rates(time.monotonic(), 0.0, 0)
        self._waited = (time.monotonic(), 0.0)  # time and total wait at the last heartbeat

    def status(self) -> ActorStatus:
        """Returns the status for a heartbeat. `wait_share` covers the time since the last call, rates a few seconds."""
        now = time.monotonic()
        steps = float((self._figures.rows[:, 0] * self._sizes).sum())
        (then, waited_then), waited = self._waited, float(self._figures.rows[:, 1].sum())
        self._waited = (now, waited)
        share = min(1.0, (waited - waited_then) / max(now - then, 1e-3) / len(self._sizes))
        rate, received = self._rates.measure(now, steps, self._received)
        waiting = None if steps else Waiting("parameters")
        if steps and share > 0.5:
            waiting = Waiting("receipts")
        return ActorStatus(
            steps_per_second=rate,
            wait_share=share,
            waiting=waiting,
            num_steps=steps,
            parameter_bytes_per_second=received,
        )

    def run(self, subscriber: ParameterSubscriber, stop: Stop, check: Callable[[], None]) -> None:
        """Publishes the newest parameters to the workers until `stop` is requested."""
        while not stop.poll():
            parameters = subscriber.receive(POLL_SECONDS)
            if parameters is not None:
                self._received += parameters.values.nbytes
                self._shared.publish(parameters)
            check()
