#!/usr/bin/env python3
"""Measures cpprb, in process: `stack_compress` stores each frame once, and gives windows as one array."""

import numpy as np
from cpprb import PrioritizedReplayBuffer
from replay_peer import BATCH, WINDOW, main


class Cpprb:
    pid = None

    def __init__(self, recording, transitions):
        fields = {"window": {"shape": (84, 84, WINDOW), "dtype": np.uint8}, "action": {"dtype": np.int32}}
        fields |= {name: {"dtype": np.float32} for name in ("n_step_return", "discount")}
        self._buffer = PrioritizedReplayBuffer(transitions, fields, alpha=0.6, stack_compress="window")
        self._recording, self._rng = recording, np.random.default_rng(0)

    def insert(self, rows):
        steps = self._recording.steps(rows)
        frames = self._recording.frames(np.arange(rows[0] - WINDOW + 1, rows[-1] + 1))
        del steps["frame"]
        windows = np.lib.stride_tricks.sliding_window_view(frames, WINDOW, axis=0)
        self._buffer.add(window=windows, priorities=self._rng.random(len(rows)) + 0.01, **steps)

    def flush(self):
        pass

    def draw(self, priorities):
        batch = self._buffer.sample(BATCH, beta=0.4)
        self._buffer.update_priorities(batch["indexes"], priorities)
        return np.moveaxis(batch["window"], -1, 1), batch["action"][:, 0]


if __name__ == "__main__":
    main(Cpprb)
