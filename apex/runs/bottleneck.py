"""Which part of a run is its bottleneck, by what every program says of itself."""

from __future__ import annotations

from collections.abc import Sequence

from apex.config import Config
from apex.runs.members import Status

BUSY = 0.8  # of its time: who works more has no time left worth mentioning
# Without a ratio to keep, a learner draws what it can: in the paper 0.8 samples per insert. Of ten times as many most
# tell what it has learned already, and fresh transitions would give more than updates.
MANY_SAMPLES_PER_INSERT = 8.0


def find_limit(config: Config, actors: Sequence[Status], replay: Status, learner: Status, absent: str) -> Status:
    """Which part of a run that trains, if it were faster, would make it faster, why, and the setting that makes it so.

    `actors`: of each host; `replay`: of all shards together; `absent`: servers of shards that are not heard.
    """
    away = find_absent(actors, absent)
    if away is not None:
        return away
    ratio = f"at {config.replay.samples_per_insert:g} samples per insert"
    waits, inserts_wait = figure(learner, "wait_share"), bool(replay.get("inserts_wait"))
    if replay.get("samplers_wait_for") == "inserts":
        why = f"samplers wait for inserts {ratio}"
        return {"part": "actors", "why": why, "setting": "--actor.num-processes, --replay.samples-per-insert"}
    drawn = figure(replay, "samples_per_insert")
    if not config.replay.samples_per_insert and drawn > MANY_SAMPLES_PER_INSERT:
        why = f"each transition is drawn {drawn:.0f} times on average"
        return {"part": "actors", "why": why, "setting": "--actor.num-processes, --replay.samples-per-insert"}
    if waits < 1 - BUSY:
        setting = "--learner.batch-size, --learner.num-threads, --device"
        if inserts_wait:
            setting = "--learner.batch-size, --replay.samples-per-insert"
        why = f"it works {_percent(1 - waits)} of its time"
        return {
            "part": "learner",
            "why": f"{why}, and inserts wait for it {ratio}" if inserts_wait else why,
            "setting": setting,
        }
    return _between(actors, replay, learner, f"the learner waits {_percent(waits)} of its time for batches")


def find_absent(actors: Sequence[Status], absent: str) -> Status | None:
    """Who must come first; None when somebody of each part is there."""
    if not actors:
        return {"part": "actors", "why": "no actor is there", "setting": "apex actor --learner HOST"}
    if absent:
        return {"part": "replay", "why": f"{absent} is away", "setting": "apex replay --learner HOST"}
    return None


def find_limit_of_filling(config: Config, actors: Sequence[Status], replay: Status, absent: str) -> Status | None:
    """The same of a run whose memory has too few transitions to be sampled yet; None when it has enough."""
    size, wanted = figure(replay, "size"), config.replay.min_size_to_sample
    away = find_absent(actors, absent)
    if away is not None or size >= wanted:
        return away
    why = f"the memory has {size:,.0f} of the {wanted:,} transitions that sampling begins with"
    return {"part": "actors", "why": why, "setting": "--actor.num-processes, --replay.min-size-to-sample"}


def _between(actors: Sequence[Status], replay: Status, learner: Status, why: str) -> Status:
    """Who keeps batches from a learner that waits for them."""
    # Those that draw for themselves; by sockets one of them receives, and more would have nothing to do.
    draw = bool(learner.get("loaders_draw"))
    more = "--learner.num-loaders" if draw else "--replay.num-samplers"
    loaders_work, replay_works = figure(learner, "loader_busy_share"), figure(replay, "busy_share")
    if loaders_work > BUSY:
        setting = more if draw else "--transport.shared-memory, a learner beside the replay server"
        return {"part": "loaders", "why": f"{why}, its loaders work {_percent(loaders_work)}", "setting": setting}
    if replay_works > BUSY:
        why = f"its writer works {_percent(replay_works)} of its time"
        return {"part": "replay", "why": why, "setting": "--replay.num-shards"}
    load = figure(learner, "load_per_core")
    if load > 1:
        why = f"{why}, and {load:.1f} threads want each core of its host"
        return {"part": "processor", "why": why, "setting": "--actor.num-processes, --learner.num-threads"}
    blocked = max(figure(actor, "wait_share") for actor in actors)
    if blocked > 0.2 and not replay.get("inserts_wait"):  # Else they wait for the learner's sake.
        why = f"actors wait {_percent(blocked)} of their time for receipts"
        return {"part": "wire", "why": why, "setting": "--actor.window"}
    # Nobody works at the limit.
    return {
        "part": "wire",
        "why": f"{why}, and nobody works at the limit",
        "setting": f"{more}, --replay.batches-in-flight",
    }


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def figure(status: Status, name: str) -> float:
    """A number that a program says of itself; 0 if it says none."""
    value = status.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
