"""`python -m chaos unusable`: replay accepts the damaged segments, from which nobody can learn."""

import itertools
from dataclasses import replace

import cramjam
import numpy as np
import pytest
from support.builders import RUN, VECTORS, make_segment

from apex.learning.batch_ring import MAX_RETURN
from apex.transport.run_codec import RunCodec
from apexreplay.store.priority_weights import MAX_STORED_PRIORITY
from apexreplay.types import Cut
from chaos.unusable import command
from chaos.unusable.spoil import KINDS, SpoilingSender

SCHEMA = replace(VECTORS, codec="lz4")
CODEC = RunCodec(RUN, SCHEMA)


def spoiled(kind):
    """Returns a damaged segment as replay decodes it."""
    segment = make_segment(SCHEMA)
    cut = KINDS[kind](Cut(0, segment.records.copy(), segment.blob))
    return CODEC.decode_segment(CODEC.encode_segment(segment._replace(records=cut.records, blob=cut.blob)))


def test_an_undecodable_frame_is_accepted():
    segment = spoiled("frames")
    table = np.frombuffer(segment.blob, "<u4", 7)
    broken = 0
    for first, stop in itertools.pairwise(table):
        try:
            cramjam.lz4.decompress_block(bytes(segment.blob[first:stop]), output_len=SCHEMA.frame_bytes)
        except cramjam.DecompressionError:
            broken += 1
    assert broken == 1


def test_huge_returns_and_priorities_are_accepted():
    assert (np.abs(spoiled("returns").records["n_step_return"]) > MAX_RETURN).all()
    assert (spoiled("priorities").records["priority"] > MAX_STORED_PRIORITY).all()


@pytest.mark.parametrize(("share", "most"), [(0.0, 0), (0.01, 30), (1.0, 1_000)])
def test_only_the_requested_share_of_segments_is_damaged(share, most):
    sent = []

    class Outlet:
        def send(self, message):
            sent.append(CODEC.decode_segment(message))
            return True

    segment, outlet = make_segment(SCHEMA), Outlet()
    sender = SpoilingSender(["priorities"], share, [segment.stream], CODEC, [outlet], None, window=64)
    for _ in range(1_000):
        sender.send([Cut(0, segment.records.copy(), segment.blob)], 1)
    count = sum(bool((each.records["priority"] > 1e38).all()) for each in sent)
    assert most / 10 <= count <= most


def test_more_than_twice_the_clean_time_misses_the_bar():
    seconds = {"clean": [10.0, 12.0], "frames": [20.0, 23.0], "returns": [20.0, 25.0], "mixed": [5.0, None]}
    reached = {name: command.figures(name, seconds, 0.0)[0].reached for name in seconds}
    assert reached == {"clean": True, "frames": True, "returns": False, "mixed": False}
