#!/usr/bin/env python3
"""Measures flashbax, in process: a trajectory buffer of single frames, from which windows are drawn, on the CPU."""

import flashbax
import jax
import numpy as np
from replay_peer import BATCH, WINDOW, main


class Flashbax:
    pid = None

    def __init__(self, recording, transitions):
        buffer = flashbax.make_prioritised_trajectory_buffer(
            add_batch_size=1,
            sample_batch_size=BATCH,
            sample_sequence_length=WINDOW,
            period=1,
            min_length_time_axis=WINDOW,
            max_length_time_axis=transitions,
            priority_exponent=0.6,
            device="cpu",
        )
        self._recording, self._key = recording, jax.random.PRNGKey(0)
        step = {name: values[0] for name, values in recording.steps(np.arange(1)).items()}
        self._state = buffer.init(step)
        self._add = jax.jit(buffer.add, donate_argnums=0)
        self._sample = jax.jit(buffer.sample)
        self._update = jax.jit(buffer.set_priorities, donate_argnums=0)

    def insert(self, rows):
        steps = {name: values[np.newaxis] for name, values in self._recording.steps(rows).items()}
        self._state = self._add(self._state, steps)

    def flush(self):
        jax.block_until_ready(self._state)

    def draw(self, priorities):
        self._key, key = jax.random.split(self._key)
        batch = jax.block_until_ready(self._sample(self._state, key))
        self._state = self._update(self._state, batch.indices, priorities)
        return np.asarray(batch.experience["frame"]), np.asarray(batch.experience["action"])[:, -1]


if __name__ == "__main__":
    main(Flashbax)
