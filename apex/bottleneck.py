"""Which part of a run is its bottleneck, by what every program says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apex.config import Config

Status = dict[str, Any]

BUSY = 0.8  # of its time: who works more has no time left worth mentioning


def find_limit(config: Config, actors: Sequence[Status], replay: Status, learner: Status, absent: str) -> Status:
    """Which part of a run that trains, if it were faster, would make it faster, why, and the knob that makes it so.

    `actors`: of each host; `replay`: of all shards together; `absent`: servers of shards that are not heard.
    """
    wait_shares = [figure(actor, "wait_share") for actor in actors]
    learner_waits = learner.get("wait_share", 0.0)
    if not actors:
        return {"part": "actors", "why": "no actor is there", "knob": "apex actor --learner HOST"}
    if absent:
        return {"part": "replay", "why": f"{absent} is away", "knob": "apex replay --learner HOST"}
    ratio = f"at {config.replay.samples_per_insert:g} samples per insert"
    if replay.get("inserts_wait"):
        why = f"inserts wait for samples {ratio}"
        return {"part": "learner", "why": why, "knob": "--learner.batch-size, --replay.samples-per-insert"}
    if replay.get("samplers_wait_for") == "inserts":
        why = f"samplers wait for inserts {ratio}"
        return {"part": "actors", "why": why, "knob": "--actor.num-processes, --replay.samples-per-insert"}
    if learner_waits < 0.2:
        why = f"it works {_percent(1 - learner_waits)} of its time"
        return {"part": "learner", "why": why, "knob": "--learner.batch-size, --learner.num-threads, --device"}
    loaders_work, replay_works = learner.get("loader_busy_share", 0.0), figure(replay, "busy_share")
    if loaders_work > BUSY:
        why = f"the learner waits {_percent(learner_waits)} of its time, its loaders work {_percent(loaders_work)}"
        return {"part": "loaders", "why": why, "knob": "--learner.num-loaders"}
    if replay_works > BUSY:
        why = f"its writer works {_percent(replay_works)} of its time"
        return {"part": "replay", "why": why, "knob": "--replay.num-shards"}
    if max(wait_shares) > 0.2:
        why = f"actors wait {_percent(max(wait_shares))} of their time for receipts"
        return {"part": "wire", "why": why, "knob": "--actor.window"}
    why = f"the learner waits {_percent(learner_waits)} of its time for batches, and nobody works at the limit"
    # Where loaders draw for themselves there are no samplers.
    more = "--learner.num-loaders" if config.transport.shared_memory else "--replay.num-samplers"
    return {"part": "wire", "why": why, "knob": f"{more}, --replay.batches-in-flight"}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def figure(status: Status, name: str) -> float:
    """A number that a program says of itself; 0 if it says none."""
    value = status.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
