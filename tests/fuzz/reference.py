"""The rules of docs/protocol.md in plain Python, one value at a time.

This file imports only the names of waits from apex/, because an error in shared code would not be noticed. It is slow;
read it beside the protocol.
"""

import binascii
import json
import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from apexreplay.facts import WaitKind

KINDS = ("segment", "receipt", "batch", "priorities", "parameters", "control", "evaluation")  # numbered from 1


class Facts(NamedTuple):
    """What the receiver knows before a message arrives."""

    run_id: int
    fingerprint: int  # fields of the schema
    frame_bytes: int
    is_float: bool
    codec: str
    stack: int
    num_actions: int
    n_step: int
    action_size: int = 0
    masked: bool = False
    shard: int = 0
    batch_size: int = 3
    num_parameters: int = 3
    wire_version: int = 6

    @property
    def action_form(self) -> str:
        return f"{self.action_size}f" if self.action_size else "q"

    @property
    def mask_bytes(self) -> int:
        return (self.num_actions + 7) // 8 if self.masked else 0

    @property
    def max_frame_bytes(self) -> int:
        return self.frame_bytes + (self.frame_bytes // 255 + 16 if self.codec == "lz4" else 0)


class Refused(Exception):  # noqa: N818 - it is no error
    """The protocol does not allow this message."""


def must(condition: bool) -> None:
    if not condition:
        raise Refused


def accepts(kind: str, parts: list[bytes], facts: Facts) -> bool:
    """Whether a message is valid where `kind` is expected."""
    try:
        header, body, rest = read_header(kind, parts, facts)
        READERS[kind](header, body, rest, facts)
    except Refused:
        return False
    return True


class Header(NamedTuple):
    version: int
    shard: int
    run_id: int
    sender: int
    schema: int
    incarnation: int
    number: int
    items: int


def read_header(kind: str, parts: list[bytes], facts: Facts) -> tuple[Header, bytes, list[bytes]]:
    must(len(parts) == (2 if kind == "batch" else 1))
    first = parts[0]
    must(len(first) >= 52)
    must(first[:4] == b"ApeX" and (first[4] == facts.wire_version or kind == "control"))
    must(first[5] == KINDS.index(kind) + 1)
    shard, run_id, sender, schema, incarnation, number, items, length, crc = struct.unpack("<HQIIQQIII", first[6:52])
    must(length == sum(len(part) for part in parts) - 52)
    must(crc == binascii.crc32(first[:48] + first[52:] + b"".join(parts[1:])))
    return Header(first[4], shard, run_id, sender, schema, incarnation, number, items), first[52:], parts[1:]


# --- arrays -----------------------------------------------------------------------------------------------------------


def read_blob(blob: bytes, most: int, facts: Facts) -> int:
    """Returns the number of frames."""
    must(len(blob) >= 8)
    start = int.from_bytes(blob[:4], "little")
    must(start % 4 == 0 and 8 <= start <= len(blob))
    num_frames = start // 4 - 1
    must(num_frames <= most)
    before = start
    for at in range(4, start, 4):
        offset = int.from_bytes(blob[at : at + 4], "little")
        if facts.codec == "raw":
            must(offset - before == facts.frame_bytes)
        else:
            must(1 <= offset - before <= facts.max_frame_bytes)
        before = offset
    must(before == len(blob))
    if facts.is_float:
        for (value,) in struct.iter_unpack("<f", blob[start:]):
            must(math.isfinite(value))
    return num_frames


def check_transition(
    n_step_return: float, discount: float, action: list[Any], frame: int, following: int, depth: int, next_depth: int,
    mask: bytes, num_frames: int, facts: Facts,
) -> None:  # fmt: skip
    must(math.isfinite(n_step_return))
    must(0 <= discount <= 1)
    for value in action:
        must(-1 <= value <= 1 if facts.action_size else 0 <= value < facts.num_actions)
    if facts.masked:
        allowed = [a for a in range(8 * len(mask)) if mask[a // 8] & 1 << a % 8]
        must(all(a < facts.num_actions for a in allowed))
        must(allowed != [] or discount == 0)
    must(frame + 1 <= following <= frame + facts.n_step)
    must(following < num_frames)
    must(1 <= depth <= facts.stack and depth <= frame + 1)
    must(1 <= next_depth <= facts.stack and next_depth <= following + 1)


def read_segment(header: Header, body: bytes, rest: list[bytes], facts: Facts) -> None:
    must(header.run_id == facts.run_id and header.schema == facts.fingerprint and header.shard == facts.shard)
    must(header.number < 2**63 and header.incarnation < 2**63)
    must(1 <= header.items <= 4096)
    form = f"<fffff{facts.action_form}{facts.mask_bytes}sHHBB"
    end = 16 + struct.calcsize(form) * header.items
    must(len(body) >= end)
    must(int.from_bytes(body[:8], "little") <= header.number)
    num_frames = read_blob(body[end:], 8192, facts)
    for fields in struct.iter_unpack(form, body[16:end]):
        priority, n_step_return, discount, reward, step_discount, *action, mask, frame, following, depth, next_depth = (
            fields
        )
        must(math.isfinite(priority) and priority >= 0)
        must(math.isfinite(reward))
        must(0 <= step_discount <= 1)
        check_transition(n_step_return, discount, action, frame, following, depth, next_depth, mask, num_frames, facts)


def read_receipt(header: Header, body: bytes, rest: list[bytes], facts: Facts) -> None:
    must(header.run_id == facts.run_id and header.schema == 0 and header.number == 0)
    must(1 <= header.items <= 65_536)
    must(len(body) == 28 * header.items)


def read_batch(header: Header, body: bytes, rest: list[bytes], facts: Facts) -> None:
    must(header.run_id == facts.run_id and header.schema == facts.fingerprint and header.shard == facts.shard)
    must(header.items == facts.batch_size)
    form = f"<qdff{facts.action_form}{facts.mask_bytes}sIHHHBB"
    padding = -struct.calcsize(form) % 8
    form += f"{padding}s"
    must(len(body) == 8 + struct.calcsize(form) * facts.batch_size)
    must(1 <= int.from_bytes(body[:8], "little") < 2**40)
    most = facts.stack + facts.n_step
    total = 0
    for fields in struct.iter_unpack(form, body[8:]):
        (
            _,
            probability,
            n_step_return,
            discount,
            *action,
            mask,
            _,
            num_frames,
            frame,
            following,
            depth,
            next_depth,
            zeros,
        ) = fields
        must(not any(zeros))
        must(2.0**-1000 <= probability <= 1)
        must(num_frames <= most)
        check_transition(n_step_return, discount, action, frame, following, depth, next_depth, mask, num_frames, facts)
        total += num_frames
    must(read_blob(rest[0], most * facts.batch_size, facts) == total)


def read_priorities(header: Header, body: bytes, rest: list[bytes], facts: Facts) -> None:
    must(header.run_id == facts.run_id and header.schema == facts.fingerprint and header.shard == facts.shard)
    must(header.items <= 65_536)
    must(len(body) == 12 * header.items)


def read_values(body: bytes) -> None:
    for (value,) in struct.iter_unpack("<f", body):
        must(math.isfinite(value))


def must_have_no_sender(header: Header, facts: Facts) -> None:
    must(header.run_id == facts.run_id and header.schema == facts.fingerprint)
    must(header.sender == header.incarnation == 0)


def read_parameters(header: Header, body: bytes, rest: list[bytes], facts: Facts) -> None:
    must_have_no_sender(header, facts)
    must(header.shard == 0 and header.number < 2**32)
    must(header.items == facts.num_parameters and len(body) == 4 * facts.num_parameters)
    read_values(body)


# --- JSON -------------------------------------------------------------------------------------------------------------


def readings(data: bytes) -> Iterator[dict[str, Any]]:
    """Yields the object of a JSON text. If it repeats a name, yields an object for each of the values.

    The receiver checks all values, and uses the last one.
    """
    choice = most = 0
    while choice <= most:
        value, repetitions = read_json(data, choice)
        must(type(value) is dict)
        yield value
        choice, most = choice + 1, repetitions


def read_json(data: bytes, choice: int) -> tuple[Any, int]:
    """Returns a value and the highest number of repetitions of a name. `choice`: which of the values to use."""
    repetitions = 0

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repetitions
        found: dict[str, list[Any]] = {}
        for name, value in pairs:
            found.setdefault(name, []).append(value)
        repetitions = max([repetitions, *(len(values) - 1 for values in found.values())])
        return {name: values[min(choice, len(values) - 1)] for name, values in found.items()}

    def refuse(text: str) -> None:  # NaN, Infinity or -Infinity
        raise Refused

    must(len(data) <= 2**20)
    try:
        value = json.loads(data.decode("utf-8", "strict"), object_pairs_hook=make_object, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()  # Fails for lone surrogates.
    except (ValueError, RecursionError):
        raise Refused from None
    return value, repetitions


def is_whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def is_hex(value: Any) -> bool:
    digits = type(value) is str and 1 <= len(value) <= 16 and all(digit in "0123456789abcdef" for digit in value)
    return digits or is_whole(value, 0, 2**64 - 1)


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e300 <= value <= 1e300


def is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= 200 and all(" " <= character <= "~" for character in value)


def is_endpoint(value: Any) -> bool:
    if not is_text(value) or not value.startswith("tcp://"):
        return False
    host, colon, port = value[len("tcp://") :].rpartition(":")
    is_host = host[:1].isalnum() and all(each.isascii() and (each.isalnum() or each in "._-") for each in host)
    is_port = port.isascii() and port.isdecimal() and not port.startswith("0") and 0 < int(port) < 65_536
    return bool(colon) and is_host and is_port


def is_histogram(value: Any) -> bool:
    if type(value) is not dict or sorted(value) != ["counts", "edges"]:
        return False
    counts, edges = value["counts"], value["edges"]
    if type(counts) is not list or type(edges) is not list or not 1 <= len(counts) <= 256:
        return False
    if len(edges) != len(counts) + 1 or not all(is_number(each) for each in counts + edges):
        return False
    if any(count < 0 or float(count) > 2**53 for count in counts) or edges[0] < 1e-30 or edges[-1] > 1e30:
        return False
    return all(edges[index] < edges[index + 1] for index in range(len(counts)))


def is_resources(value: Any) -> bool:
    if type(value) is not dict or not {"cores", "memory_bytes"} <= value.keys() <= OF_RESOURCES:
        return False
    share, gpu_bytes = value.get("gpu_share"), value.get("gpu_memory_bytes")
    if not is_number(value["cores"]) or not is_whole(value["memory_bytes"], 0, 2**62):
        return False
    return (share is None or is_number(share)) and (gpu_bytes is None or is_whole(gpu_bytes, 0, 2**62))


OF_RESOURCES = {"cores", "memory_bytes", "gpu_share", "gpu_memory_bytes"}
COUNTS = ("num_inserted", "num_steps", "num_drawn", "size", "bytes", "max_bytes")
COUNTS += ("stale_priorities", "duplicate_segments", "refused")
RATES = ("inserts_per_second", "inserted_steps_per_second", "samples_per_second", "busy_share")
OF_REPLAY = (*COUNTS, *RATES, "store_incarnation", "refusals", "refused_connections", "samplers_wait_for")
OF_REPLAY += ("inserts_wait", "priority_histogram")
OF_ACTOR = ("num_steps", "steps_per_second", "wait_share", "parameter_bytes_per_second")
OF_ROLE: dict[str, tuple[str, ...]] = {"replay": OF_REPLAY, "actor": OF_ACTOR, "evaluator": ("num_evaluations",)}
WAITING = {"what", "subject", "have", "need", "who", "seconds"}


def is_waiting(value: Any) -> bool:
    if type(value) is not dict or "what" not in value or not set(value) <= WAITING:
        return False
    numbers = [value[name] for name in ("have", "need", "seconds") if value.get(name) is not None]
    texts = [value[name] for name in ("subject", "who") if name in value]
    return value["what"] in get_args(WaitKind) and all(map(is_number, numbers)) and all(map(is_text, texts))


def check_status(status: Any, role: str) -> None:
    must(type(status) is dict)
    must(sorted(status) == sorted(("waiting", *OF_ROLE[role])))
    for name, value in status.items():
        if name in (*COUNTS, "num_evaluations") and (role, name) != ("actor", "num_steps"):
            must(is_whole(value, 0, 2**62))
        elif name == "store_incarnation":
            must(is_text(value))
        elif name == "waiting":
            must(value is None or is_waiting(value))
        elif name == "samplers_wait_for":
            must(value in ("", "inserts", "learner"))
        elif name == "inserts_wait":
            must(type(value) is bool)
        elif name in ("refusals", "refused_connections"):
            must(type(value) is dict and len(value) <= 64)
            for reason, count in value.items():
                must(is_text(reason) and is_whole(count, 0, 2**62))
        elif name == "priority_histogram":
            must(value is None or is_histogram(value))
        else:
            must(is_number(value))


def check_sender(message: dict[str, Any]) -> None:
    must(is_whole(message["session"], 0, 2**63 - 1))
    must(is_text(message["host"]))
    must(is_whole(message["pid"], 0, 2**31 - 1))
    must(is_whole(message["shard"], -(2**31), 2**31 - 1))


def check_scores(scores: Any) -> None:
    must(type(scores) is dict and {"actors"} <= scores.keys() <= {"actors", "faults", "metrics"})
    must(is_whole(scores.get("faults", 0), 0, 2**62))
    actors = scores["actors"]
    must(type(actors) is list and len(actors) <= 1_000)
    for each in actors:
        must(type(each) is list and len(each) == 4)
        actor_id, games, score, length = each
        must(is_whole(actor_id, 0, 2**32 - 1) and is_whole(games, 1, 2**31 - 1))
        must(score is None or is_number(score))
        must(is_whole(length, 0, 2**62))
    for each in named(scores.get("metrics", {})):
        must(type(each) is list and len(each) == 2)
        must(is_whole(each[0], 1, 2**31 - 1) and is_number(each[1]))


def named(metrics: Any) -> Any:
    """The values of at most 16 metrics by name."""
    must(type(metrics) is dict and len(metrics) <= 16 and all(map(is_text, metrics)))
    return metrics.values()


def read_control(header: Header, body: bytes, rest: list[bytes], facts: Facts) -> None:
    must(header.shard == header.sender == header.schema == header.incarnation == header.number == header.items == 0)
    if header.version == facts.wire_version and header.run_id in (0, facts.run_id):  # Others get a reply.
        for message in readings(body):
            check_request(message, facts)


def check_request(message: dict[str, Any], facts: Facts) -> None:
    must(type(message.get("type")) is str)
    kind, _, suffix = message["type"].partition("_")
    if message["type"] == "status":
        must(sorted(message) == ["type"])
    elif message["type"] == "goodbye":
        must(sorted(message) == ["session", "type"])
        must(is_whole(message["session"], 0, 2**63 - 1))
    elif message["type"] == "hello":
        must(sorted(message) == ["host", "num_streams", "pid", "role", "session", "shard", "type", "wire"])
        must(is_whole(message["wire"], facts.wire_version, facts.wire_version))
        must(type(message["role"]) is str and message["role"] in OF_ROLE)
        check_sender(message)
        must(is_whole(message["num_streams"], 0, 65_536 if message["role"] == "actor" else 0))
    else:
        must(kind in OF_ROLE and suffix == "heartbeat")
        resources = message.pop("resources", None)
        must(resources is None or is_resources(resources))
        must(is_whole(message.pop("fence", 0), 0, 2**63 - 1))
        if kind == "actor":
            check_scores(message.pop("scores", {"actors": []}))
        must(sorted(message) == ["endpoints", "host", "pid", "run_id", "session", "shard", "status", "streams", "type"])
        must(is_hex(message["run_id"]))
        check_sender(message)
        must(type(message["streams"]) is list and len(message["streams"]) <= (65_536 if kind == "actor" else 0))
        for stream in message["streams"]:
            must(type(stream) is list and len(stream) == 2)
            must(is_whole(stream[0], 0, 2**32 - 1) and is_hex(stream[1]))
        must(type(message["endpoints"]) is dict and len(message["endpoints"]) <= 16)
        for name, endpoint in message["endpoints"].items():
            must(is_text(name) and is_endpoint(endpoint))
        check_status(message["status"], kind)


def read_evaluation(header: Header, body: bytes, rest: list[bytes], facts: Facts) -> None:
    must_have_no_sender(header, facts)
    must(header.shard == 0 and header.number < 2**32)
    must(header.items in (0, facts.num_parameters))
    cut = 4 * header.items
    must(len(body) >= cut)
    read_values(body[:cut])
    for result in readings(body[cut:]):
        check_result(result)


def check_result(result: dict[str, Any]) -> None:
    needed = "confirmed episodes epsilon length mean median num_envs scores seconds seed updates"
    must(set(result) >= set(needed.split()))
    for name, value in result.items():
        if name == "updates":
            must(is_whole(value, 0, 2**32 - 1))
        elif name == "episodes":
            must(is_whole(value, 0, 10_000))
        elif name == "confirmed":
            must(type(value) is bool)
        elif name == "seed":
            must(is_whole(value, 0, 2**31 - 1))
        elif name == "num_envs":
            must(is_whole(value, 1, 10_000))
        elif name in ("low", "high"):
            must(value is None or is_number(value))
        elif name in ("mean", "median", "length", "epsilon", "seconds"):
            must(is_number(value))
        elif name == "scores":
            must(type(value) is list and len(value) <= 10_000 and all(is_number(each) for each in value))
        elif name == "metrics":
            must(all(map(is_number, named(value))))
        else:
            raise Refused


READERS = {
    "segment": read_segment,
    "receipt": read_receipt,
    "batch": read_batch,
    "priorities": read_priorities,
    "parameters": read_parameters,
    "control": read_control,
    "evaluation": read_evaluation,
}
