"""The results of each task and their plots, made from the committed records alone."""

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from apexreplay.errors import require
from apexreplay.files.atomic_files import replace_file
from bench.harness.results import replace_between
from bench.learning.comparison import render_comparison
from bench.learning.dormant import render_dormant
from bench.learning.records import FOLDER, Record, read_records, record_path, without_seed
from bench.learning.summary import render_summary
from bench.learning.tasks import SYSTEMS, TASKS, UNTUNED, UNTUNED_RUNS, LearningTask
from bench.learning.untuned import Run, draw, render_untuned
from bench.learning.verdicts import Group, goal, machine_of, verdict

BEGIN, END = "<!-- learning results -->", "<!-- end of learning results -->"
DOCUMENTS = (Path("docs/learning.md"),)
PLOT_SECONDS = 120.0  # time limit of one plot


def rebuild(root: Path) -> dict[Path, str]:
    """Returns the new text of the documents, by path; raises UsageError if a document has no place for the results."""
    records = read_records(root)
    failed = [run for run in UNTUNED_RUNS if record_path(root, *run, ".failed").exists()]
    texts = {}
    for document in DOCUMENTS:
        folder = (root / FOLDER).relative_to((root / document).parent)
        results = render(records, folder, lambda own: render_comparison(root, own), failed)
        texts[root / document] = replace_between(root / document, BEGIN, END, results)
    return texts


def write(root: Path, tell: Callable[[str], None]) -> None:
    """Rewrites the documents, then the plots; raises UsageError if a plot cannot be drawn."""
    for path, text in rebuild(root).items():
        if path.read_text() != text:
            replace_file(path, text.encode())
        tell(f"{path.relative_to(root)}: the results are those of {FOLDER}")
    records = read_records(root)
    if has_untuned(records):
        draw(records).savefig(root / plot_path("untuned"), dpi=160)
        tell(f"drew {plot_path('untuned')}")
    for name, task in TASKS.items():
        chosen = [record for record in records if record.task == name]
        if chosen:
            command = plot_command(root, name, task, chosen)
            answer = subprocess.run(command, capture_output=True, text=True, timeout=PLOT_SECONDS, cwd=root)
            last = (answer.stderr.strip().splitlines() or ["nothing"])[-1]
            require(answer.returncode == 0, f"{plot_path(name)} was not drawn: last line of apex plot: {last}")
            tell(f"drew {plot_path(name)}")


def has_untuned(records: Sequence[Record]) -> bool:
    """Whether any game of the first table has a record."""
    return any(record.task in UNTUNED for record in records)


def plot_path(name: str) -> Path:
    """Returns the path of a task's plot, relative to the repository."""
    return FOLDER / f"{name}.png"


def plot_command(root: Path, name: str, task: LearningTask, records: Sequence[Record]) -> list[str]:
    """Draws a task's curves; the seeds of one row of the table have the same name and become a band."""
    groups = groups_of(records)
    command = [sys.executable, "-m", "apex", "plot"]
    for group in groups:
        label = _label(group, [other for other in groups if other[0].system == group[0].system])
        for record in group:
            file = record_path(root, name, record.system, record.seed, ".csv").relative_to(root)
            command += ["--curve", f"{label}={file}"]
    machines = {machine_of(record) for record in records}
    command += ["--title", f"{task.name}, cores: {machines.pop()}" if len(machines) == 1 else task.name]
    if task.bar is not None:
        command += ["--threshold", f"{task.bar:g}"]
    return [*command, "--out", str(plot_path(name))]


def render(
    records: Sequence[Record],
    folder: Path,
    compare: Callable[[Group], str] = lambda _: "",
    failed: Sequence[Run] = (),
) -> str:
    """Returns a section for each task, with its plot first, and a table of all tasks, in Markdown.

    folder: path of the results in the document's links. compare: makes the second table of a task's records, or "".
    failed: runs of the first table that left a file instead of a record.
    """
    if not records:
        return "No run is committed yet."
    lines = ["## Games that no setting was tuned on", ""]
    if has_untuned(records):
        lines += [f"![Each run]({folder.as_posix()}/untuned.png)", "", *render_untuned(records, failed)]
    else:
        lines += [f"None of the {len(UNTUNED_RUNS)} runs is recorded yet; [Conditions](#conditions) has the rules."]
    lines += ["", "## Curves and scores"]
    for name, task in TASKS.items():
        own = [record for record in records if record.task == name]
        if own:
            lines += ["", f"### {task.name}", "", f"![{task.name}]({folder.as_posix()}/{name}.png)", "", goal(task), ""]
            lines += results_table(task, own, folder)
            comparison = compare(own)
            lines += [*("", comparison) * bool(comparison), "", *_provenance(own)]
    machines = {f"{record.machine['cpu']}, {record.machine['memory_bytes'] / 2**30:.1f} GiB" for record in records}
    dates = sorted(record.date[:10] for record in records)
    lines += ["", "## Tasks that settings were tuned on", "", *render_summary(records), ""]
    lines += [f"Measured from {dates[0]} to {dates[-1]} on: {'; '.join(sorted(machines))}."]
    return "\n".join(lines)


def results_table(task: LearningTask, records: Sequence[Record], folder: Path) -> list[str]:
    """Returns the lines of a task's table, a row for each system; a seed is a link to its record."""
    head = ["system", "goal reached", "seconds: median (range); by processor (seeds)", "final score: median", "seeds"]
    rows = []
    groups = groups_of(records)
    for group in groups:
        seeds = sorted(group, key=lambda record: record.seed)
        links = [f"[{each.seed}]({folder.as_posix()}/{each.task}/{each.name}.json)" for each in seeds]
        label = _label(group, [other for other in groups if other[0].system == group[0].system])
        rows.append([label, verdict(task, group, groups), _seconds(task, group), _scores(group), ", ".join(links)])
    if not task.num_seeds:  # no goal
        head, rows = [head[0], *head[2:]], [[row[0], *row[2:]] for row in rows]
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def _label(group: Group, groups: Sequence[Group]) -> str:
    """Returns the system's name, and the machine and options that distinguish this row from its other rows."""
    commands = [without_seed(other[0].command, other[0].seed).split() for other in groups]
    own = without_seed(group[0].command, group[0].seed).split()
    options = [option for option in own if not all(option in command for command in commands)]
    machine = [f"cores: {machine_of(group[0])}"] if len({machine_of(other[0]) for other in groups}) > 1 else []
    return ", ".join([SYSTEMS[group[0].system], *machine, *[" ".join(options)] * bool(options)]).replace("=", " ")


def groups_of(records: Sequence[Record]) -> list[Group]:
    """Returns the seeds of each command on each kind of machine."""

    def key(record: Record) -> tuple[str, int, str, str]:
        return record.system, record.machine["cores"], machine_of(record), without_seed(record.command, record.seed)

    return [list(group) for _, group in groupby(sorted(records, key=key), key)]


def _seconds(task: LearningTask, group: Group) -> str:
    """Returns the median and range of all seeds; if time is the result, also the median for each processor."""
    seconds = [record.seconds for record in group]
    ends = f" ({min(seconds):,.1f} to {max(seconds):,.1f})" if len(seconds) > 1 else ""
    by_processor: dict[str, list[float]] = {}
    for record in group:
        by_processor.setdefault(record.machine["cpu"], []).append(record.seconds)
    medians = ", ".join(
        f"{name}: {statistics.median(values):,.1f} ({len(values)})" for name, values in sorted(by_processor.items())
    )
    shown = f"; {medians}" if task.bar is not None and len(by_processor) > 1 else ""
    return f"{statistics.median(seconds):,.1f}{ends}{shown}"


def _scores(group: Group) -> str:
    """Returns the medians over the seeds of the mean scores: of the final policies if all have one, and of the best."""
    finals = [record.final_score.mean for record in group if record.final_score is not None]
    if TASKS[group[0].task].final_only:
        return f"{statistics.median(finals):.1f}"
    best = f"best {statistics.median(record.score.mean for record in group):.1f}"
    return f"{statistics.median(finals):.1f}; {best}" if len(finals) == len(group) else best


def _provenance(records: Sequence[Record]) -> list[str]:
    """Returns what the reader can unfold: dormant units, the commands of the runs, number of games, and commits."""
    groups = groups_of(records)
    commands = {without_seed(group[0].command, group[0].seed): SYSTEMS[group[0].system] for group in groups}
    games = " or ".join(map(str, sorted({record.score.episodes for record in records})))
    dormant = render_dormant(records)
    return [
        f"<details><summary>Commands and commits{', dormant units' * bool(dormant)}</summary>",
        "",
        *(f"- {system}: `{command}`" for command, system in commands.items()),
        "",
        f"The score of a seed is the mean of {games} games. Commits: {', '.join(_commits(records))}.",
        "",
        *(dormant, "") * bool(dormant),
        "</details>",
    ]


def _commits(records: Sequence[Record]) -> list[str]:
    return sorted({(record.commit or "unknown")[:10] + " with changes" * bool(record.dirty) for record in records})
