"""What stands above the worker processes of one host: their figures, and the one copy of the parameters."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence

import numpy as np

from apex.acting.shared_parameters import SharedParameters
from apex.runtime.lifecycle import POLL_SECONDS, Stop
from apex.runtime.rates import Rates
from apex.transport.endpoints import ParameterSubscriber
from apex.transport.messages.status import ActorStatus


class WorkerFigures:
    """What the worker processes tell their host: one row each of anonymous shared memory."""

    WORDS_BYTES = 2_000

    def __init__(self, num_workers: int) -> None:
        """To be made before the fork."""
        # float64[workers, 2]: steps of each stream, seconds waited
        self.rows = np.frombuffer(mmap.mmap(-1, 16 * num_workers), np.float64).reshape(num_workers, 2)
        self._words = [mmap.mmap(-1, self.WORDS_BYTES) for _ in range(num_workers)]

    def leave_words(self, row: int, words: str) -> None:
        """Says why a worker ends: its host repeats it as the last words of the whole program."""
        data = words.encode(errors="replace")[: self.WORDS_BYTES]
        self._words[row][: len(data)] = data

    @property
    def last_words(self) -> str:
        """Those of the first worker that left some; "" if none did."""
        every = (memory[:].rstrip(b"\0").decode(errors="replace") for memory in self._words)
        return next(filter(None, every), "")


class ActorHost:
    """The process above the workers: heartbeats, leases, and the host's one copy of the parameters."""

    def __init__(self, shared: SharedParameters, figures: WorkerFigures, sizes: Sequence[int]) -> None:
        """`sizes`: streams of each worker."""
        self._shared = shared
        self._figures = figures
        self._sizes = np.array(sizes)
        self._received = 0  # bytes of parameters, for all workers
        self._rates = Rates(time.monotonic(), 0.0, 0)
        self._waited = (time.monotonic(), 0.0)  # at the last heartbeat

    def status(self) -> ActorStatus:
        """What the heartbeats say; `wait_share` is of the time since the last one, rates are of some seconds."""
        now = time.monotonic()
        steps = float((self._figures.rows[:, 0] * self._sizes).sum())
        (then, waited_then), waited = self._waited, float(self._figures.rows[:, 1].sum())
        self._waited = (now, waited)
        share = min(1.0, (waited - waited_then) / max(now - then, 1e-3) / len(self._sizes))
        rate, received = self._rates.measure(now, steps, self._received)
        return ActorStatus(
            steps_per_second=rate,
            rate=f"{rate:,.0f} steps/s",
            wait_share=share,
            waiting="for receipts" if share > 0.5 and steps else "for parameters" if not steps else "",
            num_steps=steps,
            parameter_bytes_per_second=received,
        )

    def run(self, subscriber: ParameterSubscriber, stop: Stop, check: Callable[[], None]) -> None:
        """Hands on the newest parameters until asked to stop."""
        while not stop.requested:
            parameters = subscriber.receive(POLL_SECONDS)
            if parameters is not None:
                self._received += parameters.values.nbytes
                self._shared.publish(parameters)
            check()
