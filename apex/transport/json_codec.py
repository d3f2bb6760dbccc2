"""JSON on the wire: strict, of bounded size and depth, and of declared types."""

from __future__ import annotations

import re
from operator import methodcaller
from typing import Any

import msgspec

from apex.transport.header import WireError, require_field

MAX_JSON_BYTES = 1 << 20
MAX_JSON_DEPTH = 16  # The welcome's configuration is the deepest: 5.

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"(\s*:)?')  # The group matches if the string is a name.
_ENCODER = msgspec.json.Encoder(enc_hook=methodcaller("item"))  # Scalars of NumPy become those of Python.


def parse_json(body: memoryview) -> dict[str, Any]:
    """A JSON object of at most MAX_JSON_BYTES, as the standard has it and no more.

    No name stands twice in an object, every number is a whole one of 64 bits or a finite float, and nothing lies deeper
    than MAX_JSON_DEPTH. Raises WireError.
    """
    require_field(len(body) <= MAX_JSON_BYTES, "length", f"{len(body)} bytes of JSON")
    try:
        message = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError("json", str(error)[:80]) from error
    require_field(isinstance(message, dict), "json", "not an object")
    names = sum(match[1] is not None for match in _STRING.finditer(body))
    require_field(_count_names(message, MAX_JSON_DEPTH) == names, "json", "a name stands twice")
    return dict(message)


def convert(message: dict[str, Any], kind: Any) -> Any:
    """The message as its declared type; raises WireError."""
    try:
        return msgspec.convert(message, kind)
    except msgspec.ValidationError as error:
        raise WireError("fields", str(error)) from error


def require_printable(value: Any) -> None:
    """Raises WireError unless every text in a message prints as it stands: none moves a cursor."""
    if isinstance(value, dict):
        require_printable([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            require_printable(each)
    elif isinstance(value, str):
        require_field(value.isprintable(), "fields", "a text that cannot be printed")


def encode_json(message: Any) -> bytes:
    """The JSON of a record. Null stands for a number that is not finite, for which JSON has no word.

    A question mark stands for half a character: a path may be bytes that are no text.
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
    """How many names all objects in a value have; raises WireError for what is too deep, or a number too long."""
    require_field(depth > 0, "json", f"deeper than {MAX_JSON_DEPTH}")
    if isinstance(value, dict):
        return len(value) + sum(_count_names(each, depth - 1) for each in value.values())
    if isinstance(value, list):
        return sum(_count_names(each, depth - 1) for each in value)
    too_long = isinstance(value, int) and not -(2**63) <= value < 2**64
    require_field(not too_long, "json", "a whole number of more than 64 bits")
    return 0
