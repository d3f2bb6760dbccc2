"""Builds the page of `apex report` from `page.html`: one HTML file that loads no other files and contacts no hosts."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from apex.config import dump_toml
from apex.runs.folder import RunFolder
from apex.runs.history import ACTOR_SCORE, EVALUATION, RunHistory
from apex.runs.plots.aggregate import Axis
from apex.runs.plots.figure import FAINT, MAIN, PANELS, WIDE, Line, chart
from apex.runs.report import facts
from apex.runs.report.video import EmbeddedVideo
from apex.runtime.text import duration, number
from apex.sentences import describe_outcome, plural

CURVES: tuple[tuple[str, str, str, Axis], ...] = (  # role, tag, title, axis
    ("learner", "learner/loss", "Loss", "steps"),
    ("learner", "learner/mean_q", "Mean Q-value of the batches", "steps"),
    ("learner", "learner/updates_per_second", "Updates per second", "seconds"),
    ("replay", "replay/inserts_per_second", "Stored steps per second", "seconds"),
    ("replay", "replay/size", "Transitions in the replay memory", "seconds"),
    ("learner", "learner/policy_lag", "Policy lag, in updates", "seconds"),
)


FIGURES = (  # name, role, tag, format
    ("samples per insert", "replay", "replay/samples_per_insert", "{:.2f}"),
    ("transitions in the replay memory", "replay", "replay/size", "{:,.0f}"),
    ("policy lag, updates", "learner", "learner/policy_lag", "{:,.0f}"),
    ("games of all actors", "actor", "actors/episodes", "{:,.0f}"),
)


class Card(NamedTuple):
    """A number that the page shows in large type, with its name and a note."""

    value: str
    name: str
    note: str


class Chart(NamedTuple):
    """A titled SVG element."""

    title: str
    svg: str


def build_page(run: RunFolder, video: EmbeddedVideo | str) -> str:
    """Returns the whole page. `video`: the video, or the reason why there is none ("" if none was requested)."""
    history, state = RunHistory(run), facts.find_state(run)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_printable, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(files("apex.runs.report").joinpath("page.html").read_text("utf-8"))
    return template.render(
        run=run,
        git=run.manifest["git"],
        state=state.word,
        outcome=describe_outcome(state.end, running=state.word == "running"),
        cards=_cards(run, history),
        is_evaluated=bool(len(history.series(*EVALUATION).values)),
        has_actor_scores=bool(len(history.series(*ACTOR_SCORE).values)),
        scores=_score_charts(run, history),
        video=video if isinstance(video, EmbeddedVideo) else None,
        no_video=video if isinstance(video, str) else "",
        curves=_training_charts(history),
        figures=_figures(history),
        limits=facts.find_limits(history),
        changes=facts.find_changes(run.config),
        settings=dump_toml(run.config),
        command=facts.typed_command(run),
        is_from_python=facts.is_from_python(run),
        next_commands=facts.next_commands(run),
        machine=facts.describe_machine(run),
    )


def _cards(run: RunFolder, history: RunHistory) -> list[Card]:
    scores, last = facts.find_scores(history), history.series(*ACTOR_SCORE).values
    if scores is not None:
        cards = [
            Card(f"{score.mean:.4g}", f"{which} score", _origin_of(score))
            for which, score in zip(("best", "last"), scores, strict=True)
        ]
    elif len(last):
        note = f"games of actor {run.config.actor.num_actors - 1}: no evaluation was finished"
        cards = [Card(f"{last[-1]:.4g}", "last score", note)]
    else:
        cards = [Card("-", "score", "no game was finished")]
    cards.append(Card(duration(history.seconds), "wall clock", ""))
    for total in facts.find_totals(history):
        rate = "" if total.per_second is None else f"{total.per_second:,.1f} per second"
        cards.append(Card(f"{total.value:,.0f}", total.name, rate))
    return cards


def _figures(history: RunHistory) -> list[facts.Fact]:
    """Returns totals, rates and the last values of FIGURES; omits what was never recorded."""
    rows = [facts.Fact("wall clock", duration(history.seconds))]
    for total in facts.find_totals(history):
        rows.append(facts.Fact(total.name, f"{total.value:,.0f}"))
        if total.per_second is not None:
            rows.append(facts.Fact(f"{total.name} per second", f"{total.per_second:,.1f}"))
    for name, role, tag, form in FIGURES:
        values = history.series(role, tag).values
        if len(values):
            rows.append(facts.Fact(name, form.format(values[-1])))
    return rows


def _origin_of(score: facts.Score) -> str:
    interval = ""
    if score.interval is not None:
        low, high = map(number, score.interval)
        interval = f" (95 %: {low} ... {high})"
    games = "full games" if score.num_games is None else plural(score.num_games, "game")
    return f"mean of {games}{interval}, at {number(score.steps)} steps, {duration(score.seconds)}"


def _score_charts(run: RunFolder, history: RunHistory) -> list[Chart]:
    series = ((history.series(*ACTOR_SCORE), FAINT, 1.0), (history.series(*EVALUATION), MAIN, 1.8))
    charts = []
    for axis, title in zip(PANELS, ("Score against steps", "Score against wall clock"), strict=True):
        lines = [Line([each], color, width) for each, color, width in series if len(each.values)]
        if lines:
            charts.append(Chart(title, chart(lines, axis, title, width=WIDE, threshold=run.config.run.stop_score)))
    return charts


def _training_charts(history: RunHistory) -> list[Chart]:
    charts = []
    for role, tag, title, axis in CURVES:
        series = history.series(role, tag)
        if len(series.values):
            charts.append(Chart(title, chart([Line([series], width=1.2)], axis, title)))
    return charts


def _printable(value: Any) -> Any:
    """Replaces each unprintable character by a white square."""
    if not isinstance(value, str) or value.replace("\n", "").isprintable():
        return value
    return "".join(c if c.isprintable() or c == "\n" else "\N{WHITE SQUARE}" for c in value)
