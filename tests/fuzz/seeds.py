"""Small valid messages of every kind, from which mutations are made, and the decoders of these messages."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from apex.schema import Schema
from apex.transport.messages.control import decode_request
from apex.transport.messages.results import EvaluationResult
from apex.transport.run_codec import RunCodec
from apex.types import Parameters
from apexreplay.types import PriorityUpdate, Receipt, Stream
from apexreplay.wire.header import WIRE_VERSION, MessageKind, pack

from ..support.builders import RUN, make_batch, make_receipts, make_segment
from .reference import Facts

PIXELS = Schema(frame_shape=(3, 2), frame_dtype="uint8", stack=3, num_actions=3, n_step=2, codec="lz4")
VECTORS = Schema(frame_shape=(2,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
CONTINUOUS = Schema(
    frame_shape=(2,), frame_dtype="float32", stack=1, num_actions=0, n_step=3, codec="raw", action_size=2
)
MASKED = Schema(frame_shape=(2,), frame_dtype="float32", stack=1, num_actions=11, n_step=3, codec="raw", masked=True)


class Side(NamedTuple):
    """A receiver, and the facts that the reference needs."""

    codec: RunCodec
    facts: Facts


def make_side(schema: Schema) -> Side:
    return Side(
        RunCodec(RUN, schema),
        Facts(
            run_id=RUN,
            fingerprint=schema.table.fingerprint,
            frame_bytes=schema.frame_bytes,
            is_float=schema.frame_dtype == "float32",
            codec=schema.codec,
            stack=schema.stack,
            num_actions=schema.num_actions,
            n_step=schema.n_step,
            action_size=schema.action_size,
            masked=schema.masked,
            wire_version=WIRE_VERSION,
        ),
    )


SCHEMAS = {"pixels": PIXELS, "vectors": VECTORS, "continuous": CONTINUOUS, "masked": MASKED}
SIDES = {name: make_side(schema) for name, schema in SCHEMAS.items()}

DECODE: dict[str, Callable[[Side, list[bytes]], Any]] = {
    "segment": lambda side, parts: side.codec.decode_segment(parts, side.facts.shard),
    "receipt": lambda side, parts: side.codec.decode_receipts(parts),
    "batch": lambda side, parts: side.codec.decode_batch(parts, side.facts.batch_size, side.facts.shard),
    "priorities": lambda side, parts: side.codec.decode_priorities(parts, side.facts.shard),
    "parameters": lambda side, parts: side.codec.decode_parameters(parts, side.facts.num_parameters),
    "control": lambda side, parts: decode_request(parts, side.facts.run_id),
    "evaluation": lambda side, parts: side.codec.decode_evaluation(parts, side.facts.num_parameters),
}
TYPES = tuple(DECODE)


class Seed(NamedTuple):
    """A valid message."""

    side: str
    parts: list[bytes]


HEARTBEAT = {"session": 5, "run_id": RUN, "host": "h", "pid": 7, "shard": 0}
STATUS: dict[str, Any] = {"waiting": None}
WAITING = {"what": "receipts", "subject": "replay", "have": 3, "need": None, "who": "actor 7", "seconds": 12.5}
OF_REPLAY: dict[str, Any] = {
    **STATUS,
    **dict.fromkeys(
        ("num_inserted", "num_steps", "num_drawn", "size", "bytes", "max_bytes", "stale_priorities", "refused"), 3
    ),
    "duplicate_segments": 0,
    "inserts_per_second": 0.5,
    "inserted_steps_per_second": 0.5,
    "samples_per_second": 1,
    "busy_share": 0.5,
    "store_incarnation": "7",
    "samplers_wait_for": "",
    "inserts_wait": False,
    "refusals": {"crc": 1},
    "refused_connections": {},
    "priority_histogram": {"counts": [1.0, 2], "edges": [0.5, 1.0, 2.0]},
}
OF_ACTOR = {
    "waiting": WAITING,
    "num_steps": 3.0,
    "steps_per_second": 9,
    "wait_share": 0.5,
    "parameter_bytes_per_second": 8,
}
STATUSES: dict[str, Any] = {"replay": OF_REPLAY, "actor": OF_ACTOR, "evaluator": {**STATUS, "num_evaluations": 3}}
REQUESTS: list[dict[str, Any]] = [
    {"type": "status"},
    {"type": "goodbye", "session": 5},
    {"type": "hello", "wire": WIRE_VERSION, "session": 5, "role": "actor", "host": "h", "pid": 7, "shard": 0}
    | {"num_streams": 4},
    *(
        {**HEARTBEAT, "streams": [[0, 1]] if role == "actor" else [], "endpoints": {"experience": "tcp://h:1"}}
        | {"type": f"{role}_heartbeat", "status": status}
        for role, status in STATUSES.items()
    ),
    {
        **HEARTBEAT,
        "run_id": f"{RUN:x}",
        "streams": [[0, "a1"], [3, 1]],
        "endpoints": {},
        "type": "actor_heartbeat",
        "status": OF_ACTOR,
    }
    | {"scores": {"actors": [[0, 2, 7.5, 30], [3, 1, None, 4]], "faults": 1, "metrics": {"success": [2, 1.0]}}},
    {
        **HEARTBEAT,
        "streams": [],
        "endpoints": {},
        "fence": 3,
        "type": "replay_heartbeat",
        "status": {**OF_REPLAY, "priority_histogram": None},
    },
]
RESULT = EvaluationResult(
    updates=12, mean=3.5, median=3.0, length=10, episodes=2, confirmed=False, scores=[3, 4.0], epsilon=0.01, seed=9,
    num_envs=2, seconds=1.0, metrics={"success": 0.5},
)  # fmt: skip


def make_request(message: dict[str, Any], run_id: int = RUN) -> list[bytes]:
    """A control message with this JSON, whether it is valid or not."""
    body = json.dumps(message).encode()
    return [pack(MessageKind.CONTROL, 0, run_id, Stream(0, 0), 0, 0, 0, [body]) + body]


RECEIPTS = [Receipt(Stream(2, 7), 77, 4, 0b101), Receipt(Stream(9, 8), 77, 2**64 - 1, 2**64 - 1)]


def make_seeds(kind: str) -> list[Seed]:
    """At least one message of a kind for each side."""
    seeds = []
    for name, side in SIDES.items():
        codec, schema = side.codec, side.codec.schema
        values = np.array([0.5, -1.0, 2.0], np.float32)
        messages: dict[str, list[list[Any]]] = {
            "segment": [codec.encode_segment(make_segment(schema, n)) for n in (1, 4)],
            "receipt": [codec.encode_receipts(make_receipts(*RECEIPTS[:n], group=2), 1) for n in (1, 2)],
            "batch": [codec.encode_batch(make_batch(schema, 3))],
            "priorities": [
                codec.encode_priorities(PriorityUpdate(0, 77, 1, 9, np.arange(n), np.ones(n, np.float32)))
                for n in (0, 1, 4)
            ],
            "parameters": [codec.encode_parameters(Parameters(12, values))],
            "control": [*map(make_request, REQUESTS), make_request(REQUESTS[0], 0), make_request(REQUESTS[0], 1)],
            "evaluation": [
                codec.encode_evaluation(RESULT, Parameters(12, values)),
                codec.encode_evaluation(replace(RESULT, low=3, high=4.0), None),
            ],
        }
        seeds += [Seed(name, [bytes(part) for part in message]) for message in messages[kind]]
    return seeds
