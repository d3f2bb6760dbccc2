"""What a run's folder tells of it: how it ended, its scores, its figures, and the commands that belong to it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from apex.config import Config, flatten
from apex.metric_tags import SCORE
from apex.runs.folder import RunFolder
from apex.runs.history import EVALUATION, RunHistory, Series
from apex.runs.lock import is_held
from apex.runtime.text import time_text

END = re.compile(r"ends after \d+ updates: (?P<reason>.+)")  # the learner's last words in its log
START = " INFO run "  # with what a life of the learner begins there
PARTS = "limited_by/"  # the tags' beginning; each is 1 while this part limits the run, else 0

Rows = list[tuple[str, str]]  # what it is, and the value in words


class State(NamedTuple):
    """Whether a run goes on, and why not."""

    word: str  # running, finished or stopped
    why: str


class Score(NamedTuple):
    """The score of one evaluation."""

    mean: float
    steps: float
    seconds: float
    games: str  # how many, in words
    interval: tuple[float, float] | None  # 95 % of the mean; None: one game alone, or a run of before it was kept


class Change(NamedTuple):
    """A setting that is not at its default."""

    name: str
    value: str
    default: str


def find_state(run: RunFolder) -> State:
    """Reads who holds the run, and the learner's log."""
    if is_held(run.path):
        return State("running", "it is still going")
    found: list[str] = []
    with suppress(OSError):
        log = (run.logs / "learner.log").read_text(errors="replace")
        found = END.findall(log.rpartition(START)[2])  # Of its last life only.
    if not found:
        return State("stopped", "its learner did not say why: it was killed, or it failed; its logs tell more")
    return State("finished" if found[-1].startswith("reached") else "stopped", found[-1])


def find_scores(history: RunHistory) -> tuple[Score, Score] | None:
    """The best evaluation, the first one of several, and the last; None if none was finished."""
    means = history.series(*EVALUATION)
    counts, lows, highs = (_by_place(history, f"evaluator/{tag}") for tag in ("episodes", "score_low", "score_high"))
    if not len(means.values):
        return None

    def score(at: int) -> Score:
        seconds, steps, mean = (float(values[at]) for values in means)
        place = seconds, steps
        games = f"{counts[place]:.0f} games" if place in counts else "full games"
        interval = (lows[place], highs[place]) if place in lows and place in highs else None
        return Score(mean, steps, seconds, games, interval)

    return score(int(means.values.argmax())), score(-1)


def actor_scores(history: RunHistory) -> Series:
    """The games of the actor that explores least."""
    return history.series("actor", SCORE)


def find_figures(run: RunFolder, history: RunHistory) -> Rows:
    """How much was done, how fast."""
    rows = [("wall clock", time_text(history.seconds))]
    updates = history.series("learner", "learner/updates")
    for name, values in (("steps", updates.steps), ("updates", updates.values)):
        if len(values):
            rows.append((name, f"{values[-1]:,.0f}"))
            rate = _rate(updates.seconds, values)
            rows += [(f"{name} a second", f"{rate:,.1f}")] if rate is not None else []
    for name, role, tag, form in (
        ("samples per insert", "replay", "replay/samples_per_insert", "{:.2f}"),
        ("transitions in the replay memory", "replay", "replay/size", "{:,.0f}"),
        ("policy lag, updates", "learner", "learner/policy_lag", "{:,.0f}"),
        ("games of all actors", "actor", "actors/episodes", "{:,.0f}"),
    ):
        values = history.series(role, tag).values
        rows += [(name, form.format(values[-1]))] if len(values) else []
    return rows


def find_limits(history: RunHistory) -> list[tuple[str, float]]:
    """Which share of the time each part limited the run, the greatest first; only those that ever did."""
    shares = {
        tag.removeprefix(PARTS): history.series("learner", tag).values
        for tag in history.tags("learner")
        if tag.startswith(PARTS)
    }
    found = [(part, float(values.mean())) for part, values in shares.items() if values.any()]
    return sorted(found, key=lambda each: (-each[1], each[0]))


def find_changes(config: Config) -> list[Change]:
    """Settings that are not at their defaults, which are the paper's."""
    defaults = flatten(Config())
    return [
        Change(name, show(value), show(defaults[name]))
        for name, value in flatten(config).items()
        if value != defaults[name]
    ]


def describe_machine(run: RunFolder) -> Rows:
    """Where it ran, on what, by which code, and when."""
    manifest, hardware = run.manifest, run.manifest["hardware"]
    git = manifest["git"]
    commit = "not known: no checkout" if git is None else git["commit"] + (", with changes" if git["dirty"] else "")
    rows = [
        ("started", _when(manifest["started"])),
        ("git commit", commit),
        ("processor", f"{hardware['cpu']}, {hardware['cores']} cores"),
        ("memory", f"{hardware['memory_bytes'] / 2**30:.1f} GiB"),
        ("GPUs", ", ".join(hardware["gpus"]) or "none"),
        ("system", hardware["system"]),
        ("seed", f"{run.config.seed}, of networks, environments and exploration; evaluations have seeds of their own"),
    ]
    versions = [f"{name} {version}" for name, version in manifest["versions"].items() if version]
    rows.append(("versions", ", ".join(versions)))
    for life in manifest.get("resumed", []):
        typed = shlex.join(life["argv"])
        words = f"{_when(life['started'])}, after {time_text(life['elapsed_seconds'])}"
        rows.append(("resumed", f"{words}{', with ' + typed if typed else ''}"))
    return rows


def is_from_python(run: RunFolder) -> bool:
    """Whether `apex.train` started the run: no command was typed then."""
    return list(run.manifest["argv"]) == ["apex.train"]


def typed_command(run: RunFolder) -> str:
    """What was typed to start the run; of one that a program has started, what trains by the same configuration."""
    words: Sequence[str] = run.manifest["argv"]
    if is_from_python(run):
        return shlex.join(["apex", "train", "--config", str(run.config_file)])
    if words and not words[0].startswith("-"):
        return shlex.join(words)  # It was not typed at a shell's `apex train`; as it is noted.
    is_whole = run.config.run.single_process or (run.logs / "launcher.log").exists()
    return shlex.join(["apex", "train" if is_whole else "learner", *words])


def next_commands(run: RunFolder) -> Rows:
    """What to type to play the policy, and to go on with the run."""
    where = shlex.quote(str(run.path))
    rows = [
        ("score it", f"apex evaluate {where} --episodes 100"),
        ("see it play", f"apex evaluate {where} --video game.mp4"),
    ]
    if run.config.run.single_process:
        return rows  # It cannot go on.
    ended = find_state(run).word == "finished"
    return [*rows, (f"train on{', with another limit' * ended}", f"apex train --resume {where}")]


def show(value: Any) -> str:
    """A setting's value, as config.toml writes it."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _by_place(history: RunHistory, tag: str) -> dict[tuple[float, float], float]:
    """A figure of evaluations by seconds and steps; rows of before may lack it."""
    seconds, steps, values = (values.tolist() for values in history.series("evaluator", tag))
    return dict(zip(zip(seconds, steps, strict=True), values, strict=True))


def _rate(seconds: Any, values: Any) -> float | None:
    """The mean over the time in which it was counted; None where there is none."""
    time = float(seconds[-1] - seconds[0])
    return float(values[-1] - values[0]) / time if time > 0 else None


def _when(timestamp: str) -> str:
    return timestamp.replace("T", " ")
