"""Segments are sent, kept until they are acknowledged, and sent again if receipts are overdue."""

import pytest
from support.builders import PIXELS, RUN, make_segment

from apex.transport.run_codec import RunCodec
from apexreplay.client.reliable_sender import ReliableSender, SupersededError
from apexreplay.client.send_window import RESEND_SECONDS
from apexreplay.transport.timing import RENEW_SECONDS
from apexreplay.types import Cut, Receipt, Stream

CODEC = RunCodec(RUN, PIXELS)
STREAMS = [Stream(7, 3), Stream(6, 4)]


class Tape:
    """An outlet, a source of receipts and a clock. Records what is sent."""

    def __init__(self):
        self.sent = []
        self.receipts = []
        self.now = 0.0
        self.room = True
        self.num_reconnects = 0

    def send(self, message):
        if self.room:
            segment = CODEC.decode_segment(message)
            self.sent.append((segment.stream.actor_id, segment.number, segment.base))
        return self.room

    def reconnect(self):
        self.num_reconnects += 1

    def receive(self, timeout=0.0):
        receipts, self.receipts = self.receipts, []
        return receipts

    def clock(self):
        return self.now


def make_link(tape, window=2):
    return ReliableSender(STREAMS, CODEC, [tape], tape, window=window, clock=tape.clock)


def cut(stream_index):
    segment = make_segment(PIXELS)
    return Cut(stream_index, segment.records, segment.blob)


def test_each_stream_numbers_its_segments_and_sends_its_base():
    tape = Tape()
    link = make_link(tape)
    link.send([cut(0), cut(1)], version=1)
    link.send([cut(0)], version=2)
    assert tape.sent == [(7, 0, 0), (6, 0, 0), (7, 1, 0)]
    assert link.blocked
    tape.receipts = [Receipt(STREAMS[0], 1, 1, 0)]
    link.pump()
    assert not link.blocked
    link.send([cut(0)], version=3)
    assert tape.sent[-1] == (7, 2, 1)
    assert link.in_flight == 3


def test_only_overdue_segments_are_sent_again():
    tape = Tape()
    link = make_link(tape)
    link.send([cut(0), cut(1)], version=1)
    tape.receipts = [Receipt(STREAMS[1], 1, 1, 0)]
    tape.now = RESEND_SECONDS + 0.1
    link.pump()
    assert tape.sent == [(7, 0, 0), (6, 0, 0), (7, 0, 0)]
    assert link.num_resent == 1


def test_segments_that_the_queue_refuses_are_sent_later():
    tape = Tape()
    link = make_link(tape)
    tape.room = False
    link.send([cut(0)], version=1)
    tape.room = True
    tape.now = RESEND_SECONDS + 0.1
    link.pump()
    assert tape.sent == [(7, 0, 0)]


def test_a_new_store_receives_the_unacknowledged_segments():
    tape = Tape()
    link = make_link(tape, window=4)
    link.send([cut(0), cut(0), cut(0)], version=1)
    tape.receipts = [Receipt(STREAMS[0], 1, 1, 0)]
    link.pump()
    tape.receipts = [Receipt(STREAMS[0], 2, 0, 0)]
    link.pump()
    assert tape.sent[3:] == [(7, 1, 0), (7, 2, 0)]


def test_receipts_of_other_streams_and_older_incarnations_are_ignored():
    tape = Tape()
    link = make_link(tape)
    link.send([cut(0)], version=1)
    tape.receipts = [Receipt(Stream(99, 1), 1, 5, 0), Receipt(Stream(7, 2), 1, 5, 0)]
    link.pump()
    assert link.in_flight == 1


def test_a_receipt_of_a_newer_incarnation_is_an_error():
    tape = Tape()
    link = make_link(tape)
    link.send([cut(0)], version=1)
    tape.receipts = [Receipt(Stream(7, 4), 1, 0, 0)]
    with pytest.raises(SupersededError, match="stream 7"):
        link.pump()


class ShardOutlet:
    """Records the segments for one shard; decoding fails for other shards."""

    def __init__(self, shard):
        self.shard = shard
        self.sent = []

    def send(self, message):
        segment = CODEC.decode_segment(message, self.shard)
        self.sent.append((segment.stream.actor_id, segment.number))
        return True

    def reconnect(self):
        self.sent.append("reconnect")


def test_segments_of_a_stream_go_only_to_its_shard():
    tape, outlets = Tape(), [ShardOutlet(shard) for shard in range(3)]
    link = ReliableSender(STREAMS, CODEC, outlets, tape, window=2, clock=tape.clock)
    link.send([cut(0), cut(1), cut(0)], version=1)
    assert [outlet.sent for outlet in outlets] == [[(6, 0)], [(7, 0), (7, 1)], []]
    tape.receipts = [Receipt(STREAMS[0], 1, 1, 0)]
    tape.now = RESEND_SECONDS + 0.1
    link.pump()
    assert [outlet.sent for outlet in outlets] == [
        [(6, 0), (6, 0)],
        [(7, 0), (7, 1)],
        [],
    ]  # Stream 7 has made progress.
    tape.now += RESEND_SECONDS + 0.1
    link.pump()
    assert [outlet.sent[2:] for outlet in outlets] == [[(6, 0)], [(7, 1)], []]


def test_a_server_without_receipts_causes_a_reconnect():
    tape = Tape()
    link = make_link(tape)
    tape.now = 60.0  # Nothing is in flight, so no receipt is due.
    link.pump()
    link.send([cut(0)], version=1)
    for seconds, num_reconnects in ((RENEW_SECONDS - 0.1, 0), (RENEW_SECONDS, 1), (RENEW_SECONDS, 1)):
        tape.now = 60.0 + seconds
        link.pump()
        assert tape.num_reconnects == num_reconnects


def test_receipts_without_progress_cause_no_reconnect():
    tape = Tape()
    link = make_link(tape)
    link.send([cut(0)], version=1)
    for second in range(60):
        tape.now = float(second)
        tape.receipts = [Receipt(STREAMS[0], 1, 0, 0)]
        link.pump()
    assert tape.num_reconnects == 0
