"""Writes steps and items into a table of a server, each item exactly once."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Self, TypeVar

from apexreplay.client.connection import Connection, Lease
from apexreplay.client.reliable_sender import ReliableSender
from apexreplay.client.segment_buffer import SegmentBuffer
from apexreplay.client.waiting import PAUSE_SECONDS, Waiting, block
from apexreplay.errors import DataError, UsageError, require_integer
from apexreplay.transport.endpoints import ExperienceSender, ReceiptReceiver
from apexreplay.transport.sockets import open_context
from apexreplay.types import Cut, Stream
from apexreplay.wire.codec import Codec
from apexreplay.wire.control import Hello, Welcome

LINGER_SECONDS = 1.0  # time after which an incomplete segment is sent
EXIT_SECONDS = 60.0  # longest wait of a context manager; `close` and `flush` have their own
IDLE_SECONDS = 0.05
Done = TypeVar("Done")  # what a call that waits returns: None, or a coroutine
_QUEUED = 2  # segments between the caller and the thread that sends them


class BaseWriter(Lease, Generic[Done]):
    """What the writers for threads and for asyncio share: all but the waits."""

    def __init__(self, connection: Connection, hello: Hello, welcome: Welcome) -> None:
        """Use `Client.writer`."""
        super().__init__(connection, hello, welcome)
        self._version = 0
        self._buffer = SegmentBuffer(self.table)
        self._lock = threading.Lock()  # of the buffer
        self._changed_at = time.monotonic()
        self._pieces: queue.Queue[tuple[Cut, int]] = queue.Queue(_QUEUED)
        self._in_flight = 0  # segments that the thread has taken and that are not stored yet
        self._error: BaseException | None = None
        self._has_cut = False  # whether the last call has filled a segment
        connection.keep(self)
        name = f"apexreplay-writer-{self.table.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """A number that is stored with each segment of items, such as that of the policy that acts; 0 at first.

        Raises UsageError unless it is an integer from 0 to 2^32 - 1.
        """
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = require_integer("version", version, 0, 2**32 - 1)

    def append(self, step: Mapping[str, Any], priority: float = 1.0, values: Mapping[str, Any] | None = None) -> Done:
        """Appends a step: an array or number for each field of the table's steps.

        `priority` and `values` are those of the item that begins with the step: in a table of single steps, and at each
        `period` of a table of sequences. Otherwise they are ignored. Raises UsageError if something does not fit the
        table; then nothing is appended.
        """
        return self._call(self._add(partial(self._buffer.append, step, priority, values)))

    def add_item(
        self,
        priority: float = 1.0,
        values: Mapping[str, Any] | None = None,
        *,
        frame: int | None = None,
        next_frame: int = -1,
        num_steps: int | None = None,
    ) -> Done:
        """Adds an item of a table of windows or sequences. Steps are counted back from -1, the newest of the stream.

        Windows: `frame` (default -2) and `next_frame` are the newest steps of the two stacks. Sequences: `frame`
        (default -1) is the newest step, `num_steps` their number (default: as many as the table and the episode have).

        Raises UsageError if the priority is negative or not finite, if a value does not fit the table, or if the steps
        are too old, too far apart, or of two episodes.
        """
        newest = -len(self.table.item.positions) if frame is None else frame
        add = partial(self._buffer.add_item, priority, values or {}, newest, next_frame, num_steps)
        return self._call(self._add(add))

    def end_episode(self) -> Done:
        """The next step begins an episode: no item reaches over it. A sequence that the writer has begun ends."""
        return self._call(self._add(self._buffer.end_episode))

    def flush(self, timeout: float | None = None) -> Done:
        """Waits until all items are stored. Raises DataError after `timeout` seconds; None: no limit."""
        return self._call(self._flush(timeout))

    def close(self, timeout: float | None = None) -> Done:
        """Flushes and ends the lease of the stream. Further calls do nothing."""
        return self._call(self._close(timeout))

    @property
    def num_unstored(self) -> int:
        """The number of segments that the server has not acknowledged yet."""
        return self._pieces.qsize() + self._in_flight

    # --- the caller's thread ----------------------------------------------------------------------------------------

    def _call(self, call: Waiting[None]) -> Done:
        raise NotImplementedError

    def _add(self, add: Callable[[], None]) -> Waiting[None]:
        """Changes the buffer by `add`. Waits before, so that a call that is cancelled has changed nothing."""
        self._check()
        if self._has_cut:  # Other coroutines run between two segments.
            self._has_cut = False
            yield 0.0
        while self._is_full() and not self._cut():
            yield from self._pause(None)
        with self._lock:
            before = len(self._buffer)
            add()
            if len(self._buffer) > before:
                self._changed_at = time.monotonic()
        if self._is_full():
            self._has_cut = self._cut()

    def _flush(self, timeout: float | None) -> Waiting[None]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._cut():
            yield from self._pause(deadline)
        while self._pieces.unfinished_tasks or self._in_flight:
            yield from self._pause(deadline)

    def _close(self, timeout: float | None) -> Waiting[None]:
        failure: UsageError | None = None
        try:
            if not self._closed:
                yield from self._flush(timeout)
        except UsageError as error:
            failure = error
        finally:
            if not self._closed:
                self._closed = True
                self._connection.leave(self.hello.session)
        while self._thread.is_alive():
            yield PAUSE_SECONDS
        if failure is not None:
            raise failure

    def _check(self) -> None:
        super()._check()
        if self._error is not None:
            raise UsageError(f"the writer of {self.table.name!r} has failed: {self._error}") from self._error

    def _is_full(self) -> bool:
        return self._buffer.is_full(self._welcome.segment_length, is_dense=self._welcome.inserts_wait)

    def _cut(self) -> bool:
        """Passes the collected items to the thread; returns False if it has enough to do."""
        with self._lock:
            if self._pieces.full():
                return False
            if len(self._buffer):
                self._pieces.put_nowait((self._buffer.cut(), self.version))
        return True

    def _pause(self, deadline: float | None) -> Waiting[None]:
        """Waits a moment. Raises DataError after `deadline`, a time of the monotonic clock."""
        self._check()
        if deadline is not None and time.monotonic() >= deadline:
            problem = f"{self.num_unstored} segments of {self.table.name!r} are not stored"
            raise DataError(problem, "check that the server runs; apexreplay status --json shows what it waits for")
        yield PAUSE_SECONDS

    # --- the sending thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with open_context(self._connection.keys) as context:
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
                if self._is_full() or time.monotonic() - self._changed_at >= LINGER_SECONDS:
                    self._cut()
                continue
            sender.send([cut], version)
            self._in_flight = sender.in_flight
            self._pieces.task_done()


class Writer(BaseWriter[None]):
    """Appends the steps of one stream, such as one environment, to a table.

    A thread sends segments of items, and repeats them until the server has stored them. While the server is slow or
    away, `append` and `add_item` wait. Use a writer from one thread, in the process that created it, and create it
    after a fork. As a context manager, it waits at the end until everything is stored, for at most EXIT_SECONDS.
    """

    def _call(self, call: Waiting[None]) -> None:
        block(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            self.close(EXIT_SECONDS)
        except DataError:
            if kind is None:  # Otherwise the error that ended the block is the one to see.
                raise
