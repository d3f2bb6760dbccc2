"""Strict JSON for control messages: bounded size and depth, no duplicate keys, no numbers that are none."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from apex.transport.header import WireError, require_field

MAX_JSON_BYTES = 1 << 20
MAX_JSON_DEPTH = 16  # The welcome's configuration is the deepest: 5.
_SURROGATE = re.compile("[\ud800-\udfff]")


def load_json(body: memoryview) -> dict[str, Any]:
    """A JSON object of at most MAX_JSON_BYTES, as the standard has it and no more.

    No name stands twice in an object, every number is one of 64 bits or a finite float, every text can be printed, and
    nothing lies deeper than MAX_JSON_DEPTH.
    """
    require_field(len(body) <= MAX_JSON_BYTES, "length", f"{len(body)} bytes of JSON")
    try:
        message = _JSON.decode(bytes(body).decode())
    except (ValueError, RecursionError) as error:
        raise WireError("json", str(error)[:80]) from error
    require_field(isinstance(message, dict), "json", "not an object")
    _check_depth(message)
    return dict(message)


def dump_json(message: dict[str, Any]) -> bytes:
    """The inverse of `load_json`. JSON has no word for what is not finite: null stands for it.

    For half a character stands a question mark: a path or a host's name may be bytes that are no text.
    """
    try:
        text = json.dumps(message, allow_nan=False, ensure_ascii=False)
    except ValueError:
        text = json.dumps(_without_infinities(message), allow_nan=False, ensure_ascii=False)
    return text.encode(errors="replace")


def _without_infinities(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _without_infinities(each) for name, each in value.items()}
    return [_without_infinities(each) for each in value] if isinstance(value, list | tuple) else value


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _read_whole(text: str) -> int:
    number = int(text) if len(text) <= 20 else 2**64  # Longer ones take long to read.
    if not -(2**63) <= number < 2**64:
        raise ValueError("a whole number of more than 64 bits")
    return number


def _read_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number that is not finite")
    return number


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_JSON = json.JSONDecoder(
    object_pairs_hook=_read_object, parse_int=_read_whole, parse_float=_read_float, parse_constant=_refuse_constant
)


def _check_depth(message: dict[str, Any]) -> None:
    """Level by level, so that no depth is too deep to be found; and every text on the way."""
    level: list[Any] = [message]
    for _ in range(MAX_JSON_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                require_field(_SURROGATE.search(value) is None, "json", "half a character")
        if not below:
            return
        level = below
    raise WireError("json", f"deeper than {MAX_JSON_DEPTH}")
