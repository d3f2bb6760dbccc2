"""The processes of a run that the coordinator knows, each with its newest heartbeat."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from apex.config import Config
from apex.transport.messages import control
from apex.transport.messages.run_status import RoleRow
from apex.transport.messages.status import ActorStatus, Resources
from apex.transport.timing import ABSENT_HEARTBEATS
from apexreplay.wire.histogram import merge
from apexreplay.wire.status import ReplayStatus

MAX_MEMBERS = 2_000  # maximum processes; heartbeats of any further process are refused
# Maximum rows of a status reply: with three texts of at most 800 bytes per row, it stays below MAX_JSON_BYTES.
MAX_ROWS = 300
MAX_REASONS = 64  # maximum number of reasons, of at most 820 bytes each, for refused connections or messages
RATES = ("steps_per_second", "inserts_per_second", "samples_per_second", "num_evaluations")  # fields of a RoleRow
H = TypeVar("H", bound=control.AnyHeartbeat)
SUMMED = (
    *("num_inserted", "num_steps", "num_drawn", "size", "bytes", "max_bytes"),
    *("inserts_per_second", "inserted_steps_per_second", "samples_per_second"),
    *("stale_priorities", "duplicate_segments", "refused"),
)  # fields that are summed over the replay servers


class Member(NamedTuple, Generic[H]):
    """A process of the run."""

    heartbeat: H  # the newest heartbeat
    seen_at: float  # when the heartbeat arrived, in monotonic seconds


class Members:
    """The processes of a run, by session."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.replay_endpoints: list[dict[str, str]] = [{} for _ in range(config.replay.num_shards)]  # [shard][name]
        self.generation = 0  # generation number of all_replay_endpoints
        self._replay = config.replay
        self._heartbeat_seconds = config.transport.heartbeat_seconds
        self._clock = clock
        self._members: dict[int, Member[control.AnyHeartbeat]] = {}
        self._servers: dict[int, Member[control.ReplayHeartbeat]] = {}  # by shard; some may have left
        self._left: set[int] = set()  # sessions that have left the run, but whose last heartbeat is kept

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def __contains__(self, session: int) -> bool:
        return session in self._members

    def __len__(self) -> int:
        return len(self._members)

    def update(self, heartbeat: control.AnyHeartbeat) -> None:
        """Stores a heartbeat; raises ValueError if there are MAX_MEMBERS already, or if the shard does not exist."""
        if heartbeat.session not in self._members and len(self._members) >= MAX_MEMBERS:
            raise ValueError(f"{MAX_MEMBERS} processes have joined already, which is the maximum")
        if isinstance(heartbeat, control.ReplayHeartbeat):
            if not 0 <= heartbeat.shard < self._replay.num_shards:
                raise ValueError(f"there is no shard {heartbeat.shard}: the run has {self._replay.num_shards} shards")
            before = self.replay_servers.get(heartbeat.shard)
            if before is not None and before.heartbeat.session != heartbeat.session:
                self.forget(before.heartbeat.session)  # Otherwise its figures return when the new server leaves.
            if heartbeat.endpoints not in ({}, self.replay_endpoints[heartbeat.shard]):
                self.replay_endpoints[heartbeat.shard] = heartbeat.endpoints
                self.generation = control.generation_of(self.all_replay_endpoints)
            self._servers[heartbeat.shard] = Member(heartbeat, self._clock())
        self._members[heartbeat.session] = Member(heartbeat, self._clock())

    def find(self, session: int) -> control.AnyHeartbeat | None:
        """Returns the newest heartbeat of a process; None if the session is unknown."""
        member = self._members.get(session)
        return None if member is None else member.heartbeat

    @property
    def present(self) -> set[int]:
        """Sessions that have not left the run."""
        return self._members.keys() - self._left

    def forget(self, session: int, *, keeps_figures: bool = False) -> None:
        """Removes a process that has left the run. With `keeps_figures`, the status still shows its last heartbeat."""
        if keeps_figures:
            self._left.add(session)
        else:
            self._members.pop(session, None)

    def forget_silent(self, seconds: float) -> None:
        """Removes the processes that have sent no heartbeat for `seconds`."""
        now = self._clock()
        self._members = {s: member for s, member in self._members.items() if now - member.seen_at < seconds}

    def rows(self) -> list[RoleRow]:
        """Returns status rows of at most MAX_ROWS processes, sorted by role.

        The processes that joined first have precedence, so a flood of false processes cannot hide them.
        """
        shown = [
            RoleRow(
                role=beat.role,
                shard=beat.shard if isinstance(beat, control.ReplayHeartbeat) else None,
                host=beat.host,
                pid=beat.pid,
                last_seen_seconds=self._clock() - seen_at,
                waiting=beat.status.waiting,
                **{name: getattr(beat.status, name, None) for name in RATES},
                resources=beat.resources,
            )
            for beat, seen_at in islice(self._members.values(), MAX_ROWS)
        ]
        return sorted(shown, key=lambda row: (row.role, row.shard or 0, row.host))

    @property
    def resources(self) -> dict[str, Resources]:
        """CPU cores and memory in use, summed over the processes of each role."""
        used: dict[str, Resources] = {}
        for beat, _ in self._members.values():
            if beat.resources is not None:
                before = used.get(beat.role, Resources(cores=0.0, memory_bytes=0))
                used[beat.role] = Resources(
                    cores=before.cores + beat.resources.cores,
                    memory_bytes=before.memory_bytes + beat.resources.memory_bytes,
                )
        return used

    def cores_on(self, host: str) -> float:
        """Returns the CPU cores in use by the processes on a host, without the learner."""
        beats = (beat for beat, _ in self._members.values() if beat.host == host)
        return sum(beat.resources.cores for beat in beats if beat.resources is not None)

    @property
    def has_evaluator(self) -> bool:
        """Whether an evaluator has joined the run."""
        return any(isinstance(beat, control.EvaluatorHeartbeat) for beat, _ in self._members.values())

    # --- actors and replay servers ----------------------------------------------------------------------------------

    @property
    def actors(self) -> list[ActorStatus]:
        """The newest status of each actor host."""
        return [beat.status for beat, _ in self._members.values() if isinstance(beat, control.ActorHeartbeat)]

    @property
    def replay_servers(self) -> dict[int, Member[control.ReplayHeartbeat]]:
        """Each shard's server."""
        servers = self._servers.items()
        return {shard: server for shard, server in servers if server.heartbeat.session in self._members}

    @property
    def replay(self) -> ReplayStatus | None:
        """The combined status of the servers of all shards; None if there are no servers.

        Counts and rates are summed. `busy_share` is the highest. A wait in any shard counts as a wait.
        """
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
        """The endpoints of each shard, by name; empty until the servers of all shards have joined."""
        return self.replay_endpoints if all(self.replay_endpoints) else []

    @property
    def absent_replay(self) -> str:
        """Names of the replay servers that have not joined or have sent no heartbeat for a while; "" if none."""
        silence, now, servers = ABSENT_HEARTBEATS * self._heartbeat_seconds, self._clock(), self.replay_servers
        away = (i for i in range(self._replay.num_shards) if i not in servers or now - servers[i].seen_at > silence)
        return self._replay.server_names(away)

    def inserts_wanted(self, shard: int) -> bool:
        """Returns whether samplers of another shard wait for inserts. Inserts into `shard` must not wait in that case.

        A batch has a part from every shard, so `shard` is not sampled until the other shard has received inserts. These
        inserts may come from an actor process that `shard` has paused: both shards would wait for each other.
        """
        others = (server.heartbeat.status for other, server in self.replay_servers.items() if other != shard)
        return any(status.samplers_wait_for == "inserts" for status in others)


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the sums of counts with the same name; omits all but the MAX_REASONS largest sums."""
    return dict(sum(map(Counter, counts), Counter[str]()).most_common(MAX_REASONS))
