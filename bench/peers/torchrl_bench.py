#!/usr/bin/env python3
"""Measures TorchRL, in process: a storage of single frames, from which slices are drawn."""

import torch
from replay_peer import BATCH, WINDOW, main
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSliceSampler, TensorDictReplayBuffer


class TorchRL:
    pid = None

    def __init__(self, recording, transitions):
        torch.set_num_threads(1)  # With two, small operations wait for each other.
        # The ends of episodes are not looked for again before the next insert, which would take longer than a draw.
        options = {"slice_len": WINDOW, "end_key": "end", "cache_values": True}
        self._sampler = PrioritizedSliceSampler(transitions, alpha=0.6, beta=0.4, **options)
        storage = LazyTensorStorage(transitions)
        self._buffer = TensorDictReplayBuffer(storage=storage, sampler=self._sampler, batch_size=BATCH * WINDOW)
        self._recording = recording

    def insert(self, rows):
        steps = {name: torch.from_numpy(values) for name, values in self._recording.steps(rows).items()}
        steps["end"] = torch.zeros(len(rows), 1, dtype=torch.bool)
        self._buffer.extend(TensorDict(steps, batch_size=len(rows)))

    def flush(self):
        pass

    def draw(self, priorities):
        batch = self._buffer.sample().view(BATCH, WINDOW)
        self._sampler.update_priority(batch["index"][:, 0], torch.from_numpy(priorities), storage=self._buffer.storage)
        return batch["frame"].numpy(), batch["action"][:, -1].numpy()


if __name__ == "__main__":
    main(TorchRL)
