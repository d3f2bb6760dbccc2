#!/usr/bin/env python3
"""Measures TorchRL, in process: a storage of single frames, from which slices are drawn."""

import numpy as np
import torch
from replay_peer import BATCH, WINDOW, main
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler


class TorchRL:
    pid = None

    def __init__(self, recording, transitions):
        self._buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(transitions),
            sampler=PrioritizedSampler(transitions, alpha=0.6, beta=0.4),
            batch_size=BATCH,
        )
        self._recording, self._transitions = recording, transitions

    def insert(self, rows):
        self._buffer.extend(TensorDict(self._recording.steps(rows), batch_size=len(rows)))

    def flush(self):
        pass

    def draw(self, priorities):
        pass


if __name__ == "__main__":
    main(TorchRL)
