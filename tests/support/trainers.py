"""Trainers whose batches, priorities and parameters are recorded."""

import time

import numpy as np
import torch

from apex.algorithms.interface import make_algorithm
from apex.config import Config, LearnerConfig, NetworkConfig
from apex.learning.batch_ring import Batch, BatchPart
from apex.learning.trainer import Trainer
from apex.schema import Schema

SCHEMA = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=3, n_step=3, codec="raw")
NETWORK = NetworkConfig(hidden=8, body_hidden=8)
B = 16


def make_batch(number, seed=0):
    rng = np.random.default_rng([seed, number])
    return Batch(
        stacks=rng.normal(size=(2, B, 1, 4)).astype(np.float32),
        keys=np.arange(B) + 100 * number,
        probability=rng.uniform(0.01, 0.1, B),
        action=rng.integers(0, 3, B),
        n_step_return=rng.normal(size=B).astype(np.float32),
        discount=np.where(rng.random(B) < 0.2, 0, 0.97).astype(np.float32),
        version=np.full(B, 2),
        num_transitions=1000,
        parts=[BatchPart(0, 5, 1, number)],
        slot=number % 3,
    )


class Tape:
    """Batches, priorities and publications in one object."""

    def __init__(self, *batches):
        self.batches = list(batches)
        self.events = []
        self.updates = []
        self.published = []
        self.memory = np.zeros(0, np.uint8)

    def receive(self, timeout):
        return self.batches.pop(0) if self.batches else None

    def release(self, slot):
        self.events.append(f"release {slot}")

    def send(self, update):
        self.events.append(f"priorities {update.number}")
        self.updates.append(update)

    def publish(self, parameters):
        self.events.append(f"publish {parameters.version}")
        self.published.append(parameters)


def make_trainer(tape, *, clock=time.monotonic, algorithm="", **settings):
    config = LearnerConfig(
        **{"batch_size": B, "optimizer": "adam", "learning_rate": 1e-2, "publish_seconds": 0.0, **settings}
    )
    return Trainer(
        config,
        make_algorithm(Config(algorithm=algorithm, learner=config, network=NETWORK), SCHEMA),
        device=torch.device("cpu"),
        batches=tape,
        priorities=tape,
        publish=tape.publish,
        clock=clock,
    )
