"""Finds the bottleneck of a run from the status of its processes."""

import math
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from apex.config import Config, flatten
from apex.facts import Bottleneck
from apex.runtime.resources import HostUse
from apex.transport.messages.status import ActorStatus, LearnerStatus
from apexreplay.wire.status import ReplayStatus

BUSY = 0.8  # share of time; a part that works more than this counts as fully busy
# Without a configured ratio, a learner draws as many samples as it can: in the paper 0.8 samples per insert. At ten
# times this ratio, most samples have been learned from before, and more transitions help more than more updates.
MANY_SAMPLES_PER_INSERT = 8.0
CORES_PER_SHARD = 80  # of actors: a replay writer stores 130,000 transitions/s, and a core sends 1,700
# Settings that help only up to the number of cores.
ONE_PER_CORE = (
    *("actor.num_processes", "learner.num_threads", "learner.num_loaders"),
    *("replay.num_shards", "replay.num_samplers"),
)


def find_limit(
    config: Config, actors: Sequence[ActorStatus], num_actors: int, replay: ReplayStatus, learner: LearnerStatus
) -> Bottleneck:
    """Returns the part that limits a run in training, the cause, and the settings that make this part faster.

    `actors`: status of each actor host; `num_actors`: leased ids; `replay`: combined status of all shards.
    """
    ratio, drawn = config.replay.samples_per_insert, replay.samples_per_insert
    workers = "actor.num_actors" if config.run.head else "actor.num_processes"
    too_few_steps = partial(Bottleneck, part="actors", increase=(workers, "replay.samples_per_insert"))
    if replay.samplers_wait_for == "inserts":
        return too_few_steps(cause="samples_wait_for_inserts", need=ratio)
    if not ratio and drawn > MANY_SAMPLES_PER_INSERT:
        return too_few_steps(cause="repeated_draws", have=drawn)
    waits = learner.wait_share or 0.0
    if waits < 1 - BUSY:
        enough = math.ceil(num_actors * (1 - sum(actor.wait_share for actor in actors) / len(actors)))
        if replay.inserts_wait and enough < BUSY * num_actors:
            decrease = ("actor.num_actors", "learner.batch_size", "replay.samples_per_insert")
            found = Bottleneck(part="learner", cause="too_many_actors", share=1 - waits, decrease=decrease)
            return replace(found, have=max(1, enough), need=num_actors)
        return _busy_learner(1 - waits, ratio if replay.inserts_wait else None)
    return _between(actors, replay, learner, waits)


def useful_shards(cores: float) -> int:
    """Returns how many replay servers actors need that use so many cores."""
    return min(64, max(1, math.ceil(cores / CORES_PER_SHARD)))  # as `replay.num_shards`


def find_absent(actors: Sequence[ActorStatus], absent: str) -> Bottleneck | None:
    """Returns the part that has no process or lacks a shard's server; None if nothing is missing."""
    if not actors:
        return Bottleneck(part="actors", cause="no_actors")
    return Bottleneck(part="replay", cause="replay_absent", subject=absent) if absent else None


def find_other_programs(use: HostUse, own: float) -> Bottleneck | None:
    """Returns that programs outside the run use the learner's host; None if they use little, or if cores are idle.

    `own`: cores that the run's programs on this host use according to their heartbeats. They may have been started
    separately, so that `use.own` does not include all of them.
    """
    others, least = use.busy - max(use.own, own), (1 - BUSY) * use.cores
    if others < least or use.cores - use.busy > least:
        return None
    return Bottleneck(part="processor", cause="other_programs", have=others, need=use.cores)


def keep_feasible(found: Bottleneck, config: Config, cores: int) -> Bottleneck:
    """Leaves out the settings that cannot be changed so, such as more threads than the learner's host has cores.

    A setting that is 0 has no limit, or is chosen on other hosts, so it cannot be increased.
    """
    settings, least = flatten(config), {"learner.batch_size": config.replay.num_shards}
    most = dict.fromkeys(ONE_PER_CORE, cores) | {"replay.batches_in_flight": 1024}
    most["actor.window"] = config.actor.most_window
    most["actor.num_processes"] = min(cores, config.actor.num_actors)
    return replace(
        found,
        increase=tuple(name for name in found.increase if 0 < settings[name] < most.get(name, math.inf)),
        decrease=tuple(name for name in found.decrease if settings[name] > least.get(name, 1)),
    )


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
