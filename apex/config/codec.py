"""Converts the configuration to and from dictionaries and TOML. Unknown settings raise ConfigError."""

import json
import re
import tomllib
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from apex.config.tree import Config
from apex.config.validation import Branch, checked, did_you_mean, require_setting, setting_name
from apex.errors import ConfigError

# Settings of earlier versions, and why they are gone. Files that have them can still be read.
RETIRED = {"transport.metrics_port": "scores travel on the control socket"}

AnyBranch = TypeVar("AnyBranch", bound=Branch)


def flatten(config: Config) -> dict[str, Any]:
    """Returns every setting as {dotted name: value}, in the order of the tree."""
    flat: dict[str, Any] = {}
    for name, value in to_dict(config).items():
        flat |= {f"{name}.{leaf}": entry for leaf, entry in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def unflatten(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns {dotted name: value} as a tree for `from_dict`."""
    tree: dict[str, Any] = {}
    for setting, value in settings.items():
        branch, _, name = setting.rpartition(".")
        (tree.setdefault(branch, {}) if branch else tree)[name] = value
    return tree


def to_dict(config: Config) -> dict[str, Any]:
    """Returns the tree as plain dictionaries that JSON can hold."""
    return asdict(config)


def from_dict(tree: dict[str, Any], base: Config | None = None) -> Config:
    """Returns `base`, or the defaults, updated with `tree`; raises ConfigError for an unknown setting or bad value."""
    config = lay_over(base or Config(), tree)
    values = {name: getattr(config, name) for name in Config.field_types()}
    branches: dict[str, Any] = {name: replace(value) for name, value in values.items() if isinstance(value, Branch)}
    return replace(config, **branches)


def lay_over(base: AnyBranch, tree: dict[str, Any]) -> AnyBranch:
    """Returns `base`, a Config or one branch of it, updated with `tree`; checks names, types and ranges.

    Relations between settings are not checked, because later options may still change one of the settings.
    """
    result, known = copy(base), base.field_types()
    for name, value in tree.items():
        setting = setting_name(base, name)
        if setting in RETIRED:
            raise ConfigError(f"{setting} no longer exists: {RETIRED[setting]}", "leave it out")
        if name not in known:
            near = did_you_mean(setting, [*Config.field_types(), *flatten(Config())])
            raise ConfigError(f"unknown setting {setting}", near or "run apex train --help-all for a list")
        current = getattr(base, name)
        if isinstance(current, Branch):
            require_setting(isinstance(value, dict), f"{setting} must be a table of settings, got {value!r}")
            value = lay_over(current, value)
        object.__setattr__(result, name, checked(setting, known[name], value))
    return result


def from_saved(tree: dict[str, Any]) -> Config:
    """Does the same as `from_dict`, but ignores the settings of an earlier version that no longer exist."""
    return from_dict(_without_retired(tree))


def _without_retired(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        branch: {name: entry for name, entry in value.items() if f"{branch}.{name}" not in RETIRED}
        if isinstance(value, dict)
        else value
        for branch, value in tree.items()
    }


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file and returns its tables. Raises ConfigError if it is unreadable, or as `lay_over` does."""
    try:
        tree = _without_retired(tomllib.loads(path.read_text(encoding="utf-8", errors="surrogateescape")))
        lay_over(Config(), tree)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}", "name a TOML file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.problem}", error.remedy) from error
    return tree


def load_toml(path: Path) -> Config:
    """Reads a TOML file and returns the defaults, updated with its values. Raises ConfigError."""
    return from_dict(read_toml(path))


def dump_toml(config: Config, default: Config | None = None) -> str:
    """Returns the whole tree as TOML for `load_toml`. Settings that are None are left out, because TOML has no null.

    With `default`, each value that differs from it is followed by a comment with the default value.
    """
    usual, lines, table = flatten(default or config), [], ""
    for setting, value in flatten(config).items():
        branch, _, name = setting.rpartition(".")
        if branch != table:
            lines += ["", f"[{branch}]"]
            table = branch
        if value is None:
            continue
        line = f"{name} = {_toml(value)}"
        if value != usual[setting]:
            line = f"{line:<38}  # default: {'none' if usual[setting] is None else _toml(usual[setting])}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Returns a value as TOML on one line. Except for tables, TOML has the same notation as JSON."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml_key(key)} = {_toml(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _toml(key)
