"""States of a learner, their comparison, and damage to their files."""

import numpy as np
import torch

from apex.config import Config, NetworkConfig
from apex.dqn.networks import make_network
from apex.runs.checkpoints.checkpoint import LearnerState
from apex.schema import Schema
from apex.types import Progress

SCHEMA = Schema(frame_shape=(3,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
NETWORK = NetworkConfig(hidden=4, body_hidden=4)


def make_state(num_updates=7, *, online=None, optimizer=None, **changes):
    online = online or make_network(NETWORK, SCHEMA, seed=num_updates)
    state = LearnerState(
        num_updates=num_updates,
        progress=Progress(100 * num_updates, 3, 4.5),
        config=Config(seed=5, network=NETWORK),
        schema=SCHEMA,
        online=online.state_dict(),
        target=make_network(NETWORK, SCHEMA, seed=99).state_dict(),
        optimizer=(optimizer or torch.optim.SGD(online.parameters(), lr=0.1)).state_dict(),
        rng={"numpy": np.random.default_rng(3).bit_generator.state, "torch": torch.get_rng_state()},
    )
    return state._replace(**changes)


def same(a, b):
    """Asserts equal types, order of keys, dtypes and bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
