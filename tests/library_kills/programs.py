"""The programs that are killed: a writer that notes what was acknowledged, and a sampler that checks what it draws."""

import signal
import sys
import time
from pathlib import Path
from random import Random

import numpy as np

from apexreplay.client.client import Client
from apexreplay.errors import DataError
from apexreplay.process.child_setup import belong_to

from .tables import append, identify

JOIN_SECONDS = 120.0


def start_program(parent: int) -> list[int]:
    """Makes this process end with its parent; returns a list that SIGTERM fills."""
    belong_to(parent)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: asked.append(signum))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return asked


def write(parent: int, port: int, table: str, writer_id: int, notes: Path) -> None:
    """Appends items, flushes, and adds the number of acknowledged items to `notes`, until SIGTERM."""
    asked, rng, counter = start_program(parent), Random(writer_id), 0
    with (
        notes.open("w", buffering=1) as file,
        Client(port=port) as client,
        client.writer(table, timeout=JOIN_SECONDS) as writer,
    ):
        while not asked:
            for _ in range(rng.choice((1, 5, 20, 60))):
                append(writer, writer_id, counter)
                counter += 1
            writer.flush()
            file.write(f"{counter}\n")
            time.sleep(rng.choice((0.0, 0.02, 0.1)))


def sample(parent: int, port: int, table: str, seed: int, notes: Path) -> None:
    """Draws batches, checks them and sends priorities, until SIGTERM.

    Writes the number of batches to `notes`, and the keys that a queue gave to a file beside it.
    """
    asked, rng, count = start_program(parent), np.random.default_rng(seed), 0
    given = notes.with_suffix(".keys").open("w", buffering=1)
    with given, notes.open("w", buffering=1) as file, Client(port=port) as client:
        shared = bool(seed % 2)
        with client.sampler(table, 32, shared_memory=shared, timeout=JOIN_SECONDS) as sampler:
            assert sampler.reads_memory == (shared and table != "queue")
            while not asked:
                try:
                    batch = sampler.sample(1.0)
                except DataError:  # The queue is empty, or the server is away.
                    continue
                identify(sampler.table, batch.fields)
                sampler.update_priorities(batch, rng.random(32))
                count += 1
                file.write(f"{count}\n")
                if table == "queue":
                    given.write("".join(f"{key}\n" for key in batch.keys))
                time.sleep(0.02)


def run(program, errors: Path, *arguments) -> None:
    """Runs a program in this process, which ends afterwards. Writes an exception to `errors`."""
    try:
        program(*arguments)
    except BaseException as error:
        errors.write_text(f"{program.__name__}{arguments}: {type(error).__name__}: {error}\n")
        sys.exit(1)
