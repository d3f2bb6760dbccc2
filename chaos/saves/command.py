"""`python -m chaos saves`: kills a run while it saves, and damages its saves; a good save must be found each time.

A child saves the whole state of a run repeatedly, and is killed at a random moment or directly before a step. Then
single bits of the newest save are flipped, and files are truncated and deleted. Each damage must be detected, reported
with the file, and an older save used.
"""

import json
import logging
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apex.config.arguments import Parser, non_negative_int
from apex.learning.run_save import snapshot_folder
from apex.runs.checkpoints.paths import BEST, MANIFEST, NEWEST
from apex.runs.folder import RunFolder
from apexreplay.errors import FAILED, FINISHED, UsageError
from apexreplay.item_kinds import Array
from apexreplay.process.children import start_child
from apexreplay.process.lifecycle import Stop, reports_errors
from apexreplay.store.location import memory_folder
from chaos.saves.saver import Read, Saver, make_run, make_segment, read_run

STEP_NAMES = (  # the steps of a save
    "write a file",
    "rename a file",
    "write the manifest",
    "rename the manifest",
    "flush the folder",
    "remove a file",
    "copy",
    "copy weights",
)
CLOCK = "elapsed.json"  # has no digest: a wrong clock does not affect training
COMPLETED, KEY, EPOCH = range(3)  # completed for certain by the child: update, end of the snapshot, its start

LOGGERS = [logging.getLogger(name) for name in ("apex", "apexreplay")]


# --- kills ------------------------------------------------------------------------------------------------------------


class Tally:
    """Results of one kind of trial."""

    def __init__(self) -> None:
        self.count = self.detected = self.fallen_back = self.unreadable = self.wrong = 0
        self.examples: list[str] = []

    def note(self, sentence: str) -> None:
        """Records the first errors."""
        if len(self.examples) < 5:
            self.examples.append(sentence)

    def to_dict(self) -> dict[str, Any]:
        """Returns the results as JSON values."""
        return dict(vars(self))


def kill_saves(place: Path, count: int, seed: int, report: Callable[[str], None]) -> Tally:
    """Kills a saving child `count` times. Each time the run must load, at most one save behind the completed ones."""
    rng, tally = np.random.default_rng(seed), Tally()
    folder, memory = make_run(place), place / "memory"
    first = Saver(folder, memory)
    first.save()
    began = time.monotonic()
    first.save()
    save_seconds = time.monotonic() - began
    progress = np.frombuffer(mmap.mmap(-1, 24), np.int64)
    progress[:] = first.num_updates, first.store.num_inserted, first.epoch
    first.store.close()
    for trial in range(count):
        step, nth = ("", 0) if trial % 2 else (STEP_NAMES[trial // 2 % len(STEP_NAMES)], int(rng.integers(0, 4)))
        before = progress[EPOCH]
        child = start_child("saver", _save_until_killed, folder.path, memory, step, nth, progress)
        if not step:
            # The child saves after its epoch has begun; one in eight is killed while it still loads.
            while trial % 16 != 1 and progress[EPOCH] == before and child.exitcode is None:
                time.sleep(0.001)
            time.sleep(float(rng.uniform(0, 3 * save_seconds)))
            with suppress(ProcessLookupError):
                os.kill(child.pid or 0, signal.SIGKILL)
        child.join(60)
        if trial % 8 == 7:
            memory.unlink(missing_ok=True)  # Remove the memory, as if the host had restarted.
        tally.count += 1
        try:
            read = read_run(folder.path)
        except UsageError as error:
            tally.unreadable += 1
            tally.note(f"trial {trial}, {step or 'at a random moment'}: {error}")
            continue
        behind = read.num_updates < progress[COMPLETED] or read.end_key < progress[KEY]
        if behind or child.exitcode != -signal.SIGKILL:
            tally.wrong += 1
            tally.note(f"trial {trial}, {step or 'at a random moment'}: {read}, but {progress.tolist()} were completed")
        if trial % 100 == 99:
            report(f"{trial + 1} kills")
    return tally


class KillAt:
    """Kills this process before the step with this name, the `nth` time that it comes, from 0."""

    def __init__(self, step: str, nth: int) -> None:
        self._step = step
        self._left = nth

    def __call__(self, step: str) -> None:
        """Counts the step, or kills the process."""
        if step == self._step:
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _save_until_killed(stop: Stop, path: Path, memory: Path, step: str, nth: int, progress: Array) -> None:
    logging.disable()
    torch.set_num_threads(1)
    saver = Saver(RunFolder.open(path), memory, KillAt(step, nth))
    assert saver.epoch > progress[EPOCH], "an epoch was given twice"
    progress[EPOCH] = saver.epoch
    while not stop.poll():
        saver.save()
        progress[COMPLETED], progress[KEY] = saver.num_updates, saver.store.num_inserted


# --- damage -----------------------------------------------------------------------------------------------------------


def damage_saves(
    place: Path, flips: int, truncations: int, seed: int, report: Callable[[str], None]
) -> dict[str, Tally]:
    """Flips bits of a run's newest save, truncates and deletes its files, one at a time."""
    rng, known = np.random.default_rng(seed), set[Read]()
    folder, memory = make_run(place), place / "memory"
    saver = Saver(folder, memory)
    for number in range(20):
        saver.store.insert(make_segment(number + 10_000))
    for _ in range(4):
        saver.save()
        known.add(read_run(folder.path))
    saver.store.close()
    memory.unlink()
    content = {path: path.read_bytes() for path in _newest_files(folder)}
    tallies = {"flips": Tally(), "truncations": Tally(), "removals": Tally()}
    paths, sizes = list(content), np.array([len(data) for data in content.values()])
    for trial in range(flips):
        path = paths[int(rng.choice(len(paths), p=sizes / sizes.sum()))]
        data = bytearray(content[path])
        bit = int(rng.integers(0, 8 * len(data)))
        data[bit // 8] ^= 1 << bit % 8
        _try(folder, path, partial(path.write_bytes, data), content, known, tallies["flips"])
        if trial % 1_000 == 999:
            report(f"{trial + 1} flips")
    for _ in range(truncations):
        path = paths[int(rng.integers(0, len(paths)))]
        data = bytearray(content[path][: int(rng.integers(0, len(content[path])))])
        _try(folder, path, partial(path.write_bytes, data), content, known, tallies["truncations"])
    for path in paths:
        _try(folder, path, path.unlink, content, known, tallies["removals"])
    return tallies


def _newest_files(folder: RunFolder) -> list[Path]:
    """Returns all files of the newest save, and the files of the run that a resume reads."""
    newest = max(path for path in folder.checkpoints.iterdir() if path.name.isdigit())
    snapshots = snapshot_folder(folder.checkpoints, 1, 0)
    snapshot = snapshots.newest()
    assert snapshot is not None
    names = [f"{snapshot.number:09d}.json", snapshot.state.name, *(file.name for file in snapshot.segments)]
    return [
        *newest.iterdir(),
        folder.checkpoints / NEWEST,
        folder.checkpoints / BEST,
        *(snapshots.path / name for name in names),
        # An empty file is only a mark.
        *(path for path in folder.path.iterdir() if path.is_file() and path.stat().st_size and path.name != CLOCK),
    ]


def _try(
    folder: RunFolder,
    path: Path,
    damage: Callable[[], object],
    content: dict[Path, bytes],
    known: set[Read],
    tally: Tally,
) -> None:
    """Damages a file, reads the run as a resume does, checks that the damage was detected, and repairs the file."""
    damage()
    tally.count += 1
    try:
        with _collect_messages() as messages:
            read = read_run(folder.path)
            RunFolder.open(folder.path).next_epoch()
    except UsageError as error:
        # A run has only one manifest: a resume must refuse a damaged one, and name it.
        refused = path == folder.path / MANIFEST and (str(path) in str(error) or f"no {MANIFEST}" in str(error))
        tally.detected += refused
        tally.fallen_back += refused
        if not refused:
            tally.unreadable += 1
            tally.note(f"{path}: {error}")
    else:
        named = path.parent.name if path.name == MANIFEST and path.parent.name.isdigit() else path.name
        tally.detected += any(named in sentence for sentence in messages)
        if not any(named in sentence for sentence in messages):
            tally.note(f"{path}: no message")
        # The parts fall back separately: each must be that of some save.
        pairs = zip(*known, strict=True)
        fields = dict(zip(Read._fields, map(set, pairs), strict=True))
        true = all(value in fields[name] for name, value in read._asdict().items() if name != "size")
        tally.fallen_back += true and 0 < read.size <= max(fields["size"])
        if not true:
            tally.wrong += 1
            tally.note(f"{path}: {read} was accepted")
    for other, data in content.items():
        if other.parent == folder.path or other == path:
            other.write_bytes(data)


@contextmanager
def _collect_messages() -> Iterator[list[str]]:
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    ear = Collector()
    for log in LOGGERS:
        log.addHandler(ear)
    try:
        yield messages
    finally:
        for log in LOGGERS:
            log.removeHandler(ear)


@reports_errors("python -m chaos saves")
def main(argv: Sequence[str] | None = None) -> int:
    """`python -m chaos saves`: returns status 1 if a save was unreadable, or damage was undetected or accepted."""
    parser = Parser(prog="python -m chaos saves", description="Kills and damages saves of a small run.")
    parser.add_argument("--kills", type=non_negative_int, default=1_000, help="kills during a save")
    parser.add_argument("--flips", type=non_negative_int, default=10_000, help="flipped bits of the newest save")
    parser.add_argument(
        "--truncations", type=non_negative_int, default=1_000, help="truncated files of the newest save"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args(argv)
    if not options.kills + options.flips + options.truncations:
        parser.error("--kills, --flips and --truncations are all 0: set at least one above 0")
    for log in LOGGERS:
        log.propagate = False
    began = time.monotonic()

    def report(sentence: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {sentence}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir=memory_folder(), prefix="apex-chaos-") as place:
        for name in ("kills", "damage"):
            (Path(place) / name).mkdir()
        with _collect_messages():
            tallies = {"kills": kill_saves(Path(place) / "kills", options.kills, options.seed, report)}
            tallies |= damage_saves(Path(place) / "damage", options.flips, options.truncations, options.seed, report)
    result = {name: tally.to_dict() for name, tally in tallies.items()}
    good = all(tally.unreadable == tally.wrong == 0 for tally in tallies.values())
    good &= all(
        tally.detected == tally.fallen_back == tally.count for name, tally in tallies.items() if name != "kills"
    )
    if not options.json:
        print(f"{'':<12} {'trials':>8} {'unreadable':>10} {'detected':>8} {'fallen back':>11} {'wrong':>6}")
        for name, tally in tallies.items():
            seen = ("-", "-") if name == "kills" else (str(tally.detected), str(tally.fallen_back))
            print(f"{name:<12} {tally.count:>8} {tally.unreadable:>10} {seen[0]:>8} {seen[1]:>11} {tally.wrong:>6}")
            for example in tally.examples:
                print(f"    {example}")
    print(json.dumps({"seed": options.seed, "seconds": round(time.monotonic() - began, 1), **result, "passed": good}))
    return FINISHED if good else FAILED


if __name__ == "__main__":
    sys.exit(main())
