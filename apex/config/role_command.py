"""Builds the command lines of the roles: `apex learner`, `apex replay`, `apex actor` and `apex evaluator`."""

from pathlib import Path

from apex.types import Role

OptionValue = str | int | Path | None


def role_command(role: Role, *, insecure_no_auth: bool = False, **options: OptionValue) -> tuple[str, ...]:
    """Returns the arguments after `apex` that start a role. Options that are None or empty are left out.

    `options`: of a learner, `config` or `run_folder`; of the others, `learner` (HOST:PORT to join), `keys` (folder of
    keys) and their own ones, such as `bind`, `shard` and `snapshots` of a replay server.
    """
    given = {name.replace("_", "-"): str(value) for name, value in options.items() if value not in (None, "")}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    return (str(role), *words, *(("--insecure-no-auth",) if insecure_no_auth else ()))


def module_command(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the arguments after `python -m` that start the same program as `apex` followed by `arguments`."""
    role, *options = arguments
    return (f"apex.{role}", *options)
