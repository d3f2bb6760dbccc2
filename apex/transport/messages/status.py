"""What each role says of itself: with every heartbeat, or, the trainer, by the learner's own pipe."""

from __future__ import annotations

from typing import Literal

from apex.transport.messages.fields import Count, Counts, Number, Record, Text
from apex.transport.messages.histogram import Histogram


class RoleStatus(Record, frozen=True, kw_only=True):
    """What every program says of itself, and all that an evaluator says."""

    rate: Text  # what it gets done, in words
    waiting: Text  # for whom, in words; "" while it works


class ActorStatus(RoleStatus, frozen=True, kw_only=True):
    """Status of one actor host. Rates are of some seconds."""

    num_steps: Number
    steps_per_second: Number
    wait_share: Number  # of its workers' time since the last heartbeat
    parameter_bytes_per_second: Number


class ReplayStatus(RoleStatus, frozen=True, kw_only=True):
    """Status of one replay server, or the sum over all shards. Rates are of some seconds."""

    num_inserted: Count  # transitions stored since its store was made
    num_drawn: Count  # transitions drawn by all samplers
    store_incarnation: Text
    size: Count  # transitions alive
    bytes: Count  # of their frames
    max_bytes: Count
    inserts_per_second: Number
    samples_per_second: Number
    busy_share: Number  # of the writer's time since the last heartbeat; of all shards the busiest
    stale_priorities: Count  # of transitions that were overwritten
    duplicate_segments: Count
    refused: Count  # messages
    refusals: Counts  # by reason
    refused_connections: Counts  # by socket and reason
    samplers_wait_for: Literal["", "inserts", "learner"]
    inserts_wait: bool  # for the learner, to keep the replay ratio
    priority_histogram: Histogram | None  # of |TD error|, without the exponent

    @property
    def samples_per_insert(self) -> float:
        """Transitions drawn for each that was inserted."""
        return self.num_drawn / max(self.num_inserted, 1)


class LearnerStatus(Record, frozen=True, kw_only=True):
    """Status of the trainer. Rates are of the last second; None: not known before its first update or report."""

    updates: int = 0
    updates_per_second: float | None = None
    samples_per_second: float | None = None
    policy_lag: float | None = None  # updates
    loss: float | None = None
    mean_q: float | None = None
    gradient_norm: float | None = None
    td_error: float | None = None
    dormant_share: float | None = None  # of the hidden units of the worst layer
    learning_rate: float | None = None
    skipped_updates: int = 0
    refused_batches: int = 0
    wait_share: float | None = None  # of the trainer's time
    loader_busy_share: float | None = None  # of the busiest loader's time
    loaders_draw: int = 0  # 1: they draw for themselves, beside the replay server; 0: they receive batches
    load_per_core: float | None = None  # threads of its host that want to run, by core
    waiting: str = ""  # for whom, in words
