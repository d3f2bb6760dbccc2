"""The real roles in one process, over memory instead of sockets: seeded, deterministic, and they learn.

Every message still goes through the wire's encoding and back.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from apex.actor_worker import Actor
from apex.config import ActorConfig, Config, EnvironmentConfig, LearnerConfig, NetworkConfig, ReplayConfig
from apex.environment import describe, make_environment
from apex.experience_link import ExperienceLink
from apex.loader import Loader
from apex.networks import flatten_parameters, make_network
from apex.parameter_board import ParameterBoard
from apex.rate_limiter import RateLimiter
from apex.replay_server import ReplayServer
from apex.sample_ring import SampleRing
from apex.sampler import Sampler, SamplerBoard
from apex.segments import SegmentBuilder
from apex.store_reader import StoreReader
from apex.store_writer import StoreWriter
from apex.trainer import Trainer
from apex.types import Stream
from apex.wire import Codec

RUN = 99
NUM_UPDATES = 2_500
CARTPOLE = Config(
    seed=3,
    environment=EnvironmentConfig(id="CartPole-v1", clip_rewards=False),
    actor=ActorConfig(num_actors=4, envs_per_process=4, segment_length=10, parameters_period=5),
    replay=ReplayConfig(
        capacity=2_000, max_bytes=200_000, min_size_to_sample=200, samples_per_insert=8, inserts_wait=True
    ),
    learner=LearnerConfig(
        batch_size=32,
        optimizer="adam",
        learning_rate=1e-3,
        target_period=50,
        publish_period=5,
        publish_seconds=0.0,  # A clock would make runs differ.
        loss="huber",
    ),
    network=NetworkConfig(hidden=32, body_hidden=32),
)


class OneProcess:
    """All roles, stepped in turn."""

    def __init__(self, config, path):
        schema = describe(config.environment, config.actor.n_step)
        codec = Codec(RUN, schema)
        self.store = StoreWriter.create(
            path,
            schema,
            capacity=config.replay.capacity,
            max_bytes=config.replay.max_bytes,
            num_streams=config.actor.num_actors,
            priority_exponent=config.replay.priority_exponent,
            min_priority=config.replay.min_priority,
            store_incarnation=1,
        )
        limiter = RateLimiter(
            config.replay.min_size_to_sample, config.replay.samples_per_insert, 0.1, config.replay.inserts_wait
        )
        samplers = SamplerBoard(1)
        self.server = ReplayServer(self.store, codec, samplers, limiter, clock=lambda: 0.0)
        self.batches = []
        self.receipts = []
        self.segments = []
        self.codec = codec
        self.schema = schema
        self.batch_size = config.learner.batch_size
        self.sampler = Sampler(
            0,
            StoreReader(path, schema),
            self,
            samplers,
            limiter,
            batch_size=config.learner.batch_size,
            batches_in_flight=2,
            rng=np.random.default_rng(config.seed),
            clock=lambda: 0.0,
        )
        self.ring = SampleRing(schema, config.learner.batch_size)
        self.loader = Loader(schema, self.ring)
        board = ParameterBoard(sum(p.numel() for p in make_network(config.network, schema, seed=0).parameters()))
        self.trainer = Trainer(
            config.learner,
            make_network(config.network, schema, seed=config.seed),
            make_network(config.network, schema, seed=config.seed),
            device=torch.device("cpu"),
            samples=self.ring,
            priorities=Priorities(self),
            publish=board.publish,
        )
        streams = [Stream(i, 1) for i in range(config.actor.num_actors)]
        self.environment = make_environment(config.environment, len(streams), seed=config.seed)
        self.actor = Actor(
            config,
            self.environment,
            make_network(config.network, schema, seed=config.seed),
            streams,
            builder=SegmentBuilder(
                schema,
                num_streams=len(streams),
                gamma=config.actor.gamma,
                segment_length=config.actor.segment_length,
                clip_rewards=config.environment.clip_rewards,
                life_loss_terminates=config.environment.life_loss_terminates,
            ),
            link=ExperienceLink(streams, codec, [Outlet(self)], Receipts(self), window=4, clock=lambda: 0.0),
            parameters=board,
            num_actors=len(streams),
            rng=np.random.default_rng(config.seed),
        )
        self.scores = []

    def place(self, shard):
        return None

    def send(self, batch, timeout):
        """The sampler's end of sampling."""
        self.batches.append([bytes(frame) for frame in self.codec.encode_batch(batch)])
        return True

    def run(self, num_updates):
        """Steps the roles in turn until the learner has made so many updates."""
        self.trainer.begin()
        self.actor.begin()
        while self.trainer.num_updates < num_updates:
            if self.server.check_limiter():
                self.actor.step(0.0)
                taken, self.segments = self.segments, []
                self.receipts += self.server.insert(taken)
            self.sampler.step(0.0)
            if self.batches and self.loader.ready(0.0):
                self.loader.send(codec_back(self, self.batches.pop(0)), 0.0)
            self.trainer.step(0.0)
            self.scores += [v for tag, v in self.actor.scores.take().items() if tag == "actors/mean_score"]
        self.environment.close()
        self.store.close()

    def hash(self):
        """Everything that the run has made."""
        digest = hashlib.sha256(flatten_parameters(self.trainer.online).tobytes())
        digest.update(str((self.store.num_inserted, self.actor.num_steps, self.scores)).encode())
        return digest.hexdigest()


class Outlet:
    def __init__(self, system):
        self.system = system

    def send(self, message):
        self.system.segments.append(message)
        return True


class Receipts:
    def __init__(self, system):
        self.system = system

    def receive(self, timeout=0.0):
        receipts, self.system.receipts = self.system.receipts, []
        return [self.system.codec.decode_receipt(self.system.codec.encode_receipt(receipt)) for receipt in receipts]


def codec_back(system, frames):
    return system.codec.decode_batch(frames, system.batch_size)


class Priorities:
    def __init__(self, system):
        self.system = system

    def send(self, update):
        self.system.server.update_priorities([self.system.codec.encode_priorities(update)])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(path: Path, config=CARTPOLE, num_updates=100):
    system = OneProcess(config, path)
    system.run(num_updates)
    return system


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that is long enough to have learned."""
    return run(tmp_path_factory.mktemp("trained") / "store", num_updates=NUM_UPDATES)


def test_the_same_seed_gives_the_same_run_and_another_one_another(tmp_path):
    first, second = run(tmp_path / "a"), run(tmp_path / "b")
    assert first.scores
    assert first.hash() == second.hash()
    assert run(tmp_path / "c", dataclasses.replace(CARTPOLE, seed=4)).hash() != first.hash()


@pytest.mark.timeout(240)  # With the run that it shares.
def test_keeps_the_replay_ratio_and_stores_what_was_acted(trained):
    system = trained
    status = system.server.status()
    assert status["refused"] == 0
    assert status["duplicate_segments"] == 0
    drawn = NUM_UPDATES * 32
    # Either side may run ahead by the tolerance, 0.1 * 8 * 200, and by what is on its way: 2 + 3 batches, 4 * 10 steps.
    assert abs(drawn - 8 * (system.store.num_inserted - 200)) <= 0.1 * 8 * 200 + 5 * 32 + 8 * 40
    # What was acted is stored, but for the steps since the last cut and the open windows.
    assert 0 <= 4 * system.actor.num_steps - system.store.num_inserted <= 4 * (10 + 2)


def test_learns(trained):
    """A random policy scores 22; the newest games of all four actors, epsilon 0.4 among them, are far above it."""
    assert np.mean(trained.scores[-50:]) > 60
