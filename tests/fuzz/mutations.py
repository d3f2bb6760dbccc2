"""Mutations of messages. Most keep lengths and checksum correct, so that later checks are reached."""

import re
import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random

HEADER_BYTES = 52
# Offset and width of each field of the header: version, kind, shard, run, sender, schema, incarnation, number, items.
FIELDS = ((4, 1), (5, 1), (6, 2), (8, 8), (16, 4), (20, 4), (24, 8), (32, 8), (40, 4))
WHOLES = (0, 1, 2, 3, 4, 5, 8, 255, 256, 4_095, 4_096, 4_097, 8_192, 65_535, 2**31 - 1, 2**31, 2**32 - 1)
WIDE = (2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, 1.0000001, -1e-45, 1e-45, 1e-310, 2.3e-308, 2.0**-1000, 2.0**-1001, 1e38, -1.0, 0.5)
SPECIAL = (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\x01\x00\x80\x7f", b"\xff\xff\x7f\x7f")
SPECIAL_WIDE = (b"\x00" * 6 + b"\xf8\x7f", b"\x00" * 6 + b"\xf0\x7f", b"\xff" * 6 + b"\xef\x7f", b"\x01" + b"\x00" * 7)
LITERALS = [
    b"0", b"-0", b"1", b"-1", b"1.0", b"1e0", b"0.5", b"1e300", b"1.1e300", b"1e308", b"1e309", b"-1e999", b"1E-400",
    b"NaN", b"Infinity", b"-Infinity", b"01", b"1.", b".5", b"+1", b"-", b"0x10", b"1_000",
    b"255", b"256", b"65536", b"65537", b"2147483647", b"2147483648", b"4294967295", b"4294967296",

    b"4611686018427387904", b"4611686018427387905", b"9007199254740992",
    b"9007199254740993", b"9223372036854775807", b"9223372036854775808",
    b"18446744073709551615", b"18446744073709551616", b"-9223372036854775808", b"-9223372036854775809", b"9" * 400,
    b"10001", b"10000", b"11259375",
    b"true", b"false", b"null", b"nul", b"True", b"[]", b"{}", b"[[0,1]]", b"[1,2]", b"[[]]", b"[null]", b"{\"a\":1}",
    b'""', b'"a"', b'"' + b"a" * 200 + b'"', b'"' + b"a" * 201 + b'"', b'"\\u0000"', b'"\\ud800"', b'"\\ud83d\\ude00"',
    b'"\\udc00\\ud800"', b'"\\n"', b'"\\x"', b'"\\u12"', b'"\x1b[2J"', b'"\\u001b"', b'"\\u00a0"', b'"\\u200b"',
    '"ß"'.encode(), b'"\xff"', b'"\xed\xa0\x80"', '"😀"'.encode(), b'"\\ue000"',
    b"[" * 12 + b"]" * 12, b"[" * 13 + b"]" * 13, b"[" * 14 + b"]" * 14, b"[" * 15 + b"]" * 15, b"[" * 16 + b"]" * 16,
    b"[" * 2_000 + b"]" * 2_000, b'{"a":' * 15 + b"{}" + b"}" * 15,
    b'"actor"', b'"replay"', b'"learner"', b'"hello"', b'"actor_heartbeat"', b'"status"', b'"goodbye"',
    b"[[0,1,2.5,3]]", b"[[0,1,null,3]]", b"[[0,0,1,1]]", b"[[4294967296,1,1,1]]", b"[0,1,1,1]", b'{"faults":2}',
    b'{"counts":[1],"edges":[1,2]}', b'{"counts":[1],"edges":[1,1]}', b'{"counts":[1e16],"edges":[1,2]}',
    b'{"counts":[-1],"edges":[1,2]}', b'{"counts":[],"edges":[1]}', b'{"counts":[1],"edges":[0,2]}',
    b'{"counts":[1],"edges":[1,1e31]}', b'{"counts":"x","edges":[1,2]}', b'{"counts":[1]}',
    b'{"actors":[]}', b'{"actors":[[0,1,1,1]],"actors":[]}', b'{"actors":[[0]]}', b'{"crc":1,"crc":2}',
    b'{"num_inserted":1.5}',
    b'{"what":"receipts"}', b'{"waiting":null}', b'{"inserts_wait":0}', b'{"refusals":{"a":-1}}',
    b'{"busy_share":[]}', b'{"Size":1}', b'{"size":-1}', b'{"loss":null}', b'{"loss":"high"}', b'{"loss":{}}',
]  # fmt: skip
NAMES = [
    b'"type"', b'"session"', b'"status"', b'"what"', b'"num_inserted"', b'"priority_histogram"', b'"mean"', b'"scores"',
    b'"actors"', b'"faults"', b'"epsilon"', b'"x"', b'"sess\\u0069on"', b'"refusals"', b'"waiting"', b'"steps"',
    b'""', b'"__class__"', b'"A"',
]  # fmt: skip
_VALUE = re.compile(rb'(?<=[:\[,])\s*("(?:[^"\\]|\\.)*"|-?[0-9][-+.0-9eE]*|true|false|null|\[\]|\{\})')
_NAME = re.compile(rb'"(?:[^"\\]|\\.)*"(?=\s*:)')

JSON_KINDS = ("control", "evaluation")


class Mutator:
    """Makes a message from another."""

    def __init__(self, kind: str, rng: Random) -> None:
        self._rng = rng
        self._has_json = kind in JSON_KINDS
        self._body_changes: list[Callable[[bytearray], None]] = [self._flip, self._set_byte, self._set_number]
        self._body_changes += [self._set_number, self._set_float, self._nudge, self._nudge]
        self._body_changes += [self._cut, self._insert, self._repeat, self._swap]

    def mutate(self, parts: Sequence[bytes], others: Sequence[Sequence[bytes]]) -> list[bytes]:
        """`others`: messages whose pieces may be used."""
        rng, message = self._rng, [bytearray(part) for part in parts]
        count = 1 if rng.random() < 0.5 else rng.randrange(2, 6)
        reframed = False
        for _ in range(count):
            chance = rng.random()
            if chance < 0.12:
                self._change_header(message[0])
            elif chance < 0.15:
                reframed = True
                self._change_parts(message, others)
                if not message:
                    return []
            elif chance < 0.20:
                self._splice(message, rng.choice(others))
            elif self._has_json and chance < 0.85:
                self._change_json(message[0])
            else:
                self._change_body(message)
        if rng.random() < 0.97 or not reframed:
            seal(message, length=rng.random() < 0.98, crc=rng.random() < 0.985)
        return [bytes(part) for part in message]

    def _change_header(self, first: bytearray) -> None:
        rng = self._rng
        offset, width = rng.choice(FIELDS)
        if len(first) < HEADER_BYTES:
            return
        if rng.random() < 0.3:
            old = int.from_bytes(first[offset : offset + width], "little")
            number = old + rng.choice((-2, -1, 1, 2))
        else:
            number = rng.choice(WHOLES + WIDE)
        first[offset : offset + width] = (number % 256**width).to_bytes(width, "little")

    def _change_parts(self, message: list[bytearray], others: Sequence[Sequence[bytes]]) -> None:
        rng = self._rng
        change = rng.randrange(6)
        at = rng.randrange(len(message))
        if change == 0:
            del message[at]
        elif change == 1:
            message.insert(at, bytearray(message[at]))
        elif change == 2:
            message.append(bytearray(rng.choice(rng.choice(others))))
        elif change == 3:
            message.reverse()
        elif change == 4:
            message[at] = bytearray()
        else:
            cut = rng.randrange(len(message[at]) + 1)
            message[at : at + 1] = [message[at][:cut], message[at][cut:]]

    def _splice(self, message: list[bytearray], other: Sequence[bytes]) -> None:
        """Replaces the body, or a piece of it, by that of another message."""
        rng = self._rng
        if len(message) != len(other):
            return
        at = rng.randrange(len(message))
        low = HEADER_BYTES if at == 0 else 0
        if rng.random() < 0.5:
            message[at][low:] = other[at][low:]
        elif len(other[at]) > low:
            start = rng.randrange(low, len(other[at]))
            stop = rng.randrange(start, min(len(other[at]), start + 64) + 1)
            message[at][start:stop] = other[at][start:stop]

    def _change_body(self, message: list[bytearray]) -> None:
        rng = self._rng
        at = rng.randrange(len(message))
        head, body = message[at][:HEADER_BYTES], message[at][HEADER_BYTES:]
        if at:
            head, body = head[:0], message[at]
        rng.choice(self._body_changes)(body)
        message[at] = head + body

    def _at(self, body: bytearray, width: int) -> int:
        """An offset of a field, most often an aligned one."""
        room = len(body) - width
        if room < 0:
            return -1
        at = self._rng.randrange(room + 1)
        return at if self._rng.random() < 0.2 else at - at % min(width, 4)

    def _flip(self, body: bytearray) -> None:
        if body:
            body[self._rng.randrange(len(body))] ^= 1 << self._rng.randrange(8)

    def _set_byte(self, body: bytearray) -> None:
        if body:
            body[self._rng.randrange(len(body))] = self._rng.choice((0, 1, 2, 3, 4, 127, 128, 255))

    def _set_number(self, body: bytearray) -> None:
        width = self._rng.choice((1, 2, 2, 4, 4, 8))
        at = self._at(body, width)
        if at >= 0:
            number = self._rng.choice(WHOLES + WIDE) % 256**width
            body[at : at + width] = number.to_bytes(width, "little")

    def _nudge(self, body: bytearray) -> None:
        """Increments or decrements a number, so that lengths and counts are wrong."""
        width = self._rng.choice((1, 2, 4))
        at = self._at(body, width)
        if at >= 0:
            number = int.from_bytes(body[at : at + width], "little") + self._rng.choice((-4, -1, -1, 1, 1, 4))
            body[at : at + width] = (number % 256**width).to_bytes(width, "little")

    def _set_float(self, body: bytearray) -> None:
        rng = self._rng
        width = rng.choice((4, 4, 8))
        at = self._at(body, width)
        if at >= 0:
            special = rng.choice(SPECIAL if width == 4 else SPECIAL_WIDE)
            plain = struct.pack("<f" if width == 4 else "<d", rng.choice(FLOATS))
            body[at : at + width] = special if rng.random() < 0.5 else plain

    def _cut(self, body: bytearray) -> None:
        if body:
            at = self._rng.randrange(len(body))
            del body[at : at + self._rng.choice((1, 2, 4, 8, 20, 40, len(body)))]

    def _insert(self, body: bytearray) -> None:
        at = self._rng.randrange(len(body) + 1)
        body[at:at] = self._rng.randbytes(self._rng.choice((1, 2, 4, 8, 20)))

    def _repeat(self, body: bytearray) -> None:
        if body:
            at, length = self._rng.randrange(len(body)), self._rng.choice((4, 8, 20, 40))
            body[at:at] = body[at : at + length]

    def _swap(self, body: bytearray) -> None:
        width = self._rng.choice((2, 4, 8, 20))
        one, two = self._at(body, width), self._at(body, width)
        if one >= 0:
            body[one : one + width], body[two : two + width] = body[two : two + width], body[one : one + width]

    def _change_json(self, first: bytearray) -> None:
        rng = self._rng
        brace = first.find(b"{", HEADER_BYTES)
        if brace < 0:
            return
        text = bytes(first[brace:])
        change = rng.random()
        if change < 0.55:
            text = self._replace(_VALUE, text, rng.choice(LITERALS))
        elif change < 0.65:
            text = self._replace(_NAME, text, rng.choice(NAMES))
        elif change < 0.80:  # adds a field, possibly a second time
            at = rng.choice([match.end() for match in re.finditer(rb"\{", text)] or [0])
            comma = b"" if text[at : at + 1] == b"}" else b","
            text = text[:at] + rng.choice(NAMES) + b":" + rng.choice(LITERALS) + comma + text[at:]
        elif change < 0.88:  # removes a field
            fields = list(re.finditer(rb'"[^"]*"\s*:\s*[^,{}\[\]]*,\s*', text))
            if fields:
                gone = rng.choice(fields)
                text = text[: gone.start()] + text[gone.end() :]
        elif change < 0.94:
            at = rng.randrange(len(text) + 1)
            text = (
                text[:at]
                + rng.choice((b" ", b"\t", b"\n", b"\x00", b",", b"}", b"]", b'"', b"\xef\xbb\xbf"))
                + text[at:]
            )
        else:
            text = text.replace(b" ", rng.choice((b"", b"\n", b"  ", b"\x0b", b"\xc2\xa0")))
        first[brace:] = text

    def _replace(self, pattern: re.Pattern[bytes], text: bytes, by: bytes) -> bytes:
        places = list(pattern.finditer(text))
        if not places:
            return text
        place = self._rng.choice(places)
        return text[: place.start()] + by + text[place.end() :]


def seal(message: list[bytearray], *, length: bool = True, crc: bool = True) -> None:
    """Corrects length and checksum."""
    first = message[0]
    if len(first) < HEADER_BYTES:
        return
    if length:
        total = sum(map(len, message)) - HEADER_BYTES
        first[44:48] = (total % 2**32).to_bytes(4, "little")
    if crc:
        checksum = zlib.crc32(first[HEADER_BYTES:], zlib.crc32(first[:48]))
        for part in message[1:]:
            checksum = zlib.crc32(part, checksum)
        first[48:52] = checksum.to_bytes(4, "little")
