"""Starts the commands of a measured run, waits for them, and reads the scores of its games."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from apex.evaluation.episodes import Episode, summarize
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.process.spawn import File, Process, spawn
from bench.learning.records import RecordedScore
from bench.learning.runs import ROOT, RunError

# added to a run's seed for the games that count, so that neither training nor evaluator uses these seeds
FRESH = 1_000_000
GRACE_SECONDS = 300.0  # time beyond its limit in which a run starts and ends
KILL_SECONDS = 20.0  # time for a command to end after SIGINT
EVALUATE_SECONDS = 7_200.0  # time limit of the last games
STANDARD_OUTPUT, STANDARD_ERROR = 1, 2  # file descriptors


class Place(NamedTuple):
    """Where the commands of a run start."""

    folder: Path
    cores: Collection[int] = ()  # empty: all

    def start(self, command: Sequence[str], output: File) -> Process:
        """Raises OSError if the program cannot be started."""
        # The interpreter may have the packages of another checkout; the record names the commit of this one.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return spawn(
            command,
            output=output,
            errors=STANDARD_ERROR,
            ends_by=signal.SIGTERM,
            cwd=self.folder,
            cores=self.cores,
            environment={"PYTHONPATH": os.pathsep.join(paths)},
        )


def wait(process: Process, limit_seconds: float, stop: Stop) -> None:
    """Waits for a command to end; raises RunError if it was stopped or failed."""
    deadline, cause = time.monotonic() + limit_seconds, ""
    try:
        while process.poll() is None:
            late = time.monotonic() >= deadline
            if not cause and (late or stop.poll()):
                cause = f"the command had not ended after {limit_seconds:.0f} s" if late else "stopped"
                process.send_signal(signal.SIGINT)  # The command stops all programs that it has started.
                deadline = time.monotonic() + KILL_SECONDS
            elif cause and late:
                process.kill()
            try:
                process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    finally:
        process.kill()
        process.wait()
    if cause or process.returncode:
        raise RunError(cause or f"the command ended with status {process.returncode}")


def evaluate(command: Sequence[str], place: Place, episodes: int, seed: int, stop: Stop) -> RecordedScore:
    """Plays full games with a policy of the run at this place, with the given command. Raises RunError and OSError."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = place.start(command, output)
        wait(process, EVALUATE_SECONDS, stop)
        output.seek(0)
        lines = output.read().strip().splitlines()
    try:
        answer = json.loads(lines[-1])
        scores, epsilon = [float(each) for each in answer["scores"]], float(answer["epsilon"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"the evaluation gave no scores ({type(error).__name__}: {error})") from error
    if len(scores) != episodes:
        raise RunError(f"the evaluation gave {len(scores)} games, expected {episodes}")
    summary = summarize([Episode(each, 0) for each in scores])
    assert summary.interval is not None  # Only a single game has no interval.
    return RecordedScore(
        mean=summary.mean,
        median=summary.median,
        interval=summary.interval,
        episodes=episodes,
        epsilon=epsilon,
        seed=seed,
        scores=scores,
    )
