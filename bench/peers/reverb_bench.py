#!/usr/bin/env python3
"""Measures DeepMind Reverb: a server process on this host, whose items share frames; a client writes and reads."""

import multiprocessing
from functools import cached_property

import numpy as np
import reverb
import tensorflow
from replay_peer import BATCH, WINDOW, main

TABLE = "windows"


def serve(transitions, pipe):
    sampler, remover = reverb.selectors.Prioritized(0.6), reverb.selectors.Fifo()
    table = reverb.Table(TABLE, sampler, remover, transitions, rate_limiter=reverb.rate_limiters.MinSize(1))
    server = reverb.Server([table])
    pipe.send(server.port)
    server.wait()


class Reverb:
    def __init__(self, recording, transitions):
        spawned = multiprocessing.get_context("spawn")
        pipe, end = spawned.Pipe()
        self._server = spawned.Process(target=serve, args=(transitions, end), daemon=True)
        self._server.start()
        self.pid, self._address = self._server.pid, f"localhost:{pipe.recv()}"
        self._client = reverb.Client(self._address)
        self._writer = self._client.trajectory_writer(num_keep_alive_refs=WINDOW)
        self._recording, self._rng = recording, np.random.default_rng(0)
        self._example = {name: values[0] for name, values in recording.steps(np.arange(1)).items()}
        for name in self._example:  # Chunks of the default length take more memory, and are drawn more slowly.
            self._writer.configure((name,), num_keep_alive_refs=WINDOW, max_chunk_length=WINDOW)

    def insert(self, rows):
        steps = self._recording.steps(rows)
        for place, row in enumerate(rows):
            self._writer.append({name: values[place] for name, values in steps.items()})
            if row >= WINDOW - 1:
                history = self._writer.history
                item = {name: history[name][-1] for name in steps} | {"frame": history["frame"][-WINDOW:]}
                self._writer.create_item(TABLE, float(self._rng.random()) + 0.01, item)
        self._writer.flush(block_until_num_items=20)

    def flush(self):
        self._writer.flush()

    def draw(self, priorities):
        batch = next(self._batches)
        self._client.mutate_priorities(TABLE, dict(zip(batch.info.key.tolist(), priorities.tolist(), strict=True)))
        return batch.data["frame"], batch.data["action"]

    @cached_property
    def _batches(self):
        types = {name: tensorflow.as_dtype(value.dtype) for name, value in self._example.items()}
        shapes = {name: tensorflow.TensorShape(value.shape) for name, value in self._example.items()}
        shapes["frame"] = tensorflow.TensorShape((WINDOW, 84, 84))
        options = {"max_in_flight_samples_per_worker": 1024, "num_workers_per_iterator": 2}
        dataset = reverb.TrajectoryDataset(self._address, TABLE, types, shapes, **options)
        return dataset.batch(BATCH).prefetch(2).as_numpy_iterator()


if __name__ == "__main__":
    main(Reverb)
