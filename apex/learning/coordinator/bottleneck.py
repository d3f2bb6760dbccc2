"""Finds the bottleneck of a run from the status of its processes."""

from __future__ import annotations

from collections.abc import Sequence

from apex.config import Config
from apex.transport.messages.run_status import Bottleneck
from apex.transport.messages.status import ActorStatus, LearnerStatus, ReplayStatus

PARTS = ("actors", "wire", "replay", "loaders", "learner", "processor")  # parts that can limit a run
BUSY = 0.8  # share of time; a part that works more than this counts as fully busy
# Without a configured ratio, a learner draws as many samples as it can: in the paper 0.8 samples per insert. At ten
# times this ratio, most samples have been learned from before, and more transitions help more than more updates.
MANY_SAMPLES_PER_INSERT = 8.0


def find_limit(
    config: Config, actors: Sequence[ActorStatus], replay: ReplayStatus | None, learner: LearnerStatus, absent: str
) -> Bottleneck:
    """Returns the part that limits a run in training, the reason, and the setting that makes this part faster.

    `actors`: status of each actor host; `replay`: combined status of all shards; `absent`: shards without a server.
    """
    away = find_absent(actors, absent)
    if away is not None or replay is None:
        return away or Bottleneck("replay", "no replay server has joined", "apex replay --learner HOST")
    ratio = f"to keep the ratio of {config.replay.samples_per_insert:g} samples per insert"
    waits, more_actors = (
        learner.wait_share or 0.0,
        "more --actor.num-processes, or a higher --replay.samples-per-insert",
    )
    if replay.samplers_wait_for == "inserts":
        return Bottleneck("actors", f"samplers wait for inserts {ratio}", more_actors)
    drawn = replay.samples_per_insert
    if not config.replay.samples_per_insert and drawn > MANY_SAMPLES_PER_INSERT:
        return Bottleneck("actors", f"each transition is drawn {drawn:.0f} times on average", more_actors)
    if waits < 1 - BUSY:
        why = f"busy {_percent(1 - waits)} of the time"
        if replay.inserts_wait:
            setting = "a smaller --learner.batch-size, or a lower --replay.samples-per-insert"
            return Bottleneck("learner", f"{why}, and inserts wait for the learner {ratio}", setting)
        return Bottleneck(
            "learner", why, "a smaller --learner.batch-size, more --learner.num-threads, or --device cuda"
        )
    return _between(actors, replay, learner, f"the learner waits {_percent(waits)} of its time for batches")


def find_absent(actors: Sequence[ActorStatus], absent: str) -> Bottleneck | None:
    """Returns the part that has no process or lacks a shard's server; None if nothing is missing."""
    if not actors:
        setting = "waiting for local actors to start, or apex actor --learner HOST on another host"
        return Bottleneck("actors", "no actor has joined yet", setting)
    if absent:
        return Bottleneck("replay", f"{absent} is not connected", "apex replay --learner HOST")
    return None


def find_limit_of_filling(
    config: Config, actors: Sequence[ActorStatus], replay: ReplayStatus | None, absent: str
) -> Bottleneck | None:
    """Returns what limits a run whose memory has too few transitions for sampling; None if the memory has enough."""
    size, wanted = replay.size if replay else 0, config.replay.min_size_to_sample
    away = find_absent(actors, absent)
    if away is not None or size >= wanted:
        return away
    why = f"the memory has {size:,} of the {wanted:,} transitions that sampling needs"
    return Bottleneck("actors", why, "more --actor.num-processes, or a lower --replay.min-size-to-sample")


def _between(actors: Sequence[ActorStatus], replay: ReplayStatus, learner: LearnerStatus, why: str) -> Bottleneck:
    """Returns the part that delays the batches for which the learner waits."""
    loaders_work, load = learner.loader_busy_share or 0.0, learner.load_per_core or 0.0
    if loaders_work > BUSY:
        return Bottleneck(
            "loaders",
            f"{why}, and its loaders are busy {_percent(loaders_work)} of the time",
            "more --learner.num-loaders",
        )
    if replay.busy_share > BUSY:
        return Bottleneck(
            "replay", f"the replay writer is busy {_percent(replay.busy_share)} of the time", "more --replay.num-shards"
        )
    if load > 1:
        why = f"{why}, and {load:.1f} threads compete for each core of its host"
        return Bottleneck("processor", why, "fewer --actor.num-processes, or fewer --learner.num-threads")
    blocked = max(actor.wait_share for actor in actors)
    if blocked > 0.2 and not replay.inserts_wait:  # Otherwise the actors wait for the learner.
        return Bottleneck(
            "wire", f"actors wait {_percent(blocked)} of their time for receipts", "a larger --actor.window"
        )
    more = "more --learner.num-loaders" if learner.loaders_draw else "more --replay.num-samplers"
    return Bottleneck("wire", f"{why}, and no part is busy", f"{more}, or a higher --replay.batches-in-flight")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
