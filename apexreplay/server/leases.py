"""Which session has which id, stream or row: of actor hosts at a learner, and of clients at a server of tables."""

import secrets
import time
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Literal, NamedTuple

import numpy as np

from apexreplay.types import Stream

LEASE_SECONDS = 30.0  # silence after which another client of a server may get the stream or row
RECLAIM_SECONDS = 5.0  # time after a restart in which only clients of the earlier start get streams and rows
AWAKE_SECONDS = 2.0  # time between two looks at the clock after which this process counts as stopped meanwhile
MAX_REMOTE = 65_536  # samplers on other hosts
FREE = -1  # in place of a session that holds the id
_EPOCH_SHIFT = 32  # bits of an incarnation below those of the epoch


def newest_incarnation(epoch: int) -> int:
    """Returns the highest incarnation that a lease of this epoch can have."""
    return (epoch + 1 << _EPOCH_SHIFT) - 1


class AwakeClock:
    """A monotonic clock that leaves out the time in which this process did not run, such as after SIGSTOP.

    It must be asked more often than every AWAKE_SECONDS: a longer pause counts as one of the process. Without this, the
    first request after a pause would find that all leases have expired, because heartbeats were not read meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._left_out = 0.0

    def __call__(self) -> float:
        """Returns the time in seconds."""
        now = self._clock()
        if now - self._last > AWAKE_SECONDS:
            self._left_out += now - self._last
        self._last = now
        return now - self._left_out


class Lease(NamedTuple):
    """What one session holds. All its streams expire together."""

    streams: list[Stream]
    expires_at: float


class LeaseTable:
    """Leases of the ids 0 ... N-1 to sessions. An actor host has one session per start.

    The incarnation of an id grows with every lease of the id, also across restarts of the program: its upper bits are
    `epoch`, which grows with each restart. Its lower bits begin at a random number, because copies of a run folder
    that are resumed in the same second have the same epoch.
    """

    def __init__(self, num_ids: int, lease_seconds: float, epoch: int = 0) -> None:
        self.num_ids = num_ids
        self.num_leased = 0  # number of leased ids
        self._lease_seconds = lease_seconds
        self._leases: dict[int, Lease] = {}  # by session
        self._holders = np.full(num_ids, FREE, np.int64)  # session of each id
        self._newest: dict[int, int] = {}  # id -> its newest incarnation seen by this table
        self._next_incarnation = (epoch << _EPOCH_SHIFT) + 1 + secrets.randbelow(1 << 31)

    def claim(self, session: int, count: int, now: float) -> list[Stream]:
        """Leases free ids, the highest first, until the session holds `count`; returns all ids of the session."""
        self.expire(now)
        held = self.held(session)
        if count > len(held):
            free = np.flatnonzero(self._holders == FREE)[::-1][: count - len(held)]
            self._add(session, free.tolist(), now)
        return self.held(session)

    def claim_one(self, session: int, now: float, *, lowest: bool) -> list[Stream]:
        """Leases a free id, if possible one that nobody had at this start, because its silent holder may come back.

        `lowest`: the lowest such id, because clients of the start before have the highest.
        """
        if not self.held(session):
            self.expire(now)
            free = np.flatnonzero(self._holders == FREE).tolist()
            new = [i for i in free if i not in self._newest] or free
            self._add(session, new[:1] if lowest else new[-1:], now)
        return self.held(session)

    def _add(self, session: int, ids: Sequence[int], now: float) -> None:
        """Leases these free ids to a session, with those that it holds."""
        if ids:
            held, first = self.held(session), self._next_incarnation
            new = [Stream(i, first + n) for n, i in enumerate(ids)]
            self._next_incarnation += len(new)
            self._lease(session, sorted(held + new, reverse=True), now)

    def renew(self, session: int, streams: Sequence[Stream], now: float, factor: float = 1.0) -> bool:
        """Renews the leases that a session claims to hold. Renews none and returns False if one was leased again since.

        Ids without a lease are leased again under their old incarnation: the program was restarted, or the lease
        expired and no other session took the id. If another session took the id, replay would permanently refuse the
        older incarnation, and its sender would wait for receipts in vain. Other ids of the session become free.

        `factor`: the leases are so many times as long as usual.

        Every host's heartbeat calls this. If nothing has changed, it only compares `streams` with the lease.
        """
        lease = self._leases.get(session)
        if lease is not None and lease.streams == streams:
            self._leases[session] = Lease(lease.streams, now + factor * self._lease_seconds)
        elif streams:
            self.expire(now)
            if not all(self._may_hold(session, stream) for stream in streams):
                return False
            self._lease(session, streams, now, factor)
        return True

    def release(self, session: int) -> None:
        """Frees all ids of the session."""
        if (lease := self._leases.pop(session, None)) is not None:
            self._holders[[stream.actor_id for stream in lease.streams]] = FREE
            self.num_leased -= len(lease.streams)

    def expire(self, now: float) -> None:
        """Frees ids whose lease was not renewed in time."""
        for session in [session for session, lease in self._leases.items() if lease.expires_at <= now]:
            self.release(session)

    def held(self, session: int) -> list[Stream]:
        """Returns all ids of the session."""
        lease = self._leases.get(session)
        return [] if lease is None else [*lease.streams]

    def _may_hold(self, session: int, stream: Stream) -> bool:
        """Returns whether no other session has got the id since it was leased with this incarnation."""
        actor_id, incarnation = stream
        if not 0 <= actor_id < self.num_ids or incarnation >= self._next_incarnation:
            return False  # No start of this program has leased this id with this incarnation.
        newest, holder = self._newest.get(actor_id, 0), int(self._holders[actor_id])
        return incarnation >= newest if holder == FREE else (holder, newest) == (session, incarnation)

    def _lease(self, session: int, streams: Sequence[Stream], now: float, factor: float = 1.0) -> None:
        """Leases to a session just these ids, which no other session holds."""
        self.release(session)
        incarnations = dict(streams)
        self._holders[list(incarnations)] = session
        self._newest |= incarnations
        ends_at = now + factor * self._lease_seconds
        self._leases[session] = Lease(list(starmap(Stream, incarnations.items())), ends_at)
        self.num_leased += len(incarnations)


class Full(NamedTuple):
    """There is no lease for a session, and why."""

    reason: Literal["no_stream", "stream_taken", "no_row"]
    limit: int  # streams or rows that there are


class Leases:
    """The leases of one table of a server: streams of writers, rows of samplers that read the memory, other samplers.

    Each row, counted from 0, has an incarnation too.
    """

    def __init__(
        self, num_streams: int, num_rows: int, start: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`start`: number of this start, from 1."""
        self._streams, self._rows, self._remote = self._tables = [
            LeaseTable(number, LEASE_SECONDS, start) for number in (num_streams, num_rows, MAX_REMOTE)
        ]
        self._start = start
        self._clock = clock
        self._opened_at: float | None = None  # None: the memory is being restored

    def open(self) -> None:
        """Begins RECLAIM_SECONDS: the table serves its clients. Later calls do nothing."""
        if self._opened_at is None:
            self._opened_at = self._clock()

    def writer(self, session: int, known: Stream | None = None) -> Stream | Full | None:
        """Leases a stream to a writer. `known`: the stream that it had before the server started again.

        Returns None if the writer should ask again later.
        """
        stream = self._renew(self._streams, session, known)
        if stream is None and known is not None:
            return Full("stream_taken", self._streams.num_ids)
        return stream or self._claim(self._streams, session, "no_stream")

    def sampler(self, session: int, known: Stream | None = None) -> Stream | Full | None:
        """Leases a row to a sampler that reads the memory. `known`: the row with which it may still be reading.

        Returns None if the sampler should ask again later.
        """
        return self._renew(self._rows, session, known) or self._claim(self._rows, session, "no_row")

    def remote(self, session: int) -> Stream | None:
        """Records a sampler on another host, which needs no row; returns None if there are too many."""
        return self._renew(self._remote, session) or next(iter(self._remote.claim(session, 1, self._clock())), None)

    def beat(self, session: int) -> bool:
        """Keeps a lease; returns whether there is one."""
        return any(self._renew(table, session) for table in self._tables)

    def end(self, session: int) -> None:
        """Ends a lease, if there is one."""
        for table in self._tables:
            table.release(session)

    def count(self) -> tuple[int, int]:
        """Returns the numbers of writers and of samplers."""
        for table in self._tables:
            table.expire(self._clock())
        return self._streams.num_leased, self._rows.num_leased + self._remote.num_leased

    def _renew(self, table: LeaseTable, session: int, known: Stream | None = None) -> Stream | None:
        """Returns what a session holds, or what it held at an earlier start if that is free; else None."""
        held = table.held(session)
        if not held and known is not None:
            held = [known]
        return held[0] if held and table.renew(session, held, self._clock()) else None

    def _claim(self, table: LeaseTable, session: int, reason: Literal["no_stream", "no_row"]) -> Stream | Full | None:
        since = self._opened_at
        if self._start > 1 and (since is None or self._clock() - since < RECLAIM_SECONDS):
            return None  # Clients of an earlier start may still come back.
        streams = table.claim_one(session, self._clock(), lowest=self._start > 1)
        return streams[0] if streams else Full(reason, table.num_ids)
