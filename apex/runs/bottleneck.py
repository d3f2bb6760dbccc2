"""Which part of a run is its bottleneck, by what every program says of itself."""

from __future__ import annotations

from collections.abc import Sequence

from apex.config import Config
from apex.transport.messages.run_status import Bottleneck
from apex.transport.messages.status import ActorStatus, LearnerStatus, ReplayStatus

PARTS = ("actors", "wire", "replay", "loaders", "learner", "processor")  # what may limit a run
BUSY = 0.8  # of its time: who works more has no time left worth mentioning
# Without a ratio to keep, a learner draws what it can: in the paper 0.8 samples per insert. Of ten times as many most
# tell what it has learned already, and fresh transitions would give more than updates.
MANY_SAMPLES_PER_INSERT = 8.0


def find_limit(
    config: Config, actors: Sequence[ActorStatus], replay: ReplayStatus | None, learner: LearnerStatus, absent: str
) -> Bottleneck:
    """Which part of a run that trains, if it were faster, would make it faster, why, and the setting that makes it so.

    `actors`: of each host; `replay`: of all shards together; `absent`: servers of shards that are not heard.
    """
    away = find_absent(actors, absent)
    if away is not None or replay is None:
        return away or Bottleneck("replay", "no replay server is there", "apex replay --learner HOST")
    ratio = f"at {config.replay.samples_per_insert:g} samples per insert"
    waits, more_actors = learner.wait_share or 0.0, "--actor.num-processes, --replay.samples-per-insert"
    if replay.samplers_wait_for == "inserts":
        return Bottleneck("actors", f"samplers wait for inserts {ratio}", more_actors)
    drawn = replay.samples_per_insert
    if not config.replay.samples_per_insert and drawn > MANY_SAMPLES_PER_INSERT:
        return Bottleneck("actors", f"each transition is drawn {drawn:.0f} times on average", more_actors)
    if waits < 1 - BUSY:
        why = f"it works {_percent(1 - waits)} of its time"
        if replay.inserts_wait:
            setting = "--learner.batch-size, --replay.samples-per-insert"
            return Bottleneck("learner", f"{why}, and inserts wait for it {ratio}", setting)
        return Bottleneck("learner", why, "--learner.batch-size, --learner.num-threads, --device")
    return _between(actors, replay, learner, f"the learner waits {_percent(waits)} of its time for batches")


def find_absent(actors: Sequence[ActorStatus], absent: str) -> Bottleneck | None:
    """Who must come first; None when somebody of each part is there."""
    if not actors:
        return Bottleneck("actors", "no actor is there", "apex actor --learner HOST")
    if absent:
        return Bottleneck("replay", f"{absent} is away", "apex replay --learner HOST")
    return None


def find_limit_of_filling(
    config: Config, actors: Sequence[ActorStatus], replay: ReplayStatus | None, absent: str
) -> Bottleneck | None:
    """The same of a run whose memory has too few transitions to be sampled yet; None when it has enough."""
    size, wanted = replay.size if replay else 0, config.replay.min_size_to_sample
    away = find_absent(actors, absent)
    if away is not None or size >= wanted:
        return away
    why = f"the memory has {size:,} of the {wanted:,} transitions that sampling begins with"
    return Bottleneck("actors", why, "--actor.num-processes, --replay.min-size-to-sample")


def _between(actors: Sequence[ActorStatus], replay: ReplayStatus, learner: LearnerStatus, why: str) -> Bottleneck:
    """Who keeps batches from a learner that waits for them."""
    loaders_work, load = learner.loader_busy_share or 0.0, learner.load_per_core or 0.0
    if loaders_work > BUSY:
        return Bottleneck("loaders", f"{why}, its loaders work {_percent(loaders_work)}", "--learner.num-loaders")
    if replay.busy_share > BUSY:
        return Bottleneck(
            "replay", f"its writer works {_percent(replay.busy_share)} of its time", "--replay.num-shards"
        )
    if load > 1:
        why = f"{why}, and {load:.1f} threads want each core of its host"
        return Bottleneck("processor", why, "--actor.num-processes, --learner.num-threads")
    blocked = max(actor.wait_share for actor in actors)
    if blocked > 0.2 and not replay.inserts_wait:  # Else they wait for the learner's sake.
        return Bottleneck("wire", f"actors wait {_percent(blocked)} of their time for receipts", "--actor.window")
    more = "--learner.num-loaders" if learner.loaders_draw else "--replay.num-samplers"
    return Bottleneck("wire", f"{why}, and nobody works at the limit", f"{more}, --replay.batches-in-flight")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
