"""Which client has which stream of a table (writers) or row of its counters (samplers that read the memory)."""

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from apexreplay.types import Stream

LEASE_SECONDS = 30.0  # silence after which a lease ends
RECLAIM_SECONDS = 5.0  # time after a restart in which only clients of the earlier start get streams and rows


class Lease(NamedTuple):
    """The lease of a session."""

    stream: Stream | None  # of a writer
    row: int  # of a sampler; -1: none


class Full(NamedTuple):
    """There is no lease for a session, and why."""

    reason: Literal["no_stream", "stream_taken", "no_row"]
    limit: int  # streams or rows that there are


class Leases:
    """The leases of one table.

    An incarnation never repeats: its upper bits are the number of the server's start, the lower ones count.
    """

    def __init__(
        self, num_streams: int, rows: range, start: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`rows`: those that samplers may lease. `start`: number of this start, from 1."""
        self._num_streams = num_streams
        self._rows = rows
        self._next = start << 32
        self._start = start
        self._clock = clock
        self._opened_at: float | None = None  # None: the memory is being restored
        self._held: dict[int, Lease] = {}  # by session
        self._seen_at: dict[int, float] = {}

    def open(self) -> None:
        """Begins RECLAIM_SECONDS: the table serves its clients. Later calls do nothing."""
        if self._opened_at is None:
            self._opened_at = self._clock()

    @property
    def _is_reserved(self) -> bool:
        """Whether clients of an earlier start may still come back for their streams and rows."""
        since = self._opened_at
        return self._start > 1 and (since is None or self._clock() - since < RECLAIM_SECONDS)

    def writer(self, session: int, known: Stream | None = None) -> Lease | Full | None:
        """Leases a stream to a writer. `known`: the stream that it had before the server started again.

        Returns None if the writer should ask again later.
        """
        self._forget()
        if session in self._held:
            return self._keep(session, self._held[session])
        taken = {lease.stream.actor_id: lease.stream for lease in self._held.values() if lease.stream is not None}
        if known is not None:
            is_free = known.actor_id not in taken and known.actor_id < self._num_streams
            is_earlier = known.incarnation <= self._next
            if not is_free or not is_earlier:
                return Full("stream_taken", self._num_streams)
            return self._keep(session, Lease(known, -1))
        if self._is_reserved:
            return None
        free = next((each for each in range(self._num_streams) if each not in taken), None)
        if free is None:
            return Full("no_stream", self._num_streams)
        self._next += 1
        return self._keep(session, Lease(Stream(free, self._next), -1))

    def sampler(self, session: int, known: int = -1) -> Lease | Full | None:
        """Leases a row to a sampler that reads the memory. `known`: the row with which it may still be reading.

        Returns None if the sampler should ask again later.
        """
        self._forget()
        if session in self._held:
            return self._keep(session, self._held[session])
        free = [row for row in self._rows if row not in {lease.row for lease in self._held.values()}]
        if known in free:
            return self._keep(session, Lease(None, known))
        if self._is_reserved:
            return None
        return self._keep(session, Lease(None, free[0])) if free else Full("no_row", len(self._rows))

    def remote(self, session: int) -> Lease:
        """Records a sampler on another host, which needs no row."""
        return self._keep(session, Lease(None, -1))

    def beat(self, session: int) -> bool:
        """Keeps a lease; returns whether there is one."""
        self._forget()
        if session in self._held:
            self._seen_at[session] = self._clock()
        return session in self._held

    def end(self, session: int) -> None:
        """Ends a lease, if there is one."""
        self._held.pop(session, None)
        self._seen_at.pop(session, None)

    def count(self) -> tuple[int, int]:
        """Returns the numbers of writers and of samplers."""
        self._forget()
        writers = sum(lease.stream is not None for lease in self._held.values())
        return writers, len(self._held) - writers

    def _keep(self, session: int, lease: Lease) -> Lease:
        self._held[session], self._seen_at[session] = lease, self._clock()
        return lease

    def _forget(self) -> None:
        oldest = self._clock() - LEASE_SECONDS
        for session in [session for session, at in self._seen_at.items() if at < oldest]:
            self.end(session)
