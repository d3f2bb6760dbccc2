"""What the learner is compared with is measured fairly."""

from __future__ import annotations

import pytest
import torch
from support.builders import VECTORS

from apex.config import Config, LearnerConfig
from apex.runtime.lifecycle import Stop
from bench import learner


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_plain_step_copies_from_locked_memory_to_a_device_that_is_not_this_processor(monkeypatch, device):
    """As PyTorch's `pin_memory` has it. A meta device has shapes alone."""
    locked, from_cpu = [], torch.from_numpy
    copies = []

    class Source:
        def __init__(self, array):
            self.array = array

        def to(self, target, non_blocking):
            copies.append((locked[-1] if locked else None, non_blocking))
            return from_cpu(self.array).to(target)

    monkeypatch.setattr(learner, "choose_device", lambda config: torch.device(device))
    monkeypatch.setattr(learner, "lock_memory", lambda memory: locked.append(memory.nbytes))
    monkeypatch.setattr(torch, "from_numpy", Source)
    config = Config(learner=LearnerConfig(batch_size=8))
    if device == "cpu":
        learner.time_plain(config, VECTORS, 0.01, Stop())
        assert locked == []
        return
    with pytest.raises(RuntimeError, match="autocast"):  # It goes no further than to the network.
        learner.time_plain(config, VECTORS, 0.01, Stop())
    (size,) = locked
    assert size > 2 * 8 * VECTORS.stack * 4
    assert copies == [(size, True)] * 5
