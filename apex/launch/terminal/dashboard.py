"""The dashboard of a run: lays a status object out in rows, for any width and height. Prints nothing."""

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import RenderableType

from apex.facts import Phase
from apex.launch.terminal.layout import RowLayout
from apex.runtime.text import MAX_COLUMNS, duration, number
from apex.sentences import PHASES, advise, describe_bottleneck, describe_end, describe_wait
from apex.transport.messages.run_status import RoleRow, RunStatus
from apex.transport.messages.status import Resources
from apex.transport.timing import pace_of
from apexreplay.process.text import clean, size

RATE_WIDTH = 20  # columns for a program's rate in a wide terminal
MAX_ROLES = 8  # maximum rows of programs
MAX_SCORES = 512  # maximum points of a curve; beyond this, every second point is dropped
MAX_NOTES = 3
PLAIN_COLUMNS = 160  # maximum width of a plain line
SILENT_SECONDS = 5.0  # a program that has been silent for longer is shown in red
EVALUATING: Phase = "evaluating_final_policy"  # phase of a run whose training has ended
ENDING: tuple[Phase, ...] = ("finishing", EVALUATING, "finished")  # phases of a run for whose end there is a reason
PHASE_STYLES: dict[str, str] = {"training": "bold green"} | dict.fromkeys(ENDING, "bold cyan")


class Note(NamedTuple):
    """A message below the figures."""

    key: Hashable  # A new note replaces the note with the same key.
    text: str
    expires_at: float = math.inf  # time at which the note is removed, in seconds of the monitor's clock


@dataclass(slots=True)
class History:
    """What the dashboard shows in addition to the newest status."""

    footer: tuple[str, ...] = ()
    silent_seconds: float = 0.0  # since the learner last answered
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=MAX_NOTES))
    actor_scores: list[float] = field(default_factory=list)  # scores of the actor with the highest id, one per change
    evaluator_scores: list[float] = field(default_factory=list)  # one per evaluation
    _evaluation: tuple[Any, Any] = (None, None)

    def add(self, status: RunStatus) -> None:
        """Appends the scores of a status to the curves if they are new."""
        score, evaluator = status.actors.score, status.evaluator
        if score is not None and self.actor_scores[-1:] != [score]:
            self.actor_scores = _thin([*self.actor_scores, score])
        evaluation = evaluator.updates, evaluator.score
        if evaluator.score is not None and evaluation != self._evaluation:
            self._evaluation = evaluation
            self.evaluator_scores = _thin([*self.evaluator_scores, evaluator.score])


def _thin(values: list[float]) -> list[float]:
    return values if len(values) <= MAX_SCORES else values[::2]


def plain_line(status: RunStatus, silent_seconds: float = 0.0) -> str:
    """Returns the known parts of the status in one line of at most PLAIN_COLUMNS characters."""
    replay, actors, evaluator = status.replay, status.actors, status.evaluator
    parts = [
        ", ".join([f"{duration(status.elapsed_seconds)} {_phase(status)}", *_remaining(status)]),
        *_silence(silent_seconds),
        f"steps {number(status.steps)} ({number(status.steps_per_second)}/s)",
        f"updates {number(status.updates)} ({number(status.updates_per_second)}/s)",
    ]
    if actors.score is not None:
        parts.append(f"score {number(actors.score)}")
    if evaluator.score is not None:
        parts.append(f"evaluator {number(evaluator.score)}, best {number(evaluator.best)}")
    if status.limited_by is not None:
        parts.append(f"bottleneck: {status.limited_by.part}")
    parts.append(f"replay {number(replay.size)}/{number(replay.capacity)}")
    while len(line := clean(" | ".join(parts))) > PLAIN_COLUMNS and len(parts) > 1:
        parts.pop()  # The last parts are the least important ones.
    return line[:PLAIN_COLUMNS]


# --- the dashboard ----------------------------------------------------------------------------------------------------


def render(
    status: RunStatus | None, width: int, height: int, history: History, *, ascii_only: bool = False
) -> RenderableType:
    """Returns the dashboard: at most `height` rows of at most `width` and `MAX_COLUMNS` columns.

    Any part of the status may be missing.
    """
    painter = RowLayout(max(1, min(width, MAX_COLUMNS)), ascii_only)
    if status is None:
        painter.flow("apex", ["starting: waiting for the learner"], rank=0, style="bold yellow")
    else:
        _paint(painter, status, history)
    if history.notes:
        painter.blank()
    for note in history.notes:
        painter.wrap("!", note.text, rank=3, style="yellow")
    if history.footer:
        painter.blank()
        painter.flow("", history.footer, rank=5)
    return painter.picture(height)


def _paint(painter: RowLayout, status: RunStatus, history: History) -> None:
    _paint_head(painter, status, history)
    painter.blank()
    _paint_scores(painter, status, history)
    painter.blank()
    _paint_figures(painter, status)
    painter.blank()
    _paint_roles(painter, status)
    limit = status.limited_by
    if limit is not None:
        painter.blank()
        painter.wrap("bottleneck", describe_bottleneck(limit), rank=2, style="bold")
        painter.wrap("try", advise(limit), rank=2, style="bold cyan")


def _paint_head(painter: RowLayout, status: RunStatus, history: History) -> None:
    painter.flow("apex", [status.run, status.environment], rank=1, style="bold")
    items = [_phase(status), *_silence(history.silent_seconds), duration(status.elapsed_seconds), *_remaining(status)]
    style = PHASE_STYLES.get(status.phase, "bold yellow")
    painter.flow("phase", items, rank=0, style=style if history.silent_seconds <= SILENT_SECONDS else "bold red")


def _paint_scores(painter: RowLayout, status: RunStatus, history: History) -> None:
    actors, evaluator, goal = status.actors, status.evaluator, status.limits.score
    items = [
        number(actors.score),
        f"actor {actors.highest_id}",
        f"{actors.exploration} {actors.highest_exploration:.3g}",
    ]
    painter.flow("score", [*items, painter.sparkline(history.actor_scores)], rank=1, style="bold")
    items = [number(evaluator.score), f"best {number(evaluator.best)}"]
    if goal is not None:
        items.append(f"goal {number(goal)}")
    painter.flow("evaluator", [*items, painter.sparkline(history.evaluator_scores)], rank=1, style="bold")
    leased = f"{number(actors.leased)} of {number(actors.configured)}"
    items = [leased, f"mean score {number(actors.mean_score)}", f"{number(actors.episodes)} episodes"]
    painter.flow("actors", items, rank=5)


def _paint_figures(painter: RowLayout, status: RunStatus) -> None:
    replay, learner = status.replay, status.learner
    painter.flow("steps", [number(status.steps), f"{number(status.steps_per_second)}/s"], rank=2, style="bold")
    items = [f"{number(status.updates_per_second)}/s", f"policy lag {number(status.policy_lag)} updates"]
    painter.flow("updates", [number(status.updates), *items], rank=3)
    items = [f"{number(replay.size)} of {number(replay.capacity)}"]
    if replay.bytes is not None:
        items.append(f"{size(replay.bytes)} of {size(replay.max_bytes)}")
    painter.flow("replay", [painter.bar(replay.size, replay.capacity), *items], rank=3)
    items = [f"{number(replay.samples_per_insert)} per insert", f"{number(replay.stale_priorities)} stale priorities"]
    painter.flow("samples", [f"{number(status.samples_per_second)}/s", *items], rank=4)
    figures = {
        "loss": learner.loss,
        "Q": learner.mean_q,
        "TD error": learner.td_error,
        "gradient norm": learner.gradient_norm,
    }
    items = [f"{name} {number(figure)}" for name, figure in figures.items() if figure is not None]
    painter.flow("learner", items, rank=6)
    more = [_describe(learner.resources)] if learner.resources is not None else []
    more += [f"waits {describe_wait(learner.waiting)}"] if learner.waiting is not None else []
    painter.flow("" if items else "learner", more, rank=6)
    if learner.unusable_transitions:
        painter.flow("unusable", [f"{number(learner.unusable_transitions)} transitions"], rank=3, style="yellow")


def _paint_roles(painter: RowLayout, status: RunStatus) -> None:
    rows = status.roles
    several_hosts = len({row.host for row in rows}) > 1
    several_shards = any(row.shard for row in rows)
    limit = SILENT_SECONDS * pace_of(len(rows) + status.more_roles)
    for row in rows[:MAX_ROLES]:
        role = row.role
        if several_shards and row.shard is not None:
            role = f"{role} {row.shard}"
        if several_hosts:
            role = f"{role} {row.host}"
        silent = row.last_seen_seconds > limit
        rate = f"silent for {row.last_seen_seconds:.0f} s" if silent else _rate(row)
        items = [rate.ljust(RATE_WIDTH if painter.wide else 0)]
        items += [_describe(row.resources)] if row.resources is not None and not silent else []
        items += [f"waits {describe_wait(row.waiting)}"] if row.waiting is not None else []
        style = "red" if silent else "yellow" if row.waiting else ""
        painter.flow(role, items, rank=4 if style else 5, style=style)
    more = max(0, len(rows) - MAX_ROLES) + status.more_roles
    if more:
        painter.flow("", [f"and {more} more"], rank=5)


def _rate(row: RoleRow) -> str:
    """Returns the speed of a program, for the rate that its role reports."""
    if row.steps_per_second is not None:
        return f"{number(row.steps_per_second)} steps/s"
    if row.inserts_per_second is not None:
        return f"{number(row.inserts_per_second)} in/s, {number(row.samples_per_second)} out/s"
    return "connected" if row.num_evaluations is None else f"{row.num_evaluations} done"


def _describe(resources: Resources) -> str:
    """Returns the CPU, memory and GPU use of a program as text."""
    text = f"{resources.cores:.2f} cores  {size(resources.memory_bytes)}"
    if resources.gpu_memory_bytes is not None:
        share = "" if resources.gpu_share is None else f"{resources.gpu_share:.0%} "
        text += f"  GPU {share}{size(resources.gpu_memory_bytes)}"
    return text


def seconds_to_go(status: RunStatus) -> float | None:
    """Returns the seconds until training begins, or until the first limit is reached at the present rate.

    None if that cannot be estimated.
    """
    replay, limits = status.replay, status.limits
    if status.phase == "filling_replay":
        return _seconds(replay.min_size, replay.size, replay.inserts_per_second)
    if status.phase != "training":
        return None
    candidates = [
        _seconds(limits.steps, status.steps, status.steps_per_second),
        _seconds(limits.updates, status.updates, status.updates_per_second),
        _seconds(60 * limits.minutes, status.trained_seconds, 1.0),
    ]
    return min((seconds for seconds in candidates if seconds is not None), default=None)


def _remaining(status: RunStatus) -> list[str]:
    """Returns the remaining time as text; [] if it cannot be estimated."""
    remaining, what = seconds_to_go(status), "to training" if status.phase == "filling_replay" else "to go"
    return [] if remaining is None else [f"{duration(remaining)} {what}"]


def _silence(seconds: float) -> list[str]:
    """Returns for how long the learner has not answered; [] if it answers."""
    return [f"no answer for {seconds:.0f} s"] if seconds > SILENT_SECONDS else []


def _seconds(goal: float, now: float | None, rate: float | None) -> float | None:
    return max(0.0, (goal - now) / rate) if goal and now is not None and rate else None


def _phase(status: RunStatus) -> str:
    phase, end = PHASES[status.phase], status.end
    if end is None:
        return phase
    is_cut = status.phase == "finished" and not end.is_limit  # interrupted or failed, so not finished
    return describe_end(end) if is_cut else f"{phase}: {describe_end(end)}"
