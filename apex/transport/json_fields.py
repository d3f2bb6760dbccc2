"""What the JSON objects on the wire hold, field by field; see docs/protocol.md. Everything else is refused.

Whoever reads these messages afterwards adds up, divides, prints and keeps what they say: so a number is a number that
can be reckoned with, a text is short and prints as it stands, and nothing is there that nobody asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from apex.config import MAX_EPISODES
from apex.metric_tags import ACTOR_TAG_PREFIXES
from apex.transport.header import WIRE_VERSION, WireError, require_field
from apex.types import PROGRAMS

MAX_TEXT = 200  # characters of what is shown to people
MAX_STREAMS = 65_536  # in one heartbeat
MAX_STATUS = 64  # figures in one heartbeat
MAX_BINS = 256  # of a priority histogram: 32 decades
MAX_EDGE = 1e30  # Its square can still be added up.
MAX_COUNT = 2**53
MAX_SCALARS = 4_096  # in one metrics message
MAX_NUMBER = 1e300  # A few thousand of them can still be added up.


_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}")

FieldCheck = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Whether it can be reckoned with: neither a truth value, nor beyond MAX_NUMBER."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def whole(least: int, most: int) -> FieldCheck:
    """Whole numbers least ... most."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_text(value: Any) -> bool:
    """Whether it is short and prints as it stands: nothing in it moves a cursor."""
    return isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()


def printable(text: str) -> str:
    """`text` as `is_text` wants it: each character that does not print is a question mark, and a long one is cut."""
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_TEXT])


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_absent_or(check: FieldCheck) -> FieldCheck:
    return lambda value: value is None or check(value)


def _is_list(check: FieldCheck, most: int) -> FieldCheck:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def _is_table(check: FieldCheck, most: int) -> FieldCheck:
    return lambda value: (
        isinstance(value, dict) and len(value) <= most and all(map(is_text, value)) and all(map(check, value.values()))
    )


_u63 = whole(0, 2**63 - 1)
_u64 = whole(0, 2**64 - 1)
_i32 = whole(-(2**31), 2**31 - 1)


def _is_stream(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and whole(0, 2**32 - 1)(value[0]) and _u63(value[1])


def _is_histogram(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"counts", "edges"}:
        return False
    counts, edges = value["counts"], value["edges"]
    return (
        _is_list(is_number, MAX_BINS)(counts)
        and _is_list(is_number, MAX_BINS + 1)(edges)
        and 0 < len(counts) == len(edges) - 1
        and all(0 <= count <= MAX_COUNT for count in counts)
        and edges[0] > 0
        and edges[-1] <= MAX_EDGE
        and all(low < high for low, high in pairwise(edges))
    )


# What a run is steered by: nobody else may say it, for a number of steps may end the run.
_STATUS_OF_REPLAY: dict[str, FieldCheck] = {
    **dict.fromkeys(("num_inserted", "num_drawn", "size", "bytes", "max_bytes"), whole(0, 2**62)),
    **dict.fromkeys(("samplers_wait_for", "store_incarnation"), is_text),
    "inserts_wait": _is_flag,
    **dict.fromkeys(("refusals", "refused_connections"), _is_table(whole(0, 2**62), MAX_STATUS)),
    "priority_histogram": _is_absent_or(_is_histogram),
}
# What others read of a status. The rest is shown at most: see `_is_shown`.
_STATUS: dict[str, FieldCheck] = {**_STATUS_OF_REPLAY, **dict.fromkeys(("rate", "waiting"), is_text)}


def _is_shown(value: Any) -> bool:
    return value is None or _is_flag(value) or is_number(value) or is_text(value)


def _is_status(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_STATUS
        and all(_NAME.fullmatch(name) for name in value)
        and all(_STATUS.get(name, _is_shown)(figure) for name, figure in value.items())
    )


_TYPE: dict[str, FieldCheck] = {"type": is_text}
_WHO: dict[str, FieldCheck] = {
    **_TYPE,
    "role": PROGRAMS.__contains__,
    "host": is_text,
    "pid": whole(0, 2**31 - 1),
    "shard": _i32,
}
_HELLO: dict[str, FieldCheck] = {**_WHO, "wire": _i32, "session": _u63, "num_streams": whole(0, MAX_STREAMS)}
_HEARTBEAT: dict[str, FieldCheck] = {
    **_WHO,
    "session": _u63,
    "run_id": _u64,
    "streams": _is_list(_is_stream, MAX_STREAMS),
    "endpoints": _is_table(is_text, 16),
    "status": _is_status,
}
_RESULT: dict[str, FieldCheck] = {
    "updates": whole(0, 2**32 - 1),
    **dict.fromkeys(("mean", "median", "length"), is_number),
    "episodes": whole(0, MAX_EPISODES),
    "confirmed": _is_flag,
}
_RESULT_MORE: dict[str, FieldCheck] = {
    **dict.fromkeys(("low", "high", "epsilon", "seconds"), is_number),
    "scores": _is_list(is_number, MAX_EPISODES),
    "seed": whole(0, 2**31 - 1),
    "num_envs": whole(1, MAX_EPISODES),
}


def check_request(message: dict[str, Any], run_id: int) -> None:
    """What may be asked of the coordinator; raises WireError on anything else.

    Who speaks another version of the wire, or belongs to another run, is to be told so: of a message of theirs no more
    is looked at than that.
    """
    kind = message.get("type")
    if kind == "hello":
        _require_fields(message, {"wire": _i32, "session": _u63}, more=True)
        if message["wire"] == WIRE_VERSION:
            _require_fields(message, _HELLO)
    elif kind == "heartbeat":
        _require_fields(message, {"run_id": _u64, "session": _u63}, more=True)
        if message["run_id"] == run_id:
            _require_fields(message, _HEARTBEAT)
            if message["role"] != "replay":
                claimed = sorted(_STATUS_OF_REPLAY.keys() & message["status"])
                require_field(not claimed, "fields", f"{', '.join(claimed)} of a program that is no replay server")
    elif kind == "goodbye":
        _require_fields(message, {**_TYPE, "session": _u63})
    elif kind == "status":
        _require_fields(message, _TYPE)
    else:
        raise WireError("type", str(kind)[:40])


def check_result(result: dict[str, Any]) -> None:
    """What an evaluation says; raises WireError on anything else."""
    _require_fields(result, _RESULT, optional=_RESULT_MORE)


def check_metrics(message: dict[str, Any]) -> None:
    """What an actor says of its games; raises WireError on anything else."""
    scalars = message.get("scalars")
    require_field(set(message) == {"role", "steps", "time", "scalars"}, "fields", f"{sorted(message)[:8]}")
    require_field(message["role"] == "actor", "role", f"figures of {str(message['role'])[:40]!r}")
    require_field(_is_absent_or(_u63)(message["steps"]), "fields", "steps")
    require_field(is_number(message["time"]), "fields", "time")
    sound = isinstance(scalars, dict) and len(scalars) <= MAX_SCALARS
    require_field(sound, "fields", "scalars are no object, or too many")
    for tag, value in (scalars or {}).items():
        known = tag.startswith(ACTOR_TAG_PREFIXES) and _TAG.fullmatch(tag) is not None
        require_field(known, "fields", f"the tag {tag[:40]!r}")
        require_field(value is None or is_number(value), "fields", f"{tag} is no number")


def _require_fields(
    message: dict[str, Any],
    fields: dict[str, FieldCheck],
    *,
    optional: dict[str, FieldCheck] | None = None,
    more: bool = False,
) -> None:
    """All of `fields`, perhaps some of `optional`, and with `more` whatever else."""
    optional = optional or {}
    for name, check in fields.items():
        require_field(name in message and check(message[name]), "fields", f"{name} is missing, or cannot be what it is")
    for name in message.keys() - fields.keys():
        if name in optional:
            require_field(optional[name](message[name]), "fields", f"{name} cannot be what it is")
        else:
            require_field(more, "fields", f"{name[:40]!r} is no field of this message")
