"""The programs of a run as the coordinator knows them: who is there, and what each says of itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from apex.config import Config
from apex.transport.messages.control import ActorHeartbeat, AnyHeartbeat, ReplayHeartbeat
from apex.transport.messages.histogram import merge
from apex.transport.messages.run_status import RoleRow
from apex.transport.messages.status import ActorStatus, ReplayStatus
from apex.transport.timing import ABSENT_HEARTBEATS

MAX_MEMBERS = 2_000  # who is known; more cannot all be real
MAX_ROWS = 300  # who is shown: three texts each of at most 800 bytes must fit into an answer of MAX_JSON_BYTES
MAX_REASONS = 64  # why connections or messages were refused: of each at most 820 bytes
H = TypeVar("H", bound=AnyHeartbeat)
SUMMED = (
    *("num_inserted", "num_drawn", "size", "bytes", "max_bytes", "inserts_per_second", "samples_per_second"),
    *("stale_priorities", "duplicate_segments", "refused"),
)  # figures of the replay servers that are added up


class Member(NamedTuple, Generic[H]):
    """A program of the run."""

    heartbeat: H  # the newest
    seen_at: float  # monotonic seconds


class Members:
    """Who is there, by session."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.replay_endpoints: list[dict[str, str]] = [{} for _ in range(config.replay.num_shards)]  # by shard
        self._replay = config.replay
        self._heartbeat_seconds = config.transport.heartbeat_seconds
        self._clock = clock
        self._members: dict[int, Member[AnyHeartbeat]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def hear(self, heartbeat: AnyHeartbeat) -> None:
        """Notes a heartbeat; raises ValueError for one program too many, and for a shard that the run does not have."""
        if heartbeat.session not in self._members and len(self._members) >= MAX_MEMBERS:
            raise ValueError(f"{MAX_MEMBERS} programs are here already")
        if isinstance(heartbeat, ReplayHeartbeat):
            if not 0 <= heartbeat.shard < self._replay.num_shards:
                raise ValueError(f"there is no shard {heartbeat.shard}")
            self.replay_endpoints[heartbeat.shard] = heartbeat.endpoints or self.replay_endpoints[heartbeat.shard]
        self._members[heartbeat.session] = Member(heartbeat, self._clock())

    def forget(self, session: int) -> None:
        """Notes a goodbye."""
        self._members.pop(session, None)

    def forget_silent(self, seconds: float) -> None:
        """Forgets the programs that were silent for so long."""
        now = self._clock()
        self._members = {s: member for s, member in self._members.items() if now - member.seen_at < seconds}

    def rows(self) -> list[RoleRow]:
        """At most MAX_ROWS programs, for people: those that have been here longest, so that a flood hides nobody."""
        shown = [
            RoleRow(
                role=beat.role,
                shard=beat.shard if isinstance(beat, ReplayHeartbeat) else None,
                host=beat.host,
                pid=beat.pid,
                last_seen_seconds=self._clock() - seen_at,
                rate=beat.status.rate,
                waiting=beat.status.waiting,
            )
            for beat, seen_at in islice(self._members.values(), MAX_ROWS)
        ]
        return sorted(shown, key=lambda row: (row.role, row.shard or 0, row.host))

    # --- actors and replay servers ----------------------------------------------------------------------------------

    @property
    def actors(self) -> list[ActorStatus]:
        """The status of each actor host."""
        return [beat.status for beat, _ in self._members.values() if isinstance(beat, ActorHeartbeat)]

    @property
    def replay_servers(self) -> dict[int, Member[ReplayHeartbeat]]:
        """By shard the server that was heard last: one that was killed is here for a while."""
        members = sorted(self._members.values(), key=lambda member: member.seen_at)
        return {beat.shard: Member(beat, at) for beat, at in members if isinstance(beat, ReplayHeartbeat)}

    @property
    def replay(self) -> ReplayStatus | None:
        """What the servers of all shards say: sums, and what holds for one of them holds for all; None without any."""
        shards = [server.heartbeat.status for _, server in sorted(self.replay_servers.items())]
        if not shards:
            return None
        return replace(
            shards[0],
            **{name: sum(getattr(shard, name) for shard in shards) for name in SUMMED},
            busy_share=max(shard.busy_share for shard in shards),
            samplers_wait_for="inserts" if any(shard.samplers_wait_for == "inserts" for shard in shards) else "",
            inserts_wait=any(shard.inserts_wait for shard in shards),
            refusals=add_counts(shard.refusals for shard in shards),
            refused_connections=add_counts(shard.refused_connections for shard in shards),
            priority_histogram=merge([shard.priority_histogram for shard in shards if shard.priority_histogram]),
        )

    @property
    def all_replay_endpoints(self) -> list[dict[str, str]]:
        """Endpoints by name of each shard; empty before all of them have said hello."""
        return self.replay_endpoints if all(self.replay_endpoints) else []

    @property
    def absent_replay(self) -> str:
        """Whom the run waits for: shards whose server has not said hello, or was not heard for a while; or ""."""
        silence, now, servers = ABSENT_HEARTBEATS * self._heartbeat_seconds, self._clock(), self.replay_servers
        away = (i for i in range(self._replay.num_shards) if i not in servers or now - servers[i].seen_at > silence)
        return ", ".join(map(self._replay.shard_name, away))

    def inserts_wanted(self, shard: int) -> bool:
        """Whether samplers of another shard wait for inserts: those into this one must not wait for samples then.

        A batch has a part from each shard, so these samples would not come before those inserts; and they may be those
        of an actor process that is paused because of this shard.
        """
        others = (server.heartbeat.status for other, server in self.replay_servers.items() if other != shard)
        return any(status.samplers_wait_for == "inserts" for status in others)


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts by name, added up: the MAX_REASONS greatest."""
    return dict(sum(map(Counter, counts), Counter[str]()).most_common(MAX_REASONS))
