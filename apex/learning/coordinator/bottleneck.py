"""Finds the bottleneck of a run from the status of its processes."""

from collections.abc import Sequence
from functools import partial

from apex.config import Config
from apex.facts import Bottleneck
from apex.transport.messages.status import ActorStatus, LearnerStatus, ReplayStatus

BUSY = 0.8  # share of time; a part that works more than this counts as fully busy
# Without a configured ratio, a learner draws as many samples as it can: in the paper 0.8 samples per insert. At ten
# times this ratio, most samples have been learned from before, and more transitions help more than more updates.
MANY_SAMPLES_PER_INSERT = 8.0

_TOO_FEW_STEPS = partial(Bottleneck, part="actors", increase=("actor.num_processes", "replay.samples_per_insert"))


def find_limit(
    config: Config, actors: Sequence[ActorStatus], replay: ReplayStatus | None, learner: LearnerStatus, absent: str
) -> Bottleneck:
    """Returns the part that limits a run in training, the cause, and the settings that make this part faster.

    `actors`: status of each actor host; `replay`: combined status of all shards; `absent`: names of absent servers.
    """
    away = find_absent(actors, absent)
    if away is not None or replay is None:
        return away or Bottleneck(part="replay", cause="replay_absent", subject=config.replay.server_name(0))
    ratio, drawn = config.replay.samples_per_insert, replay.samples_per_insert
    if replay.samplers_wait_for == "inserts":
        return _TOO_FEW_STEPS(cause="samples_wait_for_inserts", need=ratio)
    if not ratio and drawn > MANY_SAMPLES_PER_INSERT:
        return _TOO_FEW_STEPS(cause="repeated_draws", have=drawn)
    waits = learner.wait_share or 0.0
    if waits < 1 - BUSY:
        return _busy_learner(1 - waits, ratio if replay.inserts_wait else None)
    return _between(actors, replay, learner, waits)


def find_absent(actors: Sequence[ActorStatus], absent: str) -> Bottleneck | None:
    """Returns the part that has no process or lacks a shard's server; None if nothing is missing."""
    if not actors:
        return Bottleneck(part="actors", cause="no_actors")
    return Bottleneck(part="replay", cause="replay_absent", subject=absent) if absent else None


def find_limit_of_filling(
    config: Config, actors: Sequence[ActorStatus], replay: ReplayStatus | None, absent: str
) -> Bottleneck | None:
    """Returns what limits a run whose memory has too few transitions for sampling; None if the memory has enough."""
    size, wanted = replay.size if replay else 0, config.replay.min_size_to_sample
    away = find_absent(actors, absent)
    if away is not None or size >= wanted:
        return away
    increase, decrease = ("actor.num_processes",), ("replay.min_size_to_sample",)
    return Bottleneck(part="actors", cause="memory_fills", have=size, need=wanted, increase=increase, decrease=decrease)


def _busy_learner(share: float, ratio: float | None) -> Bottleneck:
    """`ratio`: the samples per insert for which inserts wait; None if they do not wait."""
    found = partial(Bottleneck, part="learner", share=share)
    if ratio is None:
        return found(cause="busy_learner", increase=("learner.num_threads",), decrease=("learner.batch_size",))
    decrease = ("learner.batch_size", "replay.samples_per_insert")
    return found(cause="busy_learner_delays_inserts", need=ratio, decrease=decrease)


def _between(actors: Sequence[ActorStatus], replay: ReplayStatus, learner: LearnerStatus, waits: float) -> Bottleneck:
    """Returns the part that delays the batches for which the learner waits."""
    loaders_work, load = learner.loader_busy_share or 0.0, learner.load_per_core or 0.0
    found = partial(Bottleneck, learner_wait_share=waits)
    if loaders_work > BUSY:
        return found(part="loaders", cause="busy_loaders", share=loaders_work, increase=("learner.num_loaders",))
    if replay.busy_share > BUSY:
        return found(part="replay", cause="busy_replay", share=replay.busy_share, increase=("replay.num_shards",))
    if load > 1:
        decrease = ("actor.num_processes", "learner.num_threads")
        return found(part="processor", cause="crowded_cores", have=load, decrease=decrease)
    blocked = max(actor.wait_share for actor in actors)
    if blocked > 0.2 and not replay.inserts_wait:  # Otherwise the actors wait for the learner.
        return found(part="wire", cause="slow_receipts", share=blocked, increase=("actor.window",))
    more = "learner.num_loaders" if learner.loaders_draw else "replay.num_samplers"
    return found(part="wire", cause="latency", increase=(more, "replay.batches_in_flight"))
