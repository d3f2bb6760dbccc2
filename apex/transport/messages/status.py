"""The status of each role. Programs send it with each heartbeat; the trainer sends it to the coordinator by a pipe."""

import msgspec

from apex.transport.messages.fields import Figures
from apexreplay.facts import Count, Number, Record, Waiting


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
