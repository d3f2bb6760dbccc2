"""Encodes and decodes JSON messages. Limits their size and depth, and checks the type of each field."""

from __future__ import annotations

import re
from operator import methodcaller
from typing import Any

import msgspec

from apex.transport.header import WireError, require_field

MAX_JSON_BYTES = 1 << 20
MAX_JSON_DEPTH = 16  # The deepest message, the welcome, has 5 levels.

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"(\s*:)?')  # The group matches if the string is an object's key.
_ENCODER = msgspec.json.Encoder(enc_hook=methodcaller("item"))  # Converts NumPy scalars to Python scalars.


def parse_json(body: memoryview) -> dict[str, Any]:
    """Parses a standard JSON object of at most MAX_JSON_BYTES; raises WireError.

    Refuses duplicate keys, integers of more than 64 bits, numbers that are not finite, and nesting deeper than
    MAX_JSON_DEPTH.
    """
    require_field(len(body) <= MAX_JSON_BYTES, "length", f"{len(body)} bytes of JSON, maximum is {MAX_JSON_BYTES}")
    try:
        message = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError("json", str(error)[:80]) from error
    require_field(isinstance(message, dict), "json", "the message is not a JSON object")
    names = sum(match[1] is not None for match in _STRING.finditer(body))
    require_field(_count_names(message, MAX_JSON_DEPTH) == names, "json", "an object has a duplicate key")
    return dict(message)


def convert(message: dict[str, Any], kind: Any) -> Any:
    """Converts a message to the type `kind`; raises WireError."""
    try:
        return msgspec.convert(message, kind)
    except msgspec.ValidationError as error:
        raise WireError("fields", str(error)) from error


def require_printable(value: Any) -> None:
    """Raises WireError if a text has unprintable characters, which could control a terminal."""
    if isinstance(value, dict):
        require_printable([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            require_printable(each)
    elif isinstance(value, str):
        require_field(value.isprintable(), "fields", "a text has unprintable characters")


def encode_json(message: Any) -> bytes:
    """Encodes a record as JSON. Numbers that are not finite become null.

    Lone surrogates, which occur in paths that are not valid UTF-8, become question marks.
    """
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        return _ENCODER.encode(_readable(msgspec.to_builtins(message)))


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_readable(name): _readable(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(_readable, value))
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _count_names(value: Any, depth: int) -> int:
    """Returns the number of keys in all nested objects; raises WireError for deep nesting or large integers."""
    require_field(depth > 0, "json", f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels")
    if isinstance(value, dict):
        return len(value) + sum(_count_names(each, depth - 1) for each in value.values())
    if isinstance(value, list):
        return sum(_count_names(each, depth - 1) for each in value)
    too_long = isinstance(value, int) and not -(2**63) <= value < 2**64
    require_field(not too_long, "json", "an integer has more than 64 bits")
    return 0
