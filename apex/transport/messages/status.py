"""The status of each role. Programs send it with each heartbeat; the trainer sends it to the coordinator by a pipe."""

from typing import Literal

import msgspec

from apex.transport.messages.fields import Figures
from apex.transport.messages.histogram import Histogram
from apexreplay.facts import Count, Counts, Number, Record, Text, Waiting


class Resources(Record, frozen=True, kw_only=True):
    """Resources used by a program and its child processes."""

    cores: Number  # CPU seconds per second
    memory_bytes: Count  # resident memory; memory that several processes share is counted once
    gpu_share: Number | None = None  # share of time in which the learner's GPU is busy, including other programs
    gpu_memory_bytes: Count | None = None


class RoleStatus(Record, frozen=True, kw_only=True):
    """Status that every program reports."""

    waiting: Waiting | None  # what the program waits for; None while it works


class EvaluatorStatus(RoleStatus, frozen=True, kw_only=True):
    """Status of one evaluator."""

    num_evaluations: Count  # since its start


class ActorStatus(RoleStatus, frozen=True, kw_only=True):
    """Status of one actor host. Rates are averages over some seconds."""

    num_steps: Number
    steps_per_second: Number
    wait_share: Number  # share of time that the workers waited since the last heartbeat
    parameter_bytes_per_second: Number


class ReplayStatus(RoleStatus, frozen=True, kw_only=True):
    """Status of one replay server, or of all shards together. Rates are averages over some seconds."""

    num_inserted: Count  # transitions inserted since the store was created
    num_drawn: Count  # transitions drawn by all samplers
    store_incarnation: Text
    size: Count  # transitions in the store
    bytes: Count  # bytes of compressed frames
    max_bytes: Count
    inserts_per_second: Number
    samples_per_second: Number
    busy_share: Number  # share of time that the writer worked since the last heartbeat; the highest of all shards
    stale_priorities: Count  # number of priorities ignored because their transitions were already overwritten
    duplicate_segments: Count
    refused: Count  # number of invalid messages
    refusals: Counts  # number of invalid messages by reason
    refused_connections: Counts  # number of connections by socket and reason
    samplers_wait_for: Literal["", "inserts", "learner"]
    inserts_wait: bool  # whether inserts wait for the learner, to keep the replay ratio
    priority_histogram: Histogram | None  # histogram of |TD error|, without the priority exponent

    @property
    def samples_per_insert(self) -> float:
        """Transitions drawn per inserted transition."""
        return self.num_drawn / max(self.num_inserted, 1)


class LearnerStatus(Record, frozen=True, kw_only=True):
    """Status of the trainer. Rates are averages over the last second. None: no update or report yet."""

    updates: int = 0
    updates_per_second: float | None = None
    samples_per_second: float | None = None
    policy_lag: float | None = None  # mean age of the policy that chose a batch's actions, in updates
    loss: float | None = None
    mean_q: float | None = None
    gradient_norm: float | None = None
    td_error: float | None = None
    dormant_share: float | None = None  # share of dormant hidden units in the layer with the highest share
    figures: Figures = msgspec.field(default_factory=dict)  # algorithm-specific figures of the newest update
    learning_rate: float | None = None
    skipped_updates: int = 0
    unusable_transitions: int = 0  # transitions whose frames do not decompress or whose return is too large
    refused_batches: int = 0
    wait_share: float | None = None  # share of time that the trainer waited for batches
    loader_busy_share: float | None = None  # share of time that the busiest loader worked
    loaders_draw: int = 0  # 1: loaders draw from the replay server's shared memory; 0: they receive batches
    resources: Resources | None = None  # used by trainer, coordinator and loaders; measured by the coordinator
    load_per_core: float | None = None  # runnable threads per core on the learner's host
    waiting: Waiting | None = None  # what the trainer waits for; None while it works
