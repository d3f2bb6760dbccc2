"""Runs a designed experiment, and keeps the score of each run in docs/results/trials/NAME.jsonl."""

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from apex.algorithms.kernels.convolution import find_convolution
from apexreplay.errors import UsageError, require
from apexreplay.frames.lz4_blocks import find_native
from apexreplay.native import NativeError
from apexreplay.process.lifecycle import Stop
from bench.learning.design import Design, Levels, read_design, render_design
from bench.learning.measure import FRESH, GRACE_SECONDS, STANDARD_ERROR, Place, evaluate, wait
from bench.learning.processor_time import OTHERS_SHARE, ProcessorTime
from bench.learning.records import clean_commit, describe_machine, is_changed_since, is_same_code
from bench.learning.runs import ApexSystem, RunError
from bench.learning.tasks import LearningTask

FOLDER = Path("docs/results/trials")  # relative to the repository
EPISODES = 100  # games of the policy at the end of a run, whose mean is its score
NO_LIMIT_SECONDS = 24 * 3_600.0  # time limit of a run that has none in its design
EARLY_SECONDS = 60.0  # A run that fails earlier says something of the installation, and nothing of the system.
CHANGED = "the code has changed during the run, which does not count"

Run = tuple[Levels, int]  # a cell and a seed


def run_trial(root: Path, file: Path, python: str, *, jobs: int, seconds: float, stop: Stop) -> bool:
    """Makes the missing runs of a design, each seed with all cells by turns, the baseline first; prints its tables.

    `jobs`: runs at once, each with its share of the cores. No run starts after `seconds`. Returns whether no run has
    failed. Raises UsageError and OSError.
    """
    design = read_design(file)
    problem = "--jobs cannot be used with a time limit, because such runs would train for less time each"
    require(jobs == 1 or not design.has_time_limit, problem, remedy="limit the updates or the steps")
    path = root / FOLDER / f"{file.stem}.jsonl"
    trial, cores = _Trial(design, path, python), sorted(os.sched_getaffinity(0))
    good = trial.make_missing(share(cores, jobs), seconds, stop)
    print("\n".join(render_design(design, trial.scores())))
    return good


def require_native_code() -> None:
    """Refuses runs that would be slower than they are, because a compiled part is missing or of another version."""
    try:
        find_convolution()
        find_native()
    except NativeError as error:
        raise UsageError(str(error), remedy="reinstall the packages of this checkout") from error


def share(cores: Sequence[int], jobs: int) -> list[Sequence[int]]:
    """Returns the cores of each job, as many for each; the rest stays unused."""
    size = len(cores) // jobs
    return [cores[job * size : (job + 1) * size] for job in range(jobs)]


class _Trial:
    """The file with the finished runs. A run is found again by its command."""

    def __init__(self, design: Design, path: Path, python: str) -> None:
        """Raises UsageError if the file has a line that is no run."""
        self._design = design
        self._path = path
        self._system = ApexSystem(python)
        self._lock = threading.Lock()
        own = {self._show(run): run for run in self._all()}
        self._finished: dict[Run, dict[str, Any]] = {}
        try:
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
                figures = json.loads(line)
                if run := own.get(figures["command"]):
                    require(run not in self._finished, f"{path} has a run twice: {figures['command']}")
                    if "failure" not in figures and not math.isfinite(float(figures[design.measure])):
                        raise ValueError(f"{design.measure} {figures[design.measure]}")
                    _circumstances(figures)
                    self._finished[run] = figures
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} has a line that is no run: {type(error).__name__}: {error}") from error

    def scores(self) -> dict[Levels, list[float | None]]:
        """Returns the measure of each cell's seeds; None for one that is missing or has failed."""
        measure, limit = self._design.measure, 60 * self._design.minutes
        found = {run: figures.get(measure) for run, figures in self._finished.items()}
        if measure == "seconds":
            found = {run: seconds and min(seconds, limit) for run, seconds in found.items()}
        return {cell: [found.get((cell, seed)) for seed in self._design.seeds] for cell in self._design.cells()}

    def make_missing(self, shares: Sequence[Collection[int]], seconds: float, stop: Stop) -> bool:
        """Makes the missing runs, one at a time on each share of the cores. Returns whether none has failed."""
        began, missing = time.monotonic(), SimpleQueue[Run]()
        for run in self._all():
            if run not in self._finished:
                missing.put(run)
        if not missing.empty():
            self._require_same_circumstances(len(shares[0]))

        def work(cores: Collection[int]) -> None:
            while not stop.poll() and time.monotonic() - began < seconds:
                try:
                    run = missing.get_nowait()
                except Empty:
                    return
                print(f"learning: {self._show(run)}", file=sys.stderr, flush=True)
                started = time.monotonic()
                try:
                    commit = clean_commit()
                    try:
                        figures = self._make(run, cores, stop, is_alone=len(shares) == 1)
                    except RunError as error:
                        if stop.poll():
                            return
                        if time.monotonic() - started < EARLY_SECONDS:
                            raise
                        figures = {"failure": str(error)}
                    require(not is_changed_since(commit), CHANGED)
                    own = {"commit": commit, "cores": len(cores), "cpu": describe_machine()["cpu"]}
                    self._record(run, figures | own)
                except BaseException:  # The next run would fail too, as on a full disk.
                    stop.request()
                    raise

        with ThreadPoolExecutor(len(shares)) as pool:
            list(pool.map(work, shares))
        failed = {run: figures["failure"] for run, figures in self._finished.items() if "failure" in figures}
        for run, failure in failed.items():  # They are not repeated until they succeed.
            print(f"learning: {self._show(run)}: {failure}", file=sys.stderr)
        if failed:
            print(f"learning: to repeat a failed run, remove its line in {self._path}, and say why", file=sys.stderr)
        return not failed

    def _all(self) -> list[Run]:
        """Returns all runs in their order."""
        return [(cell, seed) for seed in self._design.seeds for cell in self._design.cells()]

    def _require_same_circumstances(self, num_cores: int) -> None:
        """Refuses to add runs of other code, or with other cores, to those that are there."""
        require_native_code()
        commit, cpu = clean_commit(), describe_machine()["cpu"]
        other = f"give the design another name, or remove {self._path}"
        for run in self._finished.values():
            was, at, processor = _circumstances(run)
            require(
                was == num_cores, f"the runs there had {was} cores each, these would have {num_cores}", remedy=other
            )
            same = commit is None or at is None or is_same_code(commit, at)
            require(same, f"the runs there are of commit {at}, which has other code", remedy=other)
            same = processor == cpu or not self._design.has_time_limit
            require(same, f"the runs there had another processor: {processor}", remedy=other)

    def _make(self, run: Run, cores: Collection[int], stop: Stop, *, is_alone: bool) -> dict[str, Any]:
        """Makes one run; returns its figures. Raises RunError if it has failed."""
        limit = 60 * self._design.minutes + GRACE_SECONDS
        with tempfile.TemporaryDirectory(prefix="apex-trial-") as name:
            place = Place(Path(name), cores)
            clock, processor = time.monotonic(), ProcessorTime(cores)
            output = STANDARD_ERROR if is_alone else subprocess.DEVNULL  # Two live views would overwrite each other.
            wait(place.start(self._command(run), output), limit if math.isfinite(limit) else NO_LIMIT_SECONDS, stop)
            # Runs at the same time are children of this process too, and count as others until they end.
            seconds, others = time.monotonic() - clock, processor.others_share() if is_alone else None
            outcome = self._system.read(place.folder, 0.0)
            games = EPISODES, run[1] + FRESH
            score = evaluate(self._system.evaluate(place.folder, *games, final=True), place, *games, stop)
        if others is not None and others > OTHERS_SHARE and self._design.has_time_limit:
            raise RunError(f"other processes used {others:.0%} of the cores")
        return {
            "score": score.mean,
            "interval": score.interval,
            "seconds": round(seconds, 1),
            "steps": outcome.steps,
            "updates": outcome.updates,
            "others_share": None if others is None else round(others, 3),
            "dormant_shares": outcome.dormant_shares,
            "versions": outcome.versions,
        }

    def _record(self, run: Run, figures: dict[str, Any]) -> None:
        line = {"command": self._show(run), **figures}
        with self._lock:
            self._finished[run] = line
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")
        if "score" in figures:
            print(
                f"learning: score {figures['score']:.2f} after {figures['seconds']:.0f} s", file=sys.stderr, flush=True
            )

    def _show(self, run: Run) -> str:
        """Returns the command of a run as a user types it."""
        return self._system.show(self._command(run))

    def _command(self, run: Run) -> list[str]:
        (cell, seed), minutes = run, self._design.minutes
        task = LearningTask("", tuple(self._design.settings(cell)), EPISODES, None, 0.0, minutes, 0, final_only=True)
        return self._system.train(task, seed, minutes, ())


def _circumstances(figures: dict[str, Any]) -> tuple[int, str | None, str]:
    """Returns cores, commit and processor of a finished run. Raises KeyError."""
    return figures["cores"], figures["commit"], figures["cpu"]
