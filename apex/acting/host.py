"""The parent of one host's worker processes: collects the workers' reports, and receives parameters for all workers."""

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from socket import SOCK_DGRAM, socketpair

import numpy as np

from apex.acting.shared_parameters import SharedParameters
from apex.transport.endpoints import ParameterSubscriber
from apex.transport.messages.results import Scores, ScoreSums
from apex.transport.messages.status import ActorStatus
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.process.rates import Rates
from apexreplay.wire.json_codec import MAX_JSON_BYTES, decode_json, encode_json


class WorkerReports:
    """Reports of the worker processes to their parent: figures in shared memory, scores over sockets."""

    def __init__(self, num_workers: int) -> None:
        """Create this object before the fork."""
        # float64[workers, 2]: steps of each stream, seconds spent waiting
        self.figures = np.frombuffer(mmap.mmap(-1, 16 * num_workers), np.float64).reshape(num_workers, 2)
        self._sockets = [socketpair(type=SOCK_DGRAM) for _ in range(num_workers)]
        for end in chain.from_iterable(self._sockets):
            end.setblocking(False)

    def send_scores(self, worker: int, scores: Scores) -> bool:
        """Sends scores to the parent without waiting. Returns False if the socket is full; then try again later."""
        with suppress(BlockingIOError):
            self._sockets[worker][1].send(encode_json(scores))
            return True
        return False

    def receive_scores(self) -> Iterator[Scores]:
        """Yields all scores that have arrived."""
        for receiver, _ in self._sockets:
            with suppress(BlockingIOError):
                while True:
                    yield decode_json(memoryview(receiver.recv(MAX_JSON_BYTES)), Scores)

    def close(self) -> None:
        """Closes the sockets."""
        for end in chain.from_iterable(self._sockets):
            end.close()


class ActorHost:
    """The parent process of the workers: reports their status, and publishes parameters in shared memory."""

    def __init__(self, shared: SharedParameters, reports: WorkerReports, sizes: Sequence[int]) -> None:
        """`sizes`: number of streams of each worker."""
        self._shared = shared
        self._reports = reports
        self._scores = ScoreSums()
        self._sizes = np.array(sizes)
        self._received = 0  # received bytes of parameters, shared by all workers
        self._rates = Rates(time.monotonic(), 0.0, 0)
        self._waited = (time.monotonic(), 0.0)  # time and total wait at the last heartbeat

    def status(self) -> ActorStatus:
        """Returns the status for a heartbeat. `wait_share` covers the time since the last call, rates a few seconds."""
        now = time.monotonic()
        steps = float((self._reports.figures[:, 0] * self._sizes).sum())
        (then, waited_then), waited = self._waited, float(self._reports.figures[:, 1].sum())
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

    def take_scores(self) -> Scores | None:
        """Returns the scores to send next; None if no game has ended. Call this in one thread only."""
        for scores in self._reports.receive_scores():
            self._scores.add(scores)
        return self._scores.take()

    def run(self, subscriber: ParameterSubscriber, stop: Stop, check: Callable[[], None]) -> None:
        """Publishes the newest parameters to the workers until `stop` is requested."""
        while not stop.poll():
            parameters = subscriber.receive(POLL_SECONDS)
            if parameters is not None:
                self._received = subscriber.num_bytes
                self._shared.publish(parameters)
            check()
