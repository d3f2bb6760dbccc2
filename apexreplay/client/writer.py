"""Writes steps and items into a table of a server, each item exactly once."""

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from apexreplay.client.connection import Connection, Lease
from apexreplay.client.reliable_sender import ReliableSender
from apexreplay.client.segment_buffer import SegmentBuffer
from apexreplay.errors import DataError, UsageError
from apexreplay.transport.curve.key_store import Keys
from apexreplay.transport.endpoints import ExperienceSender, ReceiptReceiver
from apexreplay.transport.sockets import open_context
from apexreplay.types import Cut, Stream
from apexreplay.wire.codec import Codec

LINGER_SECONDS = 1.0  # time after which an incomplete segment is sent
EXIT_SECONDS = 60.0  # longest wait of a context manager; `close` and `flush` have their own
IDLE_SECONDS = 0.05
_QUEUED = 2  # segments between the caller and the thread that sends them


class Writer(Lease):
    """Appends the steps of one stream, such as one environment, to a table.

    A thread sends segments of items, and repeats them until the server has stored them. While the server is slow or
    away, `append` and `add_item` wait. Use a writer from one thread, in the process that created it, and create it
    after a fork. As a context manager, it waits at the end until everything is stored, for at most EXIT_SECONDS.

    `version`: a number that is stored with each segment of items, such as that of the policy that acts; 0 at first.
    """

    def __init__(self, connection: Connection, table: str, keys: Keys | None, timeout: float) -> None:
        """Use `Client.writer`."""
        super().__init__(connection, "writer", table, timeout)
        self.version = 0
        self._keys = keys
        self._buffer = SegmentBuffer(self.table)
        self._lock = threading.Lock()  # of the buffer
        self._changed_at = time.monotonic()
        self._pieces: queue.Queue[tuple[Cut, int]] = queue.Queue(_QUEUED)
        self._in_flight = 0  # segments that the thread has taken and that are not stored yet
        self._error: BaseException | None = None
        connection.keep(self)
        self._thread = threading.Thread(target=self._run, name=f"apexreplay-writer-{table}", daemon=True)
        self._thread.start()

    def append(self, step: Mapping[str, Any], priority: float = 1.0, values: Mapping[str, Any] | None = None) -> None:
        """Appends a step: an array or number for each field of the table's steps.

        `priority` and `values` are those of the item that begins with the step: in a table of single steps, and at each
        `period` of a table of sequences. Otherwise they are ignored. Raises UsageError if something does not fit the
        table; then nothing is appended.
        """
        self._check()
        with self._lock:
            self._buffer.append(step, priority, values)
            self._changed_at = time.monotonic()
        self._send_full()

    def add_item(
        self,
        priority: float = 1.0,
        values: Mapping[str, Any] | None = None,
        *,
        frame: int | None = None,
        next_frame: int = -1,
        num_steps: int | None = None,
    ) -> None:
        """Adds an item of a table of windows or sequences. Steps are counted back from -1, the newest of the stream.

        Windows: `frame` (default -2) and `next_frame` are the newest steps of the two stacks. Sequences: `frame`
        (default -1) is the newest step, `num_steps` their number (default: as many as the table and the episode have).

        Raises UsageError if the priority is negative or not finite, if a value does not fit the table, or if the steps
        are too old, too far apart, or of two episodes.
        """
        self._check()
        with self._lock:
            newest = -len(self.table.item.positions) if frame is None else frame
            self._buffer.add_item(priority, values or {}, newest, next_frame, num_steps)
            self._changed_at = time.monotonic()
        self._send_full()

    def end_episode(self) -> None:
        """The next step begins an episode: no item reaches over it. A sequence that the writer has begun ends."""
        self._check()
        with self._lock:
            self._buffer.end_episode()
            self._changed_at = time.monotonic()
        self._send_full()

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all items are stored. Raises DataError after `timeout` seconds; None: no limit."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._cut(deadline)
        while self._pieces.unfinished_tasks or self._in_flight:
            self._wait(deadline)

    @property
    def num_unstored(self) -> int:
        """The number of segments that the server has not acknowledged yet."""
        return self._pieces.qsize() + self._in_flight

    def close(self, timeout: float | None = None) -> None:
        """Flushes and ends the lease of the stream. Further calls do nothing."""
        if self._closed:
            return
        try:
            self.flush(timeout)
        finally:
            self._closed = True
            self._thread.join()
            self._connection.leave(self.hello.session)

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            self.close(EXIT_SECONDS)
        except DataError:
            if kind is None:  # Otherwise the error that ended the block is the one to see.
                raise

    # --- the caller's thread ----------------------------------------------------------------------------------------

    def _check(self) -> None:
        super()._check()
        if self._error is not None:
            raise UsageError(f"the writer of {self.table.name!r} has failed: {self._error}") from self._error

    def _send_full(self) -> None:
        if self._buffer.is_full(self._welcome.segment_length):
            self._cut()

    def _cut(self, deadline: float | None = None) -> None:
        """Passes the collected items to the thread; waits while it has enough to do."""
        while self._pieces.full():  # Before the items leave the buffer, so that an error loses none.
            self._wait(deadline)
        with self._lock:
            if len(self._buffer):
                self._pieces.put_nowait((self._buffer.cut(), self.version))

    def _wait(self, deadline: float | None) -> None:
        """Waits a moment. Raises DataError after `deadline`, a time of the monotonic clock."""
        self._check()
        if deadline is not None and time.monotonic() >= deadline:
            problem = f"{self.num_unstored} segments of {self.table.name!r} are not stored"
            raise DataError(problem, "check that the server runs; apexreplay status shows what it waits for")
        time.sleep(0.002)

    # --- the sending thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with open_context(self._keys) as context:
                welcome = self._welcome
                codec = Codec(int(welcome.run_id, 16), self.table)
                stream = Stream(welcome.stream, int(welcome.incarnation, 16))
                outlet = ExperienceSender(context, self._endpoint(welcome.experience), num_messages=welcome.window)
                receipts = ReceiptReceiver(context, [self._endpoint(welcome.receipts)], codec, [stream])
                self._send(ReliableSender([stream], codec, [outlet], receipts, window=welcome.window))
        except BaseException as error:
            self._error = error

    def _send(self, sender: ReliableSender) -> None:
        while not self._closed:
            sender.pump(0.002 if sender.in_flight else 0.0)
            self._in_flight = sender.in_flight
            if sender.blocked:
                sender.pump(IDLE_SECONDS)
                continue
            try:
                cut, version = self._pieces.get(timeout=0.002 if sender.in_flight else IDLE_SECONDS)
            except queue.Empty:
                self._linger(sender)
                continue
            sender.send([cut], version)
            self._in_flight = sender.in_flight
            self._pieces.task_done()

    def _linger(self, sender: ReliableSender) -> None:
        """Sends an incomplete segment whose newest item is old."""
        with self._lock:  # Until the segment counts as in flight, so that `flush` cannot miss it.
            if len(self._buffer) and time.monotonic() - self._changed_at >= LINGER_SECONDS:
                sender.send([self._buffer.cut()], self.version)
                self._in_flight = sender.in_flight
