"""The page of `apex report`: one HTML file that asks nobody for anything, neither another file nor another host."""

from __future__ import annotations

import base64
from collections.abc import Iterable

from apex.config import dump_toml
from apex.runs.folder import RunFolder
from apex.runs.history import EVALUATION, RunHistory
from apex.runs.report.facts import (
    Rows,
    Score,
    actor_scores,
    describe_machine,
    find_changes,
    find_figures,
    find_limits,
    find_scores,
    find_state,
    is_from_python,
    next_commands,
    typed_command,
)
from apex.runs.report.html import Markup, join, tag
from apex.runs.report.svg_chart import WIDE, ChartLine, XAxis, chart
from apex.runs.report.video import EmbeddedVideo
from apex.runtime.text import number_text, time_text

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"  # A browser holds us to it.
CURVES: tuple[tuple[str, str, str, XAxis], ...] = (
    ("learner", "learner/loss", "Loss", "steps"),
    ("learner", "learner/mean_q", "Mean Q-value of what is sampled", "steps"),
    ("learner", "learner/updates_per_second", "Updates a second", "seconds"),
    ("replay", "replay/inserts_per_second", "Steps a second, as stored", "seconds"),
    ("replay", "replay/size", "Transitions in the replay memory", "seconds"),
    ("learner", "learner/policy_lag", "Policy lag, in updates", "seconds"),
)
STYLE = """
:root { color-scheme: light; --ink: #1f2328; --soft: #636c76; --line: #e3e6ea; --back: #f6f7f9; --blue: #0072b2;
  --orange: #d55e00; --green: #00795a }
* { box-sizing: border-box }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 48px }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 36px 0 12px }
h3 { font-size: .93rem; font-weight: 600; margin: 0 0 4px }
p { margin: .4em 0 } .soft { color: var(--soft) }
.state { display: inline-block; padding: 1px 10px; border-radius: 99px; font-size: .85rem; font-weight: 600;
  color: #fff; background: var(--soft); margin-right: 8px }
.state.finished { background: var(--green) } .state.running { background: var(--blue) }
.state.stopped { background: #9a6700 }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)) }
.big.grid { grid-template-columns: repeat(auto-fit, minmax(min(100%, 190px), 1fr)) }
.wide.grid { grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)) }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; min-width: 0 }
.value { font-size: 1.75rem; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums }
.name { font-size: .88rem; color: var(--soft) }
svg { display: block; width: 100%; height: auto; overflow: visible; font-family: inherit }
svg text { font-size: 11.5px; fill: var(--soft) } svg .at-left { text-anchor: end } svg .below { text-anchor: middle }
svg line.grid { stroke: var(--line); stroke-width: 1 }
svg .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke: var(--blue) }
svg .dot { fill: var(--blue) } svg .dot.faint { fill: #d9a37c }
svg .curve.faint { stroke: #e3b999; stroke-width: 1 } svg .curve.thin { stroke-width: 1.2 }
svg .threshold { stroke: var(--soft); stroke-width: 1.1; stroke-dasharray: 5 4 }
.key { margin-left: 18px; display: inline-block; width: 18px; height: 3px; border-radius: 2px; background: var(--blue);
  vertical-align: middle; margin-right: 6px } .key:first-child { margin-left: 0 } .key.faint { background: #e3b999 }
.film { width: fit-content; max-width: 100% }
video { display: block; width: 640px; max-width: 100%; border-radius: 8px; background: #000 }
table { border-collapse: collapse; width: 100%; font-size: .93rem }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere }
tr:last-child > * { border-bottom: 0 }
.short { white-space: nowrap } td:has(.bar) { vertical-align: middle }
th { font-weight: 500; color: var(--soft); width: 34% } thead th { font-size: .85rem; width: auto }
code, pre { font: .88rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere }
.bar { height: 8px; border-radius: 4px; background: var(--blue); min-width: 2px }
summary { cursor: pointer; font-weight: 600; padding: 2px 0 } details pre { margin-top: 10px }
footer { margin-top: 40px; font-size: .85rem; color: var(--soft) }
@media (max-width: 560px) { main { padding: 18px 12px 32px } h1 { font-size: 1.5rem } th { width: 42% }
  td, th { padding-right: 8px } td code { font-size: .76rem } }
@media print { body { background: #fff } .card { break-inside: avoid } }
"""


def build_page(run: RunFolder, video: EmbeddedVideo | str) -> str:
    """The whole page; `video` is one, or why there is none ("": none was asked for)."""
    history = RunHistory(run)
    title = f"{run.config.environment.id}, {run.name}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    body = tag(
        "main",
        _header(run),
        _summary(run, history),
        _scores(run, history),
        _video(run, video),
        _curves(history),
        _figures(run, history),
        _configuration(run),
        _origin(run),
        tag("footer", f"Made by apex report, apex {run.manifest['versions'].get('apex')}, from {run.path}."),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", body), lang="en") + "\n"


def _header(run: RunFolder) -> Markup:
    state = find_state(run)
    return tag(
        "header",
        tag("h1", run.config.environment.id),
        tag("p", f"Run {run.name}, seed {run.config.seed}, started {run.manifest['started'].replace('T', ' ')}"),
        tag("p", tag("span", state.word, class_=f"state {state.word}"), state.why),
    )


def _summary(run: RunFolder, history: RunHistory) -> Markup:
    cards: list[Markup] = []
    scores = find_scores(history)
    if scores is None:
        last = actor_scores(history).values
        highest = run.config.actor.num_actors - 1
        if len(last):
            cards.append(
                _card(f"{last[-1]:.4g}", "last score", f"games of actor {highest}: no evaluation was finished")
            )
        else:
            cards.append(_card("-", "score", "no game was finished"))
    else:
        best, last_score = scores
        cards += [_card(f"{best.mean:.4g}", "best score", _origin_of(best))]
        cards += [_card(f"{last_score.mean:.4g}", "last score", _origin_of(last_score))]
    figures = dict(find_figures(run, history))
    for name in ("wall clock", "steps", "updates"):
        if name in figures:
            rate = figures.get(f"{name} a second")
            cards.append(_card(figures[name], name, f"{rate} a second" if rate else ""))
    epsilon = run.config.evaluator.epsilon
    note = (
        f"A score is the evaluator's: the mean raw score of full games of the newest parameters, epsilon {epsilon:g}. "
        "The best of many is above what it would have again, and an interval of fewer than ten games is too narrow."
        if scores
        else ""
    )
    return join(tag("h2", "In short"), tag("div", *cards, class_="big grid"), tag("p", note, class_="soft"))


def _origin_of(score: Score) -> str:
    interval = ""
    if score.interval is not None:
        low, high = map(number_text, score.interval)
        interval = f" (95 %: {low} ... {high})"
    return f"mean of {score.games}{interval}, at {number_text(score.steps)} steps, {time_text(score.seconds)}"


def _card(value: str, name: str, note: str) -> Markup:
    return tag(
        "div",
        tag("div", name, class_="name"),
        tag("div", value, class_="value"),
        tag("div", note, class_="name"),
        class_="card",
    )


def _scores(run: RunFolder, history: RunHistory) -> Markup:
    evaluated, played = history.series(*EVALUATION), actor_scores(history)
    if not len(evaluated.values) and not len(played.values):
        return join()
    axes: tuple[tuple[XAxis, str], ...] = (("steps", "Score against steps"), ("seconds", "Score against wall clock"))
    charts = []
    for axis, title in axes:
        lines = [
            ChartLine(getattr(played, axis), played.values, "faint"),
            ChartLine(getattr(evaluated, axis), evaluated.values),
        ]
        drawing = chart(lines, axis, title, width=WIDE, threshold=run.config.run.stop_score)
        charts.append(tag("div", tag("h3", title), drawing, class_="card"))
    highest = run.config.actor.num_actors - 1
    keys = [tag("span", class_="key"), "evaluations"] if len(evaluated.values) else []
    keys += (
        [tag("span", class_="key faint"), f"games of actor {highest}, which explores least"]
        if len(played.values)
        else []
    )
    return join(tag("h2", "Learning curve"), tag("div", *charts, class_="wide grid"), tag("p", *keys, class_="soft"))


def _video(run: RunFolder, video: EmbeddedVideo | str) -> Markup:
    if video == "":
        return join()
    if isinstance(video, str):
        return join(tag("h2", "One game"), tag("p", f"There is no video: {video}", class_="soft"))
    source = f"data:video/mp4;base64,{base64.b64encode(video.data).decode()}"
    updates = "" if video.updates is None else f" of update {video.updates:,}"
    part = "" if video.is_whole else " Only its beginning is here."
    who = f"Played by {video.checkpoint}{updates}, epsilon {video.epsilon:g}"
    words = f"{who}: score {video.score:.4g} in {video.length:,} steps.{part}"
    picture = tag(
        "video", controls=True, autoplay=True, loop=True, muted=True, playsinline=True, preload="auto", src=source
    )
    return join(tag("h2", "One game"), tag("div", picture, tag("p", words, class_="soft"), class_="card film"))


def _curves(history: RunHistory) -> Markup:
    charts = []
    for role, name, title, axis in CURVES:
        series = history.series(role, name)
        if len(series.values):
            drawing = chart([ChartLine(getattr(series, axis), series.values, "thin")], axis, title)
            charts.append(tag("div", tag("h3", title), drawing, class_="card"))
    return join(tag("h2", "Training"), tag("div", *charts, class_="grid")) if charts else join()


def _figures(run: RunFolder, history: RunHistory) -> Markup:
    parts = [tag("div", tag("h3", "How much, how fast"), _table(find_figures(run, history)), class_="card")]
    limits = find_limits(history)
    if limits:
        rows = [
            tag(
                "tr",
                tag("th", part),
                tag("td", f"{share:.0%}", class_="short"),
                tag("td", tag("div", class_="bar", style=f"width:{100 * share:.0f}%"), style="width:50%"),
            )
            for part, share in limits
        ]
        note = tag("p", "Share of the seconds in which this part, if it were faster, would have made training faster.")
        parts.append(tag("div", tag("h3", "Limited by"), tag("table", *rows), note, class_="card"))
    return join(tag("h2", "Figures"), tag("div", *parts, class_="wide grid"))


def _configuration(run: RunFolder) -> Markup:
    head = tag("thead", tag("tr", tag("th", "setting"), tag("th", "this run"), tag("th", "default")))
    rows = [
        tag(
            "tr",
            tag("td", tag("code", name)),
            tag("td", tag("code", value)),
            tag("td", tag("code", default), class_="soft"),
        )
        for name, value, default in find_changes(run.config)
    ]
    tree = tag("details", tag("summary", "Every setting"), tag("pre", dump_toml(run.config)))
    note = tag(
        "p",
        "What differs from the defaults, which are the paper's. A default of 0 is a size that the machine decides.",
        class_="soft",
    )
    return join(
        tag("h2", "Configuration"),
        note,
        tag("div", tag("table", head, tag("tbody", *rows)), class_="card"),
        tag("p"),
        tag("div", tree, class_="card"),
    )


def _origin(run: RunFolder) -> Markup:
    git = run.manifest["git"]
    lines = [] if git is None else [f"git checkout {git['commit']}"]
    typed = "\n".join([*lines, typed_command(run)])
    note = "Started by apex.train: this trains by the same configuration" if is_from_python(run) else "What was typed"
    note += "; a name that was given is taken now, so choose another." * bool(run.config.run.name) or "."
    commands = [
        tag("div", tag("h3", "Run it again"), tag("pre", typed), tag("p", note, class_="soft"), class_="card"),
        tag("div", tag("h3", "Go on"), *[_command(*row) for row in next_commands(run)], class_="card"),
    ]
    return join(
        tag("h2", "Reproduce it, go on with it"),
        tag("div", *commands, class_="wide grid"),
        tag("h2", "Where it ran"),
        tag("div", _table(describe_machine(run)), class_="card"),
    )


def _command(name: str, words: str) -> Markup:
    return tag("p", tag("span", f"{name}: ", class_="soft"), tag("code", words))


def _table(rows: Rows | Iterable[tuple[str, str]]) -> Markup:
    return tag("table", tag("tbody", *[tag("tr", tag("th", name), tag("td", value)) for name, value in rows]))
