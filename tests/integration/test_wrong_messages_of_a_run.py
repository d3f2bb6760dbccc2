"""A foreign peer sends wrong messages to the programs of a run: the status has a reason for each within 10 s."""

from collections import Counter

import numpy as np
import zmq
from msgspec.structs import replace
from support.messages import HELLO
from support.programs import DEADLINE, TINY, offset, programs
from support.sealing import damaged, reseal, with_json
from support.waiting import until

from apex.launch.status import ask
from apex.transport.messages.control import WelcomeAnswer, decode_answer
from apex.transport.run_codec import RunCodec
from apexreplay.frame_blob import make_blob
from apexreplay.transport.sockets import open_context
from apexreplay.types import PriorityUpdate, Segment
from apexreplay.wire.codec import MAX_PRIORITIES
from apexreplay.wire.header import WIRE_VERSION
from apexreplay.wire.json_codec import MAX_JSON_BYTES, encode_control

__all__ = ["offset", "programs"]  # fixtures
KINDS = {"experience": zmq.PUSH, "priorities": zmq.PUSH, "batches": zmq.DEALER, "control": zmq.DEALER}
STATUS_SECONDS = 10.0  # within which the status has a reason


class Peer:
    """Knows the wire, and has joined a run as an actor with one stream."""

    def __init__(self, context, endpoint):
        self._context, self._control = context, endpoint
        welcome = until(self._join, "welcome", DEADLINE)
        self.run_id, self.stream = welcome.run_id, welcome.streams[0]
        self.codec = RunCodec(welcome.run_id, welcome.schema)
        self.length = welcome.config["actor"]["segment_length"] + welcome.config["actor"]["n_step"]
        self._places = {**welcome.replay[0], "control": endpoint}
        host, _, port = self._places["experience"].rpartition(":")
        self._places["batches"] = f"{host}:{int(port) + 3}"

    def _join(self):
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self._control)
            socket.send_multipart(encode_control(replace(HELLO, num_streams=1)))
            answer = decode_answer(socket.recv_multipart()) if socket.poll(1_000) else None
            return answer if isinstance(answer, WelcomeAnswer) and answer.replay and answer.streams else None

    def send(self, name, frames):
        socket = self._context.socket(KINDS[name])  # Open until the end: the end could overtake the message.
        socket.connect(self._places[name])
        socket.send_multipart(frames)

    def segment(self, count=1, **changed):
        """Returns a segment of the own stream; fields of its records and of the message may be wrong."""
        schema = self.codec.schema
        records = np.zeros(count, schema.table.record)
        good = {"priority": 1.0, "next_frame": np.arange(1, count + 1), "depth": 1, "next_depth": 1}
        for name, value in {"frame": np.arange(count), **good}.items():
            records[name] = value
        for name in {*changed} & {*records.dtype.names}:
            records[name] = changed.pop(name)
        blob = make_blob([bytes(schema.frame_bytes)] * (count + 1))
        return self.codec.encode_segment(Segment(self.stream, 0, 0, records, blob)._replace(**changed))

    def priorities(self, count=1, store=0, **changed):
        keys, values = np.full(count, 10**9), np.ones(count, np.float32)
        return self.codec.encode_priorities(PriorityUpdate(0, store, 0, 0, keys, values)._replace(**changed))


def text(body):
    """Returns a control message."""
    return with_json(encode_control(HELLO), body)


STALE = "stale"  # of another store: counted as such
# (socket, what is wrong, message of the peer, reason)
WRONG = [
    ("experience", "no message of ours", lambda peer: [b"x" * 80], "magic"),
    ("experience", "version", lambda peer: reseal(peer.segment(), version=WIRE_VERSION + 1), "version"),
    ("experience", "kind", lambda peer: peer.codec.encode_request(1), "kind"),
    ("experience", "run", lambda peer: reseal(peer.segment(), run_id=1), "run"),
    ("experience", "schema", lambda peer: reseal(peer.segment(), schema=1), "schema"),
    ("experience", "shard", lambda peer: reseal(peer.segment(), shard=1), "shard"),
    ("experience", "checksum", lambda peer: damaged(peer.segment()), "crc"),
    ("experience", "cut off", lambda peer: [peer.segment()[0][:-1]], "length"),
    ("experience", "one transition too many", lambda peer: peer.segment(peer.length + 1), "count"),
    ("experience", "discount", lambda peer: peer.segment(discount=1.5), "discount"),
    ("experience", "action", lambda peer: peer.segment(action=2), "action"),
    ("experience", "step that is not there", lambda peer: peer.segment(next_frame=2), "steps"),
    ("experience", "priority not finite", lambda peer: peer.segment(priority=np.nan), "priority"),
    ("experience", "unknown actor", lambda peer: reseal(peer.segment(), sender=100), "unknown actor"),
    ("experience", "beyond the window", lambda peer: peer.segment(number=100), "too far ahead"),
    ("priorities", "no message of ours", lambda peer: [b"x" * 80], "magic"),
    ("priorities", "too many", lambda peer: peer.priorities(MAX_PRIORITIES + 1), "count"),
    ("priorities", "segment", lambda peer: peer.segment(), "kind"),
    ("priorities", "another store", lambda peer: peer.priorities(store=1), STALE),
    ("batches", "no message of ours", lambda peer: [b"x" * 80], "magic"),
    ("batches", "no item", lambda peer: peer.codec.encode_request(0), "count"),
    ("batches", "too many items", lambda peer: peer.codec.encode_request(MAX_PRIORITIES), "count"),
    ("batches", "run", lambda peer: reseal(peer.codec.encode_request(1), run_id=1), "run"),
    ("control", "no message of ours", lambda peer: [b"x" * 80], "magic"),
    ("control", "version", lambda peer: reseal(encode_control(HELLO), version=WIRE_VERSION + 1), "version"),
    ("control", "run", lambda peer: reseal(encode_control(HELLO), run_id=1), "run"),
    ("control", "kind", lambda peer: peer.segment(), "kind"),
    ("control", "checksum", lambda peer: damaged(encode_control(HELLO)), "crc"),
    ("control", "no JSON", lambda peer: text(b"{"), "json"),
    ("control", "unknown field", lambda peer: text({"type": "goodbye", "session": 1, "more": 1}), "fields"),
    ("control", "missing field", lambda peer: text({"type": "goodbye"}), "fields"),
    ("control", "unknown type", lambda peer: text({"type": "what"}), "fields"),
    ("control", "too long", lambda peer: text(b" " * (MAX_JSON_BYTES + 1)), "length"),
]


def test_the_status_of_a_run_has_a_reason_for_each_wrong_message(programs):
    limits = ["--transport.no-shared-memory", "--max-minutes", "20"]
    programs.start("learner", "learner", *TINY, *programs.offset, *limits)
    programs.start("replay", "replay", *programs.learner)
    programs.start("actor", "actor", *programs.learner, "--envs", "3")
    before = programs.status(lambda status: status.updates > 50)

    expected = Counter(("control" if socket == "control" else "replay", reason) for socket, _, _, reason in WRONG)
    num_stale = expected.pop(("replay", STALE)) + before.replay.stale_priorities

    def arrived():
        """Whether the status has all of them, and nothing else."""
        status = ask(programs.endpoint, DEADLINE)
        found = {
            (where, reason): count
            for where in ("control", "replay")
            for reason, count in status.refusals.get(where, {}).items()
        }
        assert all(count <= expected[reason] for reason, count in found.items()), found
        return found == expected and status.replay.stale_priorities >= num_stale

    with open_context() as context:
        peer = Peer(context, programs.endpoint)
        for socket, _, message, _ in WRONG:
            peer.send(socket, message(peer))
        until(arrived, "refusals", STATUS_SECONDS)
    programs.status(lambda status: status.updates > before.updates + 100 and status.steps > before.steps + 500)
    assert all(process.poll() is None for process in programs.running.values())
