"""The results table and the plots, made from the committed records alone."""

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from apex.errors import require
from apex.runtime.atomic_files import replace_file
from bench.learning.comparison import is_above, peers_of, processor_of, render_comparison
from bench.learning.dormant import render_dormant
from bench.learning.records import FOLDER, Record, read_records, record_path, without_seed
from bench.learning.tasks import SYSTEMS, TASKS, LearningTask

BEGIN, END = "<!-- learning results -->", "<!-- end of learning results -->"
DOCUMENTS = (Path("docs/learning.md"),)
PLOT_SECONDS = 120.0  # time limit of one plot
SAME_TIME = 0.95  # The other system must have had this share of our seconds for a comparison after equal time.

Group = list[Record]  # the seeds of one command on one kind of machine


def rebuild(root: Path) -> dict[Path, str]:
    """Returns the new text of the documents, by path; raises UsageError if a document has no place for the results."""
    records = read_records(root)
    texts = {}
    for document in DOCUMENTS:
        text = (root / document).read_text()
        require(
            text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END),
            f"{document} must have one line {BEGIN}, and after it one line {END}",
        )
        before, _, rest = text.partition(BEGIN)
        folder = (root / FOLDER).relative_to((root / document).parent)
        results = render(records, folder, render_comparison(root, records), render_dormant(records))
        texts[root / document] = f"{before}{BEGIN}\n{results}\n{END}{rest.partition(END)[2]}"
    return texts


def write(root: Path, tell: Callable[[str], None]) -> None:
    """Rewrites the documents, then the plots; raises UsageError if a plot cannot be drawn."""
    for path, text in rebuild(root).items():
        if path.read_text() != text:
            replace_file(path, text.encode())
        tell(f"{path.relative_to(root)}: the results are those of {FOLDER}")
    records = read_records(root)
    for name, task in TASKS.items():
        chosen = [record for record in records if record.task == name]
        if chosen:
            command = plot_command(root, name, task, chosen)
            answer = subprocess.run(command, capture_output=True, text=True, timeout=PLOT_SECONDS, cwd=root)
            last = (answer.stderr.strip().splitlines() or ["nothing"])[-1]
            require(answer.returncode == 0, f"{plot_path(name)} was not drawn: last line of apex plot: {last}")
            tell(f"drew {plot_path(name)}")


def plot_path(name: str) -> Path:
    """Returns the path of a task's plot, relative to the repository."""
    return FOLDER / f"{name}.png"


def plot_command(root: Path, name: str, task: LearningTask, records: Sequence[Record]) -> list[str]:
    """Draws a task's curves; the seeds of one row of the table have the same name and become a band."""
    groups = _groups(records)
    command = [sys.executable, "-m", "apex", "plot"]
    for group in groups:
        label = _label(group, [other for other in groups if other[0].system == group[0].system])
        for record in group:
            file = record_path(root, name, record.system, record.seed, ".csv").relative_to(root)
            command += ["--curve", f"{label}={file}"]
    machines = {_machine(record) for record in records}
    command += ["--title", f"{task.name}, cores: {machines.pop()}" if len(machines) == 1 else task.name]
    if task.bar is not None:
        command += ["--threshold", f"{task.bar:g}"]
    return [*command, "--out", str(plot_path(name))]


def render(records: Sequence[Record], folder: Path, *further: str) -> str:
    """Returns the table, the machines, the `further` tables and the plots in Markdown.

    folder: path of the results in the document's links. Empty tables are left out.
    """
    if not records:
        return "No run is committed yet."
    lines = [
        "| task | system | cores | seeds | seconds to exit, median (min ... max); of each processor (seeds) "
        "| score, median of the seeds | bar | | command |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, task in TASKS.items():
        groups = _groups([record for record in records if record.task == name])
        lines += [_row(task, group, groups) for group in groups]
    lines += ["", _provenance(records)]
    for table in filter(None, further):
        lines += ["", table]
    for name, task in TASKS.items():
        if any(record.task == name for record in records):
            lines += ["", f"![{task.name}]({folder.as_posix()}/{name}.png)"]
    return "\n".join(lines)


def _label(group: Group, groups: Sequence[Group]) -> str:
    """Returns the system's name, and the machine and options that distinguish this row from its other rows."""
    commands = [without_seed(other[0].command, other[0].seed).split() for other in groups]
    own = without_seed(group[0].command, group[0].seed).split()
    options = [option for option in own if not all(option in command for command in commands)]
    machine = [f"cores: {_machine(group[0])}"] if len({_machine(other[0]) for other in groups}) > 1 else []
    return ", ".join([SYSTEMS[group[0].system], *machine, *[" ".join(options)] * bool(options)]).replace("=", " ")


def _machine(record: Record) -> str:
    """Returns cores and GPUs, which must be equal in a comparison."""
    return " + ".join([str(record.machine["cores"]), *record.machine["gpus"]])


def _groups(records: Sequence[Record]) -> list[Group]:
    def key(record: Record) -> tuple[str, int, str, str]:
        return record.system, record.machine["cores"], _machine(record), without_seed(record.command, record.seed)

    return [list(group) for _, group in groupby(sorted(records, key=key), key)]


def _row(task: LearningTask, group: Group, groups: Sequence[Group]) -> str:
    first = group[0]
    cells = [
        task.name,
        SYSTEMS[first.system],
        _machine(first),
        ", ".join(str(record.seed) for record in sorted(group, key=lambda record: record.seed)),
        _seconds(task, group),
        f"{_score(task, group):.1f}",
        _bar(task),
        _verdict(task, group, groups),
        f"`{without_seed(first.command, first.seed)}`",
    ]
    return f"| {' | '.join(cells)} |"


def _seconds(task: LearningTask, group: Group) -> str:
    """Returns the median and range of all seeds; if time is the result, also the median for each processor."""
    seconds = [record.seconds for record in group]
    ends = f" ({min(seconds):,.1f} ... {max(seconds):,.1f})" if len(seconds) > 1 else ""
    by_processor: dict[str, list[float]] = {}
    for record in group:
        by_processor.setdefault(processor_of(record), []).append(record.seconds)
    medians = ", ".join(
        f"{name}: {statistics.median(values):,.1f} ({len(values)})" for name, values in sorted(by_processor.items())
    )
    shown = f"; {medians}" if task.bar is not None and len(by_processor) > 1 else ""
    return f"{statistics.median(seconds):,.1f}{ends}{shown}"


def _score(task: LearningTask, group: Group) -> float:
    """Returns the median over the seeds of each seed's mean score; after equal updates, that of the final policy."""
    scores = [(task.is_ablation and record.final_score) or record.score for record in group]
    return statistics.median(score.mean for score in scores)


def _bar(task: LearningTask) -> str:
    if not task.num_seeds:
        return f"none, a curve of {task.minutes:g} min"
    if task.bar is None:
        return f"above the other after {task.minutes:g} min"
    return f"{task.bar:g} in {task.limit_seconds:g} s"


def _verdict(task: LearningTask, group: Group, groups: Sequence[Group]) -> str:
    if task.bar is None:
        return _comparison(task, group, groups)
    met = sum(bool(task.reached(record.score.mean, record.seconds)) for record in group)
    if met < len(group):
        return f"not met: {met} of {len(group)} seeds"
    return "met" if met >= task.num_seeds else f"met so far: {met} of {task.num_seeds} seeds"


def _comparison(task: LearningTask, group: Group, groups: Sequence[Group]) -> str:
    """Compares each of our seeds with all seeds of the others that ran as long on the same kind of machine."""
    if group[0].system != "apex" or not task.num_seeds:
        return ""
    others = [
        other
        for other in groups
        if other[0].system != group[0].system
        and _machine(other[0]) == _machine(group[0])
        and min(record.seconds for record in other) >= SAME_TIME * max(record.seconds for record in group)
    ]
    if not any(peers_of(record, other) for record in group for other in others):
        return "not compared yet"
    met = sum(all(is_above(record, other) for other in others) for record in group)
    if met < len(group):
        return f"not met: {met} of {len(group)} seeds"
    strongest = max(others, key=lambda other: statistics.mean(record.score.mean for record in other))
    # Seeds with a counterpart on the same processor. A peer that is weaker than another needs no further seeds.
    compared = sum(bool(peers_of(record, strongest)) for record in group)
    peers, needed = sum(bool(peers_of(record, group)) for record in strongest), task.peer_seeds or task.num_seeds
    if compared >= task.num_seeds and peers >= needed:
        return "met"
    if compared < task.num_seeds:
        return f"met so far: {compared} of {task.num_seeds} seeds"
    return f"met so far: {peers} of {needed} seeds of the other"


def _provenance(records: Sequence[Record]) -> str:
    machines = sorted(
        {f"{record.machine['cpu']}, {record.machine['memory_bytes'] / 2**30:.1f} GiB" for record in records}
    )
    dates = sorted(record.date[:10] for record in records)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} ... {dates[-1]}"
    measured = {name: task for name, task in TASKS.items() if any(record.task == name for record in records)}
    games: dict[str, set[int]] = {}
    for name, task in measured.items():
        games.setdefault(task.game, set()).update(r.score.episodes for r in records if r.task == name)
    episodes = "; ".join(f"{game} {', '.join(map(str, sorted(counts)))}" for game, counts in games.items())
    commits = "; ".join(
        f"{task.name} {', '.join(_commits([record for record in records if record.task == name]))}"
        for name, task in measured.items()
    )
    return f"Measured {when} on {' and on '.join(machines)}. Games per seed: {episodes}. Commits: {commits}."


def _commits(records: Sequence[Record]) -> list[str]:
    return sorted({(record.commit or "unknown")[:10] + " with changes" * bool(record.dirty) for record in records})
