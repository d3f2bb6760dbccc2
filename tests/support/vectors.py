"""One message of each kind with known contents, and their form in docs/reference/vectors.md."""

import re
from pathlib import Path

import numpy as np
from support.builders import make_receipts
from support.messages import RESULT, STATUSES, make_heartbeat, make_run_status

from apex.schema import Schema
from apex.transport.messages import control as run_control
from apex.transport.messages.control import Lease
from apex.transport.messages.results import ActorScores, Scores
from apex.transport.messages.status import Resources
from apex.transport.run_codec import RunCodec
from apex.types import Parameters, Tensor
from apexreplay.facts import HexInt
from apexreplay.frame_blob import make_blob
from apexreplay.tables import table
from apexreplay.types import BatchMessage, PriorityUpdate, Receipt, Segment, Stream
from apexreplay.wire import control
from apexreplay.wire.codec import Codec
from apexreplay.wire.header import HEADER, WIRE_VERSION
from apexreplay.wire.json_codec import encode_control

PAGE = Path(__file__).parents[2] / "docs/reference/vectors.md"
WIDTH = 80  # characters of a line

RUN_ID = HexInt(0x0123456789ABCDEF)
STREAM, STORE = Stream(3, 0x100000002), 0x1122334455667788
NUMBERS = table("numbers", {"x": "int64"}, values={"score": "float32"})
SCHEMA = Schema(frame_shape=(2,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
TABLE_CODEC, RUN_CODEC = Codec(RUN_ID, NUMBERS), RunCodec(RUN_ID, SCHEMA)


def _table_messages():
    records = np.zeros(2, NUMBERS.record)
    records["priority"], records["score"], records["frame"] = (1.0, 0.5), (2.0, -2.0), (0, 1)
    batch = np.zeros(1, NUMBERS.batch_record)
    batch["key"], batch["probability"], batch["score"], batch["version"], batch["num_frames"] = 7, 0.25, -2.0, 9, 1
    one, two = (np.int64(number).tobytes() for number in (1, 2))
    update = PriorityUpdate(0, STORE, 1, 6, np.array([7]), np.array([1.5], np.float32))
    given = {"run_id": f"{RUN_ID:x}", "stream": 3, "incarnation": "100000002"}
    welcome = control.Welcome(
        session=12, table=NUMBERS.to_dict(), experience=23_001, priorities=23_002, receipts=23_003, batches=[23_004],
        window=8, segment_length=50, row=-1, num_rows=65, max_batch=512, limiter=(1, 0.0, 0.0, False), **given,
    )  # fmt: skip
    status = control.TableStatus(capacity=1_000, writers=1, samplers=0, replay=STATUSES["replay"])
    answers = {
        "hello": control.Hello(session=12, role="writer", table="numbers"),
        "hello_again": control.Hello(session=12, role="writer", table="numbers", **given),
        "welcome": welcome,
        "later": control.Later(session=12),
        "refused": control.Refusal(session=12, reason="no_table", subject="numbers"),
        "beat": control.Beat(session=12),
        "alive": control.Alive(session=12),
        "status_request": control.StatusRequest(session=13),
        "status": control.ServerStatus(
            session=13, tables={"numbers": status}, refused_connections={}, refusals={"magic": 2}
        ),
        "bye": control.Bye(session=12),
    }
    return {
        **{name: encode_control(message) for name, message in answers.items()},
        "segment": TABLE_CODEC.encode_segment(Segment(STREAM, 5, 9, records, make_blob([one, two]), 4, group=3)),
        "receipt": TABLE_CODEC.encode_receipts(make_receipts(Receipt(STREAM, STORE, 6, 0), group=3)),
        "request": TABLE_CODEC.encode_request(1),
        "batch": TABLE_CODEC.encode_batch(BatchMessage(0, STORE, 1, 6, 100, batch, make_blob([two]))),
        "priorities": TABLE_CODEC.encode_priorities(update),
    }


def _run_messages():
    leases = [Lease.of(STREAM)]
    endpoints = {name: f"tcp://10.0.0.2:{port}" for name, port in (("experience", 21_001), ("receipts", 21_003))}
    settings = {"n_step": 3, "segment_length": 50, "window": 4, "num_actors": 4}
    welcome = run_control.WelcomeAnswer(
        run_id=RUN_ID, config={"actor": settings}, schema=SCHEMA, table=SCHEMA.table.to_dict(), num_parameters=6,
        parameters=[Tensor("value.output.weight", (1, 2)), Tensor("advantage.output.weight", (2, 2))], num_actors=4,
        run="cartpole-1", owner="ada@learner", memory="m", replay=[endpoints], absent="", generation=5, streams=leases,
    )  # fmt: skip
    program = {"session": 12, "host": "actor-1", "run_id": RUN_ID}
    sums = Scores([ActorScores(3, 2, 41.0, 41)])
    sent = {
        "hello": run_control.Hello(
            wire=WIRE_VERSION, session=12, role="actor", host="actor-1", pid=7, shard=0, num_streams=1
        ),
        "welcome": welcome,
        "wait": run_control.WaitAnswer(holder=11, host="replay-1", run_id=RUN_ID),
        "refused": run_control.RefusedAnswer("the request is for another run"),
        "actor_heartbeat": make_heartbeat("actor", **program, streams=leases, scores=sums),
        "replay_heartbeat": make_heartbeat("replay", **program, endpoints=endpoints, fence=2),
        "evaluator_heartbeat": make_heartbeat("evaluator", **program, resources=Resources(cores=0.5, memory_bytes=9)),
        "state": run_control.StateAnswer(stop=False, generation=5),
        "status_request": run_control.StatusRequest(),
        "status": make_run_status(),
        "goodbye": run_control.Goodbye(session=12),
    }
    records = np.zeros(1, SCHEMA.table.record)
    for name, value in {
        "priority": 0.5, "n_step_return": 2.0, "discount": 0.0, "reward": 1.0, "step_discount": 0.5, "action": 1,
        "frame": 0, "next_frame": 2, "depth": 1, "next_depth": 1,
    }.items():  # fmt: skip
        records[name] = value
    frames = [np.array([step, -step], "<f4").tobytes() for step in (1, 2, 3)]
    values = Parameters(9, np.arange(6, dtype=np.float32))
    return {
        **{f"run_{name}": encode_control(message, RUN_ID) for name, message in sent.items()},
        "run_segment": RUN_CODEC.encode_segment(Segment(STREAM, 0, 9, records, make_blob(frames), 0)),
        "run_parameters": RUN_CODEC.encode_parameters(values),
        "run_evaluation": RUN_CODEC.encode_evaluation(RESULT, values),
    }


TABLE_VECTORS, RUN_VECTORS = _table_messages(), _run_messages()
VECTORS = {**TABLE_VECTORS, **RUN_VECTORS}


def _cut(text):
    return [f"  {text[start : start + WIDTH]}" for start in range(0, len(text), WIDTH)]


def write(parts):
    """Returns the lines of a message: hexadecimal digits, then its JSON if it has one."""
    *first, last = (bytes(part) for part in parts)
    split = last.find(b"{", HEADER.size) if last[5] in (6, 7) else -1
    if split < 0:
        return _cut(" | ".join(part.hex() for part in (*first, last)))
    return _cut(last[:split].hex()) + _cut(last[split:].decode())


def read(lines):
    """Returns the message parts that `write` has written."""
    text = "".join(line[2:] for line in lines)
    digits, brace, json = text.partition("{")
    parts = [bytes.fromhex(part) for part in digits.split("|")]
    parts[-1] += (brace + json).encode()
    return parts


def documented():
    """Returns the messages of the page by name."""
    found = {}
    for block in re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.S):
        for message in re.split(r"^(?=\w)", block, flags=re.M):
            if message:
                name, *lines = message.splitlines()
                found[name] = read(lines)
    return found


if __name__ == "__main__":  # Writes the blocks of the page.
    lines = [
        [line for name, parts in each.items() for line in (name, *write(parts))]
        for each in (TABLE_VECTORS, RUN_VECTORS)
    ]
    blocks = iter("\n".join(["```text", *each, "```"]) for each in lines)
    PAGE.write_text(re.sub(r"```text\n.*?```", lambda _: next(blocks), PAGE.read_text(), flags=re.S))
