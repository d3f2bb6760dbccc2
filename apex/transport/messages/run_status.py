"""The status of a run, computed by the coordinator and shown by `apex status` and the live view."""

import msgspec

from apex.facts import Bottleneck, EndReason, Phase
from apex.transport.messages.status import LearnerStatus, Resources
from apexreplay.facts import Record, Waiting

STATUS_VERSION = 1  # rises if a field is removed, renamed or changes its meaning; a new field does not raise it


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
    exploration: str  # what the amount of exploration measures: "epsilon" or "noise"
    highest_exploration: float  # amount of exploration of that actor
    score: float | None  # score of the actor with the highest id
    mean_score: float | None
    episodes: float | None
    faults: int = 0  # games that faults of the environment have ended since the learner started
    wait_share: float | None = None  # share of time that workers wait; the highest of all hosts
    steps_per_second: float | None = None
    parameter_bytes_per_second: float | None = None


class EvaluatorSummary(Record, frozen=True, kw_only=True):
    """The newest evaluation. None: there was no evaluation yet."""

    score: float | None
    best: float | None
    episodes: int | None
    updates: int | None


class EvaluationRow(Record, frozen=True, kw_only=True):
    """One evaluation."""

    number: int  # 1 for the first evaluation since the learner started
    updates: int  # version of the parameters
    steps: int  # of the run
    score: float  # mean raw score
    best: float | None  # best mean score of a trained policy until then; None: there was none
    episodes: int


class Limits(Record, frozen=True, kw_only=True):
    """Limits that end the run. 0 or None: no limit."""

    steps: int
    updates: int
    minutes: float
    score: float | None


class RoleRow(Record, frozen=True, kw_only=True):
    """One program of the run. None: the value is unknown, or does not belong to this role."""

    role: str
    shard: int | None  # for replay servers; None for other roles
    host: str
    pid: int
    last_seen_seconds: float
    waiting: Waiting | None  # what the program waits for; None while it works
    steps_per_second: float | None = None
    inserts_per_second: float | None = None
    samples_per_second: float | None = None
    num_evaluations: int | None = None
    resources: Resources | None = None  # None: not measured


class RunStatus(Record, frozen=True, tag="status", kw_only=True):
    """Status of a run. None: not known yet. docs/reference/status.md documents each field."""

    version: int = STATUS_VERSION
    run: str
    folder: str
    environment: str
    elapsed_seconds: float
    untrained_seconds: float = 0.0  # start-ups and final evaluations; not counted towards the limit of minutes
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
    # the newest ones since the learner started, the oldest first
    evaluations: list[EvaluationRow] = msgspec.field(default_factory=list)

    @property
    def trained_seconds(self) -> float:
        """Seconds that count towards the limit of minutes."""
        return self.elapsed_seconds - self.untrained_seconds
