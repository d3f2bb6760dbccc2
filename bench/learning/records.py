"""Records: one finished run is a JSON file and a CSV file with its curve, in docs/results/learning/TASK/."""

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import apex
from apex.runtime.provenance import describe_checkout, describe_hardware
from apexreplay.errors import UsageError, require
from apexreplay.files.atomic_files import replace_file

FOLDER = Path("docs/results/learning")  # relative to the repository
HEADER = "seconds,steps,score"
FORMAT = 1
MAX_SEED = 999_999
PACKAGES = ("apex", "apexreplay")  # folders of the product's code
CODE = (".", ":(exclude)docs", ":(exclude)*.md")  # all but documents and results


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedScore:
    """Raw scores of full games on seeds that were not used before, and their statistics."""

    mean: float
    median: float
    interval: tuple[float, float]  # 95 % interval of the mean, by the bootstrap
    episodes: int
    epsilon: float
    seed: int  # seed of the games
    scores: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One finished run. It names no host and no path."""

    task: str
    system: str
    seed: int
    command: str
    score: RecordedScore
    reached: bool | None  # whether it reached the bar in time; None: the task has no bar for a single run
    seconds: float  # from the start of the command to its exit
    steps: int
    updates: int
    date: str
    commit: str | None  # None: the code is not in a git checkout
    dirty: bool | None  # whether the code differs from the commit, apart from documents and results
    load: float  # average load of the minute before; well below 1 on a quiet machine
    machine: dict[str, Any]
    versions: dict[str, Any]
    settings: dict[str, Any]
    # of Ape-X's worst layer, by updates; None: the run did not record it
    dormant_shares: dict[str, float] | None = None
    # of the policy at the end, on the same games; `score` is that of the best policy, except in tasks with `final_only`
    final_score: RecordedScore | None = None
    # share of the cores' time that other processes used; None: the run did not record it
    others_share: float | None = None

    @property
    def name(self) -> str:
        """Returns the name of the record's files without the ending."""
        return f"{self.system}-seed-{self.seed}"


def record_path(root: Path, task: str, system: str, seed: int, suffix: str = ".json") -> Path:
    """Returns the path of the JSON file."""
    return root / FOLDER / task / f"{system}-seed-{seed}{suffix}"


def write_record(root: Path, record: Record, curve: Sequence[tuple[float, int, float]]) -> Path:
    """Writes both files, the JSON file last, because it makes the run count. Returns its path; raises OSError."""
    rows = [HEADER, *(f"{seconds:.2f},{steps},{score:g}" for seconds, steps, score in curve)]
    where = (root, record.task, record.system, record.seed)
    replace_file(record_path(*where, ".csv"), "\n".join([*rows, ""]).encode())
    text = json.dumps({"format": FORMAT, **asdict(record)}, indent=2)
    # Each list stands on one line.
    text = re.sub(r"\[[^\[\]{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    replace_file(record_path(*where), f"{text}\n".encode())
    return record_path(*where)


def read_records(root: Path) -> list[Record]:
    """Returns all records, by task, system and seed; raises UsageError for an invalid or misplaced file."""
    records = []
    for path in (root / FOLDER).glob("*/*.json"):
        try:
            fields = json.loads(path.read_text())
            if fields.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            scores = {name: RecordedScore(**fields[name]) for name in ("score", "final_score") if fields.get(name)}
            record = Record(**fields | scores)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is not a record of a run: {type(error).__name__}: {error}") from error
        if path != record_path(root, record.task, record.system, record.seed):
            raise UsageError(f"{path} contains seed {record.seed} of {record.system}, {record.task}")
        if not path.with_suffix(".csv").exists():
            raise UsageError(f"{path} has no curve: the CSV file is missing")
        records.append(record)
    return sorted(records, key=lambda record: (record.task, record.system, record.seed))


def describe_code(folders: Sequence[str] = CODE) -> tuple[str | None, bool | None]:
    """Returns the commit of the code, and whether the code in these folders was changed since."""
    package = Path(apex.__file__).parent
    checkout = describe_checkout(package)
    if checkout is None:
        return None, None
    status = subprocess.run(
        ["git", "-C", str(package.parent), "status", "--porcelain", "--", *folders],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return checkout["commit"], bool(status.stdout.strip())


def clean_commit() -> str | None:
    """Returns the commit of the code; None if it is not in a git checkout. Raises UsageError if it was changed."""
    commit, dirty = describe_code()
    require(not dirty, "the code differs from its commit", remedy="commit the changes, or take a clean checkout")
    return commit


def is_same_code(
    commit: str, other: str, root: Path = Path(apex.__file__).parents[1], folders: Sequence[str] = PACKAGES
) -> bool:
    """Returns whether the folders are the same in two commits of `root`; raises OSError if one is unknown."""
    if commit == other:
        return True
    compare = ["git", "-C", str(root), "diff", "--quiet", commit, other, "--", *folders]
    status = subprocess.run(compare, check=False, capture_output=True, timeout=30).returncode
    if status > 1:
        raise OSError(f"git cannot compare {commit} and {other}")
    return status == 0


def is_changed_since(commit: str | None, folders: Sequence[str] = PACKAGES) -> bool:
    """Returns whether the code in these folders is no longer that of a commit, or differs from its own commit."""
    now, dirty = describe_code(folders)
    if dirty or now == commit:
        return bool(dirty)
    return now is None or commit is None or not is_same_code(commit, now, folders=folders)


def describe_machine() -> dict[str, Any]:
    """Returns usable cores, processor, memory and GPUs, without anything that identifies the machine."""
    hardware = describe_hardware()
    return {name: hardware[name] for name in ("cores", "cpu", "memory_bytes", "gpus")}


def without_seed(command: str, seed: int) -> str:
    """Returns a command with K instead of the seed, which all seeds have in common."""
    return re.sub(rf"--seed {seed}\b", "--seed K", command)
