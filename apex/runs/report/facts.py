"""Facts about a run, read from its folder: how it ended, its scores, rates, machine, and the commands to repeat it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from apex.config import Config, flatten
from apex.runs.folder import RunFolder
from apex.runs.history import EVALUATION, RunHistory
from apex.runs.lock import is_held
from apex.runtime.text import time_text

END = re.compile(r"ends after \d+ updates: (?P<reason>.+)")  # the learner's last line in its log
START = " INFO run "  # the first line of each start of the learner
LIMITED_BY = "limited_by/"  # prefix of the tags that are 1 while their part limits the run, else 0


class Fact(NamedTuple):
    """A row of a table, or a command with its purpose."""

    name: str
    value: str


class State(NamedTuple):
    """Whether a run goes on."""

    word: str  # running, finished or stopped
    reason: str


class Score(NamedTuple):
    """The score of one evaluation."""

    mean: float
    steps: float
    seconds: float
    games: str  # "33 games"; "full games" if the number was not recorded
    interval: tuple[float, float] | None  # 95 % of the mean; None: one game, or not recorded


class Change(NamedTuple):
    """A setting that is not at its default."""

    name: str
    value: str
    default: str


class Share(NamedTuple):
    """How much of the time one part limited the run."""

    part: str
    fraction: float


def find_state(run: RunFolder) -> State:
    """Reads the run's lock and the learner's log."""
    if is_held(run.path):
        return State("running", "it is still going")
    found: list[str] = []
    with suppress(OSError):
        log = (run.logs / "learner.log").read_text(errors="replace")
        found = END.findall(log.rpartition(START)[2])  # Only of its last start.
    if not found:
        return State("stopped", "its learner did not say why: it was killed, or it failed; see its logs")
    return State("finished" if found[-1].startswith("reached") else "stopped", found[-1])


def find_scores(history: RunHistory) -> tuple[Score, Score] | None:
    """The best evaluation (the first of equal ones) and the last one; None if none was finished."""
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


def find_figures(run: RunFolder, history: RunHistory) -> list[Fact]:
    """Totals and rates; a figure that was never recorded is left out."""
    facts = [Fact("wall clock", time_text(history.seconds))]
    updates = history.series("learner", "learner/updates")
    for name, values in (("steps", updates.steps), ("updates", updates.values)):
        if len(values):
            facts.append(Fact(name, f"{values[-1]:,.0f}"))
            seconds = float(updates.seconds[-1] - updates.seconds[0])
            facts += [Fact(f"{name} per second", f"{(values[-1] - values[0]) / seconds:,.1f}")] if seconds > 0 else []
    for name, role, tag, form in (
        ("samples per insert", "replay", "replay/samples_per_insert", "{:.2f}"),
        ("transitions in the replay memory", "replay", "replay/size", "{:,.0f}"),
        ("policy lag, updates", "learner", "learner/policy_lag", "{:,.0f}"),
        ("games of all actors", "actor", "actors/episodes", "{:,.0f}"),
    ):
        values = history.series(role, tag).values
        facts += [Fact(name, form.format(values[-1]))] if len(values) else []
    return facts


def find_limits(history: RunHistory) -> list[Share]:
    """How often each part limited the run, the most frequent first; parts that never did are left out."""
    shares = {
        tag.removeprefix(LIMITED_BY): history.series("learner", tag).values
        for tag in history.tags("learner")
        if tag.startswith(LIMITED_BY)
    }
    found = [Share(part, float(values.mean())) for part, values in shares.items() if values.any()]
    return sorted(found, key=lambda share: (-share.fraction, share.part))


def find_changes(config: Config) -> list[Change]:
    """Settings that differ from their defaults."""
    defaults = flatten(Config())
    return [
        Change(name, _show(value), _show(defaults[name]))
        for name, value in flatten(config).items()
        if value != defaults[name]
    ]


def describe_machine(run: RunFolder) -> list[Fact]:
    """When, where and with which versions the run was started, and each time that it was resumed."""
    manifest, hardware = run.manifest, run.manifest["hardware"]
    git = manifest["git"]
    commit = "not known: no checkout" if git is None else git["commit"] + (", with changes" if git["dirty"] else "")
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items() if version)
    facts = [
        Fact("started", _when(manifest["started"])),
        Fact("git commit", commit),
        Fact("processor", f"{hardware['cpu']}, {hardware['cores']} cores"),
        Fact("memory", f"{hardware['memory_bytes'] / 2**30:.1f} GiB"),
        Fact("GPUs", ", ".join(hardware["gpus"]) or "none"),
        Fact("system", hardware["system"]),
        Fact("seed", f"{run.config.seed}, of networks, environments and exploration; evaluations have other seeds"),
        Fact("versions", versions),
    ]
    for start in manifest.get("resumed", []):
        options = f", with {shlex.join(start['argv'])}" if start["argv"] else ""
        facts.append(
            Fact("resumed", f"{_when(start['started'])}, after {time_text(start['elapsed_seconds'])}{options}")
        )
    return facts


def is_from_python(run: RunFolder) -> bool:
    """Whether `apex.train` started the run, so that nobody typed a command."""
    return list(run.manifest["argv"]) == ["apex.train"]


def typed_command(run: RunFolder) -> str:
    """The command that started the run; for `apex.train`, a command that trains with the same configuration."""
    words: Sequence[str] = run.manifest["argv"]
    if is_from_python(run):
        return shlex.join(["apex", "train", "--config", str(run.config_file)])
    if words and not words[0].startswith("-"):
        return shlex.join(words)  # Another program's whole command line.
    is_whole = run.config.run.single_process or (run.logs / "launcher.log").exists()
    return shlex.join(["apex", "train" if is_whole else "learner", *words])


def next_commands(run: RunFolder) -> list[Fact]:
    """Commands that play the policy or continue the run, by their purpose."""
    where = shlex.quote(str(run.path))
    commands = [
        Fact("score it", f"apex evaluate {where} --episodes 100"),
        Fact("see it play", f"apex evaluate {where} --video game.mp4"),
    ]
    if run.config.run.single_process:
        return commands  # A serial run cannot be resumed.
    ended = find_state(run).word == "finished"
    return [*commands, Fact(f"train on{', with another limit' * ended}", f"apex train --resume {where}")]


def _show(value: Any) -> str:
    """A setting's value as config.toml writes it."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _by_place(history: RunHistory, tag: str) -> dict[tuple[float, float], float]:
    """A figure of evaluations by seconds and steps; older rows may lack it."""
    seconds, steps, values = (values.tolist() for values in history.series("evaluator", tag))
    return dict(zip(zip(seconds, steps, strict=True), values, strict=True))


def _when(timestamp: str) -> str:
    return timestamp.replace("T", " ")
