"""The configuration as a dictionary and as TOML, and back; refuses what the tree does not know."""

from __future__ import annotations

import json
import tomllib
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from apex.config.tree import Config
from apex.config.validation import Branch, checked, did_you_mean, setting_name
from apex.errors import ConfigError, require

AnyBranch = TypeVar("AnyBranch", bound=Branch)


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name, in the tree's order."""
    flat: dict[str, Any] = {}
    for name, value in to_dict(config).items():
        flat |= {f"{name}.{leaf}": entry for leaf, entry in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def to_dict(config: Config) -> dict[str, Any]:
    """The tree as plain dictionaries, ready for JSON."""
    return asdict(config)


def from_dict(tree: dict[str, Any], base: Config | None = None) -> Config:
    """`base`, or the defaults, with the values of `tree`; raises ConfigError for what may not be configured."""
    config = lay_over(base or Config(), tree)
    values = {name: getattr(config, name) for name in Config.field_types()}
    branches: dict[str, Any] = {name: replace(value) for name, value in values.items() if isinstance(value, Branch)}
    return replace(config, **branches)


def lay_over(base: AnyBranch, tree: dict[str, Any]) -> AnyBranch:
    """`base`, the tree or a branch of it, with the values of `tree`, whose names, types and ranges are checked.

    Relations between settings are not checked, because a command line may change one of them later.
    """
    result, known = copy(base), base.field_types()
    for name, value in tree.items():
        setting = setting_name(base, name)
        if name not in known:
            raise ConfigError(f"unknown setting {setting}{did_you_mean(setting, [*known, *flatten(Config())])}")
        current = getattr(base, name)
        if isinstance(current, Branch):
            require(isinstance(value, dict), f"{setting} must be a table of settings, got {value!r}")
            value = lay_over(current, value)
        object.__setattr__(result, name, checked(setting, known[name], value))
    return result


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file; whether it holds settings is for `from_dict` to say."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error


def load_toml(path: Path, base: Config | None = None) -> Config:
    """Reads a TOML file over `base`."""
    return from_dict(read_toml(path), base)


def dump_toml(config: Config, default: Config | None = None) -> str:
    """The whole tree as TOML; `load_toml` gives it back. A setting that is None is left out, as TOML has no null.

    With `default`, a value that differs from it has the default beside it.
    """
    usual, lines, table = flatten(default or config), [], ""
    for setting, value in flatten(config).items():
        branch, _, name = setting.rpartition(".")
        if branch != table:
            lines += ["", f"[{branch}]"]
            table = branch
        if value is None:
            continue
        line = f"{name} = {json.dumps(value, ensure_ascii=False)}"
        if value != usual[setting]:
            line = f"{line:<38}  # default: {'none' if usual[setting] is None else json.dumps(usual[setting])}"
        lines.append(line)
    return "\n".join(lines) + "\n"
