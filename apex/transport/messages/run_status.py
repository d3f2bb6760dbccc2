"""The status of a run, as the coordinator sums it up: what `apex status` and the live view show."""

from __future__ import annotations

from apex.transport.messages.fields import Record
from apex.transport.messages.status import LearnerStatus


class ReplaySummary(Record, frozen=True, kw_only=True):
    """All shards together; None: no server has said it."""

    size: int | None  # transitions alive
    capacity: int
    min_size: int  # transitions with which sampling begins
    bytes: int | None
    max_bytes: int | None
    inserts_per_second: float | None
    samples_per_second: float | None
    samples_per_insert: float | None
    stale_priorities: int | None
    busy_share: float | None


class ActorSummary(Record, frozen=True, kw_only=True):
    """All actor hosts together; None: none has said it, or no game has ended."""

    configured: int
    leased: int
    highest_id: int  # explores least
    highest_epsilon: float
    score: float | None  # of the highest id
    mean_score: float | None
    episodes: float | None
    wait_share: float | None = None  # of the host that waits most
    steps_per_second: float | None = None
    parameter_bytes_per_second: float | None = None


class EvaluatorSummary(Record, frozen=True, kw_only=True):
    """The newest evaluation; None: there was none."""

    score: float | None
    best: float | None
    episodes: int | None
    updates: int | None


class Limits(Record, frozen=True, kw_only=True):
    """What ends the run; 0 or None: this does not."""

    steps: int
    updates: int
    minutes: float
    score: float | None


class Bottleneck(Record, frozen=True):
    """The part that would make training faster if it were faster."""

    part: str
    why: str
    setting: str  # what to change


class RoleRow(Record, frozen=True, kw_only=True):
    """One program of the run."""

    role: str
    shard: int | None  # of a replay server
    host: str
    pid: int
    last_seen_seconds: float
    rate: str
    waiting: str


class RunStatus(Record, frozen=True, tag="status", kw_only=True):
    """What a run is doing. Each None is something that is not known yet."""

    run: str
    folder: str
    environment: str
    elapsed_seconds: float
    phase: str
    reason: str  # why the run ends; "" while it goes on
    steps: int
    steps_per_second: float | None
    updates: int
    updates_per_second: float | None
    samples_per_second: float | None
    policy_lag: float | None
    replay: ReplaySummary
    actors: ActorSummary
    learner: LearnerStatus
    evaluator: EvaluatorSummary
    limits: Limits
    limited_by: Bottleneck | None
    refused_connections: dict[str, int]  # by socket and reason
    refusals: dict[str, dict[str, int]]  # messages, by socket, by reason
    roles: list[RoleRow]
    more_roles: int  # how many are left out of `roles`
