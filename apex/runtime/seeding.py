"""Seeds the global generators of Python, NumPy and torch.

Custom environments and networks may use these generators, and some algorithms draw their noise from torch's.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

GLOBAL = 2  # the third sequence of a process's seed; 0 and 1 are those of environments and of exploration


def seed_generators(*key: int) -> None:
    """Seeds the global generators. `key`: integers from 0 on, first the run's seed; processes have different ones."""
    torch.manual_seed(_seed_cpu(key))


@contextmanager
def seeded_generators(*key: int) -> Iterator[None]:
    """Seeds the global generators of the CPU for the duration of the context, and then restores their states."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    torch.default_generator.manual_seed(_seed_cpu(key))
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _seed_cpu(key: tuple[int, ...]) -> int:
    """Seeds the generators of Python and NumPy; returns the seed."""
    seed = int(np.random.SeedSequence(key, spawn_key=(GLOBAL,)).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    return seed
