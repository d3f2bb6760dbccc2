"""The command line of each role: what starts `apex learner`, `apex replay`, `apex actor` and `apex evaluator`."""

from __future__ import annotations

from pathlib import Path

from apex.types import Role


def role_command(
    role: Role,
    *,
    learner: str = "",
    keys: str | Path = "",
    insecure_no_auth: bool = False,
    bind: str = "",
    shard: int | None = None,
    snapshots: Path | None = None,
    processes: int = 0,
    envs: int = 0,
    config: Path | None = None,
    run_folder: Path | str | None = None,
) -> tuple[str, ...]:
    """The words after `apex`, or, but for the first of them, after `python -m apex.ROLE`.

    `learner` is HOST:PORT of the control socket; `keys` a folder. `bind`, `shard` and `snapshots` are a replay
    server's, `processes` and `envs` an actor host's, `config` and `run_folder` the learner's. Empty ones are left out.
    """
    options: dict[str, object] = {
        "--learner": learner,
        "--keys": keys,
        "--bind": bind,
        "--shard": None if shard is None else str(shard),
        "--snapshots": snapshots,
        "--processes": processes,
        "--envs": envs,
        "--config": config,
        "--run-folder": run_folder,
    }
    words = [word for option, value in options.items() if value for word in (option, str(value))]
    return (str(role), *words, *(("--insecure-no-auth",) if insecure_no_auth else ()))


def module_command(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words after `python -m` that start the same program as `words` after `apex`: named by its module."""
    role, *options = words
    return (f"apex.{role}", *options)
