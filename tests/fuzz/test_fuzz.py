"""Decoders judge mutated messages as the reference does, and accepted messages do no harm.

`python -m tests.fuzz --messages 1000000` runs longer.
"""

import dataclasses
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.builders import make_segment

from apex.algorithms.interface import make_algorithm
from apex.algorithms.parameters import flatten_parameters
from apex.config import ActorConfig, Config, LearnerConfig, NetworkConfig, RunConfig
from apex.launch.terminal.dashboard import History, plain_line, render
from apex.learning.batch_ring import BatchRing
from apex.learning.batch_source import LocalSource, RemoteSource
from apex.learning.coordinator.coordinator import Coordinator
from apex.learning.coordinator.metric_rows import MetricRows, evaluation_row
from apex.learning.coordinator.state import RunState
from apex.learning.coordinator.status import summarize
from apex.learning.loader import Loader
from apex.learning.random_shift import RandomShift
from apex.learning.trainer import Trainer
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import MetricsWriter
from apex.transport.messages.control import ActorHeartbeat, Heartbeat, decode_answer
from apex.transport.run_codec import RunCodec
from apex.types import Exploration
from apexreplay.client.send_window import SendWindow
from apexreplay.frames import lz4_blocks
from apexreplay.frames.stack_decoder import StackDecoder
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.batch_drawer import BatchDrawer, DrawSettings
from apexreplay.sampling.sampler_counters import SamplerCounters
from apexreplay.store.layout import StoreSettings
from apexreplay.store.reader import StoreReader
from apexreplay.store.writer import StoreWriter
from apexreplay.types import BatchMessage, Stream
from apexreplay.wire.json_codec import encode_control
from tests.fuzz.campaign import Finding, accepted_messages, judge, replay, run
from tests.fuzz.mutations import seal
from tests.fuzz.reference import accepts
from tests.fuzz.seeds import PIXELS, SIDES, TYPES, VECTORS, make_seeds

pytestmark = pytest.mark.no_cover  # Coverage would double the time; unit/apexreplay/wire/test_codec.py measures it.

MESSAGES = 20_000  # of each type
ROOT = Path(__file__).parents[2]
FOUR_ACTORS = Config(actor=ActorConfig(num_actors=4))


@pytest.mark.timeout(600)  # Each takes 3 to 11 s of CPU, which is long on a busy machine.
@pytest.mark.parametrize("kind", TYPES)
def test_decoders_judge_mutated_messages_as_the_reference_does(kind):
    command = [sys.executable, "-m", "tests.fuzz", "--messages", str(MESSAGES), "--type", kind, "--json"]
    # A separate process, because both the campaign and coverage trace each line.
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert (process.returncode, process.stderr) == (0, "")
    report = json.loads(process.stdout)
    assert (report["messages"], report["findings"]) == (MESSAGES, 0)
    assert report["accepted"] > MESSAGES // 100  # Mutations pass all checks ...
    assert len(report["reasons"]) >= 8  # ... and fail each.


def test_a_campaign_finds_errors_of_decoders(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RunCodec, "_check_records", lambda *arguments: None)
        assert run("segment", 2_000, seed=1).findings[0].problem == "only the reference refuses"
        patch.setattr(RunCodec, "_check_blob", lambda codec, blob, limit: blob[1_000])
        assert "IndexError" in run("segment", 50, seed=1).findings[0].problem
    check = RunCodec._check

    def wasteful(codec, frames, *arguments, **more):
        np.zeros(1 << 20, np.uint8)
        return check(codec, frames, *arguments, **more)

    monkeypatch.setattr(RunCodec, "_check", wasteful)
    assert "bytes for a message of" in run("receipt", 1_000, seed=1).findings[0].problem


def test_a_campaign_depends_only_on_its_seed():
    assert run("evaluation", 500, seed=3) == run("evaluation", 500, seed=3)
    assert run("evaluation", 500, seed=3) != run("evaluation", 500, seed=4)


def test_a_finding_can_be_replayed(tmp_path):
    seed = make_seeds("receipt")[0]
    path = tmp_path / "found.json"
    path.write_text(Finding("receipt", seed.side, seed.parts, "").to_json())
    assert replay(path) == ""
    assert judge("receipt", seed.side, [b""]) == ("length", "")
    assert json.loads(path.read_text())["parts"] == [seed.parts[0].hex()]


def test_sealing_makes_a_changed_message_valid():
    message = [bytearray(make_seeds("receipt")[0].parts[0])]
    message[0][60] ^= 1
    assert not accepts("receipt", [bytes(message[0])], SIDES["pixels"].facts)
    seal(message)
    assert accepts("receipt", [bytes(message[0])], SIDES["pixels"].facts)


# --- accepted messages ------------------------------------------------------------------------------------------------

SETTINGS = StoreSettings(capacity=64, max_bytes=4_096, num_streams=21, priority_exponent=0.6, min_priority=1e-6)


def decode_both_ways(schema, reader, rng):
    """Draws and decodes as samplers and loaders do, and as loaders do that read the store directly."""
    stacks = np.zeros((2, 16, schema.stack, *schema.frame_shape), schema.frame_dtype)
    decoder = StackDecoder(schema.table, [stacks])
    sample = reader.sample(16, rng)
    if sample is None:
        return 0
    batch = BatchMessage(0, 1, 0, 0, sample.num_transitions, sample.records, sample.blob)
    codec = RunCodec(1, schema)
    back = codec.decode_batch([bytes(part) for part in codec.encode_batch(batch)], 16)  # It can be sent too.
    if decoder.decode(back.records, back.blob, np.arange(16)).all():
        assert np.isfinite(stacks).all()
    draw = reader.draw(16, rng)
    decoder.decode_located(draw.frames, np.arange(len(draw.records)))
    return 1


@pytest.fixture(scope="module")
def accepted_segments():
    return list(accepted_messages("segment", 15_000, seed=1))


@pytest.mark.parametrize("side", ["pixels", "vectors"])
def test_accepted_segments_can_be_stored_drawn_and_decoded(side, accepted_segments, tmp_path):
    schema = {"pixels": PIXELS, "vectors": VECTORS}[side]
    path, rng = tmp_path / "store", np.random.default_rng(0)
    writer = StoreWriter.create(path, schema.table, SETTINGS, store_incarnation=1)
    reader = StoreReader(path, schema.table)
    num_stored = num_decoded = 0
    for seed, segment in accepted_segments:
        if seed.side != side:
            continue
        stream = Stream(20, 1)  # a stream of its own, as most would be duplicates otherwise
        number = writer.receipt(stream.actor_id).contiguous
        outcome = writer.insert(segment._replace(stream=stream, number=number, base=number))
        writer.insert(segment)  # unchanged: stored or refused
        assert outcome == "stored"
        num_stored += 1
        if num_stored % 4 == 0:
            num_decoded += decode_both_ways(schema, reader, rng)
    assert num_stored > 700
    assert num_decoded > 150
    writer.close()


class Learning:
    """A store, a loader's ring and a trainer."""

    def __init__(self, path, schema, *, by_socket):
        settings = StoreSettings(8_192, 1 << 20, num_streams=2, priority_exponent=0.6, min_priority=1e-6)
        self.schema = schema
        self.writer = StoreWriter.create(path, schema.table, settings, store_incarnation=1)
        self.counters = SamplerCounters(1)
        limits = DrawSettings(0, 1, 16, 8, RateLimiter(1, 0.0, 0.1, inserts_wait=False))
        drawer = BatchDrawer(StoreReader(path, schema.table), self.counters, 0, limits, np.random.default_rng(0))
        self.remote = RemoteSource(SimpleNamespace(receive=lambda timeout: drawer.draw()))
        self.source = self.remote if by_socket else LocalSource(drawer)
        self.ring = BatchRing(schema, 16)
        self.loader = Loader(schema, self.ring, RandomShift(0, np.random.default_rng(0)))
        self.trainer = None
        if schema == VECTORS:  # The frames of PIXELS are too small for a network.
            learner = LearnerConfig(batch_size=16, optimizer="adam", loss="squared")
            config = Config(learner=learner, network=NetworkConfig(hidden=8, body_hidden=8))
            options = {"batches": self.ring, "priorities": self, "publish": lambda parameters: None}
            self.trainer = Trainer(learner, make_algorithm(config, schema), device=torch.device("cpu"), **options)

    def insert(self, segment, actor_id):
        stream = Stream(actor_id, 1)
        number = self.writer.receipt(actor_id).contiguous
        assert self.writer.insert(segment._replace(stream=stream, number=number, base=number)) == "stored"

    def send(self, update):
        """Takes new priorities, as the replay server does."""
        self.writer.update_priorities(update)
        self.counters.acknowledge(update.sampler, update.number)

    def learn(self):
        """Learns from a batch, if there is a network, and sets its priorities; returns the share of good rows."""
        assert self.loader.ready(0.0)
        self.remote.receive(0.0)
        assert self.loader.fill([self.source])
        if self.trainer is not None:
            unusable = self.trainer.num_unusable + 16 * self.trainer.num_skipped
            assert self.trainer.step(0.0)
            return 1 - (self.trainer.num_unusable + 16 * self.trainer.num_skipped - unusable) / 16
        batch = self.ring.receive(0.0)
        for update in batch.updates(np.ones(16, np.float32)):
            self.send(update)
        share = batch.usable.mean()
        self.ring.release(batch.slot)
        return share


@pytest.mark.parametrize("by_socket", [False, True])
@pytest.mark.parametrize("side", ["pixels", "vectors"])
def test_training_continues_after_accepted_segments(side, by_socket, accepted_segments, tmp_path):
    """A hostile transition may spoil only the first batch that contains it."""
    learning = Learning(tmp_path / "store", {"pixels": PIXELS, "vectors": VECTORS}[side], by_socket=by_socket)
    for first in range(0, 500, 5):
        learning.insert(make_segment(learning.schema, first=first), actor_id=0)
    hostile = [segment for seed, segment in accepted_segments if seed.side == side][:600]
    for segment in hostile:
        learning.insert(segment, actor_id=1)
    shares = [learning.learn() for _ in range(400)]
    assert min(shares) < 1  # Some transitions were hostile.
    assert np.mean(shares[-100:]) > 0.95
    if learning.trainer is not None:
        assert np.isfinite(flatten_parameters(learning.trainer.online)).all()
    learning.writer.close()


def make_decoders():
    """Returns the stacks and the decoder of each side, for batches of 3."""
    made = {}
    for name, side in SIDES.items():
        schema = side.codec.schema
        stacks = np.zeros((2, 3, schema.stack, *schema.frame_shape), schema.frame_dtype)
        made[name] = stacks, StackDecoder(schema.table, [stacks])
    return made


def test_accepted_batches_are_decoded_as_by_the_python_loop(monkeypatch):
    made = make_decoders()
    monkeypatch.setattr(lz4_blocks, "load_native", lambda: None)
    twins = make_decoders()
    decoded = broken = 0
    for seed, batch in accepted_messages("batch", 8_000, seed=1):
        (stacks, decoder), (twin_stacks, twin) = made[seed.side], twins[seed.side]
        rows = np.arange(len(batch.records))
        good = decoder.decode(batch.records, batch.blob, rows)
        assert good.tolist() == twin.decode(batch.records, batch.blob, rows).tolist()
        np.testing.assert_array_equal(stacks[:, rows[good]], twin_stacks[:, rows[good]])
        decoded, broken = decoded + good.all(), broken + (not good.all())
    assert decoded > 500
    assert broken > 50


def test_accepted_priorities_keep_the_store_valid(tmp_path):
    writer = StoreWriter.create(tmp_path / "store", PIXELS.table, SETTINGS, store_incarnation=77)
    for _, segment in accepted_messages("segment", 200, seed=2):
        if len(segment.blob) % 4:
            writer.insert(segment._replace(stream=Stream(0, 1), number=0, base=0))
            break
    for _, update in accepted_messages("priorities", 10_000, seed=1):
        writer.update_priorities(update)
        weights = writer.weights(np.arange(writer.first_key, writer.num_inserted))
        assert np.isfinite(weights).all()
        assert (weights > 0).all()
    writer.close()


def test_accepted_receipts_keep_the_window_valid():
    receipts = [each for _, message in accepted_messages("receipt", 10_000, seed=1) for each in message.each()]
    assert receipts
    for receipt in receipts:
        window = SendWindow(receipt.stream, 8)
        for _ in range(8):
            window.add([b""], 0.0)
        window.acknowledge(receipt, 0.0)
        assert 0 <= window.in_flight <= 8
        assert len(window.resend(1.0)) == window.in_flight


def test_accepted_heartbeats_can_be_summed_shown_and_kept(tmp_path):
    metrics = MetricsWriter(tmp_path)
    beats = 0
    for index, (_, heartbeat) in enumerate(accepted_messages("control", 20_000, seed=1)):
        if not isinstance(heartbeat, Heartbeat):
            continue
        beats += 1
        state = RunState(FOUR_ACTORS, name="run", folder="/run", exploration=Exploration("epsilon", np.full(4, 0.1)))
        for session in range(2):
            with suppress(ValueError):  # It is of a shard that the run does not have.
                state.update(replace(heartbeat, session=session))
        state.over = index % 2 == 0
        status = summarize(state, metrics.latest)
        assert decode_answer(encode_control(status)) == status
        plain_line(status)
        if beats % 10 == 0:
            render(status, 80, 24, History(), ascii_only=True)
        for row in MetricRows(state).next():
            metrics.accept(row)
    assert beats > 200
    metrics.close()


def test_accepted_evaluations_and_scores_can_be_kept(tmp_path):
    metrics, kept = MetricsWriter(tmp_path), 0
    for _, (result, _) in accepted_messages("evaluation", 10_000, seed=1):
        state = RunState(FOUR_ACTORS, name="run", folder="/run", exploration=Exploration("epsilon", np.full(4, 0.1)))
        state.evaluation, state.best_score = result, result.mean
        assert state.reached_limit() is None
        plain_line(summarize(state, metrics.latest))
        metrics.accept(evaluation_row(5, result, result.mean))
        kept += 1
    config = dataclasses.replace(FOUR_ACTORS, run=RunConfig(folder=str(tmp_path), name="run"))
    coordinator = Coordinator(RunFolder.create(config, VECTORS), epoch=1)
    for _, heartbeat in accepted_messages("control", 10_000, seed=2):
        if isinstance(heartbeat, ActorHeartbeat):
            coordinator.keep_scores(heartbeat.scores)
            coordinator.write_rows()
            kept += 1
    assert kept > 500
    coordinator.close()
    metrics.close()
