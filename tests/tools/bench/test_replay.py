"""`python -m bench replay`: recordings, the check of samples, ratios, and a short run."""

import json
import os
import time

import numpy as np
import pytest
from support.benches import stand_in, start
from support.policy_runs import make_run

from apex.config import ActorConfig, Config, EnvironmentConfig
from apex.environments.factory import describe
from apex.learning.batch_ring import Batch, BatchPart
from apexreplay.frames.stack_decoder import StackDecoder
from apexreplay.process.children import call_in_child
from apexreplay.process.lifecycle import Stop
from bench.__main__ import main
from bench.harness.recording import Compressor, load, record
from bench.harness.report import print_report
from bench.replay import VerificationError, verify
from bench.replay_steps import median_ms, read_memory

CONFIG = Config(environment=EnvironmentConfig(id="ALE/Seaquest-v5"), actor=ActorConfig(num_actors=2, segment_length=10))
TINY = ["replay", "--transitions", "2000", "--frames", "900", "--seconds", "0.5", "--leaves", "4096", "--json"]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recording")
    schema = describe(CONFIG.environment, CONFIG.actor.n_step)
    rng = np.random.default_rng(0)

    def play(stop):
        return record(stop, folder, CONFIG, schema, lambda o: rng.integers(schema.num_actions, size=len(o)), 300)

    return load(folder, schema, call_in_child("recorder", play, Stop()))


def sample_of(recording, keys):
    """Returns the correct sample for these keys, taken from the recording."""
    rounds, rows = np.divmod(keys, len(recording.records))
    records = recording.records[rows]
    piece = np.searchsorted(recording.pieces["first_record"], rows, side="right") - 1
    return Batch(
        stacks=recording.stacks(rows),
        keys=keys,
        probability=np.full(len(keys), 0.5),
        action=records["action"].astype(np.int64),
        n_step_return=records["n_step_return"].copy(),
        discount=records["discount"].copy(),
        version=rounds * len(recording.pieces) + piece,
        num_transitions=10,
        parts=[BatchPart(0, 1, 0, 0)],
        slot=0,
    )


class TapeBed:
    """A fixture with one sample, which records the returned priorities."""

    def __init__(self, sample):
        self.sample = sample
        self.answered = []

    def receive(self):
        return self.sample

    def answer(self, sample, priorities):
        self.answered.append(priorities)


def test_a_recording_has_the_requested_number_of_distinct_frames(recording):
    seen = {frame.tobytes() for stream in recording.frames for frame in stream}
    assert len(seen) == recording.num_distinct_frames >= 300


def test_blobs_compressed_again_have_the_frames_of_the_games(recording):
    compressor = Compressor(recording)
    schema = recording.schema
    for _ in range(2):  # The second round starts with the frames of the first one.
        rows = np.zeros(0, np.int64)
        for piece in range(len(recording.pieces)):
            records = recording.records_of(piece)
            wanted = recording.stacks(np.arange(len(rows), len(rows) + len(records)))
            rows = np.append(rows, np.zeros(len(records), np.int64))
            np.testing.assert_array_equal(decode_segment(schema, records, compressor.blob(piece)), wanted)


def decode_segment(schema, records, blob):
    """Decodes the stacks of a segment with the learner's decoder, each transition as a separate sample."""
    stacks = np.zeros((2, len(records), *schema.observation_shape), np.uint8)
    table = np.frombuffer(blob, "<u4", int.from_bytes(blob[:4], "little") // 4)
    for place, row in enumerate(records):
        first = min(int(row["frame"]) - int(row["depth"]), int(row["next_frame"]) - int(row["next_depth"])) + 1
        frames = [blob[table[i] : table[i + 1]] for i in range(first, int(row["next_frame"]) + 1)]
        one = np.zeros(1, schema.table.batch_record)
        one["num_frames"] = len(frames)
        one["frame"], one["next_frame"] = row["frame"] - first, row["next_frame"] - first
        one["depth"], one["next_depth"] = row["depth"], row["next_depth"]
        offsets = np.cumsum([4 * (len(frames) + 1), *map(len, frames)]).astype("<u4")
        single = np.empty((2, 1, *schema.observation_shape), np.uint8)
        StackDecoder(schema.table, [single]).decode(one, b"".join([offsets.tobytes(), *frames]), np.zeros(1, np.int64))
        stacks[:, place] = single[:, 0]
    return stacks


def test_correct_samples_pass_and_their_priorities_are_returned(recording):
    keys = np.array([0, 7, len(recording.records) - 1, 3 * len(recording.records) + 5])
    bed = TapeBed(sample_of(recording, keys))
    assert verify(bed, recording, 2) == 8
    assert len(bed.answered) == 2


@pytest.mark.parametrize("field", ["stacks", "version", "action", "n_step_return", "discount"])
def test_a_sample_with_any_difference_is_reported_by_its_key(recording, field):
    sample = sample_of(recording, np.array([3, 11, 40]))
    wrong = getattr(sample, field)
    if field == "stacks":
        wrong[1, 2, 0, 80, 80] ^= 1
    else:
        wrong[2] += 1
    with pytest.raises(VerificationError, match=r"1 of 3.*\[40\]"):
        verify(TapeBed(sample), recording, 1)


def test_the_report_marks_figures_below_the_bar(capsys):
    print_report({"update_512_ms": 0.5, "draw_512_ms": 0.15})
    update, draw = (line for line in capsys.readouterr().out.splitlines() if "2^21" in line)
    assert update.endswith("below the bar")
    assert not draw.endswith("below the bar")


def test_a_median_ignores_one_slow_round():
    slow = iter([0.2])
    assert median_ms(lambda: time.sleep(next(slow, 0.0)), calls=1, rounds=5) < 50


def test_memory_is_summed_over_all_living_processes():
    whole, shared = read_memory([os.getpid()])
    assert 0 <= shared < whole
    assert read_memory([2**22 + 1]) == (0, 0)


@pytest.mark.covers_programs
def test_a_short_run_measures_every_figure(tmp_path):
    """Both links are measured, with frames of a random policy and with frames of a trained policy in another game."""
    run, record = make_run(tmp_path / "runs", best=3), tmp_path / "record.json"
    cpprb, torchrl = stand_in(tmp_path, "cpprb", "inserts=5"), stand_in(tmp_path, "torchrl", "exit 3")
    bench = start(tmp_path, *TINY, "--run", str(run.path), "--record", str(record), "--peer", cpprb, "--peer", torchrl)
    try:
        output, errors = bench.communicate(timeout=200)
    finally:
        bench.kill()
    assert output, errors
    figures = json.loads(output.splitlines()[-1])
    for prefix in ("", "direct_", "trained_", "trained_direct_"):
        for name in ("insert_transitions_per_s", "sample_batches_per_s", "both_sample_batches_per_s"):
            assert figures[prefix + name] > 0, errors
        assert figures[prefix + "verified_transitions"] >= 512
        assert figures[prefix + "bytes_per_transition"] < 2_000
        assert (prefix + "memory_bytes_2m" in figures) == ("direct_" not in prefix)
    assert figures["bytes_per_transition"] > 200
    assert figures["cpprb_inserts_per_s"] == 5
    assert bench.returncode == 1  # The peer that failed costs no other figure.
    assert "torchrl_inserts_per_s" not in figures
    assert json.loads(record.read_text())["figures"] == figures
    assert {"update_512_ms", "draw_512_ms"} < set(figures)
    assert figures["trained_distinct_frames"] >= 900
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "record.json", "cpprb", "torchrl"}


def test_a_run_without_a_policy_is_refused_before_measuring(tmp_path, capsys):
    run = make_run(tmp_path / "runs")
    assert main(["replay", "--run", str(run.path)]) == 2
    assert str(run.path) in capsys.readouterr().err
