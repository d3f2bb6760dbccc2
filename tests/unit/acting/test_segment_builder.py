"""`SegmentBuilder` stores every transition exactly, at every boundary.

A script describes the episodes of a stream. `drive` plays it, and `naive_transitions` computes the expected result from
the script alone. Each frame contains its stream, episode and step, and rewards are powers of ten, so that a value from
a wrong place is noticed.
"""

import dataclasses
import itertools
import sys
from contextlib import contextmanager
from typing import NamedTuple

import cramjam
import lz4.block
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv

from apex.acting.segment_builder import SegmentBuilder
from apex.config import ActorConfig, EnvironmentConfig
from apex.schema import Schema, unpack_mask
from apex.types import Step
from apexreplay.errors import UsageError

NUM_ACTIONS = 3
FORMATS = [("uint8", "lz4"), ("float32", "raw"), ("float32", "lz4"), ("uint8", "raw")]


class Episode(NamedTuple):
    """The steps of one stream between two resets: L steps, L + 1 states."""

    frames: np.ndarray  # [L + 1, *F]
    q: np.ndarray  # float32[L + 1, A]; the last row is NaN if that state is terminal
    action: np.ndarray  # int64[L]
    reward: np.ndarray  # float32[L]
    life_lost: np.ndarray  # bool[L]
    terminated: bool  # at step L - 1; if neither is set, the script stops within the episode
    truncated: bool
    failed: bool = False  # the environment failed in a further step

    @property
    def length(self):
        return len(self.action)

    @property
    def ended(self):
        return self.terminated or self.truncated

    @property
    def over(self):
        return self.ended or self.failed


class Stored(NamedTuple):
    """A decoded transition."""

    n_step_return: float
    discount: float
    priority: float
    reward: float
    step_discount: float
    action: int
    num_steps: int  # m
    observation: list  # [S, *F]
    next_observation: list


def make_schema(*, stack=2, n_step=3, dtype="uint8", codec="lz4"):
    return Schema(
        frame_shape=(2, 3), frame_dtype=dtype, stack=stack, num_actions=NUM_ACTIONS, n_step=n_step, codec=codec
    )


def make_builder(schema, *, num_streams=1, segment_length=50, gamma=0.5, clip=False, life_loss_terminates=False):
    actor = ActorConfig(gamma=gamma, segment_length=segment_length)
    environment = EnvironmentConfig(clip_rewards=clip, life_loss_terminates=life_loss_terminates)
    return SegmentBuilder(actor, environment, schema, num_streams)


def make_frames(stream, episode, length, dtype="uint8"):
    """Returns frames of an episode: stream, episode and step, counted from 1 because zeros are padding."""
    frames = np.zeros((length + 1, 2, 3), dtype)
    frames[:] = stream + 1, episode + 1, 0
    frames[:, :, 2] = np.arange(1, length + 2)[:, None]
    return frames


def make_episode(rewards, *, terminated=False, truncated=False, lives_lost=(), episode=0):
    """In state t, the value of action 0 is 1 and the best value is 100 + t. Action 0 is chosen."""
    length = len(rewards)
    q = np.ones((length + 1, NUM_ACTIONS), np.float32)
    q[:, 2] = 100 + np.arange(length + 1)
    life_lost = np.isin(np.arange(length), lives_lost)
    action = np.zeros(length, np.int64)
    frames = make_frames(0, episode, length)
    return Episode(frames, q, action, np.array(rewards, np.float32), life_lost, terminated, truncated)


def make_script(rng, stream, num_steps, *, n, segment_length, dtype):
    """Returns random episodes of `num_steps` steps in total. The last one does not end, and may have no steps."""
    lengths = [1, 2, n, n + 1, segment_length, 2 * segment_length + 1]
    ends = [(True, False, False), (False, True, False), (True, True, False), (False, False, True)]
    script, steps_left = [], num_steps
    while not script or script[-1].over:
        terminated, truncated, failed = ends[rng.integers(4)]
        length = int(rng.choice([0, *lengths] if failed else lengths))
        if length + failed > steps_left:
            length, terminated, truncated, failed = steps_left, False, False, False
        steps_left -= length + failed
        q = rng.normal(size=(length + 1, NUM_ACTIONS)).astype(np.float32)
        if terminated:
            q[-1] = np.nan
        script.append(
            Episode(
                frames=make_frames(stream, len(script), length, dtype),
                q=q,
                action=rng.integers(NUM_ACTIONS, size=length),
                reward=(10.0 ** (np.arange(length) % 5) * rng.choice([-1, 1], length)).astype(np.float32),
                life_lost=rng.random(length) < 0.15,
                terminated=terminated,
                truncated=truncated,
                failed=failed,
            )
        )
    return script


def naive_stack(frames, t, stack):
    """Returns the observation at step t: the last `stack` frames, with zeros before the first."""
    return [frames[i] if i >= 0 else np.zeros_like(frames[0]) for i in range(t - stack + 1, t + 1)]


def naive_transitions(script, schema, *, gamma=0.5, clip=False, life_loss_terminates=False):
    """Computes transitions from the definition. Leaves out windows that are open when the script stops."""
    transitions = []
    for episode in script:
        for t in range(episode.length):
            total, m, terminal, closed = 0.0, 0, False, False
            while not closed and t + m < episode.length:
                reward = float(episode.reward[t + m])
                total += gamma**m * (min(max(reward, -1.0), 1.0) if clip else reward)
                m += 1
                is_last = t + m == episode.length
                terminal = bool(
                    (is_last and episode.terminated) or (life_loss_terminates and episode.life_lost[t + m - 1])
                )
                closed = terminal or m == schema.n_step or (is_last and episode.over)
            if not closed:
                continue
            n_step_return, discount = np.float32(total), np.float32(0 if terminal else gamma**m)
            bootstrap = 0.0 if terminal else float(discount) * float(episode.q[t + m].max())
            priority = abs(float(n_step_return) + bootstrap - float(episode.q[t][episode.action[t]]))
            transitions.append(
                Stored(
                    float(n_step_return),
                    float(discount),
                    float(np.float32(priority)),
                    float(min(max(episode.reward[t], -1.0), 1.0) if clip else episode.reward[t]),
                    0.0 if terminal and m == 1 else float(np.float32(gamma)),
                    int(episode.action[t]),
                    m,
                    np.array(naive_stack(episode.frames, t, schema.stack)).tolist(),
                    np.array(naive_stack(episode.frames, t + m, schema.stack)).tolist(),
                )
            )
    return transitions


def timeline(script, schema):
    """Returns the states (observation, Q-values) of a stream, and the steps between them."""
    states, steps = [], []
    for episode in script:
        stacks = [naive_stack(episode.frames, t, schema.stack) for t in range(episode.length + 1)]
        states += zip(stacks, episode.q, strict=True)
        if episode.ended:
            states.pop()  # No action is chosen in a final state: the next episode begins at once.
        for t in range(episode.length):
            ended = episode.ended and t + 1 == episode.length
            final = stacks[-1] if ended else np.full(schema.observation_shape, 77)
            final_q = episode.q[-1] if ended and episode.truncated else np.full(NUM_ACTIONS, np.nan)
            flags = (ended and episode.terminated, ended and episode.truncated, episode.life_lost[t])
            steps.append((episode.action[t], episode.reward[t], *flags, final, final_q, False))
        if episode.failed:
            nothing = np.full(schema.observation_shape, 77), np.full(NUM_ACTIONS, np.nan)
            steps.append((1, np.float32(7e7), False, False, False, *nothing, True))
    return states, steps


def drive(scripts, schema, builder, *, cut_when=lambda t: False):
    """Plays one script per stream; cuts when the builder is ready, if `cut_when`, and at the end. Returns the cuts.

    Arrays are overwritten after each call, so that a builder that keeps a view is noticed.
    """
    states, steps = zip(*(timeline(script, schema) for script in scripts), strict=True)
    observations = [np.array([stack for stack, _ in now], schema.frame_dtype) for now in zip(*states, strict=True)]
    qs = [np.array([q for _, q in now], np.float32) for now in zip(*states, strict=True)]
    builder.begin(observations[0])
    observations[0].fill(1)
    cuts = []
    for t, now in enumerate(zip(*steps, strict=True)):
        if builder.ready or cut_when(t):
            cuts.append(builder.cut(qs[t].max(1)))
        action, reward, terminated, truncated, life_lost, final, final_q, failed = map(np.array, zip(*now, strict=True))
        final, final_q = final.astype(schema.frame_dtype), final_q.astype(np.float32)
        step = Step(observations[t + 1], reward, terminated, truncated, life_lost, final, failed)
        step = step if failed.any() else step._replace(failed=None)
        value, state_value, final_value = qs[t][np.arange(len(action)), action], qs[t].max(1), final_q.max(1)
        builder.append(action, value, state_value, step, final_value if (truncated & ~terminated).any() else None)
        for array in (*step, action, value, state_value, final_value):
            if isinstance(array, np.ndarray):
                array.fill(1)
    return [*cuts, builder.cut(qs[-1].max(1))]


def decode_frames(schema, blob):
    """Returns the frames of a blob."""
    (first,) = np.frombuffer(blob, "<u4", 1)
    offsets = np.frombuffer(blob, "<u4", first // 4)
    assert offsets[-1] == len(blob)
    frames = [blob[begin:end] for begin, end in itertools.pairwise(offsets)]
    if schema.codec == "lz4":
        frames = [lz4.block.decompress(frame, uncompressed_size=schema.frame_bytes) for frame in frames]
    return [np.frombuffer(frame, schema.frame_dtype).reshape(schema.frame_shape) for frame in frames]


def rebuild(frames, newest, depth, stack):
    """Returns the stack with `depth` real frames, the newest of which is `frames[newest]`."""
    real = [frames[i] for i in range(int(newest) - int(depth) + 1, int(newest) + 1)]
    return np.array([np.zeros_like(frames[0])] * (stack - int(depth)) + real)


def decode(schema, cut):
    """Returns the transitions of a cut. Fails if the blob lacks a frame, or has one that is not needed or twice."""
    frames = decode_frames(schema, cut.blob)
    records = cut.records
    assert (
        records[0]["frame"] + 1 == records[0]["depth"]
    )  # The blob begins with the oldest frame of the first stack ...
    assert records[-1]["next_frame"] + 1 == len(frames)  # ... and ends with the newest frame of the last next stack.
    assert len({frame.tobytes() for frame in frames}) == len(frames)
    return [
        Stored(
            float(record["n_step_return"]),
            float(record["discount"]),
            float(record["priority"]),
            float(record["reward"]),
            float(record["step_discount"]),
            int(record["action"]),
            int(record["next_frame"]) - int(record["frame"]),
            rebuild(frames, record["frame"], record["depth"], schema.stack).tolist(),
            rebuild(frames, record["next_frame"], record["next_depth"], schema.stack).tolist(),
        )
        for record in records
    ]


def stored_by(scripts, schema, builder, **options):
    """Returns the transitions of each stream in order."""
    stored = [[] for _ in scripts]
    for cut in itertools.chain(*drive(scripts, schema, builder, **options)):
        stored[cut.stream_index] += decode(schema, cut)
    return stored


def play(rewards, **options):
    """Returns the transitions of one episode, after the next one has begun."""
    keywords = {name: options.pop(name) for name in ("clip", "life_loss_terminates") if name in options}
    schema = make_schema()
    script = [make_episode(rewards, **options)]
    if script[0].ended:
        script.append(make_episode([], episode=1))
    (stored,) = stored_by([script], schema, make_builder(schema, **keywords))
    return stored


def steps_in(observation):
    """Returns the steps in an observation's frames; 0 for padding."""
    return [frame[0][2] for frame in observation]


def zeros_of(schema, num_streams=1):
    return np.zeros((num_streams, *schema.observation_shape), schema.frame_dtype)


def append(builder, schema, num_streams=1, *, value=0.0, state_value=0.0, final_value=None, action=None, **fields):
    """Appends a step; `fields` change fields of the Step, and other options the values of all streams."""
    no, zeros = np.zeros(num_streams, bool), np.zeros(num_streams, np.float32)
    observation, fields = zeros_of(schema, num_streams), {name: np.asarray(each) for name, each in fields.items()}
    step = Step(observation, zeros, no, no, no, observation)._replace(**fields)
    action = np.zeros(num_streams, np.int64) if action is None else action
    values = (np.broadcast_to(np.array(each, np.float32), num_streams) for each in (value, state_value))
    builder.append(action, *values, step, final_value)


@contextmanager
def counted_compressions():
    """Yields a list that gets an entry with each call of the compressor."""
    calls = []

    def look(frame, event, function):
        if event == "c_call" and function is cramjam.lz4.compress_block:
            calls.append(event)

    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_streams", [1, 3])
@pytest.mark.parametrize("segment_length", [1, 2, 7, 50])
@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_stored_transitions_equal_the_definition_in_every_bit(n, stack, segment_length, num_streams, seed):
    rng = np.random.default_rng(seed)
    dtype, codec = FORMATS[seed % len(FORMATS)]
    schema = make_schema(stack=stack, n_step=n, dtype=dtype, codec=codec)
    options = {"gamma": 0.9, "life_loss_terminates": seed % 2 == 0, "clip": seed == 3}
    num_steps = max(60, 3 * segment_length)
    scripts = [
        make_script(rng, stream, num_steps, n=n, segment_length=segment_length, dtype=dtype)
        for stream in range(num_streams)
    ]
    builder = make_builder(schema, num_streams=num_streams, segment_length=segment_length, **options)
    assert stored_by(scripts, schema, builder) == [naive_transitions(script, schema, **options) for script in scripts]


@pytest.mark.parametrize(("n", "segment_length"), [(3, 7), (5, 7), (5, 50)])
def test_random_scripts_reach_every_boundary(n, segment_length):
    reached = set()
    for seed in range(5):
        rng = np.random.default_rng(seed)
        for stream in range(3):
            options = {"n": n, "segment_length": segment_length, "dtype": "uint8"}
            for episode in make_script(rng, stream, max(60, 3 * segment_length), **options):
                reached |= {
                    "life loss" if episode.life_lost[:-1].any() else "",
                    "life loss at the end" if episode.life_lost[-1:].any() and episode.ended else "",
                    f"terminated {episode.terminated} truncated {episode.truncated}",
                    "one step" if episode.length == 1 and episode.ended else "",
                    "shorter than n" if 1 < episode.length < n and episode.ended else "",
                    "as long as a segment" if episode.length == segment_length and episode.ended else "",
                    "crosses several cuts" if episode.length > 2 * segment_length and episode.ended else "",
                    "still going on" if episode.length and not episode.over else "",
                    "failed" if episode.length and episode.failed else "",
                    "failed at once" if not episode.length and episode.failed else "",
                }
    assert len(reached - {""}) == 13, sorted(reached)


@pytest.mark.parametrize("seed", range(5))
def test_the_time_of_a_cut_changes_no_transition(seed):
    rng = np.random.default_rng(seed)
    schema = make_schema(stack=4, n_step=5)
    scripts = [make_script(rng, stream, 100, n=5, segment_length=7, dtype="uint8") for stream in range(3)]
    builders = [make_builder(schema, num_streams=3, segment_length=1000) for _ in range(2)]
    at_random = stored_by(scripts, schema, builders[0], cut_when=lambda t: rng.random() < 0.4)
    assert at_random == stored_by(scripts, schema, builders[1])


@pytest.mark.parametrize("kind", ["terminated", "truncated", "failed"])
def test_episodes_of_one_step_are_stored_for_any_window(kind):
    schema = make_schema(n_step=64)
    script = [make_episode([10.0**i], episode=i)._replace(**{kind: True}) for i in range(6)]
    (stored,) = stored_by([[*script, make_episode([], episode=6)]], schema, make_builder(schema, segment_length=4))
    assert [s.n_step_return for s in stored] == [10.0**i for i in range(6)]
    assert [s.discount for s in stored] == [0.0 if kind == "terminated" else 0.5] * 6


def test_windows_end_at_a_terminal_state():
    stored = play([1, 10, 100, 1000], terminated=True)
    assert [s.n_step_return for s in stored] == [1 + 5 + 25, 10 + 50 + 250, 100 + 500, 1000]
    assert [s.discount for s in stored] == [0.125, 0, 0, 0]
    assert [s.priority for s in stored] == [31 + 103 / 8 - 1, 310 - 1, 600 - 1, 1000 - 1]
    assert [s.num_steps for s in stored] == [3, 3, 2, 1]


def test_truncated_windows_bootstrap_from_the_final_observation():
    stored = play([1, 10, 100, 1000], truncated=True)
    assert [s.n_step_return for s in stored] == [31, 310, 600, 1000]
    assert [s.discount for s in stored] == [0.125, 0.125, 0.25, 0.5]
    assert [s.priority for s in stored] == [31 + 103 / 8 - 1, 310 + 104 / 8 - 1, 600 + 104 / 4 - 1, 1000 + 104 / 2 - 1]
    assert [steps_in(s.next_observation) for s in stored] == [[3, 4], [4, 5], [4, 5], [4, 5]]


def test_windows_before_a_failed_step_bootstrap_from_its_state():
    script = [make_episode([1, 10, 100, 1000])._replace(failed=True), make_episode([5], terminated=True, episode=1)]
    schema = make_schema()
    (stored,) = stored_by([[*script, make_episode([], episode=2)]], schema, make_builder(schema))
    assert [s.n_step_return for s in stored] == [31, 310, 600, 1000, 5]
    assert [s.discount for s in stored] == [0.125, 0.125, 0.25, 0.5, 0]
    assert [s.priority for s in stored[1:4]] == [310 + 104 / 8 - 1, 600 + 104 / 4 - 1, 1000 + 104 / 2 - 1]
    assert [steps_in(s.next_observation) for s in stored] == [[3, 4], [4, 5], [4, 5], [4, 5], [1, 2]]


def test_priorities_are_finite_for_any_value_of_the_network():
    """The replay server refuses other priorities, and the actor would wait for receipts forever."""
    schema = make_schema(n_step=1)
    builder = make_builder(schema, num_streams=4)
    value = np.array([1, np.nan, np.inf, -np.inf], np.float32)
    state_value = np.array([1, np.nan, np.inf, 1], np.float32)
    builder.begin(zeros_of(schema, 4))
    append(builder, schema, 4, value=value, state_value=state_value, reward=np.ones(4, np.float32))
    priorities = [float(cut.records["priority"][0]) for cut in builder.cut(state_value)]
    assert priorities == [0.5] + [float(np.finfo(np.float32).max)] * 3


def test_priorities_of_rescaled_values_are_errors_of_the_rescaled_target():
    """h(8) is 2.008 and h(3) is 1.003, so the target is h(1 + 0.5 * 8), and the error its distance from 1.003."""
    schema = make_schema(n_step=1)
    actor, environment = ActorConfig(n_step=1, gamma=0.5), EnvironmentConfig(clip_rewards=False)
    builder = SegmentBuilder(actor, environment, schema, 1, rescaled=True)
    builder.begin(zeros_of(schema))
    append(builder, schema, value=1.003, state_value=1.003, reward=[np.float32(1)])
    (cut,) = builder.cut(np.float32([2.008]))
    assert cut.records["priority"][0] == pytest.approx(6**0.5 - 1 + 0.005 - 1.003, rel=1e-5)
    assert cut.records["n_step_return"][0] == 1.0


def test_a_lost_life_closes_windows_but_not_stacks():
    stored = play([1, 10, 100, 1000], terminated=True, lives_lost=[1], life_loss_terminates=True)
    assert [s.n_step_return for s in stored] == [1 + 5, 10, 100 + 500, 1000]
    assert [s.discount for s in stored] == [0, 0, 0, 0]
    assert [steps_in(s.observation) for s in stored] == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert [steps_in(s.next_observation) for s in stored] == [[2, 3], [2, 3], [4, 5], [4, 5]]


def test_rewards_are_scaled_and_then_clipped_only_if_configured():
    assert [s.n_step_return for s in play([-7, 0.25, 30], terminated=True, clip=True)] == [-0.625, 0.75, 1]
    assert [s.n_step_return for s in play([-7, 0.25, 30], terminated=True)] == [0.625, 15.25, 30]
    schema = make_schema(n_step=1)
    environment = EnvironmentConfig(reward_scale=0.1, clip_rewards=True)
    builder = SegmentBuilder(ActorConfig(n_step=1, segment_length=2), environment, schema, 1)
    builder.begin(zeros_of(schema))
    for reward in (-5.0, -50.0):
        append(builder, schema, reward=[np.float32(reward)], terminated=[True])
    (cut,) = builder.cut(np.zeros(1, np.float32))
    assert cut.records["reward"].tolist() == [-0.5, -1.0]


def test_every_frame_is_compressed_once():
    rng = np.random.default_rng(0)
    schema = make_schema(stack=4, n_step=5)
    scripts = [make_script(rng, stream, 100, n=5, segment_length=7, dtype="uint8") for stream in range(3)]
    with counted_compressions() as calls:
        cuts = drive(scripts, schema, make_builder(schema, num_streams=3, segment_length=7))
    assert len(calls) == sum(len(episode.frames) for script in scripts for episode in script)
    assert len(calls) < sum(len(decode_frames(schema, cut.blob)) for cut in itertools.chain(*cuts))


def test_a_builder_is_ready_segment_length_steps_after_each_cut():
    schema = make_schema()
    builder = make_builder(schema, segment_length=3)
    cuts = drive([[make_episode([0] * 10)]], schema, builder)  # Cuts when it is ready, and at the end.
    assert [[len(cut.records) for cut in cuts_of_call] for cuts_of_call in cuts] == [[1], [3], [3], [1]]
    assert not builder.ready


def test_begin_drops_pending_steps():
    schema = make_schema()
    builder = make_builder(schema)
    script = [make_episode([1, 10], terminated=True), make_episode([], episode=1)]
    drive([[make_episode([1000, 1000])]], schema, builder)
    assert stored_by([script], schema, builder) == [naive_transitions(script, schema)]


def test_a_cut_before_the_first_step_is_empty():
    schema = make_schema()
    assert drive([[make_episode([])]], schema, make_builder(schema)) == [[]]


def test_invalid_calls_are_errors():
    schema, masked = make_schema(), dataclasses.replace(make_schema(), masked=True)
    builder, mask = make_builder(schema, segment_length=1), np.ones((1, NUM_ACTIONS), bool)
    builder.begin(zeros_of(schema))
    with pytest.raises(ValueError, match="final_value"):
        append(builder, schema, truncated=[True])
    append(builder, schema)
    with pytest.raises(RuntimeError, match="cut"):
        append(builder, schema)
    for masks in ({}, {"action_mask": mask}, {"final_mask": mask}):
        builder = make_builder(masked)
        builder.begin(zeros_of(masked))
        with pytest.raises(ValueError, match="masks"):
            append(builder, masked, terminated=[True], **masks)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 2, 2, 3), "uint8"), ((1, 2, 3), "uint8"), ((1, 2, 3, 2), "uint8"), ((1, 2, 2, 3), "int64")],
)
def test_observations_of_another_shape_or_dtype_are_refused(shape, dtype):
    with pytest.raises(UsageError) as error:
        make_builder(make_schema()).begin(np.zeros(shape, dtype))
    assert "uint8[1, 2, 2, 3]" in error.value.problem
    assert f"{dtype}{list(shape)}" in error.value.problem
    assert error.value.remedy


def test_continuous_actions_are_stored_completely():
    schema = dataclasses.replace(make_schema(n_step=1), num_actions=0, action_size=2)
    builder, action = make_builder(schema, num_streams=2), np.array([[0.5, -1], [0.25, 1]], np.float32)
    builder.begin(zeros_of(schema, 2))
    append(builder, schema, 2, action=action.copy(), terminated=[True, True])
    records = [cut.records[0] for cut in builder.cut(np.zeros(2, np.float32))]
    assert [record["action"].tolist() for record in records] == action.tolist()


def mask_of(*allowed, num_actions=10):
    return np.isin(np.arange(num_actions), allowed)


def test_a_transition_has_the_mask_of_its_next_state():
    """Steps 0 ... 4, n = 2. Step 2 is truncated and step 4 terminates. Action i is allowed in state i."""
    schema = dataclasses.replace(make_schema(n_step=2), num_actions=10, masked=True)
    builder, zeros = make_builder(schema), np.zeros(1, np.float32)
    builder.begin(zeros_of(schema))
    for t, final in enumerate([None, None, (9, 0), None, ()]):
        masks = {"action_mask": mask_of(t + 1)[None]}
        masks |= {} if final is None else {"final_mask": mask_of(*final)[None]}
        append(builder, schema, terminated=[t == 4], truncated=[t == 2], final_value=zeros, **masks)
        for mask in masks.values():
            mask.fill(True)
    (cut,) = builder.cut(zeros)
    masks = unpack_mask(cut.records["next_mask"], 10)
    assert [np.flatnonzero(mask).tolist() for mask in masks] == [[2], [0, 9], [0, 9], [], []]
    assert (cut.records["discount"] > 0).tolist() == [True, True, True, False, False]


def test_stacks_of_segments_equal_the_observations_of_ale():
    num_envs, num_steps, rng = 8, 400, np.random.default_rng(0)
    schema = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=NUM_ACTIONS, n_step=3, codec="lz4")
    builder = make_builder(schema, num_streams=num_envs, life_loss_terminates=True)
    environment = AtariVectorEnv(
        "breakout",
        num_envs,
        num_threads=1,
        max_num_frames_per_episode=800,  # so that some games are truncated
        autoreset_mode="SameStep",
        reward_clipping=False,
    )
    observation, info = environment.reset(seed=np.arange(num_envs))
    seen, ends, lives = [observation.copy()], [], info["lives"].copy()
    builder.begin(observation)
    stored = [[] for _ in range(num_envs)]
    num_endings = np.zeros(3, int)
    for t in range(num_steps):
        action = rng.integers(NUM_ACTIONS, size=num_envs)
        q = rng.normal(size=(num_envs, NUM_ACTIONS)).astype(np.float32)
        observation, reward, terminated, truncated, info = environment.step(action)
        ended = terminated | truncated
        life_lost = (info["lives"] < lives) & ~ended
        lives = info["lives"].copy()
        final = info["final_obs"] if ended.any() else observation
        num_endings += [terminated.sum(), truncated.sum(), life_lost.sum()]
        step = Step(observation, reward.astype(np.float32), terminated, truncated, life_lost, final)
        builder.append(action, q[:, 0], q[:, 1], step, q[:, 2])
        seen.append(observation.copy())
        ends.append((ended.copy(), final.copy()))
        if builder.ready or t == num_steps - 1:
            for cut in builder.cut(q[:, 0]):
                frames = decode_frames(schema, cut.blob)
                stored[cut.stream_index] += [(frames, record) for record in cut.records]
    environment.close()
    assert (num_endings > 0).all()  # Each kind of end occurs.
    assert sum(map(len, stored)) >= num_envs * (num_steps - 2)
    for stream, transitions in enumerate(stored):
        for t, (frames, record) in enumerate(transitions):
            last = t + int(record["next_frame"]) - int(record["frame"]) - 1
            ended, final = ends[last]
            following = final if ended[stream] else seen[last + 1]
            assert np.array_equal(rebuild(frames, record["frame"], record["depth"], 4), seen[t][stream])
            assert np.array_equal(rebuild(frames, record["next_frame"], record["next_depth"], 4), following[stream])


@pytest.mark.parametrize(
    ("failed", "skipped", "expected"),
    [
        (None, None, None),
        ([True, False, False], None, [True, False, False]),
        (None, [False, True, False], [False, True, False]),
        ([True, False, False], [False, True, False], [True, True, False]),
    ],
)
def test_steps_that_failed_or_were_skipped_are_unplayed(failed, skipped, expected):
    none = np.zeros(3, np.bool_)
    observation = np.zeros((3, 1, 2), np.float32)
    given = {name: np.array(rows) for name, rows in (("failed", failed), ("skipped", skipped)) if rows}
    unplayed = Step(observation, np.zeros(3, np.float32), none, none, none, observation, **given).unplayed
    assert unplayed is None if expected is None else unplayed.tolist() == expected
