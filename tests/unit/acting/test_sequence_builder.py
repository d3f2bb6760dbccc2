"""`SequenceBuilder` stores sequences whose every number equals that of a naive twin, and trains each step once.

A random script says how each step of a stream ends. Observations are numbered, so that a frame in a wrong place is
noticed.
"""

from itertools import pairwise
from typing import NamedTuple

import cramjam
import numpy as np
import pytest

from apex.acting.segment_builder import SegmentBuilder
from apex.acting.sequence_builder import SequenceBuilder
from apex.acting.worker import make_builder
from apex.algorithms.n_step import rescale, restore
from apex.config import ActorConfig, Config, EnvironmentConfig, NetworkConfig, R2d2Config
from apex.config.algorithm_choice import with_sequences
from apex.schema import Schema, unpack_mask
from apex.transport.run_codec import RunCodec
from apex.types import Step
from apexreplay.frame_blob import read_table
from apexreplay.types import Segment, Stream
from apexreplay.wire.codec import Codec

GAMMA, ETA, NUM_ACTIONS = 0.5, 0.75, 3
KINDS = ["play", "terminate", "truncate", "both", "fail", "skip", "lose"]  # how a step of the script ends


def make_config(length, burn_in, n, *, rescaled=False, segment_length=7):
    return Config(
        algorithm="r2d2",
        actor=ActorConfig(gamma=GAMMA, n_step=n, segment_length=segment_length),
        environment=EnvironmentConfig(clip_rewards=False, life_loss_terminates=True),
        network=NetworkConfig(value_rescaling=rescaled),
        r2d2=R2d2Config(sequence_length=length, burn_in=burn_in, units=1, priority_max_share=ETA),
    )


def make_schema(config, **changes):
    form = {"frame_shape": (1,), "frame_dtype": "float32", "codec": "raw", "masked": True} | changes
    return with_sequences(config, Schema(stack=1, num_actions=NUM_ACTIONS, n_step=config.actor.n_step, **form))


class Played(NamedTuple):
    """Everything of one step of all streams, axes [E]."""

    kind: np.ndarray
    observation: np.ndarray  # number of s_t
    final: np.ndarray  # number of the last state of an episode that ends
    action: np.ndarray
    reward: np.ndarray
    value: np.ndarray
    state_value: np.ndarray
    final_value: np.ndarray
    mask: np.ndarray  # [E, A]  of s_t
    final_mask: np.ndarray
    state: np.ndarray  # [E, 2]


def make_script(rng, num_steps, num_streams, odds):
    """Returns num_steps + 1 random steps; of the last one, only what belongs to s_t counts."""
    shape = num_steps + 1, num_streams
    masks = rng.random((2, *shape, NUM_ACTIONS)) < 0.7
    masks[..., 0] = True
    numbers = np.arange(1, 2 * np.prod(shape) + 1).reshape(2, *shape)
    return Played(
        kind=rng.choice(KINDS, shape, p=odds),
        observation=numbers[0],
        final=numbers[1],
        action=rng.integers(NUM_ACTIONS, size=shape),
        reward=rng.integers(-5, 6, shape).astype(np.float32),
        value=rng.normal(size=shape).astype(np.float32),
        state_value=rng.normal(size=shape).astype(np.float32),
        final_value=rng.normal(size=shape).astype(np.float32),
        mask=masks[0],
        final_mask=masks[1],
        state=rng.normal(size=(*shape, 2)).astype(np.float32),
    )


def to_step(script, t):
    kind, frame = script.kind[t], np.float32
    return Step(
        observation=script.observation[t + 1].astype(frame)[:, None, None],
        reward=script.reward[t],
        terminated=np.isin(kind, ["terminate", "both"]),
        truncated=np.isin(kind, ["truncate", "both"]),
        life_lost=kind == "lose",
        final_observation=script.final[t].astype(frame)[:, None, None],
        failed=kind == "fail",
        skipped=kind == "skip",
        action_mask=script.mask[t + 1],
        final_mask=script.final_mask[t],
    )


def drive(script, builder, cuts_at):
    """Plays the script; returns the segments of each stream in order."""
    segments = [[] for _ in script.kind[0]]
    num_steps = len(script.kind) - 1
    builder.begin(script.observation[0].astype(np.float32)[:, None, None])
    for t in range(num_steps + 1):
        if t in cuts_at or builder.ready or t == num_steps:
            for cut in builder.cut(script.state_value[t]):
                segments[cut.stream_index].append(cut)
        if t < num_steps:
            row = [each[t] for each in (script.action, script.value, script.state_value)]
            builder.append(*row, to_step(script, t), script.final_value[t], script.state[t])
    return segments


def decode(schema, cut):
    """Returns the sequences of a segment, each as (numbers of its frames, record)."""
    table = read_table(cut.blob, (np.frombuffer(cut.blob[:4], "<u4")[0] // 4) - 1)
    frames = [cut.blob[start:stop] for start, stop in pairwise(table)]
    if schema.codec == "lz4":
        frames = [bytes(cramjam.lz4.decompress_block(each, output_len=schema.frame_bytes)) for each in frames]
    numbers = [int(np.frombuffer(each, schema.frame_dtype)[0]) for each in frames]
    newest = cut.records["frame"].astype(int)
    return [
        (numbers[last + 1 - depth : last + 1], record)
        for last, depth, record in zip(newest, cut.records["depth"].astype(int), cut.records, strict=True)
    ]


class Episode(NamedTuple):
    """The played steps of an episode, as rows of the script, and its end."""

    rows: list  # t
    end: str  # kind of the end; "open": the script stops; "fail": the next step was not played


def episodes_of(script, stream):
    found, rows = [], []
    for t, kind in enumerate(script.kind[:-1, stream]):
        if kind in ("fail", "skip"):
            found.append(Episode(rows, "fail"))
            rows = []
            continue
        rows.append(t)
        if kind in ("terminate", "truncate", "both"):
            found.append(Episode(rows, kind))
            rows = []
    return [*found, Episode(rows, "open")]


def naive_sequences(config, script, stream):
    """Returns the sequences of a stream that are complete: (frames, {field: values})."""
    length, warm, n = config.r2d2.sequence_length, config.r2d2.burn_in, config.actor.n_step
    period, found = length - warm - n, []
    for rows, end in episodes_of(script, stream):
        size = len(rows)
        states = [script.observation[t, stream] for t in rows]
        masks = [script.mask[t, stream] for t in rows]
        values = [float(script.state_value[t, stream]) for t in rows]
        if rows:
            after = rows[-1] + 1
            is_next = end in ("fail", "open")  # s_T is the state in which the next step began
            states.append(script.observation[after, stream] if is_next else script.final[rows[-1], stream])
            masks.append(script.mask[after, stream] if is_next else script.final_mask[rows[-1], stream])
            values.append(float((script.state_value[after] if is_next else script.final_value[rows[-1]])[stream]))
        for begin in range(0, size, period):
            first = begin if begin == 0 else begin + warm
            last = min(begin + length - n, size)  # the first step that is not trained
            is_complete = size - begin >= length - 1 or end != "open"
            if first >= last or not is_complete:
                continue
            fields, errors = {}, []
            for t in range(first, last):
                total, m, discount = 0.0, 0, 1.0
                while m < n and t + m < size:
                    total += GAMMA**m * float(script.reward[rows[t + m], stream])
                    kind = script.kind[rows[t + m], stream]
                    m += 1
                    if kind in ("terminate", "both", "lose"):
                        discount = 0.0
                        break
                discount *= GAMMA**m
                bootstrap = values[t + m]
                if config.network.value_rescaling:
                    goal = rescale(total + discount * restore(bootstrap))
                else:
                    goal = total + discount * bootstrap
                errors.append(abs(goal - float(script.value[rows[t], stream])))
                fields[t - begin] = (m, total, discount, script.action[rows[t], stream], masks[t + m])
            priority = ETA * max(errors) + (1 - ETA) * sum(errors) / len(errors)
            state = script.state[rows[begin], stream]
            found.append((states[begin : begin + length], fields, priority, state))
    return found


ODDS = {
    "long": [0.96, 0.01, 0.01, 0.0, 0.01, 0.0, 0.01],
    "short": [0.6, 0.1, 0.1, 0.02, 0.08, 0.05, 0.05],
    "tiny": [0.1, 0.3, 0.3, 0.1, 0.1, 0.1, 0.0],
}


@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("odds", ODDS)
@pytest.mark.parametrize("sizes", [(8, 3, 2), (5, 0, 1), (6, 0, 5), (9, 7, 1), (2, 0, 1), (4, 1, 2)])
def test_sequences_equal_those_of_a_naive_twin(sizes, odds, rescaled):
    rng = np.random.default_rng(3)
    config = make_config(*sizes, rescaled=rescaled)
    schema = make_schema(config)
    script = make_script(rng, 150, 3, ODDS[odds])
    segments = drive(script, make_builder(config, schema, 3), set(rng.integers(0, 150, 15).tolist()))
    num_found = 0
    for stream, cuts in enumerate(segments):
        found = [sequence for cut in cuts for sequence in decode(schema, cut)]
        expected = naive_sequences(config, script, stream)
        assert len(found) == len(expected)
        num_found += len(found)
        for (numbers, record), (states, fields, priority, state) in zip(found, expected, strict=True):
            assert numbers == states
            assert record["state"].tolist() == state.tolist()
            assert record["priority"] == pytest.approx(priority, rel=1e-5, abs=1e-6)
            for t in range(sizes[0]):
                m, total, discount, action, mask = fields.get(t, (0, 0.0, 0.0, 0, np.zeros(NUM_ACTIONS, bool)))
                assert record["span"][t] == m
                assert record["n_step_return"][t] == np.float32(total)
                assert record["discount"][t] == np.float32(discount)
                assert record["action"][t] == action
                assert unpack_mask(record["next_mask"][t], NUM_ACTIONS).tolist() == mask.tolist()
    assert num_found > 10


@pytest.mark.parametrize("odds", ODDS)
def test_every_step_is_trained_by_exactly_one_sequence(odds):
    rng = np.random.default_rng(4)
    config = make_config(8, 3, 2)
    schema = make_schema(config)
    script = make_script(rng, 300, 1, ODDS[odds])
    (cuts,) = drive(script, make_builder(config, schema, 1), set())
    trained = [
        numbers[t] for cut in cuts for numbers, record in decode(schema, cut) for t in np.flatnonzero(record["span"])
    ]
    over = [episode for episode in episodes_of(script, 0) if episode.end != "open"]
    expected = [script.observation[t, 0] for episode in over for t in episode.rows]
    assert trained[: len(expected)] == expected
    assert len(set(trained)) == len(trained)
    assert sum(RunCodec(1, schema).num_steps(cut.records) for cut in cuts) == len(trained)


def test_images_are_sent_once_per_segment():
    """Four sequences of 20 steps with an overlap of 15: 35 frames, not 80."""
    config = make_config(20, 12, 3, segment_length=34)
    schema = make_schema(config, frame_shape=(4, 4), frame_dtype="uint8", codec="lz4", masked=False)
    builder = make_builder(config, schema, 1)
    frame = np.zeros((1, 1, 4, 4), np.uint8)
    builder.begin(frame + np.uint8(1))
    none = np.zeros(1, bool)
    for t in range(34):
        step = Step(frame + np.uint8(t + 2), np.zeros(1, np.float32), none, none, none, frame)
        builder.append(np.zeros(1, int), np.zeros(1, np.float32), np.zeros(1, np.float32), step, None, None)
    (cut,) = builder.cut(np.zeros(1, np.float32))
    assert [numbers for numbers, _ in decode(schema, cut)] == [list(range(1 + 5 * k, 21 + 5 * k)) for k in range(4)]
    assert np.frombuffer(cut.blob[:4], "<u4")[0] == 4 * 36
    assert not cut.records["state"].any()


def test_segments_pass_the_checks_of_the_wire_and_wrong_ones_do_not():
    rng = np.random.default_rng(5)
    config = make_config(8, 3, 2)
    schema = make_schema(config)
    (cuts,) = drive(make_script(rng, 60, 1, ODDS["short"]), make_builder(config, schema, 1), set())
    codec = RunCodec(1, schema)

    def send(records):
        frames = Codec.encode_segment(codec, Segment(Stream(0, 1), 0, 1, records, cuts[0].blob))
        return codec.decode_segment(frames)

    assert np.array_equal(send(cuts[0].records).records, cuts[0].records)
    at = int(np.flatnonzero(cuts[0].records["span"][0])[-1])
    for name, value in (("span", 3), ("action", 3), ("discount", 1.5), ("n_step_return", np.nan)):
        wrong = cuts[0].records.copy()
        wrong[name][0, at] = value
        with pytest.raises(ValueError, match=name):
            send(wrong)
    first = int(cuts[0].records["span"][:, 0].argmax())  # a sequence that begins its episode
    for span, problem in (([0] * 8, "no step"), ([0, 1, 0, 0, 0, 0, 0, 0], "burn-in")):
        wrong = cuts[0].records.copy()
        wrong["span"][first] = span
        with pytest.raises(ValueError, match=problem):
            send(wrong)
    beyond = cuts[0].records.copy()
    beyond["span"][0, -1] = 1
    with pytest.raises(ValueError, match="beyond its sequence"):
        send(beyond)


def test_begin_forgets_the_steps_before():
    rng = np.random.default_rng(6)
    config = make_config(8, 3, 2)
    builder = make_builder(config, make_schema(config), 2)
    script = make_script(rng, 50, 2, ODDS["short"])
    expected = drive(script, builder, {20})
    again = drive(script, builder, {20})
    for before, after in zip(expected, again, strict=True):
        assert [cut.blob for cut in before] == [cut.blob for cut in after]


def test_only_recurrent_algorithms_have_sequences():
    config = make_config(8, 3, 2)
    schema = make_schema(config)
    assert type(make_builder(config, schema, 1)) is SequenceBuilder
    plain = with_sequences(Config(), schema)
    assert plain is schema
    assert type(make_builder(Config(), make_schema(Config()), 1)) is SegmentBuilder
