"""Messages survive encoding, and decoders refuse invalid ones with a reason."""

import dataclasses
import zlib

import numpy as np
import pytest
import torch
from support.builders import (
    CONTINUOUS,
    MASKED,
    PIXELS,
    RUN,
    VECTORS,
    make_batch,
    make_receipts,
    make_records,
    make_segment,
)
from support.messages import RESULT, as_json
from support.sealing import reseal, with_body, with_json

from apex.transport.run_codec import PARAMETER_TOPICS, RunCodec
from apex.types import Parameters
from apexreplay.types import PriorityUpdate, Receipt, Stream
from apexreplay.wire.header import HEADER, TOPIC_BYTES, MessageKind, WireError, peek_kind, receipt_topic

CODEC = RunCodec(RUN, PIXELS)
UPDATE = PriorityUpdate(0, 77, 1, 9, np.arange(5), np.linspace(0, 1, 5, dtype=np.float32))
RECEIPTS = make_receipts(Receipt(Stream(0, 0), 0, 0, 0))
PARAMETERS = Parameters(12, np.linspace(-1, 1, 10, dtype=np.float32))


def refusal(decode, *arguments):
    """Returns the reason for which a message is refused."""
    with pytest.raises(WireError) as error:
        decode(*arguments)
    return error.value.reason


@pytest.mark.parametrize("schema", [PIXELS, VECTORS, CONTINUOUS, MASKED])
def test_segments_survive_encoding(schema):
    codec, segment = RunCodec(RUN, schema), make_segment(schema)
    back = codec.decode_segment(codec.encode_segment(segment))
    assert back[:3] == segment[:3]
    assert back.base == segment.base
    assert bytes(back.blob) == segment.blob
    np.testing.assert_array_equal(back.records, segment.records)
    initial, final = back.checksum
    assert zlib.crc32(segment.blob, zlib.crc32(segment.records, initial)) == final


@pytest.mark.parametrize("schema", [PIXELS, VECTORS, CONTINUOUS, MASKED])
def test_batches_survive_encoding(schema):
    codec, batch = RunCodec(RUN, schema), make_batch(schema)
    back = codec.decode_batch(codec.encode_batch(batch), 4)
    assert back[:5] == batch[:5]
    assert bytes(back.blob) == batch.blob
    np.testing.assert_array_equal(back.records, batch.records)


@pytest.mark.parametrize("schema", [PIXELS, VECTORS])
def test_receipts_survive_encoding_and_begin_with_their_topic(schema):
    receipts = [Receipt(Stream(5, 8), 2**64 - 1, 40, 0b1011), Receipt(Stream(9, 2**63 - 1), 2**64 - 1, 7, 2**64 - 1)]
    frames = RunCodec(RUN, schema).encode_receipts(make_receipts(*receipts, group=5), shard=2)
    back = CODEC.decode_receipts(frames)
    assert back.each() == receipts
    assert back.group == 5
    assert frames[0][:TOPIC_BYTES] == receipt_topic(RUN, 2, 5)
    assert receipt_topic(RUN, 2, 5) not in (receipt_topic(RUN, 2, 6), receipt_topic(RUN, 1, 5))


@pytest.mark.parametrize("num_items", [0, 5])
def test_priorities_survive_encoding(num_items):
    update = UPDATE._replace(keys=UPDATE.keys[:num_items], priorities=UPDATE.priorities[:num_items])
    back = CODEC.decode_priorities(CODEC.encode_priorities(update))
    assert back[:4] == update[:4]
    np.testing.assert_array_equal(back.keys, update.keys)
    np.testing.assert_array_equal(back.priorities, update.priorities)


def test_parameters_are_one_frame_and_survive_encoding():
    frames = CODEC.encode_parameters(PARAMETERS)
    assert len(frames) == 1  # CONFLATE keeps the last frame only.
    back = CODEC.decode_parameters(frames, 10)
    assert back.version == 12
    np.testing.assert_array_equal(back.values, PARAMETERS.values)


def test_evaluations_survive_encoding_with_and_without_parameters():
    back, parameters = CODEC.decode_evaluation(CODEC.encode_evaluation(RESULT, PARAMETERS), 10)
    assert (back, parameters.version) == (RESULT, 12)
    np.testing.assert_array_equal(parameters.values, PARAMETERS.values)
    assert CODEC.decode_evaluation(CODEC.encode_evaluation(RESULT, None), 10) == (RESULT, None)


def test_the_kind_of_a_message_is_known_before_decoding():
    assert peek_kind(CODEC.encode_evaluation(RESULT, None)) == MessageKind.EVALUATION == 7
    assert peek_kind([b"short"]) == peek_kind([]) == -1


SEGMENT = CODEC.encode_segment(make_segment(PIXELS))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "frames"),
        ([b""], "length"),
        ([b"GET / HTTP/1.1\r\nHost: localhost\r\n" * 4], "magic"),
        ([*SEGMENT, b"more"], "frames"),
        ([SEGMENT[0][:-1]], "length"),
        ([SEGMENT[0] + b"x"], "length"),
        ([SEGMENT[0][:-1] + b"\x00"], "crc"),
        (reseal(SEGMENT, version=9), "version"),
        (reseal(SEGMENT, kind=200), "kind"),
        (reseal(SEGMENT, kind=MessageKind.BATCH), "kind"),
        (reseal(SEGMENT, run_id=1), "run"),
        (reseal(SEGMENT, schema=1), "schema"),
        (reseal(SEGMENT, count=0), "count"),
        (reseal(SEGMENT, count=2**32 - 1), "count"),
        (reseal(SEGMENT, count=4000), "length"),
        (reseal(SEGMENT, number=0), "base"),
        (reseal(SEGMENT, number=2**63), "number"),
        (reseal(SEGMENT, incarnation=2**63), "incarnation"),
    ],
)
def test_malformed_messages_are_refused(frames, reason):
    assert refusal(CODEC.decode_segment, frames) == reason


def bad(name, value, schema=PIXELS, at=2):
    records = make_records(schema, 5)
    records[name][at] = value
    return records


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        (bad("n_step_return", np.nan), "n_step_return"),
        (bad("discount", -0.1), "discount"),
        (bad("discount", 1.5), "discount"),
        (bad("discount", np.nan), "discount"),
        (bad("priority", np.inf), "priority"),
        (bad("priority", -1), "priority"),
        (bad("action", 3), "action"),
        (bad("action", -1), "action"),
        (bad("reward", np.inf), "reward"),
        (bad("step_discount", 1.5), "step_discount"),
        (bad("step_discount", np.nan), "step_discount"),
        (bad("depth", 0), "steps"),
        (bad("depth", 5), "steps"),
        (bad("next_depth", 0), "steps"),
        (bad("next_depth", 200), "steps"),
        (bad("depth", 4), "steps"),
        (bad("next_frame", 2), "steps"),
        (bad("next_frame", 6), "steps"),
        (bad("next_frame", 60_000), "steps"),
        (bad("next_depth", 3, at=0), "steps"),
    ],
)
def test_invalid_records_are_refused(records, reason):
    assert refusal(CODEC.decode_segment, CODEC.encode_segment(make_segment(PIXELS, records=records))) == reason


@pytest.mark.parametrize(
    ("schema", "name", "value", "reason"),
    [
        (CONTINUOUS, "action", (0, np.nan, 0), "action"),
        (CONTINUOUS, "action", (0, 0, 1.0001), "action"),
        (CONTINUOUS, "action", (-np.inf, 0, 0), "action"),
        (MASKED, "next_mask", 0, "mask"),  # No action is allowed in a state that is bootstrapped from.
        (MASKED, "next_mask", (1, 0b1000), "mask"),  # Action 11 of 11
        (dataclasses.replace(MASKED, num_actions=8), "next_mask", 0, "mask"),
    ],
)
def test_invalid_actions_and_masks_are_refused(schema, name, value, reason):
    codec = RunCodec(RUN, schema)
    segment = codec.encode_segment(make_segment(schema, records=bad(name, value, schema)))
    batch = make_batch(schema)
    records = batch.records.copy()
    records[name][2] = value
    assert refusal(codec.decode_segment, segment) == reason
    assert refusal(codec.decode_batch, codec.encode_batch(batch._replace(records=records)), 4) == reason


def test_masks_may_be_empty_if_the_discount_is_zero():
    codec, records = RunCodec(RUN, MASKED), make_records(MASKED, 5)
    records["discount"][2], records["next_mask"][2] = 0, 0
    back = codec.decode_segment(codec.encode_segment(make_segment(MASKED, records=records)))
    assert not back.records["next_mask"][2].any()


def make_table(*offsets, size=200):
    return np.array(offsets, "<u4").tobytes() + bytes(size)


@pytest.mark.parametrize(
    "blob",
    [
        b"\x00" * 8,
        make_table(7),
        make_table(4_000_000),
        make_table(12, 40, 30),
        make_table(12, 40, 999_999),
        make_table(12, 12, 212),
        make_table(12, 13, 212),
    ],
)
def test_blobs_with_an_invalid_table_are_refused(blob):
    message = CODEC.encode_segment(make_segment(PIXELS)._replace(blob=blob))
    assert refusal(CODEC.decode_segment, message) in ("blob", "frames")


def test_vectors_that_are_not_finite_are_refused():
    segment = make_segment(VECTORS)
    blob = bytearray(segment.blob)
    blob[-4:] = np.float32(np.nan).tobytes()
    codec = RunCodec(RUN, VECTORS)
    assert refusal(codec.decode_segment, codec.encode_segment(segment._replace(blob=bytes(blob)))) == "blob"


BATCH = CODEC.encode_batch(make_batch(PIXELS))


def decode_ten(frames):
    return CODEC.decode_parameters(frames, 10)


def bad_batch(**fields):
    batch = make_batch(PIXELS)
    records = batch.records.copy()
    for name, value in fields.items():
        records[name][1] = value
    return CODEC.encode_batch(batch._replace(records=records))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (BATCH[:1], "frames"),
        (reseal(BATCH, count=5), "count"),
        (with_body(BATCH, b"short"), "length"),
        (CODEC.encode_batch(make_batch(PIXELS, num_transitions=0)), "count"),
        (bad_batch(num_frames=5), "count"),
        (bad_batch(num_frames=1000), "count"),
        (bad_batch(probability=0), "probability"),
        (bad_batch(probability=np.nan), "probability"),
        (bad_batch(probability=np.nextafter(2.0**-1_000, 0)), "probability"),
        (bad_batch(next_frame=7), "steps"),
    ],
)
def test_invalid_batches_are_refused(frames, reason):
    assert refusal(CODEC.decode_batch, frames, 4) == reason


@pytest.mark.parametrize(
    ("decode", "frames", "reason"),
    [
        (CODEC.decode_receipts, with_body(CODEC.encode_receipts(RECEIPTS), b"x"), "length"),
        (CODEC.decode_receipts, reseal(CODEC.encode_receipts(RECEIPTS), count=0), "count"),
        (CODEC.decode_receipts, reseal(CODEC.encode_receipts(RECEIPTS), count=65_537), "count"),
        (CODEC.decode_receipts, reseal(CODEC.encode_receipts(RECEIPTS), number=1), "number"),
        (CODEC.decode_priorities, reseal(CODEC.encode_priorities(UPDATE), count=65_537), "count"),
        (CODEC.decode_priorities, reseal(CODEC.encode_priorities(UPDATE), count=6), "length"),
        (decode_ten, CODEC.encode_parameters(PARAMETERS._replace(values=np.array([np.nan] * 10, "<f4"))), "values"),
        (decode_ten, reseal(CODEC.encode_parameters(PARAMETERS), count=9), "count"),
        (decode_ten, with_body(CODEC.encode_parameters(PARAMETERS), b"abc"), "length"),
        (decode_ten, reseal(CODEC.encode_parameters(PARAMETERS), number=2**40), "number"),
        (decode_ten, CODEC.encode_parameters(PARAMETERS, bfloat16=True), "shard"),
    ],
)
def test_invalid_receipts_priorities_and_parameters_are_refused(decode, frames, reason):
    assert refusal(decode, frames) == reason


def test_parameters_are_rounded_to_the_nearest_bfloat16():
    values = np.array([1.0, -1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 0.0, -1e-40, 3e38], np.float32)
    frames = CODEC.encode_parameters(Parameters(12, values), bfloat16=True)
    assert len(frames[0]) == HEADER.size + 2 * len(values)
    back = CODEC.decode_parameters(frames, len(values), bfloat16=True)
    assert back.version == 12
    assert back.values.tolist()[:6] == [1.0, -1.0, 1.0, 1 + 4 * 2**-8, 1 + 2 * 2**-8, 0.0]  # Ties go to the even one.
    np.testing.assert_array_equal(back.values, torch.tensor(values).bfloat16().float().numpy())


def test_formats_of_parameters_have_different_topics():
    for bfloat16, topic in PARAMETER_TOPICS.items():
        other = PARAMETER_TOPICS[not bfloat16]
        frame = CODEC.encode_parameters(PARAMETERS, bfloat16=bfloat16)[0]
        assert frame.startswith(topic)
        assert not frame.startswith(other)


@pytest.mark.parametrize("seed", range(5))
def test_single_bit_flips_are_refused(seed):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        message = bytearray(SEGMENT[0])
        bit = int(rng.integers(8 * len(message)))
        message[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            CODEC.decode_segment([bytes(message)])


@pytest.mark.parametrize("seed", range(5))
def test_resealed_garbage_is_refused_or_within_the_schema(seed):
    """The checksum of each mutation is correct."""
    rng = np.random.default_rng(seed)
    for _ in range(300):
        message = bytearray(SEGMENT[0])
        for at in rng.integers(HEADER.size, len(message), size=rng.integers(1, 6)):
            message[at] = rng.integers(256)
        try:
            segment = CODEC.decode_segment(reseal([bytes(message)]))
        except WireError:
            continue
        table = np.frombuffer(segment.blob, "<u4", int.from_bytes(segment.blob[:4], "little") // 4)
        assert (segment.records["next_frame"] < len(table) - 1).all()
        assert (segment.records["action"] < PIXELS.num_actions).all()
        assert table[-1] == len(segment.blob)


def test_messages_for_another_shard_are_refused():
    update = PriorityUpdate(3, 1, 0, 0, np.arange(2), np.ones(2, np.float32))
    segment, priorities = CODEC.encode_segment(make_segment(PIXELS), shard=3), CODEC.encode_priorities(update)
    batch = CODEC.encode_batch(make_batch(PIXELS)._replace(shard=3))
    assert CODEC.decode_segment(segment, 3).number == make_segment(PIXELS).number
    assert CODEC.decode_priorities(priorities, 3).shard == CODEC.decode_batch(batch, 4, 3).shard == 3
    assert refusal(CODEC.decode_segment, segment, 2) == "shard"
    assert refusal(CODEC.decode_priorities, priorities, 2) == "shard"
    assert CODEC.decode_request(CODEC.encode_request(4, shard=3), 3) == 4
    assert refusal(CODEC.decode_batch, batch, 4, 2) == "shard"


INVALID_RESULTS = (
    *({"mean": mean} for mean in ([1], None, 1e301)),
    *({"episodes": episodes} for episodes in (-1, 2.0)),
    *({"scores": scores} for scores in ([None], [0.0] * 10_001)),
    *({"confirmed": 1}, {"seed": 2**31}, {"num_envs": 0}, {"else": 1}),
)


def test_invalid_evaluations_are_refused():
    frames, result = CODEC.encode_evaluation(RESULT, None), as_json(RESULT)
    required = result.keys() - {"low", "high"}
    incomplete = [{name: value for name, value in result.items() if name != gone} for gone in required]
    for changed in [{**result, **field} for field in INVALID_RESULTS] + incomplete:
        assert refusal(CODEC.decode_evaluation, with_json(frames, changed), 10) == "fields"
    with_parameters = CODEC.encode_evaluation(RESULT, PARAMETERS)
    assert refusal(CODEC.decode_evaluation, with_parameters, 11) == "count"
    assert refusal(CODEC.decode_evaluation, with_body(with_parameters, b"{}"), 10) == "length"
