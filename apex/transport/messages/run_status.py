"""The status of a run, computed by the coordinator and shown by `apex status` and the live view."""

from __future__ import annotations

from apex.facts import EndReason, Phase, Record
from apex.transport.messages.fields import Text
from apex.transport.messages.status import LearnerStatus, Resources


class ReplaySummary(Record, frozen=True, kw_only=True):
    """Totals over all replay shards. None: no replay server has reported the value yet."""

    size: int | None  # transitions in the stores
    capacity: int
    min_size: int  # transitions needed before sampling begins
    bytes: int | None
    max_bytes: int | None
    inserts_per_second: float | None
    samples_per_second: float | None
    samples_per_insert: float | None
    stale_priorities: int | None
    busy_share: float | None


class ActorSummary(Record, frozen=True, kw_only=True):
    """Totals over all actor hosts. None: no host has reported the value, or no episode has ended yet."""

    configured: int
    leased: int
    highest_id: int  # id of the actor that explores least
    highest_exploration: Text  # exploration of that actor, such as "epsilon 0.016"
    score: float | None  # score of the actor with the highest id
    mean_score: float | None
    episodes: float | None
    wait_share: float | None = None  # share of time that workers wait; the highest of all hosts
    steps_per_second: float | None = None
    parameter_bytes_per_second: float | None = None


class EvaluatorSummary(Record, frozen=True, kw_only=True):
    """The newest evaluation. None: there was no evaluation yet."""

    score: float | None
    best: float | None
    episodes: int | None
    updates: int | None


class Limits(Record, frozen=True, kw_only=True):
    """Limits that end the run. 0 or None: no limit."""

    steps: int
    updates: int
    minutes: float
    score: float | None


class Bottleneck(Record, frozen=True):
    """The part that limits the speed of training."""

    part: str
    why: str
    setting: str  # setting to change


class RoleRow(Record, frozen=True, kw_only=True):
    """One program of the run."""

    role: str
    shard: int | None  # for replay servers; None for other roles
    host: str
    pid: int
    last_seen_seconds: float
    rate: str
    waiting: str
    resources: Resources | None = None  # None: not measured


class RunStatus(Record, frozen=True, tag="status", kw_only=True):
    """Status of a run. None: not known yet."""

    run: str
    folder: str
    environment: str
    elapsed_seconds: float
    phase: Phase
    end: EndReason | None  # why the run ends; None while it continues
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
    refused_connections: dict[str, int]  # number of connections by socket and reason
    refusals: dict[str, dict[str, int]]  # number of invalid messages by socket and reason
    roles: list[RoleRow]
    more_roles: int  # number of programs that `roles` omits
