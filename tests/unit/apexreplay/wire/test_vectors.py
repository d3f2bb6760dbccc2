"""The messages in docs/protocol.md, in hexadecimal digits, are those of the codec."""

import re
from pathlib import Path

import numpy as np
import pytest

from apexreplay.frame_blob import make_blob
from apexreplay.tables import table
from apexreplay.types import BatchMessage, PriorityUpdate, Receipt, Segment, Stream
from apexreplay.wire.codec import Codec
from apexreplay.wire.control import Beat, Hello, Request, decode_message
from apexreplay.wire.json_codec import encode_control

DECLARED = table("numbers", {"x": "int64"}, values={"score": "float32"})
CODEC = Codec(0x0123456789ABCDEF, DECLARED)
STREAM, STORE = Stream(3, 0x100000002), 0x1122334455667788
RECORDS = np.zeros(2, DECLARED.record)
RECORDS["priority"], RECORDS["score"], RECORDS["frame"] = (1.0, 0.5), (2.0, -2.0), (0, 1)
BATCH = np.zeros(1, DECLARED.batch_record)
BATCH["key"], BATCH["probability"], BATCH["score"], BATCH["version"], BATCH["num_frames"] = 7, 0.25, -2.0, 9, 1
ONE, TWO = (np.int64(number).tobytes() for number in (1, 2))
SEGMENT = Segment(STREAM, 5, 9, RECORDS, make_blob([ONE, TWO]), 4)
PART = BatchMessage(0, STORE, 1, 6, 100, BATCH, make_blob([TWO]))
UPDATE = PriorityUpdate(0, STORE, 1, 6, np.array([7]), np.array([1.5], np.float32))
VECTORS = {
    "hello": encode_control(Hello(session=12, role="writer", table="numbers")),
    "beat": encode_control(Beat(session=12)),
    "segment": CODEC.encode_segment(SEGMENT),
    "receipt": CODEC.encode_receipt(Receipt(STREAM, STORE, 6, 0)),
    "request": CODEC.encode_request(1),
    "batch": CODEC.encode_batch(PART),
    "priorities": CODEC.encode_priorities(UPDATE),
}


def documented():
    text = (Path(__file__).parents[4] / "docs/protocol.md").read_text()
    block = text.split("## Test vectors")[1].split("```text\n")[1].split("```")[0]
    found = {}
    for name, digits in re.findall(r"^(\w+)((?:\n  [0-9a-f |]+)+)", block, re.M):
        found[name] = [bytes.fromhex(part) for part in re.sub(r"\s", "", digits).split("|")]
    return found


@pytest.mark.parametrize("name", VECTORS)
def test_the_document_has_the_bytes_of_each_message(name):
    assert documented()[name] == [bytes(part) for part in VECTORS[name]]


def test_the_document_has_no_other_message():
    assert set(documented()) == set(VECTORS)


def test_the_documented_messages_are_valid():
    frames = {name: [memoryview(part) for part in parts] for name, parts in documented().items()}
    assert decode_message(frames["hello"], Request).table == "numbers"
    segment = CODEC.decode_segment(frames["segment"])
    assert (segment.number, segment.base, segment.version) == (5, 4, 9)
    assert segment.records["score"].tolist() == [2.0, -2.0]
    assert CODEC.decode_receipt(frames["receipt"]) == Receipt(STREAM, STORE, 6, 0)
    assert CODEC.decode_request(frames["request"]) == 1
    assert CODEC.decode_batch(frames["batch"], 1).records["key"].tolist() == [7]
    assert CODEC.decode_priorities(frames["priorities"]).priorities.tolist() == [1.5]


if __name__ == "__main__":  # Prints the block of the document.
    for title, parts in VECTORS.items():
        print(title)
        text = " | ".join(bytes(part).hex() for part in parts)
        for start in range(0, len(text), 80):
            print(f"  {text[start : start + 80]}")
