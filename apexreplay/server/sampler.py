"""A sampler process: draws from the shared store without a lock. Each request for a batch is a credit of one batch."""

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apexreplay.process.freed_memory import keep_freed_memory
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.sampling.batch_drawer import BatchDrawer, DrawSettings
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.store.reader import StoreReader
from apexreplay.transport.curve.key_store import Keys
from apexreplay.transport.endpoints import RequestReceiver
from apexreplay.transport.sockets import open_context
from apexreplay.transport.timing import GOODBYE_SECONDS
from apexreplay.wire.codec import Codec
from apexreplay.wire.json_codec import decode_json, encode_json

IDLE_SECONDS = 0.001  # seconds between two checks whether drawing is allowed
REPORT_SECONDS = 1.0
MAX_WAITING = 10_000  # requests that wait; the oldest of more are dropped: their clients may be gone
MAX_OF_CLIENT = 1_024  # of them from one client: `MAX_PREFETCH` of ours, and the batches in flight of a run's loader


class SamplerTask(NamedTuple):
    """Arguments that all sampler processes of a replay server share."""

    codec: Codec
    path: Path  # file of the store
    counters: SamplerCounters
    settings: DrawSettings
    read_keys: Callable[[], Keys | None]
    endpoints: list[str]  # the address that each sampler process binds


class SamplerReports:
    """What the sampler processes have refused, by reason: requests, and connections."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes
        self._newest: list[list[dict[str, int]]] = [[{}, {}] for _ in pipes]

    def collect(self) -> list[Counter[str]]:
        """Returns the sums over all sampler processes: of requests by reason, of connections by socket and reason."""
        for index, pipe in enumerate(self._pipes):
            with suppress(EOFError, OSError):  # The process has ended, which is reported elsewhere.
                while pipe.poll():
                    self._newest[index] = decode_json(pipe.recv_bytes(), list[dict[str, int]])
        return [sum((Counter(each[i]) for each in self._newest), Counter[str]()) for i in (0, 1)]


def run_sampler(stop: Stop, index: int, task: SamplerTask, seed: np.random.SeedSequence, reports: Connection) -> None:
    """Runs sampler process number `index`: answers requests for batches until `stop` is requested."""
    keep_freed_memory()
    with open_context(task.read_keys()) as context:
        reader = StoreReader(task.path, task.codec.table)
        drawer = BatchDrawer(reader, task.counters, index, task.settings, np.random.default_rng(seed))
        settings = task.settings
        # The items of a queue count as given once they are drawn.
        linger = 0.0 if settings.selection.order == "priority" else GOODBYE_SECONDS
        address = task.endpoints[index]
        receiver = RequestReceiver(context, address, task.codec, settings.shard, settings.part_size, linger=linger)
        waiting = WaitingRequests()
        pause, report_at = 0.0, 0.0
        told: list[dict[str, int]] = []
        while not stop.poll():
            context.check()
            if time.monotonic() >= report_at:
                report_at = time.monotonic() + REPORT_SECONDS
                refused = [dict(receiver.refused), context.refused_connections]
                if refused != told:
                    reports.send_bytes(encode_json(refused))
                    told = refused
            receiver.refused += waiting.extend(receiver.receive(pause if waiting else POLL_SECONDS))
            if not waiting:
                task.counters.note_wait(index, learner=True)
                continue
            answered = answer_first(waiting, drawer, receiver, any_size=settings.selection.order != "priority")
            pause = 0.0 if answered else IDLE_SECONDS


class WaitingRequests:
    """Requests for batches as (client, batch size), the oldest first."""

    def __init__(self) -> None:
        self._requests: deque[tuple[bytes, int]] = deque()
        self._of_client: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        return iter(self._requests)

    def extend(self, requests: Sequence[tuple[bytes, int]]) -> Counter[str]:
        """Adds requests; returns how many were refused, by reason."""
        refused: Counter[str] = Counter()
        for client, size in requests:
            if self._of_client[client] >= MAX_OF_CLIENT:
                refused["credit"] += 1
                continue
            if len(self) == MAX_WAITING:
                self.remove(0)
                refused["dropped"] += 1
            self._requests.append((client, size))
            self._of_client[client] += 1
        return refused

    def remove(self, index: int) -> None:
        """Removes a request."""
        client, _ = self._requests[index]
        del self._requests[index]
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]


def answer_first(waiting: WaitingRequests, drawer: BatchDrawer, receiver: RequestReceiver, *, any_size: bool) -> bool:
    """Answers the oldest request for which there are enough items; returns False if there is none.

    `any_size`: whether a smaller batch may be possible where the oldest request must wait.
    """
    impossible = sys.maxsize  # the smallest batch size that was refused
    for index, (client, size) in enumerate(waiting):
        if size >= impossible:
            continue
        drawer.part_size = size
        part = drawer.draw()
        if part is not None:
            waiting.remove(index)
            if receiver.answer(client, part):
                drawer.confirm()
            else:
                drawer.take_back()
            return True
        if not any_size:
            break
        impossible = size
    return False
