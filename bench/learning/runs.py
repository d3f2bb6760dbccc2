"""Starts a run of each system, and reads its results in one form."""

import json
import math
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from apex.config import Config, flatten
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apex.runtime.provenance import describe_versions
from apexreplay.errors import ApexError, UsageError, require
from bench.learning.tasks import LearningTask

ROOT = Path(__file__).resolve().parents[2]
PEER_SCRIPT = Path("bench/peers/stable_baselines3_dqn.py")
VERSIONS_SECONDS = 100.0  # time to import its packages
FIRST_UPDATES = 8_000  # Records have the share of dormant units at each multiple of this number of updates.
# settings that do not affect learning: name and files of a run, and connections between its programs
_ASIDE = ("seed", "run.name", "run.folder", "run.tensorboard_port", "transport.", "environment.id")


class RunError(ApexError):
    """The reason why a run cannot be recorded, as a sentence."""


class Outcome(NamedTuple):
    """The results that a finished run has written."""

    curve: list[tuple[float, int, float]]  # seconds since the start of the command, agent decisions, mean raw score
    steps: int
    updates: int
    # Ape-X: settings that differ from the defaults, which are the paper's; other systems: all settings
    settings: dict[str, Any]
    versions: dict[str, Any]
    dormant_shares: dict[str, float] | None = None  # see `dormant_shares`; None: not an Ape-X run


class System(Protocol):
    """One trainer. Its commands run in the same folder, so that each finds the files of the previous one."""

    def train(self, task: LearningTask, seed: int, minutes: float, further: Sequence[str]) -> list[str]:
        """Returns the command that trains."""

    def read(self, folder: Path, began: float) -> Outcome:
        """Returns the results in `folder`. `began`: start of the command, in seconds since 1970. Raises RunError."""

    def evaluate(self, folder: Path, episodes: int, seed: int, *, final: bool = False) -> list[str]:
        """Returns the command that plays full games with the best policy, or with the policy at the end.

        The last line of its output is a JSON object with `scores`.
        """

    def show(self, command: Sequence[str]) -> str:
        """Returns the command as a user types it in the repository."""


class ApexSystem:
    """`apex train` as a user starts it: replay, learner, actors, evaluator, live view and TensorBoard."""

    def __init__(self, python: str, variant: Sequence[str] = ()) -> None:
        """`variant`: further options of `apex train`."""
        self._program = [python, "-m", "apex"]
        self._variant = variant

    def train(self, task: LearningTask, seed: int, minutes: float, further: Sequence[str]) -> list[str]:
        """See System."""
        end = () if math.isinf(minutes) else ("--max-minutes", f"{minutes:g}")
        return [*self._program, "train", *task.options, *self._variant, "--seed", str(seed), *end, *further]

    def read(self, folder: Path, began: float) -> Outcome:
        """See System."""
        run = self._run(folder)
        evaluations = read_curve(run.curves / "evaluator.jsonl") if (run.curves / "evaluator.jsonl").exists() else []
        learner = read_curve(run.curves / "learner.jsonl") if (run.curves / "learner.jsonl").exists() else []
        curve = [
            (max(0.0, row["time"] - began), int(row["steps"]), float(row["scalars"]["evaluator/score"]))
            for row in evaluations
        ]
        defaults = flatten(Config())
        return Outcome(
            curve,
            steps=max((int(row["steps"]) for row in learner), default=0),
            updates=int(max((row["scalars"].get("learner/updates") or 0 for row in learner), default=0)),
            settings={
                name: value
                for name, value in flatten(run.config).items()
                if value != defaults[name] and not name.startswith(_ASIDE)
            },
            versions=describe_versions(),
            dormant_shares=dormant_shares([row["scalars"] for row in learner]),
        )

    def evaluate(self, folder: Path, episodes: int, seed: int, *, final: bool = False) -> list[str]:
        """See System."""
        games = ("--episodes", str(episodes), "--seed", str(seed), *("--checkpoint", "last") * final)
        return [*self._program, "evaluate", str(self._run(folder).path), *games, "--json"]

    def show(self, command: Sequence[str]) -> str:
        """See System."""
        return shlex.join(["apex", *command[len(self._program) :]])

    def _run(self, folder: Path) -> RunFolder:
        found = sorted(folder.glob("runs/*/manifest.json"))
        if len(found) != 1:
            raise RunError(f"expected one run folder of apex train in runs, found {len(found)}")
        return RunFolder.open(found[0].parent)


def dormant_shares(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the worst layer's share of dormant units by number of updates, and the highest from the first number on.

    The numbers are the multiples of `FIRST_UPDATES`, as text; each has the first share that was reported from there on.
    """
    known = [
        (row["learner/updates"], row["learner/dormant_share"])
        for row in rows
        if row.get("learner/dormant_share") is not None
    ]
    later = [(updates, share) for updates, share in known if updates >= FIRST_UPDATES]
    shares: dict[str, float] = {}
    for updates, share in later:
        shares.setdefault(str(int(updates // FIRST_UPDATES * FIRST_UPDATES)), share)
    return shares | {"highest": max(share for _, share in later)} if later else shares


class PeerSystem:
    """Stable-Baselines3's DQN, or the algorithm after the dash in the system's name, in its own virtual environment."""

    def __init__(self, python: Path, name: str) -> None:
        require(python.exists(), f"{python} does not exist: run bench/peers/setup.sh, or pass --peer-python")
        self._program = [str(python.absolute()), str(ROOT / PEER_SCRIPT)]
        _, _, algorithm = name.partition("-")
        self._algorithm = ("--algorithm", algorithm) if algorithm else ()

    def versions(self) -> dict[str, str]:
        """Returns the versions of its packages. Raises UsageError if it cannot import them."""
        try:
            asked = subprocess.run(
                [*self._program, "versions"], capture_output=True, text=True, check=True, timeout=VERSIONS_SECONDS
            )
            return dict(json.loads(asked.stdout))
        except (OSError, subprocess.SubprocessError, TypeError, ValueError) as error:
            cause = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
            raise UsageError(f"{self._program[0]} cannot run {PEER_SCRIPT}: {cause}", "bench/peers/setup.sh") from error

    def train(self, task: LearningTask, seed: int, minutes: float, further: Sequence[str]) -> list[str]:
        """See System."""
        end = ["--minutes", f"{minutes:g}"]
        if task.bar is not None:
            end += ["--stop-score", f"{task.bar:g}"]
        return [
            *self._program,
            "train",
            *self._algorithm,
            "--env",
            task.environment,
            "--seed",
            str(seed),
            *end,
            *further,
        ]

    def read(self, folder: Path, began: float) -> Outcome:
        """See System."""
        left = folder / "runs" / "sb3"
        try:
            result = json.loads((left / "result.json").read_text())
            rows = [row.split(",") for row in (left / "curve.csv").read_text().splitlines()[1:]]
            curve = [(float(seconds), int(steps), float(score)) for seconds, steps, score in rows]
            evaluations = {name: result[name] for name in ("evaluations", "evaluation_seconds")}
            settings = result["settings"] | evaluations
            return Outcome(curve, result["steps"], result["updates"], settings, result["versions"])
        except (OSError, KeyError, ValueError) as error:
            raise RunError(f"{PEER_SCRIPT} has written no result: {type(error).__name__}: {error}") from error

    def evaluate(self, folder: Path, episodes: int, seed: int, *, final: bool = False) -> list[str]:
        """See System."""
        return [*self._program, "evaluate", "--episodes", str(episodes), "--seed", str(seed), *["--final"] * final]

    def show(self, command: Sequence[str]) -> str:
        """See System."""
        return shlex.join([".peer-sb3/bin/python", str(PEER_SCRIPT), *command[len(self._program) :]])
