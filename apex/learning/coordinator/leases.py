"""Leases actor ids to hosts, the highest free ids first. An id is free again if its lease is not renewed in time."""

import secrets
from typing import NamedTuple

from apexreplay.types import Stream


class Lease(NamedTuple):
    """The lease of one id to one session."""

    session: int
    incarnation: int
    expires_at: float


class LeaseTable:
    """Leases of the ids 0 ... N-1 to sessions. An actor host has one session per start.

    The incarnation of an id grows with every lease of the id, also across restarts of the learner: its upper bits are
    `epoch`, which grows with each restart (`RunFolder.next_epoch`). Its lower bits begin at a random number, because
    copies of a run folder that are resumed in the same second have the same epoch.
    """

    def __init__(self, num_actors: int, lease_seconds: float, epoch: int = 0) -> None:
        self.num_actors = num_actors
        self._lease_seconds = lease_seconds
        self._leases: dict[int, Lease] = {}
        self._newest: dict[int, int] = {}  # id -> its newest incarnation seen by this table
        self._next_incarnation = (epoch << 32) + 1 + secrets.randbelow(1 << 31)

    @property
    def num_leased(self) -> int:
        """The number of leased ids."""
        return len(self._leases)

    def claim(self, session: int, count: int, now: float) -> list[Stream]:
        """Leases free ids, the highest first, until the session holds `count`; returns all ids of the session."""
        self.expire(now)
        missing = count - len(self.held(session))
        free = (actor_id for actor_id in range(self.num_actors - 1, -1, -1) if actor_id not in self._leases)
        for _, actor_id in zip(range(missing), free, strict=False):
            self._leases[actor_id] = Lease(session, self._next_incarnation, now + self._lease_seconds)
            self._newest[actor_id] = self._next_incarnation
            self._next_incarnation += 1
        return self.held(session)

    def renew(self, session: int, streams: list[Stream], now: float) -> bool:
        """Renews the leases that a session claims to hold. Renews none and returns False if one was leased again since.

        Ids without a lease are leased again under their old incarnation: the learner was restarted, or the lease
        expired and no other session took the id. If another session took the id, the replay server would permanently
        refuse the older incarnation, and the actor host would wait for receipts in vain.

        The running time is proportional to `streams`, not to all leases, because every host's heartbeat calls this.
        """
        for stream in streams:
            if not 0 <= stream.actor_id < self.num_actors or stream.incarnation >= self._next_incarnation:
                return False  # No learner of this run has leased this id with this incarnation.
            if stream.incarnation < self._newest.get(stream.actor_id, 0):
                return False
            lease = self._leases.get(stream.actor_id)
            if lease is None or lease.expires_at <= now:  # The lease has expired, but `expire` has not run yet.
                continue
            if (lease.session, lease.incarnation) != (session, stream.incarnation):
                return False
        for stream in streams:
            self._leases[stream.actor_id] = Lease(session, stream.incarnation, now + self._lease_seconds)
            self._newest[stream.actor_id] = stream.incarnation
        return True

    def release(self, session: int) -> None:
        """Frees all ids of the session."""
        self._leases = {i: lease for i, lease in self._leases.items() if lease.session != session}

    def expire(self, now: float) -> None:
        """Frees ids whose lease was not renewed in time. Checks every lease: call this once a second at most."""
        self._leases = {i: lease for i, lease in self._leases.items() if lease.expires_at > now}

    def held(self, session: int) -> list[Stream]:
        """Returns all ids of the session, the highest first."""
        streams = [Stream(i, lease.incarnation) for i, lease in self._leases.items() if lease.session == session]
        return sorted(streams, reverse=True)
