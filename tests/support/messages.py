"""Control messages, statuses and results with known contents; keyword arguments change fields."""

import msgspec
from msgspec.structs import replace

from apex.transport.heartbeat import HEARTBEATS
from apex.transport.messages.control import Hello
from apex.transport.messages.results import EvaluationResult
from apex.transport.messages.run_status import RunStatus
from apex.transport.messages.status import ActorStatus, EvaluatorStatus
from apexreplay.wire.header import WIRE_VERSION
from apexreplay.wire.json_codec import encode_json
from apexreplay.wire.status import ReplayStatus

RUN = 0xABCDEF

REPLAY = ReplayStatus(
    waiting=None, num_inserted=0, num_steps=0, num_drawn=0, store_incarnation="7", size=0, bytes=0, max_bytes=1_000,
    inserts_per_second=0.0, inserted_steps_per_second=0.0, samples_per_second=0.0, busy_share=0.0,
    stale_priorities=0, duplicate_segments=0,
    refused=0, refusals={}, refused_connections={}, samplers_wait_for="",
    inserts_wait=False, priority_histogram=None,
)  # fmt: skip
ACTOR = ActorStatus(waiting=None, num_steps=9.0, steps_per_second=10.0, wait_share=0.0, parameter_bytes_per_second=0.0)
EVALUATOR = EvaluatorStatus(waiting=None, num_evaluations=1)
STATUSES = {"replay": REPLAY, "actor": ACTOR, "evaluator": EVALUATOR}
HELLO = Hello(wire=WIRE_VERSION, session=5, role="actor", host="h", pid=7, shard=0, num_streams=4)
RESULT = EvaluationResult(
    updates=12, mean=3.5, median=3.0, low=3.0, high=4.0, length=10.0, episodes=2, scores=[3.0, 4.0], confirmed=False,
    epsilon=0.01, seed=9, num_envs=2, seconds=1.0,
)  # fmt: skip


def make_heartbeat(
    role="replay",
    session=5,
    *,
    host="h",
    pid=7,
    shard=0,
    endpoints=None,
    streams=(),
    run_id=RUN,
    resources=None,
    scores=None,
    fence=0,
    **status,
):
    """Returns a heartbeat; `status` changes fields of its status. Each inserted item stands for one step."""
    if "num_inserted" in status:
        status.setdefault("num_steps", status["num_inserted"])
    return HEARTBEATS[role](
        session=session, run_id=run_id, host=host, pid=7, shard=shard, streams=list(streams),
        endpoints=endpoints or {}, resources=resources, fence=fence, status=replace(STATUSES[role], **status),
        **({"scores": scores} if scores else {}),
    )  # fmt: skip


def as_json(message):
    """Returns a message as the dictionary that is sent."""
    return msgspec.json.decode(encode_json(message))


def make_run_status(**changes):
    """Returns the status of a run; a dictionary changes fields of a part."""
    status = {
        "run": "pong-20250131-235959",
        "folder": "runs/pong-20250131-235959",
        "environment": "ALE/Pong-v5",
        "elapsed_seconds": 3723.4,
        "phase": "training",
        "end": None,
        "steps": 123_456,
        "steps_per_second": 1890.2,
        "updates": 345,
        "updates_per_second": 9.12,
        "samples_per_second": 1164.8,
        "policy_lag": 12.0,
        "replay": {
            "size": 50_000,
            "capacity": 200_000,
            "min_size": 20_000,
            "bytes": 100 * 2**20,
            "max_bytes": 3 * 2**30,
            "inserts_per_second": 1890.0,
            "samples_per_second": 1164.8,
            "samples_per_insert": 0.61,
            "stale_priorities": 3,
            "busy_share": 0.5,
        },
        "actors": {
            "configured": 32,
            "leased": 31,
            "highest_id": 31,
            "exploration": "epsilon",
            "highest_exploration": 0.00066,
            "score": 12.0,
            "mean_score": -3.25,
            "episodes": 17,
        },
        "learner": {"loss": 0.0123, "mean_q": 0.5, "gradient_norm": 1.0, "td_error": 0.1},
        "evaluator": {"score": 18.2, "best": 19.0, "episodes": 5, "updates": 300},
        "limits": {"steps": 0, "updates": 0, "minutes": 65.0, "score": 475.0},
        "limited_by": {"part": "actors", "cause": "repeated_draws", "have": 9.0, "increase": ["actor.num_processes"]},
        "refused_connections": {},
        "refusals": {},
        "roles": [
            make_row("actor", waiting={"what": "receipts", "seconds": 12.0}, steps_per_second=1890.0),
            make_row("replay", shard=0, inserts_per_second=1890.0, samples_per_second=1165.0),
        ],
        "more_roles": 0,
    }
    for name, value in changes.items():
        status[name] = {**status[name], **value} if isinstance(value, dict) else value
    return msgspec.convert(status, RunStatus)


def make_row(role, *, shard=None, host="one", seen=0.3, waiting=None, resources=None, **figures):
    """Returns one program in the status of a run."""
    return {
        "role": role, "shard": shard, "host": host, "pid": 12, "last_seen_seconds": seen,
        "waiting": waiting, "resources": resources and as_json(resources), **figures,
    }  # fmt: skip
