"""Encodes and decodes JSON, and checks the type of each field."""

from functools import cache
from operator import methodcaller
from typing import Any

import msgspec

from apexreplay.wire.header import Frame, WireError, require_field

MAX_JSON_BYTES = 1 << 20

_ENCODER = msgspec.json.Encoder(enc_hook=methodcaller("item"))  # Converts NumPy scalars to Python scalars.
_decoder = cache(msgspec.json.Decoder)


def decode_json(body: Frame, kind: Any) -> Any:
    """Decodes standard JSON of at most MAX_JSON_BYTES to the type `kind`; raises WireError."""
    require_field(len(body) <= MAX_JSON_BYTES, "length", f"{len(body)} bytes of JSON, maximum is {MAX_JSON_BYTES}")
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise WireError("fields", str(error)) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError("json", str(error)[:80]) from error


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
