"""Measures the replay buffer of another project with its own interpreter, for `python -m bench replay --peer`.

SCRIPT FRAMES.npy TRANSITIONS SECONDS

A step is a frame with an action, an n-step return and a discount, and is stored once. An item is a window of seven
steps: the two stacks of four of a 3-step transition. Steps are inserted 50 at a time; episodes never end. Batches of
512 windows are drawn by priority, arrive as arrays, and get new priorities. Prints one JSON object; compare only
figures of one run.
"""

import json
import statistics
import sys
import time

import numpy as np

BATCH, WINDOW, SEGMENT, PIECES = 512, 7, 50, 5


class Recording:
    """The frames of recorded games, repeated without end. Row r is the step with frame r modulo their number."""

    def __init__(self, frames):
        self._frames = frames

    def frames(self, rows):
        """Returns uint8[len(rows), 84, 84]."""
        return self._frames[rows % len(self._frames)]

    def steps(self, rows):
        """Returns the fields of the steps. The action is the row, so that drawn windows can be checked."""
        ones = np.ones(len(rows), np.float32)
        return {"frame": self.frames(rows), "action": rows.astype(np.int32), "n_step_return": ones, "discount": ones}


def main(make):
    """Measures `make(recording, transitions)`, which returns an object with these members:

    insert(rows): stores the steps of these rows. flush(): waits until all are stored.
    draw(priorities): draws a batch and returns its priorities; returns the frames, [512, 7, 84, 84], and the row of the
    last step of each window.
    pid: the process that stores the steps, None for this one.
    """
    recording, transitions, seconds = Recording(np.load(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3])
    before = read_memory("self")
    peer = make(recording, transitions)
    if peer.pid is not None:
        before = read_memory(peer.pid)
    inserts = [_insert(peer, piece, transitions // PIECES) for piece in range(PIECES)]
    grown = read_memory(peer.pid or "self") - before
    priorities = np.random.default_rng(1).random(BATCH, np.float32) + np.float32(0.01)
    _check(recording, *peer.draw(priorities))
    batches = [_draw(peer, priorities, seconds / PIECES) for _ in range(PIECES)]
    figures = {
        "inserts_per_s": statistics.median(inserts),
        "batches_per_s": statistics.median(batches),
        "bytes_per_transition": grown / transitions,
    }
    print(json.dumps(figures))


def read_memory(pid):
    """Returns the bytes of a process's own and shared memory, without files that it maps."""
    with open(f"/proc/{pid}/status") as status:
        sizes = dict(line.split(":", 1) for line in status)
    return 1024 * sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def _insert(peer, piece, count):
    first, end, began = piece * count, (piece + 1) * count, time.monotonic()
    if not piece:  # The first call compiles.
        peer.insert(np.arange(SEGMENT))
        peer.flush()
        first, began = SEGMENT, time.monotonic()
    for row in range(first, end, SEGMENT):
        peer.insert(np.arange(row, min(row + SEGMENT, end)))
    peer.flush()
    return (end - first) / (time.monotonic() - began)


def _draw(peer, priorities, seconds):
    began, count = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < seconds or not count:
        peer.draw(priorities)
        count += 1
    return count / elapsed


def _check(recording, frames, last):
    """Raises ValueError if the windows differ from what was inserted."""
    rows = np.asarray(last, np.int64)[:, np.newaxis] + np.arange(1 - WINDOW, 1)
    wrong = (np.asarray(frames) != recording.frames(rows)).any(axis=(1, 2, 3))
    if len(frames) != BATCH or wrong.any() or len(set(last.tolist())) < BATCH // 4:
        raise ValueError(f"{wrong.sum()} of {len(frames)} windows are wrong, {len(set(last.tolist()))} differ")
