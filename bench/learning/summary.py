"""The table of all tasks: our result and that of the strongest peer on the same processors."""

import statistics
from collections.abc import Sequence

from bench.learning.comparison import have_finals, is_peer, mean_score, peers_of
from bench.learning.records import Record
from bench.learning.tasks import SYSTEMS, TASKS, LearningTask

HEAD = ("| task | result | Ape-X over ZeroMQ | strongest peer | ratio |", "|---|---|---|---|---|")


def render_summary(records: Sequence[Record]) -> list[str]:
    """Returns the lines of the table: median seconds where time is the result, otherwise mean scores.

    Final policies stand first if both systems have scores of them; if not, best policies are compared.
    """
    lines = []
    for name, task in TASKS.items():
        own = [record for record in records if record.task == name]
        ours = [record for record in own if record.system == "apex"]
        if ours and task.num_seeds:
            peers = [record for record in own if is_peer(record.system)]
            lines.append(f"| {' | '.join(_cells(task, ours, peers))} |")
    return [*HEAD, *lines]


def _cells(task: LearningTask, ours: Sequence[Record], peers: Sequence[Record]) -> list[str]:
    what = f"score after {task.minutes:g} minutes" if task.bar is None else f"time to score {task.bar:g}"
    theirs = _strongest(task, peers)
    compared = [record for record in ours if peers_of(record, theirs)]
    if not compared:
        most = statistics.mode(record.machine["cpu"] for record in ours)
        shown = [record for record in ours if record.machine["cpu"] == most]
        return [task.name, what, _result(task, shown, final=have_finals(shown)), "not measured", ""]
    theirs = [record for record in theirs if peers_of(record, ours)]
    final = have_finals([*compared, *theirs])
    return [
        task.name,
        what,
        _result(task, compared, final=final),
        f"{_result(task, theirs, final=final)}, {SYSTEMS[theirs[0].system]}",
        _ratio(task, compared, theirs, final=final),
    ]


def _strongest(task: LearningTask, peers: Sequence[Record]) -> list[Record]:
    """Returns the records of the peer with the highest mean score; a peer that reached the score is above others."""
    systems = {record.system: [other for other in peers if other.system == record.system] for record in peers}
    final = have_finals(peers)
    return max(systems.values(), key=lambda own: (_is_solved(task, own), mean_score(own, final=final)), default=[])


def _is_solved(task: LearningTask, records: Sequence[Record]) -> bool:
    return task.bar is not None and all(record.score.mean >= task.bar for record in records)


def _seconds(records: Sequence[Record]) -> float:
    return statistics.median(record.seconds for record in records)


def _result(task: LearningTask, records: Sequence[Record], *, final: bool) -> str:
    seeds = f"({len(records)} {'seed' if len(records) == 1 else 'seeds'})"
    if _is_solved(task, records):
        return f"{_seconds(records):,.1f} s {seeds}"
    best = f"{mean_score(records, final=False):,.1f}"
    if task.bar is not None:
        return f"{best} after {_seconds(records) / 60:.0f} minutes {seeds}"
    return f"{mean_score(records, final=True):,.1f}; best {best} {seeds}" if final else f"best {best} {seeds}"


def _ratio(task: LearningTask, ours: Sequence[Record], theirs: Sequence[Record], *, final: bool) -> str:
    if _is_solved(task, ours) and _is_solved(task, theirs):
        return f"{_seconds(theirs) / _seconds(ours):.1f} times as fast"
    scores = mean_score(ours, final=final), mean_score(theirs, final=final)
    if task.bar is None and min(scores) > 0:
        return f"{scores[0] / scores[1]:.1f} times the score"
    return "-"
