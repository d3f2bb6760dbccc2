"""Runs a designed experiment, and keeps the score of each run in docs/results/trials/NAME.jsonl."""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop
from bench.learning.design import Design, Levels, read_design, render_design
from bench.learning.measure import FRESH, GRACE_SECONDS, STANDARD_ERROR, Place, evaluate, wait
from bench.learning.processor_time import OTHERS_SHARE, ProcessorTime
from bench.learning.records import describe_code, describe_machine
from bench.learning.runs import ApexSystem, RunError
from bench.learning.tasks import LearningTask

FOLDER = Path("docs/results/trials")  # relative to the repository
EPISODES = 100  # games of the policy at the end of a run, whose mean is its score
NO_LIMIT_SECONDS = 24 * 3_600.0  # time limit of a run that has none in its design


def run_trial(root: Path, file: Path, python: str, *, jobs: int, seconds: float, stop: Stop) -> bool:
    """Makes the missing runs of a design, each seed with all cells by turns, the baseline first; prints its tables.

    `jobs`: runs at once, each with its share of the cores. No run starts after `seconds`. Returns whether every run
    that was started has ended well. Raises UsageError.
    """
    design, trial = read_design(file), _Trial(root / FOLDER / f"{file.stem}.jsonl", python)
    began, cores = time.monotonic(), sorted(os.sched_getaffinity(0))
    missing: SimpleQueue[tuple[Levels, int]] = SimpleQueue()
    there = trial.scores(design)
    for seed in design.seeds:
        for cell in design.cells():
            if (cell, seed) not in there:
                missing.put((cell, seed))
    failures: list[Exception] = []

    def work(own: Sequence[int]) -> None:
        while not stop.poll() and time.monotonic() - began < seconds:
            try:
                cell, seed = missing.get_nowait()
            except Empty:
                break
            try:
                trial.run(design, cell, seed, own, stop, is_alone=jobs == 1)
            except (RunError, OSError) as error:
                failures.append(error)
                print(f"learning: {trial.show(design, cell, seed)}: {error}", file=sys.stderr)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, [cores[job::jobs] for job in range(jobs)]))
    scores: dict[Levels, list[float]] = {}
    for (cell, _), score in sorted(trial.scores(design).items(), key=lambda each: each[0][1]):
        scores.setdefault(cell, []).append(score)
    print("\n".join(render_design(design, scores)))
    return not failures


class _Trial:
    """The file with the finished runs. A run is found again by its command."""

    def __init__(self, path: Path, python: str) -> None:
        self._path = path
        self._system = ApexSystem(python)
        self._lock = threading.Lock()

    def show(self, design: Design, cell: Levels, seed: int) -> str:
        """Returns the command of a run as a user types it."""
        return self._system.show(self._command(design, cell, seed))

    def scores(self, design: Design) -> dict[tuple[Levels, int], float]:
        """Returns the scores of the design's finished runs by cell and seed. Raises UsageError."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        try:
            known = {run["command"]: float(run["score"]) for run in map(json.loads, lines)}
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self._path} has a line that is no run: {type(error).__name__}: {error}") from error
        runs = ((cell, seed) for seed in design.seeds for cell in design.cells())
        return {run: known[shown] for run in runs if (shown := self.show(design, *run)) in known}

    def run(
        self, design: Design, cell: Levels, seed: int, cores: Collection[int], stop: Stop, *, is_alone: bool
    ) -> None:
        """Makes and records one run. Raises RunError and OSError."""
        commit, dirty = describe_code()
        command, shown = self._command(design, cell, seed), self.show(design, cell, seed)
        print(f"learning: {shown}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="apex-trial-") as name:
            place, clock, processor = (
                Place(Path(name), design.environment, cores),
                time.monotonic(),
                ProcessorTime(cores),
            )
            limit = min(60 * design.minutes + GRACE_SECONDS, NO_LIMIT_SECONDS)
            wait(place.start(command, STANDARD_ERROR), limit, stop)
            # Others' runs are children of this process too, and count as others until they end.
            seconds, others = time.monotonic() - clock, processor.others_share() if is_alone else None
            outcome = self._system.read(place.folder, 0.0)
            games = self._system.evaluate(place.folder, EPISODES, seed + FRESH, final=True)
            score = evaluate(games, place, EPISODES, seed + FRESH, stop)
        if others is not None and others > OTHERS_SHARE:
            print(f"learning: other processes used {others:.0%} of the cores", file=sys.stderr)
        figures: dict[str, Any] = {
            "command": shown,
            "score": score.mean,
            "interval": score.interval,
            "seconds": round(seconds, 1),
            "steps": outcome.steps,
            "updates": outcome.updates,
            "others_share": None if others is None else round(others, 3),
            "commit": commit,
            "dirty": dirty,
            "cores": len(cores),
            "cpu": describe_machine()["cpu"],
        }
        print(f"learning: score {score.mean:.2f} after {seconds:.0f} s", file=sys.stderr, flush=True)
        with self._lock:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(figures)}\n")

    def _command(self, design: Design, cell: Levels, seed: int) -> list[str]:
        options = tuple(design.settings(cell))
        task = LearningTask("", options, EPISODES, None, 0.0, design.minutes, 0, final_only=True)
        return self._system.train(task, seed, design.minutes, ())
