"""Reads facts about a run from its folder: its end, scores, totals and limits, and the command that started it."""

import json
import shlex
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from apex.config import Config, flatten
from apex.facts import EndReason
from apex.runs.folder import RunFolder
from apex.runs.history import Floats, RunHistory
from apex.runs.lock import is_held

LIMITED_BY = "limited_by/"  # prefix of tags; the value is 1 while that part limits the run, else 0


class State(NamedTuple):
    """The state of a run."""

    word: Literal["running", "finished", "stopped"]
    end: EndReason | None  # None: the run has not ended, or the learner was killed or failed


class Total(NamedTuple):
    """The number of steps or updates of a run."""

    name: Literal["steps", "updates"]
    value: float
    per_second: float | None  # None: not known


class Change(NamedTuple):
    """A setting that is not at its default."""

    name: str
    value: str
    default: str


class Share(NamedTuple):
    """The share of time in which one part limited the run."""

    part: str
    fraction: float


def find_state(run: RunFolder) -> State:
    """Determines the state of a run from its lock and from end.json."""
    if is_held(run.path):
        return State("running", None)
    end = run.end
    return State("finished" if end is not None and end.is_limit else "stopped", end)


def find_totals(history: RunHistory) -> list[Total]:
    """Returns the number of steps and of updates; empty if the learner has recorded none."""
    updates = history.series("learner", "learner/updates")
    if not len(updates.values):
        return []
    seconds = float(updates.seconds[-1] - updates.seconds[0])

    def total(name: Literal["steps", "updates"], values: Floats) -> Total:
        return Total(name, float(values[-1]), float(values[-1] - values[0]) / seconds if seconds > 0 else None)

    return [total("steps", updates.steps), total("updates", updates.values)]


def find_limits(history: RunHistory) -> list[Share]:
    """Returns the share of time in which each part limited the run, largest first; omits parts that never did."""
    shares = {
        tag.removeprefix(LIMITED_BY): history.series("learner", tag).values
        for tag in history.tags("learner")
        if tag.startswith(LIMITED_BY)
    }
    found = [Share(part, float(values.mean())) for part, values in shares.items() if values.any()]
    return sorted(found, key=lambda share: (-share.fraction, share.part))


def find_changes(config: Config) -> list[Change]:
    """Returns the settings that differ from their defaults."""
    defaults = flatten(Config())
    return [
        Change(name, _show(value), _show(defaults[name]))
        for name, value in flatten(config).items()
        if value != defaults[name]
    ]


def is_from_python(run: RunFolder) -> bool:
    """Returns whether the Python function `apex.train` started the run, and not a command."""
    return list(run.manifest["argv"]) == ["apex.train"]


def typed_command(run: RunFolder) -> str:
    """Returns the command that started the run; for `apex.train`, a command that trains with the same configuration."""
    arguments: Sequence[str] = run.manifest["argv"]
    if is_from_python(run):
        return shlex.join(["apex", "train", "--config", str(run.config_file)])
    if arguments and not arguments[0].startswith("-"):
        return shlex.join(arguments)  # The whole command line of another program.
    is_whole = run.config.run.single_process or (run.logs / "launcher.log").exists()
    return shlex.join(["apex", "train" if is_whole else "learner", *arguments])


def _show(value: Any) -> str:
    """Returns a setting's value as it is written in config.toml."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
