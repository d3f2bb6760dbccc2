"""Who is which actor: ids are leased in blocks, the highest free ones first, and are free again when silence falls."""

from __future__ import annotations

from typing import NamedTuple

from apex.types import Stream


class Lease(NamedTuple):
    """One id in one session's hands."""

    session: int
    incarnation: int
    expires_at: float


class LeaseTable:
    """Leases of the ids 0 ... N-1 to sessions (one per actor host and life).

    An id's incarnation grows with every lease of it, also across restarts of the learner: `epoch` is how often it
    has started, and stands above the counter.
    """

    def __init__(self, num_actors: int, lease_seconds: float, epoch: int = 0) -> None:
        self.num_actors = num_actors
        self._lease_seconds = lease_seconds
        self._leases: dict[int, Lease] = {}
        self._newest: dict[int, int] = {}  # incarnation of each id that this table has seen
        self._next_incarnation = (epoch << 32) + 1

    @property
    def num_leased(self) -> int:
        """Ids in somebody's hands."""
        return len(self._leases)

    def claim(self, session: int, count: int, now: float) -> list[Stream]:
        """Leases up to `count` free ids, the highest first; returns all that the session holds then."""
        self.expire(now)
        missing = count - len(self.held(session))
        free = (actor_id for actor_id in range(self.num_actors - 1, -1, -1) if actor_id not in self._leases)
        for _, actor_id in zip(range(missing), free, strict=False):
            self._leases[actor_id] = Lease(session, self._next_incarnation, now + self._lease_seconds)
            self._newest[actor_id] = self._next_incarnation
            self._next_incarnation += 1
        return self.held(session)

    def renew(self, session: int, streams: list[Stream], now: float) -> bool:
        """Prolongs what the session says that it holds. False: somebody else has one of the ids, or had it since.

        What nobody holds is adopted under its old incarnation: this learner was restarted, or the silence was long and
        nobody came. Had somebody come, replay would refuse the older life for ever, and it would wait for receipts.

        Takes time for `streams` alone, not for all leases: every host's heartbeat comes here.
        """
        for stream in streams:
            if not 0 <= stream.actor_id < self.num_actors or stream.incarnation >= self._next_incarnation:
                return False  # No learner of this run has given such a one.
            if stream.incarnation < self._newest.get(stream.actor_id, 0):
                return False
            lease = self._leases.get(stream.actor_id)
            if lease is None or lease.expires_at <= now:  # `expire` has not come to it yet.
                continue
            if (lease.session, lease.incarnation) != (session, stream.incarnation):
                return False
        for stream in streams:
            self._leases[stream.actor_id] = Lease(session, stream.incarnation, now + self._lease_seconds)
            self._newest[stream.actor_id] = stream.incarnation
        return True

    def release(self, session: int) -> None:
        """Frees all that the session holds."""
        self._leases = {i: lease for i, lease in self._leases.items() if lease.session != session}

    def expire(self, now: float) -> None:
        """Frees what was not renewed in time. Looks at every lease: call it once a second, not at each heartbeat."""
        self._leases = {i: lease for i, lease in self._leases.items() if lease.expires_at > now}

    def held(self, session: int) -> list[Stream]:
        """What the session holds, the highest id first."""
        streams = [Stream(i, lease.incarnation) for i, lease in self._leases.items() if lease.session == session]
        return sorted(streams, reverse=True)
