"""The checked types that messages are made of. A value outside its bounds is refused; see docs/protocol.md."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_TEXT = 200  # characters of what is shown to people
MAX_STREAMS = 65_536  # in one heartbeat
MAX_NUMBER = 1e300  # A few thousand of them can still be added up.

Text = Annotated[str, Meta(max_length=MAX_TEXT)]  # In a request it must also print as it stands.
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
U31 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
U64 = Annotated[int, Meta(ge=0)]  # No whole number on the wire has more than 64 bits.
Counts = Annotated[dict[Text, Count], Meta(max_length=64)]  # by name
HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]"  # a name, an IPv4 address, or an IPv6 address in brackets
PORT = r"[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
Endpoint = Annotated[str, Meta(max_length=MAX_TEXT, pattern=rf"^tcp://({HOST}):({PORT})$")]
Endpoints = Annotated[dict[Text, Endpoint], Meta(max_length=16)]  # by the socket's name


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message, or a part of one: each field is declared, and checked where the message arrives."""


def printable(text: str) -> str:
    """`text` as a request may hold it: each character that does not print is a question mark, and a long one is cut."""
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_TEXT])
