"""Builds the command lines of the roles: `apex learner`, `apex replay`, `apex actor` and `apex evaluator`."""

from pathlib import Path

from apex.types import Role

OptionValue = str | int | Path | None


def learner_command(*, config: Path | None = None, run_folder: Path | str | None = None) -> tuple[str, ...]:
    """Returns the arguments after `apex` that start a learner with this configuration file and run folder."""
    return (str(Role.LEARNER), *_options({"config": config, "run-folder": run_folder}))


def role_command(
    role: Role, *, learner: str, keys: str | Path = "", insecure_no_auth: bool = False, **own: OptionValue
) -> tuple[str, ...]:
    """Returns the arguments after `apex` that start a role. `learner`: HOST:PORT to join; `keys`: folder of keys.

    `own`: options of this role, such as `bind`, `shard` and `snapshots` of a replay server, or `processes` and `envs`
    of an actor host. Options that are None or empty are left out.
    """
    options = _options({"learner": learner, "keys": keys, **own})
    return (str(role), *options, *(("--insecure-no-auth",) if insecure_no_auth else ()))


def module_command(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the arguments after `python -m` that start the same program as `apex` followed by `arguments`."""
    role, *options = arguments
    return (f"apex.{role}", *options)


def _options(values: dict[str, OptionValue]) -> list[str]:
    return [each for name, value in values.items() if value not in (None, "") for each in (f"--{name}", str(value))]
