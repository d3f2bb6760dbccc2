"""`python -m bench learner`: the plain step, with which the learner is compared, copies from locked memory."""

import pytest
import torch
from support.builders import VECTORS

from apex.config import Config, LearnerConfig
from apex.runtime.lifecycle import Stop
from bench import learner


def test_the_plain_step_copies_from_locked_memory_to_a_device(monkeypatch):
    """The plain step is comparable to PyTorch with `pin_memory`. The meta device replaces a GPU."""
    locked, from_cpu = [], torch.from_numpy
    copies = []

    class Source:
        def __init__(self, array):
            self.array = array

        def to(self, target, non_blocking):
            copies.append((locked[-1] if locked else None, non_blocking))
            return from_cpu(self.array).to(target)

    monkeypatch.setattr(learner, "choose_device", lambda config: torch.device("meta"))
    monkeypatch.setattr(learner, "lock_memory", lambda memory: locked.append(memory.nbytes))
    monkeypatch.setattr(torch, "from_numpy", Source)
    config = Config(learner=LearnerConfig(batch_size=8))
    with pytest.raises(RuntimeError, match="autocast"):  # The network fails on the meta device.
        learner.time_plain(config, VECTORS, 0.01, Stop())
    (size,) = locked
    assert size > 2 * 8 * VECTORS.stack * 4
    assert copies == [(size, True)] * 5
