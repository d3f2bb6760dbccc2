"""The wire gives back what it was given, and refuses everything else by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace
from support.builders import CONTINUOUS, MASKED, PIXELS, RUN, VECTORS, make_batch, make_records, make_segment
from support.messages import RESULT, as_json
from support.sealing import reseal, with_body, with_json

from apex.transport.codec import Codec
from apex.transport.header import HEADER, TOPIC_BYTES, MessageKind, WireError, peek_kind, receipt_topic
from apex.transport.messages.results import ActorFigures
from apex.types import Parameters, PriorityUpdate, Receipt, Stream

CODEC = Codec(RUN, PIXELS)
UPDATE = PriorityUpdate(0, 77, 1, 9, np.arange(5), np.linspace(0, 1, 5, dtype=np.float32))
FIGURES = ActorFigures(role="actor", steps=None, time=1.5, scalars={"actors/mean_score": 2.0})
PARAMETERS = Parameters(12, np.linspace(-1, 1, 10, dtype=np.float32))


@pytest.mark.parametrize("schema", [PIXELS, VECTORS, CONTINUOUS, MASKED])
def test_a_segment_comes_back(schema):
    codec, segment = Codec(RUN, schema), make_segment(schema)
    back = codec.decode_segment(codec.encode_segment(segment))
    assert back[:3] == segment[:3]
    assert back.base == segment.base
    assert bytes(back.blob) == segment.blob
    np.testing.assert_array_equal(back.records, segment.records)


@pytest.mark.parametrize("schema", [PIXELS, VECTORS, CONTINUOUS, MASKED])
def test_a_batch_comes_back(schema):
    codec, batch = Codec(RUN, schema), make_batch(schema)
    back = codec.decode_batch(codec.encode_batch(batch), 4)
    assert back[:5] == batch[:5]
    assert bytes(back.blob) == batch.blob
    np.testing.assert_array_equal(back.records, batch.records)


def test_a_receipt_comes_back_and_begins_with_its_topic():
    receipt = Receipt(Stream(5, 8), 2**62 + 1, 40, 0b1011)
    frames = CODEC.encode_receipt(receipt)
    assert CODEC.decode_receipt(frames) == receipt
    assert frames[0][:TOPIC_BYTES] == receipt_topic(RUN, 0, 5)
    assert frames[0][:TOPIC_BYTES] != receipt_topic(RUN, 0, 6)


@pytest.mark.parametrize("num_items", [0, 5])
def test_priorities_survive_encoding(num_items):
    update = UPDATE._replace(keys=UPDATE.keys[:num_items], priorities=UPDATE.priorities[:num_items])
    back = CODEC.decode_priorities(CODEC.encode_priorities(update))
    assert back[:4] == update[:4]
    np.testing.assert_array_equal(back.keys, update.keys)
    np.testing.assert_array_equal(back.priorities, update.priorities)


def test_parameters_are_one_frame_and_come_back():
    frames = CODEC.encode_parameters(PARAMETERS)
    assert len(frames) == 1  # CONFLATE keeps the last frame only.
    back = CODEC.decode_parameters(frames, 10)
    assert back.version == 12
    np.testing.assert_array_equal(back.values, PARAMETERS.values)


def test_an_evaluation_comes_back_with_and_without_parameters():
    result = RESULT
    back, parameters = CODEC.decode_evaluation(CODEC.encode_evaluation(result, PARAMETERS), 10)
    assert back == result
    np.testing.assert_array_equal(parameters.values, PARAMETERS.values)
    assert parameters.version == 12
    assert CODEC.decode_evaluation(CODEC.encode_evaluation(result, None), 10) == (result, None)


def test_metrics_come_back_and_what_is_not_finite_as_null():
    figures = replace(FIGURES, scalars={"actors/mean_score": np.inf, "actor_highest_id/score": np.float32(2.0)})
    expected = replace(FIGURES, scalars={"actors/mean_score": None, "actor_highest_id/score": 2.0})
    assert CODEC.decode_metrics(CODEC.encode_metrics(FIGURES)) == FIGURES
    assert CODEC.decode_metrics(CODEC.encode_metrics(figures)) == expected


def test_the_kind_can_be_told_before_decoding():
    assert peek_kind(CODEC.encode_evaluation(RESULT, None)) == MessageKind.EVALUATION
    assert peek_kind([b"short"]) == -1
    assert peek_kind([]) == -1


SEGMENT = CODEC.encode_segment(make_segment(PIXELS))
METRICS = CODEC.encode_metrics(FIGURES)


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
def test_refuses_what_is_not_a_message(frames, reason):
    with pytest.raises(WireError) as refusal:
        CODEC.decode_segment(frames)
    assert refusal.value.reason == reason


def bad(name, value, schema=PIXELS):
    records = make_records(schema, 5)
    records[name][2] = value
    return records


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        (bad("n_step_return", np.nan), "return"),
        (bad("discount", -0.1), "discount"),
        (bad("discount", 1.5), "discount"),
        (bad("discount", np.nan), "discount"),
        (bad("priority", np.inf), "priority"),
        (bad("priority", -1), "priority"),
        (bad("action", 3), "action"),
        (bad("action", -1), "action"),
        (bad("reward", np.inf), "reward"),
        (bad("step_discount", 1.5), "discount"),
        (bad("step_discount", np.nan), "discount"),
        (bad("depth", 0), "depth"),
        (bad("depth", 5), "depth"),
        (bad("next_depth", 0), "depth"),
        (bad("next_depth", 200), "depth"),
        (bad("depth", 4), "frames"),
        (bad("next_frame", 2), "frames"),
        (bad("next_frame", 6), "frames"),
        (bad("next_frame", 60_000), "frames"),
    ],
)
def test_refuses_records_that_cannot_be(records, reason):
    with pytest.raises(WireError) as refusal:
        CODEC.decode_segment(CODEC.encode_segment(make_segment(PIXELS, records=records)))
    assert refusal.value.reason == reason


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
def test_refuses_actions_and_masks_that_cannot_be(schema, name, value, reason):
    codec = Codec(RUN, schema)
    segment = codec.encode_segment(make_segment(schema, records=bad(name, value, schema)))
    batch = make_batch(schema)
    records = batch.records.copy()
    records[name][2] = value
    with pytest.raises(WireError) as refusal:
        codec.decode_segment(segment)
    assert refusal.value.reason == reason
    with pytest.raises(WireError) as refusal:
        codec.decode_batch(codec.encode_batch(batch._replace(records=records)), 4)
    assert refusal.value.reason == reason


def test_a_state_that_nothing_is_bootstrapped_from_may_allow_no_action():
    codec, records = Codec(RUN, MASKED), make_records(MASKED, 5)
    records["discount"][2], records["next_mask"][2] = 0, 0
    assert (
        not codec.decode_segment(codec.encode_segment(make_segment(MASKED, records=records)))
        .records["next_mask"][2]
        .any()
    )


def test_refuses_a_next_stack_that_begins_before_the_first_frame():
    records = make_records(PIXELS, 5)
    records["next_depth"][0] = 3
    with pytest.raises(WireError, match="before the first"):
        CODEC.decode_segment(CODEC.encode_segment(make_segment(PIXELS, records=records)))


def image_of(*offsets, size=200):
    return np.array(offsets, "<u4").tobytes() + bytes(size)


@pytest.mark.parametrize(
    "blob",
    [
        b"\x00" * 8,
        image_of(7),
        image_of(4_000_000),
        image_of(12, 40, 30),
        image_of(12, 40, 999_999),
        image_of(12, 12, 212),
        image_of(12, 13, 212),
    ],
)
def test_refuses_an_image_whose_table_lies(blob):
    segment = make_segment(PIXELS)._replace(blob=blob)
    with pytest.raises(WireError) as refusal:
        CODEC.decode_segment(CODEC.encode_segment(segment))
    assert refusal.value.reason in ("blob", "frames")


def test_refuses_vectors_that_are_not_finite():
    segment = make_segment(VECTORS)
    blob = bytearray(segment.blob)
    blob[-4:] = np.float32(np.nan).tobytes()
    codec = Codec(RUN, VECTORS)
    with pytest.raises(WireError, match="not finite"):
        codec.decode_segment(codec.encode_segment(segment._replace(blob=bytes(blob))))


BATCH = CODEC.encode_batch(make_batch(PIXELS))


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
        (bad_batch(next_frame=7), "frames"),
    ],
)
def test_refuses_batches_that_cannot_be(frames, reason):
    with pytest.raises(WireError) as refusal:
        CODEC.decode_batch(frames, 4)
    assert refusal.value.reason == reason


@pytest.mark.parametrize(
    ("decode", "frames", "reason"),
    [
        (CODEC.decode_receipt, with_body(CODEC.encode_receipt(Receipt(Stream(0, 0), 0, 0, 0)), b"x"), "length"),
        (CODEC.decode_priorities, reseal(CODEC.encode_priorities(UPDATE), count=65_537), "count"),
        (CODEC.decode_priorities, reseal(CODEC.encode_priorities(UPDATE), count=6), "length"),
        (CODEC.decode_metrics, with_json(METRICS, b"nonsense"), "json"),
        (CODEC.decode_metrics, reseal(METRICS, sender=1), "sender"),
        *(
            (CODEC.decode_metrics, with_json(METRICS, {**as_json(FIGURES), **field}), "fields")
            for field in (
                {"role": "learner"},
                {"steps": 5},
                {"time": None},
                {"time": True},
                {"time": 1e301},
                {"more": 1},
                {"scalars": []},
                {"scalars": {"learner/loss": 0}},
                {"scalars": {"actors/x": "1"}},
                {"scalars": {"actors/x\n": 1}},
                {"scalars": {"actors/" + "x" * 122: 1}},
                {"scalars": {f"actors/{number}": 1 for number in range(4_097)}},
                {"histograms": {"x": {"counts": [1], "edges": [1, 2]}}},
            )
        ),
    ],
)
def test_refuses_other_messages_that_cannot_be(decode, frames, reason):
    with pytest.raises(WireError) as refusal:
        decode(frames)
    assert refusal.value.reason == reason


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (CODEC.encode_parameters(PARAMETERS._replace(values=np.array([np.nan] * 10, "<f4"))), "values"),
        (reseal(CODEC.encode_parameters(PARAMETERS), count=9), "count"),
        (with_body(CODEC.encode_parameters(PARAMETERS), b"abc"), "length"),
        (reseal(CODEC.encode_parameters(PARAMETERS), number=2**40), "number"),
    ],
)
def test_refuses_parameters_that_cannot_be(frames, reason):
    with pytest.raises(WireError) as refusal:
        CODEC.decode_parameters(frames, 10)
    assert refusal.value.reason == reason


def test_refuses_an_evaluation_of_another_network():
    frames = CODEC.encode_evaluation(RESULT, PARAMETERS)
    with pytest.raises(WireError, match="count"):
        CODEC.decode_evaluation(frames, 11)
    with pytest.raises(WireError, match="length"):
        CODEC.decode_evaluation(with_body(frames, b"{}"), 10)


@pytest.mark.parametrize("seed", range(5))
def test_no_single_bit_flip_is_accepted(seed):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        message = bytearray(SEGMENT[0])
        bit = int(rng.integers(8 * len(message)))
        message[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            CODEC.decode_segment([bytes(message)])


@pytest.mark.parametrize("seed", range(5))
def test_resealed_garbage_is_refused_or_harmless(seed):
    """Mutations whose checksum was made right: either refused, or everything in it lies inside the schema."""
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


def test_what_is_for_another_shard_is_refused():
    codec = Codec(RUN, PIXELS)
    update = PriorityUpdate(3, 1, 0, 0, np.arange(2), np.ones(2, np.float32))
    segment, priorities = codec.encode_segment(make_segment(PIXELS), shard=3), codec.encode_priorities(update)
    batch = codec.encode_batch(make_batch(PIXELS)._replace(shard=3))
    assert codec.decode_segment(segment, 3).number == make_segment(PIXELS).number
    assert codec.decode_priorities(priorities, 3).shard == codec.decode_batch(batch, 4, 4).shard == 3
    for decode in (
        lambda: codec.decode_segment(segment, 2),
        lambda: codec.decode_priorities(priorities, 2),
        lambda: codec.decode_batch(batch, 4, 3),
    ):
        with pytest.raises(WireError, match="shard 3"):
            decode()


@pytest.mark.parametrize(
    "field",
    [
        {"mean": [1]},
        {"mean": None},
        {"mean": 1e301},
        {"episodes": -1},
        {"episodes": 2.0},
        {"scores": [None]},
        {"scores": [0.0] * 10_001},
        {"confirmed": 1},
        {"seed": 2**31},
        {"num_envs": 0},
        {"else": 1},
    ],
)
def test_refuses_results_that_cannot_be(field):
    frames = with_json(CODEC.encode_evaluation(RESULT, None), {**as_json(RESULT), **field})
    with pytest.raises(WireError, match="fields"):
        CODEC.decode_evaluation(frames, 10)


@pytest.mark.parametrize("field", sorted(as_json(RESULT).keys() - {"low", "high"}))
def test_refuses_a_result_that_lacks_a_field(field):
    result = {name: value for name, value in as_json(RESULT).items() if name != field}
    with pytest.raises(WireError, match=f"missing required field `{field}`"):
        CODEC.decode_evaluation(with_json(CODEC.encode_evaluation(RESULT, None), result), 10)


def test_the_topic_of_a_streams_receipts_is_the_header_up_to_its_actor_id():
    """Magic, version, kind and shard, run id and sender: 20 bytes, whatever comes after them."""
    receipt = Receipt(Stream(5, 7), 77, 3, 0)
    for codec in (CODEC, Codec(RUN, VECTORS)):
        (frame,) = codec.encode_receipt(receipt, 2)
        assert bytes(frame[:20]) == receipt_topic(RUN, 2, 5)


def test_the_kinds_of_messages_have_the_numbers_that_other_versions_know():
    numbers = {"SEGMENT": 1, "RECEIPT": 2, "BATCH": 3, "PRIORITIES": 4, "PARAMETERS": 5, "CONTROL": 6, "METRICS": 7}
    assert {kind.name: int(kind) for kind in MessageKind} == {**numbers, "EVALUATION": 8}
