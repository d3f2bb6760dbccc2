"""The evidence: one finished run is a JSON file and its curve, a CSV file, in docs/results/learning/TASK/."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import apex
from apex.errors import UsageError
from apex.runtime.atomic_files import replace_file
from apex.runtime.provenance import describe_checkout, describe_hardware

FOLDER = Path("docs/results/learning")  # below the repository
HEADER = "seconds,steps,score"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedScore:
    """Raw scores of full games on seeds that nothing else has played, and what they come to."""

    mean: float
    median: float
    interval: tuple[float, float]  # 95 % of the mean, by the bootstrap
    episodes: int
    epsilon: float
    seed: int  # of the games
    scores: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One finished run. Nothing here names a host or a path."""

    task: str
    system: str
    seed: int
    command: str
    score: RecordedScore
    reached: bool | None  # the bar, and in time; None where there is no bar for a run alone
    seconds: float  # from the command to its exit
    steps: int
    updates: int
    date: str
    commit: str | None  # None: the code comes from no checkout
    dirty: bool | None  # whether that differs from the commit, documents and results aside
    load: float  # average of the minute before: what else went on; of a quiet machine well below 1
    machine: dict[str, Any]
    versions: dict[str, Any]
    settings: dict[str, Any]
    dormant_shares: dict[str, float] | None = None  # of Ape-X's worst layer, by updates; None: not recorded then
    final_score: RecordedScore | None = None  # of the policy at the end, on the same games; `score` is the best one's
    others_share: float | None = None  # of the cores' time during the run, other processes'; None: not recorded then

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.system}-seed-{self.seed}"


def record_path(root: Path, task: str, system: str, seed: int, suffix: str = ".json") -> Path:
    """Where the run is, or will be."""
    return root / FOLDER / task / f"{system}-seed-{seed}{suffix}"


def write_record(root: Path, record: Record, curve: Sequence[tuple[float, int, float]]) -> Path:
    """Writes both files, the JSON last: it makes the run count. Returns its path; raises OSError."""
    rows = [HEADER, *(f"{seconds:.2f},{steps},{score:g}" for seconds, steps, score in curve)]
    where = (root, record.task, record.system, record.seed)
    replace_file(record_path(*where, ".csv"), "\n".join([*rows, ""]).encode())
    text = json.dumps({"format": FORMAT, **asdict(record)}, indent=2)
    text = re.sub(r"\[[^\[\]{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text)  # A list of them is a line.
    replace_file(record_path(*where), f"{text}\n".encode())
    return record_path(*where)


def read_records(root: Path) -> list[Record]:
    """All runs, by task, system and seed; raises UsageError for a file that is none, or stands in another's place."""
    records = []
    for path in (root / FOLDER).glob("*/*.json"):
        try:
            fields = json.loads(path.read_text())
            if fields.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            scores = {name: RecordedScore(**fields[name]) for name in ("score", "final_score") if fields.get(name)}
            record = Record(**fields | scores)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is no evidence of a run: {type(error).__name__}: {error}") from error
        if path != record_path(root, record.task, record.system, record.seed):
            raise UsageError(f"{path} says that it is seed {record.seed} of {record.system}, {record.task}")
        if not path.with_suffix(".csv").exists():
            raise UsageError(f"{path} has no curve beside it")
        records.append(record)
    return sorted(records, key=lambda record: (record.task, record.system, record.seed))


def describe_code() -> tuple[str | None, bool | None]:
    """The commit of the code that is run, and whether that was changed since. Documents and results are not code."""
    package = Path(apex.__file__).parent
    checkout = describe_checkout(package)
    if checkout is None:
        return None, None
    status = subprocess.run(
        ["git", "-C", str(package.parent), "status", "--porcelain", "--", ".", ":(exclude)docs", ":(exclude)*.md"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return checkout["commit"], bool(status.stdout.strip())


def describe_machine() -> dict[str, Any]:
    """Cores that may be used, processor, memory, GPUs; not whose it is."""
    hardware = describe_hardware()
    return {name: hardware[name] for name in ("cores", "cpu", "memory_bytes", "gpus")}


def without_seed(command: str, seed: int) -> str:
    """A command with K in the place of the seed: what all seeds have in common."""
    return re.sub(rf"--seed {seed}\b", "--seed K", command)
