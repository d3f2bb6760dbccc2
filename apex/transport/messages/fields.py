"""Field types of messages. A value outside its bounds is refused; see docs/protocol.md."""

from typing import Annotated

from msgspec import Meta

from apexreplay.facts import MAX_TEXT, Text

MAX_STREAMS = 65_536  # maximum streams in one heartbeat

Label = Annotated[str, Meta(max_length=MAX_TEXT)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
U31 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Figures = Annotated[dict[Label, float | None], Meta(max_length=64)]  # name -> figure; None: not finite
HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # a name or an IPv4 address; IPv6 is not supported
PORT = r"[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
Endpoint = Annotated[str, Meta(max_length=MAX_TEXT, pattern=rf"^tcp://({HOST}):({PORT})$")]
Endpoints = Annotated[dict[Text, Endpoint], Meta(max_length=16)]  # name of the socket -> its endpoint


def printable(text: str) -> str:
    """Returns `text` as a Text: other characters become question marks, and the end is cut off."""
    return "".join(character if " " <= character <= "~" else "?" for character in text[:MAX_TEXT])
