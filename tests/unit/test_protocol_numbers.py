"""The numbers in docs/protocol.md are the constants of the code, and the fields of the schema are its fields."""

from pathlib import Path

import pytest
from support.builders import PIXELS

from apex.config.tree import MAX_EPISODES, Config
from apex.learning.coordinator.members import MAX_MEMBERS
from apex.metric_tags import MAX_METRICS
from apex.transport import timing as run_timing
from apex.transport.messages.fields import MAX_STREAMS
from apex.transport.messages.results import MAX_SCORES
from apexreplay.client.sampler import SLOWEST_CONNECTION
from apexreplay.facts import MAX_TEXT
from apexreplay.item_kinds import MAX_STEPS
from apexreplay.server.leases import LEASE_SECONDS, RECLAIM_SECONDS
from apexreplay.server.place import MEMORY_SAMPLERS, PORT, PORTS_PER_TABLE
from apexreplay.server.sampler import MAX_OF_CLIENT, MAX_WAITING
from apexreplay.transport import timing
from apexreplay.types import RECEIPT_ROW
from apexreplay.wire.codec import MAX_PRIORITIES, MAX_RECEIPTS, MAX_RECORDS
from apexreplay.wire.header import HEADER, TOPIC_BYTES, WIRE_VERSION
from apexreplay.wire.histogram import MAX_BINS
from apexreplay.wire.json_codec import MAX_JSON_BYTES

TEXT = " ".join((Path(__file__).parents[2] / "docs/protocol.md").read_text().split())
PORTS = Config().transport
IDLE = timing.KEEPALIVE_SECONDS + timing.KEEPALIVE_PROBES * timing.PROBE_SECONDS


@pytest.mark.parametrize(
    ("sentence", "numbers"),
    [
        ("| {} experience | replay, PULL |", [PORTS.experience_port]),
        ("| {} priorities | replay, PULL |", [PORTS.priorities_port]),
        ("| {} receipts | replay, PUB |", [PORTS.receipts_port]),
        ("| {} batches | replay (each sampler process), ROUTER |", [PORTS.batches_port]),
        ("| {} parameters | learner, XPUB |", [PORTS.parameters_port]),
        ("| {} control | learner, ROUTER |", [PORTS.control_port]),
        (
            "after {} s {} probes, {} s apart | {} s |",
            [timing.KEEPALIVE_SECONDS, timing.KEEPALIVE_PROBES, timing.PROBE_SECONDS, IDLE],
        ),
        ("| unacknowledged bytes | TCP user timeout | {:.0f} s |", [timing.UNACKNOWLEDGED_SECONDS]),
        (
            "and connects anew | {:.0f} s, {:.0f} s, {:.0f} s ...",
            [timing.RENEW_SECONDS * factor for factor in (1, 2, 4)],
        ),
        ("largest batch takes at {:.0f} MB/s", [SLOWEST_CONNECTION / 1e6]),
        ("Every message starts with these {} bytes", [HEADER.size]),
        ("| u8 | version | {} |", [WIRE_VERSION]),
        ("The first {} bytes of a message of receipts are its topic", [TOPIC_BYTES]),
        ("Body: {} bytes per stream, at most {:,}", [RECEIPT_ROW.itemsize, MAX_RECEIPTS]),
        ("one record per transition ({} bytes with discrete actions", [PIXELS.table.record.itemsize]),
        ("then per transition ({} bytes with discrete actions", [PIXELS.table.batch_record.itemsize]),
        ("No setting allows more than {:,} transitions or {:,} frames", [MAX_RECORDS, MAX_STEPS]),
        (
            "after {} s, and then every {} s while the stream has sent a segment within {:.0f} s",
            [timing.RECEIPT_SECONDS, timing.RECEIPT_REPEAT_SECONDS, timing.STREAM_LIFE_SECONDS],
        ),
        ("after {:.0f} s without progress", [timing.RESEND_SECONDS]),
        ("if that is longer (at most {:.0f} s)", [timing.MOST_RESEND_SECONDS]),
        ("`items` is the size of the batch, 1 ... {:,}", [MAX_PRIORITIES]),
        (
            "More than {:,} waiting requests of one connection are refused; if more than {:,} wait in all",
            [MAX_OF_CLIENT, MAX_WAITING],
        ),
        ("Body: 0 ... {:,} keys", [MAX_PRIORITIES]),
        ("After {:.0f} s without any, the sampler process may send one more", [timing.CREDIT_SECONDS]),
        (
            "within {} s. The learner repeats it every {:.0f} s",
            [run_timing.SUBSCRIPTION_SECONDS, run_timing.REPEAT_SECONDS],
        ),
        ("one JSON object of at most {} MiB", [MAX_JSON_BYTES >> 20]),
        ("| `wire` | {} |", [WIRE_VERSION]),
        ("every text | at most {} printable ASCII characters", [MAX_TEXT]),
        ("| `table`, `memory` | at most {} printable ASCII characters", [MAX_TEXT]),
        ("| `num_streams` | 0 ... {:,} |", [MAX_STREAMS]),
        ("| `streams` | at most {:,} of", [MAX_STREAMS]),
        ("`actors`: at most {:,} of", [MAX_SCORES]),
        ("`metrics`: at most {} of", [MAX_METRICS]),
        ("`counts`, 1 ... {} of 0 ... 2^53", [MAX_BINS]),
        ("`scores` (at most {:,} numbers)", [MAX_EPISODES]),
        ("A run has at most {:,} programs", [MAX_MEMBERS]),
        ("The control socket has port P (`--port`, {})", [PORT]),
        ("has the ports from P + 1 + {} i on", [PORTS_PER_TABLE]),
        ("of which {} are for such samplers", [MEMORY_SAMPLERS]),
        ("no hello or beat for {:.0f} s", [LEASE_SECONDS]),
        ("until {:.0f} s after the table is ready", [RECLAIM_SECONDS]),
    ],
)
def test_the_document_has_the_limit_of_the_code(sentence, numbers):
    assert sentence.format(*numbers) in TEXT


def test_the_document_names_every_field_of_the_schema():
    described = TEXT.partition("The **schema**")[2].partition("An **action**")[0]
    assert [name for name in PIXELS.to_dict() if f"`{name}`" not in described] == []
