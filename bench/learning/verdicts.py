"""The goal of a task in words, and whether the seeds of a system reached it."""

from collections.abc import Sequence

from bench.learning.comparison import have_finals, is_above, is_compared, is_peer, mean_score, peers_of
from bench.learning.records import Record
from bench.learning.tasks import LearningTask

SAME_TIME = 0.95  # The other system must have had this share of our seconds for a comparison after equal time.

Group = list[Record]  # the seeds of one command on one kind of machine


def machine_of(record: Record) -> str:
    """Returns cores and GPUs, which must be equal in a comparison."""
    return " + ".join([str(record.machine["cores"]), *record.machine["gpus"]])


def goal(task: LearningTask) -> str:
    """Returns the goal as a sentence, or what the runs show without one."""
    if task.is_ablation:
        return "No goal: every variant makes as many updates, and the score is that of the final policy."
    if task.final_only:
        return "A game of the first table: the score is that of the final policy."
    if not task.num_seeds:
        return f"No goal: a curve of {task.minutes:g} minutes."
    if task.bar is None:
        what = "every seed scores higher than every seed of the peers on the same processor"
        return f"Goal: after {task.minutes:g} minutes, {what} (final policies, where both were scored)."
    return f"Goal: every seed scores at least {task.bar:g} within {task.limit_seconds:g} s."


def verdict(task: LearningTask, group: Group, groups: Sequence[Group]) -> str:
    """Returns whether a system's seeds reached the goal; groups: those of all systems."""
    if task.bar is None:
        return _comparison(task, group, groups)
    met = sum(bool(task.reached(record.score.mean, record.seconds)) for record in group)
    if met < len(group):
        return f"no: {met} of {len(group)} seeds"
    return "yes" if met >= task.num_seeds else f"yes, with {met} of {task.num_seeds} seeds"


def _comparison(task: LearningTask, group: Group, groups: Sequence[Group]) -> str:
    """Compares each of our seeds with all seeds of the others that ran as long on the same kind of machine."""
    if not is_compared(group[0].system) or not task.num_seeds:
        return ""
    others = [
        other
        for other in groups
        if is_peer(other[0].system)
        and machine_of(other[0]) == machine_of(group[0])
        and min(record.seconds for record in other) >= SAME_TIME * max(record.seconds for record in group)
    ]
    if not any(peers_of(record, other) for record in group for other in others):
        return "not compared yet"
    met = sum(all(is_above(record, other) for other in others) for record in group)
    if met < len(group):
        return f"no: {met} of {len(group)} seeds"
    final = have_finals([record for other in others for record in other])
    strongest = max(others, key=lambda other: mean_score(other, final=final))
    # Seeds with a counterpart on the same processor. A peer that is weaker than another needs no further seeds.
    compared = sum(bool(peers_of(record, strongest)) for record in group)
    peers, needed = sum(bool(peers_of(record, group)) for record in strongest), task.peer_seeds or task.num_seeds
    if compared < task.num_seeds:
        return f"yes, with {compared} of {task.num_seeds} seeds"
    return "yes" if peers >= needed else f"yes, with {peers} of {needed} seeds of the peer"
