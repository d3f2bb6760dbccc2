#!/usr/bin/env python3
"""Measures DeepMind Reverb with the work of our replay server, for the comparison in `python -m bench replay`.

One Reverb server process (prioritized table, FIFO removal), one writer and one reader run on localhost and do the same
work as our replay server: items are n-step transitions (7 distinct 84x84 uint8 frames, action, rewards), items share
frames, batches of 512 arrive in the reader as arrays, and 512 priorities are returned.

python3.11 -m venv .peer && .peer/bin/pip install "dm-reverb[tensorflow]==0.14.0"      # 0.7 GB, apart from the project
python3 make_frames.py seaquest frames.npy                                         # in an environment with ale-py
.peer/bin/python reverb_bench.py frames.npy

Prints one line for each figure: name, value, unit. Compare only ratios of one session on one machine.
"""

import multiprocessing
import os
import sys
import time

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
BATCH, FRAMES, NUM_ITEMS, NUM_BATCHES = 512, 7, 20_000, 20


def serve(port, ready):
    import reverb

    table = reverb.Table(
        "per",
        reverb.selectors.Prioritized(0.6),
        reverb.selectors.Fifo(),
        max_size=200_000,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server([table], port=port)
    ready.set()
    server.wait()


def write(port, frames, result):
    import reverb

    rng = np.random.default_rng(0)
    start, num_items = time.perf_counter(), 0
    with reverb.Client(f"localhost:{port}").trajectory_writer(num_keep_alive_refs=16) as writer:
        for i in range(NUM_ITEMS + FRAMES):
            writer.append({"frame": frames[i % len(frames)], "action": np.int32(1), "reward": np.float32(0)})
            if i >= FRAMES:
                history = writer.history
                writer.create_item(
                    "per",
                    priority=float(rng.random()) + 0.01,
                    trajectory={
                        "frame": history["frame"][-FRAMES:],
                        "action": history["action"][-4],
                        "reward": history["reward"][-4:-1],
                    },
                )
                num_items += 1
            if i % 100 == 0:
                writer.flush(block_until_num_items=20)
        writer.flush()
    result.put(num_items / (time.perf_counter() - start))


def main():
    frames = np.load(sys.argv[1])
    multiprocessing.set_start_method("spawn")
    ready, result = multiprocessing.Event(), multiprocessing.Queue()
    port = 16000 + os.getpid() % 1000
    server = multiprocessing.Process(target=serve, args=(port, ready), daemon=True)
    server.start()
    ready.wait()
    writer = multiprocessing.Process(target=write, args=(port, frames, result))
    writer.start()
    inserts = result.get()
    writer.join()

    import reverb
    import tensorflow as tf

    dtypes = {"frame": tf.uint8, "action": tf.int32, "reward": tf.float32}
    shapes = {"frame": tf.TensorShape([FRAMES, 84, 84]), "action": tf.TensorShape([]), "reward": tf.TensorShape([3])}
    dataset = reverb.TrajectoryDataset(
        f"localhost:{port}", "per", dtypes, shapes, max_in_flight_samples_per_worker=1024, num_workers_per_iterator=2
    )
    batches = iter(dataset.batch(BATCH).prefetch(2))
    batch = next(batches)
    start = time.perf_counter()
    for _ in range(NUM_BATCHES):
        batch = next(batches)
    samples = NUM_BATCHES / (time.perf_counter() - start)

    client, keys = reverb.Client(f"localhost:{port}"), batch.info.key.numpy()
    start = time.perf_counter()
    for _ in range(50):
        client.mutate_priorities("per", {int(key): 1.0 for key in keys})
    update = (time.perf_counter() - start) / 50

    print(f"reverb_insert {inserts:.0f} transitions/s")
    print(f"reverb_sample {samples:.1f} batches_of_{BATCH}/s")
    print(f"reverb_update {update * 1e3:.2f} ms_per_{BATCH}")
    server.terminate()


if __name__ == "__main__":
    main()
