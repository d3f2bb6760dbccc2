"""A foreign peer sends wrong messages: the status has a reason for each within 10 s, and nothing else is disturbed."""

import json
import threading
import time
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest
import zmq
from support.sealing import damaged, reseal
from support.waiting import DEADLINE, until

from apexreplay import TableSettings, serve, table
from apexreplay.frame_blob import make_blob
from apexreplay.transport.sockets import open_context
from apexreplay.types import PriorityUpdate, Segment, Stream
from apexreplay.wire.codec import MAX_PRIORITIES, Codec
from apexreplay.wire.control import Answer, Beat, Hello, Welcome, decode_message
from apexreplay.wire.header import WIRE_VERSION, MessageKind, pack
from apexreplay.wire.json_codec import MAX_JSON_BYTES, encode_control

NUMBERS = table("numbers", {"x": "float64"}, values={"score": "float32"})
LENGTH, CAPACITY, STREAMS = 10, 100_000, 4
SETTINGS = [
    TableSettings(table=NUMBERS, capacity=CAPACITY, segment_length=LENGTH, num_streams=STREAMS, priority_exponent=0.0),
    TableSettings(table=table("queue", {"x": "int64"}), capacity=100, segment_length=LENGTH, order="queue"),
]
STATUS_SECONDS = 10.0  # within which the status has a reason
KINDS = {"experience": zmq.PUSH, "priorities": zmq.PUSH, "batches": zmq.DEALER, "control": zmq.DEALER}


class Peer:
    """Knows the wire, and has a lease of a stream that it does not use otherwise."""

    def __init__(self, context, port, client):
        self._context = context
        self._control = port
        self._joined = {}
        for name in ("numbers", "queue"):
            with context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.connect(f"tcp://127.0.0.1:{port}")
                socket.send_multipart(encode_control(Hello(session=5, role="writer", table=name)))
                assert socket.poll(1_000 * DEADLINE)
                welcome = decode_message(socket.recv_multipart(), Answer)
                assert isinstance(welcome, Welcome)
                self._joined[name] = welcome
        own = self._joined["numbers"]
        self.run_id = int(own.run_id, 16)
        self.stream = Stream(own.stream, int(own.incarnation, 16))
        self.codec = Codec(self.run_id, NUMBERS)
        self.store = int(client.status().tables["numbers"].replay.store_incarnation)
        self.queue = Codec(int(self._joined["queue"].run_id, 16), SETTINGS[1].table)

    def send(self, name, frames, table="numbers"):
        own = self._joined[table]
        ports = {"control": self._control, "batches": own.batches[0], "experience": own.experience}
        socket = self._context.socket(KINDS[name])  # Open until the end: the end could overtake the message.
        socket.connect(f"tcp://127.0.0.1:{ports.get(name, own.priorities)}")
        socket.send_multipart(frames)

    def segment(self, count=1, blob=None, **changed):
        """Returns a segment of the own stream; fields of its records and of the message may be wrong."""
        records = np.zeros(count, NUMBERS.record)
        records["priority"], records["frame"] = 1.0, np.arange(count)
        for name in {*changed} & {*records.dtype.names}:
            records[name] = changed.pop(name)
        blob = blob or make_blob([np.float64(1).tobytes()] * count)
        return self.codec.encode_segment(Segment(self.stream, 0, 0, records, blob)._replace(**changed))

    def priorities(self, count=1, *, sampler=0, number=0):
        """Returns priorities of this number, for keys that there are not."""
        keys, values = np.full(count, 10**9), np.ones(count, np.float32)
        return self.codec.encode_priorities(PriorityUpdate(0, self.store, sampler, number, keys, values))


def text(body):
    """Returns a control message."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return [pack(MessageKind.CONTROL, 0, 0, Stream(0, 0), 0, 0, 0, [body]) + body]


HELLO = {"type": "hello", "session": 7, "role": "writer", "table": "numbers"}
STALE = "stale"  # of another store: counted as such
# (socket, what is wrong, message of the peer, reason)
WRONG = [
    ("experience", "empty", lambda peer: [b""], "length"),
    ("experience", "no message of ours", lambda peer: [b"x" * 80], "magic"),
    ("experience", "two parts", lambda peer: [*peer.segment(), b""], "frames"),
    ("experience", "version", lambda peer: reseal(peer.segment(), version=WIRE_VERSION + 1), "version"),
    ("experience", "kind", lambda peer: peer.codec.encode_request(1), "kind"),
    ("experience", "run", lambda peer: reseal(peer.segment(), run_id=1), "run"),
    ("experience", "schema", lambda peer: reseal(peer.segment(), schema=1), "schema"),
    ("experience", "shard", lambda peer: reseal(peer.segment(), shard=1), "shard"),
    ("experience", "checksum", lambda peer: damaged(peer.segment()), "crc"),
    ("experience", "cut off", lambda peer: [peer.segment()[0][:-1]], "length"),
    ("experience", "no item", lambda peer: reseal(peer.segment(), count=0), "count"),
    ("experience", "one item too many", lambda peer: peer.segment(LENGTH + 1), "count"),
    ("experience", "4,096 items", lambda peer: peer.segment(4_096), "length"),
    ("experience", "above the limit of the socket", lambda peer: peer.segment(blob=bytes(1_000_000)), "length"),
    ("experience", "number too large", lambda peer: reseal(peer.segment(), number=2**63), "number"),
    ("experience", "incarnation too large", lambda peer: reseal(peer.segment(), incarnation=2**63), "incarnation"),
    ("experience", "base above the number", lambda peer: peer.segment(base=1), "base"),
    ("experience", "priority below 0", lambda peer: peer.segment(priority=-1.0), "priority"),
    ("experience", "priority not finite", lambda peer: peer.segment(priority=np.nan), "priority"),
    ("experience", "value not finite", lambda peer: peer.segment(score=np.inf), "score"),
    ("experience", "step that is not there", lambda peer: peer.segment(frame=1), "steps"),
    ("experience", "offsets", lambda peer: peer.segment(blob=bytes(30)), "blob"),
    ("experience", "unknown stream", lambda peer: reseal(peer.segment(), sender=STREAMS), "unknown actor"),
    (
        "experience",
        "old incarnation",
        lambda peer: reseal(peer.segment(), sender=STREAMS - 1, incarnation=0),
        "older incarnation",
    ),
    ("experience", "beyond the window", lambda peer: peer.segment(number=100), "too far ahead"),
    ("priorities", "no message of ours", lambda peer: [b"x" * 80], "magic"),
    ("priorities", "run", lambda peer: reseal(peer.priorities(), run_id=1), "run"),
    ("priorities", "segment", lambda peer: peer.segment(), "kind"),
    ("priorities", "cut off", lambda peer: [peer.priorities()[0][:-1]], "length"),
    ("priorities", "too many", lambda peer: peer.priorities(MAX_PRIORITIES + 1), "count"),
    ("priorities", "unknown sampler", lambda peer: peer.priorities(sampler=10**6), "number"),
    ("priorities", "batch that was not sent", lambda peer: peer.priorities(number=2**40), "number"),
    ("priorities", "another store", lambda peer: reseal(peer.priorities(), incarnation=1), STALE),
    ("batches", "no message of ours", lambda peer: [b"x" * 80], "magic"),
    ("batches", "nothing", lambda peer: [b""], "length"),
    ("batches", "no item", lambda peer: peer.codec.encode_request(0), "count"),
    ("batches", "too many items", lambda peer: peer.codec.encode_request(MAX_PRIORITIES + 1), "count"),
    ("batches", "run", lambda peer: reseal(peer.codec.encode_request(1), run_id=1), "run"),
    ("batches", "schema", lambda peer: reseal(peer.codec.encode_request(1), schema=1), "schema"),
    ("batches", "checksum", lambda peer: damaged(peer.codec.encode_request(1)), "crc"),
    ("batches", "body", lambda peer: [*peer.codec.encode_request(1), b"x" * 100_000], "frames"),
    ("batches", "above the limit of the socket", lambda peer: [b"x" * 900_000], "magic"),
    ("control", "no message of ours", lambda peer: [b"x" * 80], "magic"),
    ("control", "version", lambda peer: reseal(text(HELLO), version=WIRE_VERSION + 1), "version"),
    ("control", "kind", lambda peer: reseal(text(HELLO), kind=MessageKind.BATCH), "kind"),
    ("control", "run id", lambda peer: reseal(text(HELLO), run_id=1), "run_id"),
    ("control", "schema", lambda peer: reseal(text(HELLO), schema=1), "schema"),
    ("control", "checksum", lambda peer: damaged(text(HELLO)), "crc"),
    ("control", "two parts", lambda peer: [*text(HELLO), b""], "frames"),
    ("control", "no JSON", lambda peer: text(b'{"type":'), "json"),
    ("control", "unknown field", lambda peer: text({**HELLO, "more": 1}), "fields"),
    ("control", "missing field", lambda peer: text({"type": "beat"}), "fields"),
    ("control", "unknown type", lambda peer: text({"type": "what", "session": 1}), "fields"),
    ("control", "number as a text", lambda peer: text({**HELLO, "session": "7"}), "fields"),
    ("control", "long text", lambda peer: text({**HELLO, "table": "x" * 201}), "fields"),
    ("control", "too long", lambda peer: text(b" " * (MAX_JSON_BYTES + 1)), "length"),
    ("control", "above the limit of the socket", lambda peer: text(b" " * 3 * MAX_JSON_BYTES), "length"),
    ("control", "unknown table", lambda peer: text({**HELLO, "table": "none"}), "no_table"),
    ("control", "another memory", lambda peer: text({**HELLO, "run_id": "1"}), "new_memory"),
    ("control", "no lease", lambda peer: encode_control(Beat(session=99)), "unknown_lease"),
]


class Traffic:
    """A writer and two samplers that work all the time, in a thread each."""

    def __init__(self, client):
        self.counts = {"items": 0, "memory": 0, "messages": 0}
        self.errors = []
        self._client, self._stop = client, threading.Event()
        self._threads = [threading.Thread(target=self._keep, args=(name,)) for name in self.counts]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        until(lambda: min(self.counts.values()) > 0, "traffic")
        return self

    def __exit__(self, *error):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _keep(self, name):
        try:
            self._write() if name == "items" else self._sample(name)
        except BaseException as error:
            self.errors.append(error)

    def _write(self):
        with self._client.writer("numbers") as writer:
            while not self._stop.is_set():
                for _ in range(2 * LENGTH):
                    writer.append({"x": self.counts["items"]}, values={"score": self.counts["items"] % 7})
                    self.counts["items"] += 1
                writer.flush(DEADLINE)
                time.sleep(0.02)

    def _sample(self, name):
        with self._client.sampler("numbers", 16, shared_memory=name == "memory") as sampler:
            while not self._stop.is_set():
                batch = sampler.sample(DEADLINE)
                np.testing.assert_array_equal(batch["score"], batch["x"] % 7)
                np.testing.assert_array_equal(batch["x"], batch.keys)
                sampler.update_priorities(batch, np.ones(16))
                self.counts[name] += 1
                time.sleep(0.02)

    def check(self):
        """Each of the threads still makes progress."""
        before = dict(self.counts)
        until(lambda: self.errors or all(self.counts[name] > before[name] for name in before), "progress")
        assert self.errors == []


@pytest.fixture(scope="module")
def scene():
    """A server, its client, the peer, and the traffic."""
    with ExitStack() as stack:
        server = stack.enter_context(serve(SETTINGS))
        client = stack.enter_context(server.client())
        traffic = stack.enter_context(Traffic(client))
        context = stack.enter_context(open_context())
        yield client, Peer(context, server.port, client), traffic
        traffic.__exit__()
        assert traffic.errors == []
        until(lambda: client.status().tables["numbers"].replay.num_inserted == traffic.counts["items"], "all items")
        status = client.status()
        assert status.refused_connections == status.tables["numbers"].replay.refused_connections == {}


def counts(client, name, table="numbers"):
    status = client.status(timeout=DEADLINE)
    replay = status.tables[table].replay
    counts = status.refusals if name == "control" else {**replay.refusals, STALE: replay.stale_priorities}
    return {reason: count for reason, count in counts.items() if count}


def check_refused(client, peer, name, messages, reasons, table="numbers"):
    """Sends messages, and waits until the status has one more refusal for each of them, and no other."""
    before = Counter(counts(client, name, table))
    for message in messages:
        peer.send(name, message, table)
    expected = dict(before + Counter(reasons))
    found = {}

    def arrived():
        found.update(counts(client, name, table))
        return sum(found.values()) >= sum(expected.values())

    until(arrived, "refusals", STATUS_SECONDS)
    assert found == expected


@pytest.mark.parametrize("name", KINDS)
def test_the_status_has_a_reason_for_each_wrong_message(scene, name):
    client, peer, traffic = scene
    own = [(message(peer), reason) for socket, _, message, reason in WRONG if socket == name]
    check_refused(client, peer, name, *zip(*own, strict=True))
    traffic.check()


def test_a_request_that_a_queue_cannot_answer_does_not_delay_others(scene):
    client, peer, _ = scene
    with client.writer("queue") as writer, client.sampler("queue", 50, shared_memory=False) as sampler:
        check_refused(client, peer, "batches", [peer.queue.encode_request(101)], ["count"], "queue")
        for x in range(50):
            writer.append({"x": x})
        np.testing.assert_array_equal(sampler.sample(DEADLINE)["x"], np.arange(50))
