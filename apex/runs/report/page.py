"""Builds the page of `apex report` from `page.html`: one HTML file that loads no other files and contacts no hosts."""

import shlex
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from apex.config import dump_toml
from apex.metric_tags import ACTOR_METRIC, EVALUATOR_METRIC, SUCCESS
from apex.runs.folder import RunFolder
from apex.runs.history import ACTOR_SCORE, EVALUATION, RunHistory
from apex.runs.plots.aggregate import Axis
from apex.runs.plots.figure import FAINT, MAIN, PANELS, WIDE, Line, chart
from apex.runs.report import facts
from apex.runs.report.video import EmbeddedVideo
from apex.runs.scores import find_scores
from apex.runtime.text import duration, number
from apex.sentences import describe_outcome, plural

CURVES: tuple[tuple[str, str, str, Axis], ...] = (  # role, tag, title, axis
    ("learner", "learner/loss", "Loss", "steps"),
    ("learner", "learner/mean_q", "Mean Q-value of the batches", "steps"),
    ("learner", "learner/updates_per_second", "Updates per second", "seconds"),
    ("replay", "replay/inserts_per_second", "Stored transitions per second", "seconds"),
    ("replay", "replay/size", "Transitions in the replay memory", "seconds"),
    ("learner", "learner/policy_lag", "Policy lag, in updates", "seconds"),
)
FIGURES = (  # name, role, tag, format
    ("samples per insert", "replay", "replay/samples_per_insert", "{:.2f}"),
    ("transitions in the replay memory", "replay", "replay/size", "{:,.0f}"),
    ("policy lag, updates", "learner", "learner/policy_lag", "{:,.0f}"),
    ("games of all actors", "actor", "actors/episodes", "{:,.0f}"),
)


class Chart(NamedTuple):
    """A titled SVG element."""

    title: str
    svg: str


def build_page(run: RunFolder, video: EmbeddedVideo | str) -> str:
    """Returns the whole page. `video`: the video, or the reason why there is none ("" if none was requested)."""
    history, state = RunHistory(run), facts.find_state(run)
    scores, actor_scores = find_scores(history), history.series(*ACTOR_SCORE).values
    templates = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_printable, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {"duration": duration, "number": number, "plural": plural, "shell": shlex.join}
    return templates.from_string(files("apex.runs.report").joinpath("page.html").read_text("utf-8")).render(
        run=run,
        where=shlex.quote(str(run.path)),
        manifest=run.manifest,
        git=run.manifest["git"],
        versions=[f"{name} {version}" for name, version in run.manifest["versions"].items() if version],
        state=state.word,
        outcome=describe_outcome(state.end, running=state.word == "running"),
        best_and_last=scores or (),
        actor_score=float(actor_scores[-1]) if len(actor_scores) else None,
        seconds=history.seconds,
        totals=facts.find_totals(history),
        figures=_figures(history),
        scores=_score_charts(run, history),
        video=video if isinstance(video, EmbeddedVideo) else None,
        no_video=video if isinstance(video, str) else "",
        curves=_training_charts(history),
        limits=facts.find_limits(history),
        changes=facts.find_changes(run.config),
        settings=dump_toml(run.config),
        typed_command=facts.typed_command(run),
        is_from_python=facts.is_from_python(run),
    )


def _figures(history: RunHistory) -> list[tuple[str, str]]:
    """Returns names and last values of the environment's metrics and of FIGURES; omits what was never recorded."""
    figures = (*_metrics(history), *FIGURES)
    series = [(name, form, history.series(role, tag).values) for name, role, tag, form in figures]
    return [(name, form.format(values[-1])) for name, form, values in series if len(values)]


def _metrics(history: RunHistory) -> list[tuple[str, str, str, str]]:
    """Returns the environment's metrics like FIGURES: those of evaluations, or of the actors if there are none."""
    for role, prefix, of in (("evaluator", EVALUATOR_METRIC, "evaluations"), ("actor", ACTOR_METRIC, "all actors")):
        names = sorted(tag.removeprefix(prefix) for tag in history.tags(role) if tag.startswith(prefix))
        if names:
            form = {SUCCESS: "{:.1%}"}
            return [(f"{name}, {of}", role, prefix + name, form.get(name, "{:,.4g}")) for name in names]
    return []


def _score_charts(run: RunFolder, history: RunHistory) -> list[Chart]:
    series = ((history.series(*ACTOR_SCORE), FAINT, 1.0), (history.series(*EVALUATION), MAIN, 1.8))
    lines = [Line([each], color, width) for each, color, width in series if len(each.values)]
    titles = zip(PANELS, ("Score against steps", "Score against wall clock"), strict=True) if lines else ()
    threshold = run.config.run.stop_score
    return [Chart(title, chart(lines, axis, title, width=WIDE, threshold=threshold)) for axis, title in titles]


def _training_charts(history: RunHistory) -> list[Chart]:
    metrics: list[tuple[str, str, str, Axis]] = [(role, tag, name, "steps") for name, role, tag, _ in _metrics(history)]
    curves = [(history.series(role, tag), title, axis) for role, tag, title, axis in (*metrics, *CURVES)]
    return [Chart(title, chart([Line([c], width=1.2)], axis, title)) for c, title, axis in curves if len(c.values)]


def _printable(value: Any) -> Any:
    """Replaces each unprintable character by a white square."""
    if not isinstance(value, str) or value.replace("\n", "").isprintable():
        return value
    return "".join(c if c.isprintable() or c == "\n" else "\N{WHITE SQUARE}" for c in value)
