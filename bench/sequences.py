"""`python -m bench sequences`: measures sequences of steps beside single steps, in a server of tables."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apexreplay.client.client import Client
from apexreplay.item_kinds import Sequence as StepSequence
from apexreplay.server.table_settings import TableSettings
from apexreplay.serving import serve
from apexreplay.tables import table
from bench.harness.command import Figures, make_parser, run_bench

LENGTH, PERIOD, BATCH = 80, 40, 16  # as R2D2 has them: sequences of 80 steps, of which 40 overlap
NUM_STEPS, EPISODE = 40_000, 1_000
STEPS = {"image": ("uint8", (84, 84)), "action": "int64", "reward": "float32"}
LIMITS: dict[str, Any] = {"capacity": 100_000, "max_bytes": 400_000_000}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns the exit status."""
    parser = make_parser("sequences", f"Measures sequences of {LENGTH} steps that overlap by {LENGTH - PERIOD}.")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of each kind of draws; default 10")
    arguments = parser.parse_args(argv)
    return run_bench(lambda folder, stop: measure(arguments.seconds), show, as_json=arguments.json)


def measure(seconds: float) -> Figures:
    """Returns the bytes of a step in both tables, and the decoded MB/s of both, by memory and by messages."""
    steps, sequences = table("steps", STEPS), table("sequences", STEPS, item=StepSequence(LENGTH, PERIOD))
    figures: Figures = {}
    with (
        serve([TableSettings(table=each, **LIMITS) for each in (steps, sequences)]) as server,
        server.client() as client,
    ):
        for name in ("steps", "sequences"):
            with client.writer(name) as writer:
                for number, image in enumerate(make_images()):
                    writer.append({"image": image, "action": number % 4, "reward": 0.0})
                    if number % EPISODE == EPISODE - 1:
                        writer.end_episode()
            time.sleep(1.5)  # The status is about a second old.
            replay = client.status().tables[name].replay
            figures[f"{name}_bytes_per_step"] = replay.bytes / NUM_STEPS if replay else 0.0
        for way, shared in (("memory", True), ("tcp", False)):
            rates: dict[str, list[float]] = {"steps": [], "sequences": []}
            for _ in range(4):  # By turns.
                for name, size in (("steps", LENGTH * BATCH), ("sequences", BATCH)):
                    rates[name].append(draw(client, name, size, seconds / 4, shared=shared))
            for name, found in rates.items():
                figures[f"{name}_{way}_mb_per_s"] = float(np.median(found))
    return figures


def make_images() -> Iterator[NDArray[np.uint8]]:
    """Yields images of a still picture in which a few things move: about 2 kB each with LZ4."""
    rng = np.random.default_rng(1)
    picture = np.repeat(rng.integers(0, 255, (84, 6), np.uint8), 14, axis=1)
    for number in range(NUM_STEPS):
        image = picture.copy()
        for thing in range(4):
            row, column = (number * (thing + 1)) % 76, (number * (thing + 2) * 3) % 76
            image[row : row + 8, column : column + 8] = rng.integers(0, 255, (8, 8), np.uint8)
        yield image


def draw(client: Client, name: str, batch_size: int, seconds: float, *, shared: bool) -> float:
    """Returns the decoded MB/s of images, without the zeros after the end of an episode."""
    with client.sampler(name, batch_size, shared_memory=shared, prefetch=4) as sampler:
        sampler.sample()
        begin, num_steps = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            num_steps += int(sampler.sample().lengths.sum())
        return num_steps * 84 * 84 / 1e6 / (time.perf_counter() - begin)


def show(figures: Figures) -> None:
    """Prints the figures."""
    steps, sequences = figures["steps_bytes_per_step"], figures["sequences_bytes_per_step"]
    print(f"bytes of a step: {steps:.0f} as an item, {sequences:.0f} in sequences ({sequences / steps:.3f} times)")
    for way in ("memory", "tcp"):
        steps, sequences = figures[f"steps_{way}_mb_per_s"], figures[f"sequences_{way}_mb_per_s"]
        print(f"{way}: {steps:.0f} MB/s of single steps, {sequences:.0f} of sequences ({sequences / steps:.2f} times)")


if __name__ == "__main__":
    sys.exit(main())
