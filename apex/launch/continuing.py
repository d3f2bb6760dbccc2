"""`apex train --name NAME --continue`: starts a run, or continues it if it exists."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from apex.config import Config, flatten
from apex.config.codec import lay_over, unflatten
from apex.environments.inspection import Inspector
from apex.launch.mirroring import bring_back
from apex.launch.preflight.fit import fit, require_head, require_keys
from apex.launch.resume import (
    CHANGEABLE,
    CONTINUE,
    LIMITS,
    prepare,
    raise_limit,
    reached_limit,
    require_fitting,
    require_idle,
    require_same_environment,
    require_same_settings,
)
from apex.launch.start import TOO_SHORT, Start
from apex.runs.checkpoints.paths import newest_update
from apex.runs.folder import MANIFEST, RunFolder
from apex.runs.lock import is_held
from apex.runtime.text import number
from apex.sentences import describe_end, plural
from apexreplay.errors import require
from apexreplay.process.lifecycle import Stop
from apexreplay.store.location import store_path


def read_continue(
    typed: Config,
    argv: Sequence[str],
    *,
    accept: bool,
    inspector: Inspector,
    stop: Stop | None = None,
    elsewhere: Callable[[], Sequence[Config]] = tuple,
) -> Start:
    """Returns a start of the run that `typed` names: of a new run, or of the run if it exists here or in its mirror.

    The saved settings stay, except for the limits and for those that differ from the last such command. `elsewhere`
    returns what the command means on other hosts: presets depend on the GPU. The start is over if the run has reached a
    limit that `typed` keeps. Raises UsageError if the run has no name, or as `reopen`.
    """
    name = typed.run.name
    require(bool(name), f"{CONTINUE}: the run to continue has no name", remedy="add --name NAME")
    path = Path(typed.run.folder) / name
    single = typed.run.single_process
    require(not single, f"{CONTINUE}: a run with --single-process cannot be continued", remedy="leave one of them out")
    run = f"{CONTINUE} --name {name}"
    require(not is_held(path), f"{run}: this run is still running", remedy="stop it first")

    def read(folder: RunFolder) -> tuple[Config, Config]:
        asked = _meant(folder, typed, elsewhere)
        config = lay_over(folder.config, _changes(folder, asked))
        require_same_settings(folder, config, run, accept)
        return asked, config

    def check(folder: RunFolder, is_over: bool) -> None:
        config = read(folder)[1]
        if not is_over:
            require_keys(config)
            require_same_environment(folder, config, run, inspector)
            require_idle(folder, config, run)
            if config.run.head:
                require_head(config)
            fit(config, folder.schema, lambda line: None, store_path(folder.run_id))

    is_restored = bool(typed.run.mirror) and bring_back(typed.run, stop or Stop(), check)
    if not (path / MANIFEST).exists():
        return Start(config=typed, argv=argv, inspector=inspector, repeated=typed)
    folder = RunFolder.open(path)
    asked, config = read(folder)
    if (end := reached_limit(folder, config)) is not None:
        has_learned = end.kind not in TOO_SHORT or newest_update(folder.checkpoints)
        require(bool(has_learned), f"{run}: this run ended without an update", remedy=raise_limit(end))
        return Start(config=config, argv=argv, folder=path, is_over=True)
    prepare(folder, run)
    require_fitting(folder, config, run, accept, inspector)
    return Start(
        config=config,
        argv=argv,
        folder=path,
        accept_changes=accept or is_restored,  # The mirror has no replay memory.
        restored_from=typed.run.mirror if is_restored else "",
        inspector=inspector,
        repeated=asked,
    )


def describe_over(path: Path) -> list[str]:
    """Returns the lines about a run that has ended at its limit: the end, how to train further, and the score."""
    from apex.runs.history import RunHistory  # Imported here because runs that train do not need it.
    from apex.runs.scores import find_scores

    folder = RunFolder.open(path)
    end, scores = folder.end, find_scores(RunHistory(folder))
    if end is None:
        return []
    lines = [f"finished before: {describe_end(end)}", f"run folder: {path}", f"to train further: {raise_limit(end)}"]
    if scores is None:
        return [*lines, "score: none, because no evaluation was finished"]
    best, last = scores
    games = "" if last.num_games is None else f", mean of {plural(last.num_games, 'game')}"
    return [*lines, f"score: {number(last.mean)}{games} of the last evaluation; best: {number(best.mean)}"]


def _meant(folder: RunFolder, typed: Config, elsewhere: Callable[[], Sequence[Config]]) -> Config:
    """Returns `typed`, or what the command means on a host like the one that began the run, if that is nearer to it."""
    before = flatten(folder.asked)

    def distance(config: Config) -> int:
        return sum(value != before[name] for name, value in flatten(config).items())

    return min((typed, *elsewhere()), key=distance) if _differing(folder, typed).keys() - CHANGEABLE else typed


def _differing(folder: RunFolder, typed: Config) -> dict[str, Any]:
    """Returns the settings that differ from the last command with --continue, or the first start.

    Not the name, by which the folder was found: a first start may have had none.
    """
    before, values = flatten(folder.asked), flatten(typed).items()
    return {name: value for name, value in values if value != before[name] and name != "run.name"}


def _changes(folder: RunFolder, typed: Config) -> dict[str, Any]:
    """Returns the limits and the settings that differ."""
    values = flatten(typed)
    return unflatten(_differing(folder, typed) | {name: values[name] for name in LIMITS.values()})
