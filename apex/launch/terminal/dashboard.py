"""The picture of a run: a status object laid out in rows, for any width and height. Pure: nothing here is printed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType

from apex.launch.terminal.layout import RowLayout
from apex.runs.members import Status
from apex.runtime.text import clean, duration, known, number, size

RATE_WIDTH = 20  # columns of a program's rate in a wide terminal
MAX_ROLES = 8  # rows of programs
MAX_SCORES = 512  # points kept of a curve; then every second one goes
MAX_NOTES = 3
SILENT_SECONDS = 5.0  # after which silence is shown in red
PHASE_STYLES = {"training": "bold green", "finishing": "bold cyan", "finished": "bold cyan"}


@dataclass(slots=True)
class History:
    """What the picture shows beside the newest status."""

    footer: str = ""
    silent_seconds: float = 0.0  # since the learner last answered
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_NOTES))
    actor_scores: list[float] = field(default_factory=list)  # of the highest id, at each change
    evaluator_scores: list[float] = field(default_factory=list)  # one per evaluation
    _evaluation: tuple[Any, Any] = (None, None)

    def add(self, status: Status) -> None:
        """Notes the scores of a status if they are new."""
        score = known(_table(status, "actors").get("score"))
        if score is not None and self.actor_scores[-1:] != [score]:
            self.actor_scores = _thin([*self.actor_scores, score])
        evaluator = _table(status, "evaluator")
        score, evaluation = known(evaluator.get("score")), (evaluator.get("updates"), evaluator.get("score"))
        if score is not None and evaluation != self._evaluation:
            self._evaluation = evaluation
            self.evaluator_scores = _thin([*self.evaluator_scores, score])


def _thin(values: list[float]) -> list[float]:
    return values if len(values) <= MAX_SCORES else values[::2]


def plain_line(status: Status) -> str:
    """The status in one line, of what is known."""
    replay, actors, evaluator = (_table(status, name) for name in ("replay", "actors", "evaluator"))
    limit = _table(status, "limited_by")
    parts = [
        f"{duration(status.get('elapsed_seconds'))} {_phase(status)}",
        f"steps {number(status.get('steps'))} ({number(status.get('steps_per_second'))}/s)",
        f"updates {number(status.get('updates'))} ({number(status.get('updates_per_second'))}/s)",
        f"replay {number(replay.get('size'))}/{number(replay.get('capacity'))}",
    ]
    if actors.get("score") is not None:
        parts.append(f"score {number(actors['score'])}")
    if evaluator.get("score") is not None:
        parts.append(f"evaluator {number(evaluator['score'])}, best {number(evaluator.get('best'))}")
    if limit:
        parts.append(f"limited by {limit.get('part')}: {limit.get('why')}; turn {limit.get('setting')}")
    return clean(" | ".join(parts))


# --- the picture ------------------------------------------------------------------------------------------------------


def render(
    status: Status | None, width: int, height: int, history: History, *, ascii_only: bool = False
) -> RenderableType:
    """The picture: at most `height` rows of at most `width` columns, whatever the status lacks."""
    painter = RowLayout(max(1, width), ascii_only)
    if status is None:
        painter.flow("apex", ["starting: waiting for the learner"], rank=0, style="bold yellow")
    else:
        _paint(painter, status, history)
    if history.notes:
        painter.blank()
    for sentence in history.notes:
        painter.wrap("!", sentence, rank=3, style="yellow")
    if history.footer:
        painter.blank()
        painter.wrap("", history.footer, rank=5, style="dim")
    return painter.picture(height)


def _paint(painter: RowLayout, status: Status, history: History) -> None:
    _paint_head(painter, status, history)
    painter.blank()
    _paint_scores(painter, status, history)
    painter.blank()
    _paint_figures(painter, status)
    painter.blank()
    _paint_roles(painter, status)
    limit = _table(status, "limited_by")
    if limit:
        painter.blank()
        painter.wrap("limited by", f"{limit.get('part')}: {limit.get('why')}", rank=2, style="bold")
        painter.wrap("turn", str(limit.get("setting")), rank=2, style="bold cyan")


def _paint_head(painter: RowLayout, status: Status, history: History) -> None:
    names = [str(name) for name in (status.get("run"), status.get("environment")) if name]
    painter.flow("apex", names, rank=1, style="bold")
    items = [_phase(status)]
    if history.silent_seconds > SILENT_SECONDS:
        items.append(f"no answer for {history.silent_seconds:.0f} s")
    items.append(duration(status.get("elapsed_seconds")))
    remaining = seconds_to_go(status)
    if remaining is not None:
        what = "to training" if status.get("phase") == "filling replay" else "to go"
        items.append(f"{duration(remaining)} {what}")
    style = PHASE_STYLES.get(str(status.get("phase")), "bold yellow")
    painter.flow("phase", items, rank=0, style=style if history.silent_seconds <= SILENT_SECONDS else "bold red")


def _paint_scores(painter: RowLayout, status: Status, history: History) -> None:
    actors, evaluator, limits = (_table(status, name) for name in ("actors", "evaluator", "limits"))
    items = [number(actors.get("score")), f"actor {number(actors.get('highest_id'))}"]
    if actors.get("highest_epsilon") is not None:
        items.append(f"epsilon {number(actors['highest_epsilon'])}")
    painter.flow("score", [*items, painter.sparkline(history.actor_scores)], rank=1, style="bold")
    items = [number(evaluator.get("score")), f"best {number(evaluator.get('best'))}"]
    if limits.get("score") is not None:
        items.append(f"goal {number(limits['score'])}")
    painter.flow("evaluator", [*items, painter.sparkline(history.evaluator_scores)], rank=1, style="bold")
    leased = f"{number(actors.get('leased'))} of {number(actors.get('configured'))}"
    items = [leased, f"mean score {number(actors.get('mean_score'))}", f"{number(actors.get('episodes'))} episodes"]
    painter.flow("actors", items, rank=5)


def _paint_figures(painter: RowLayout, status: Status) -> None:
    replay, learner = _table(status, "replay"), _table(status, "learner")
    painter.flow(
        "steps", [number(status.get("steps")), f"{number(status.get('steps_per_second'))}/s"], rank=2, style="bold"
    )
    items = [f"{number(status.get('updates_per_second'))}/s", f"policy lag {number(status.get('policy_lag'))}"]
    painter.flow("updates", [number(status.get("updates")), *items], rank=3)
    items = [f"{number(replay.get('size'))} of {number(replay.get('capacity'))}"]
    if replay.get("bytes") is not None:
        items.append(f"{size(replay['bytes'])} of {size(replay.get('max_bytes'))}")
    painter.flow("replay", [painter.bar(replay.get("size"), replay.get("capacity")), *items], rank=3)
    items = [f"{number(replay.get('samples_per_insert'))} per insert"]
    items.append(f"stale {number(replay.get('stale_priorities'))}")
    painter.flow("samples", [f"{number(status.get('samples_per_second'))}/s", *items], rank=4)
    names = {"loss": "loss", "mean_q": "Q", "td_error": "TD error", "gradient_norm": "gradient norm"}
    items = [f"{name} {number(learner[key])}" for key, name in names.items() if learner.get(key) is not None]
    painter.flow("learner", items, rank=6)


def _paint_roles(painter: RowLayout, status: Status) -> None:
    rows = [row for row in status.get("roles") or [] if isinstance(row, dict)]
    several_hosts = len({row.get("host") for row in rows}) > 1
    several_shards = any(row.get("shard") for row in rows)
    for row in rows[:MAX_ROLES]:
        role = str(row.get("role"))
        if several_shards and row.get("shard") is not None:
            role = f"{role} {row['shard']}"
        if several_hosts and row.get("host"):
            role = f"{role} {row['host']}"
        seen, waiting = row.get("last_seen_seconds"), row.get("waiting")
        rate, silent = str(row.get("rate") or "connected"), (known(seen) or 0) > SILENT_SECONDS
        rate = f"silent for {known(seen):.0f} s" if silent else rate  # What it did before is not what it does.
        items = [rate.ljust(RATE_WIDTH if painter.wide else 0)]
        items += [f"waits {waiting}"] if waiting else []
        style = "red" if silent else "yellow" if waiting else ""
        painter.flow(role, items, rank=4 if style else 5, style=style)
    more = max(0, len(rows) - MAX_ROLES) + int(known(status.get("more_roles")) or 0)
    if more:
        painter.flow("", [f"and {more} more"], rank=5)


def seconds_to_go(status: Status) -> float | None:
    """Until training begins, or until the first limit is reached at the present rate; None if nobody knows."""
    replay, limits = _table(status, "replay"), _table(status, "limits")
    if status.get("phase") == "filling replay":
        return _seconds(replay.get("min_size"), replay.get("size"), replay.get("inserts_per_second"))
    if status.get("phase") != "training":
        return None
    candidates = [
        _seconds(limits.get("steps"), status.get("steps"), status.get("steps_per_second")),
        _seconds(limits.get("updates"), status.get("updates"), status.get("updates_per_second")),
        _seconds(60 * (known(limits.get("minutes")) or 0), status.get("elapsed_seconds"), 1.0),
    ]
    return min((seconds for seconds in candidates if seconds is not None), default=None)


def _seconds(goal: Any, now: Any, rate: Any) -> float | None:
    goal, now, rate = known(goal), known(now), known(rate)
    return max(0.0, (goal - now) / rate) if goal and now is not None and rate else None


def _phase(status: Status) -> str:
    phase = str(status.get("phase") or "starting")
    return f"{phase}: {status['reason']}" if status.get("reason") else phase


def _table(status: Status, name: str) -> Status:
    value = status.get(name)
    return value if isinstance(value, dict) else {}
