"""The configuration as a dictionary and as TOML, and back; refuses what the tree does not know."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from apex.config.tree import Config
from apex.errors import ConfigError, require


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name, in the tree's order."""
    flat: dict[str, Any] = {}
    for branch in dataclasses.fields(config):
        value = getattr(config, branch.name)
        if dataclasses.is_dataclass(value):
            flat |= {
                f"{branch.name}.{setting.name}": getattr(value, setting.name) for setting in dataclasses.fields(value)
            }
        else:
            flat[branch.name] = value
    return flat


def to_dict(config: Config) -> dict[str, Any]:
    """The tree as plain dictionaries, ready for JSON."""
    return dataclasses.asdict(config)


def from_dict(tree: dict[str, Any], base: Config | None = None) -> Config:
    """Lays the values of `tree` over `base`; raises ConfigError for names and types that do not exist here."""
    base = base or Config()
    changes: dict[str, Any] = {}
    for name, value in tree.items():
        require(
            name in get_type_hints(Config), f"unknown setting {name}; known here: {', '.join(get_type_hints(Config))}"
        )
        current: Any = getattr(base, name)
        is_branch = dataclasses.is_dataclass(current)
        if not is_branch:
            changes[name] = _coerce(name, get_type_hints(Config)[name], value)
            continue
        require(isinstance(value, dict), f"{name} must be a table of settings, got {value!r}")
        hints = get_type_hints(type(current))
        for setting in value:
            require(setting in hints, f"unknown setting {name}.{setting}; known here: {', '.join(hints)}")
        branch = {setting: _coerce(f"{name}.{setting}", hints[setting], entry) for setting, entry in value.items()}
        changes[name] = dataclasses.replace(current, **branch)
    return dataclasses.replace(base, **changes)


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file; whether it holds settings is for `from_dict` to say."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error


def load_toml(path: Path, base: Config | None = None) -> Config:
    """Reads a TOML file over `base`."""
    return from_dict(read_toml(path), base)


def dump_toml(config: Config) -> str:
    """The whole tree as TOML; `load_toml` gives it back. A setting that is None is left out, as TOML has no null."""
    lines: list[str] = []
    branches: list[str] = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            settings = {setting.name: getattr(value, setting.name) for setting in dataclasses.fields(value)}
            branches += ["", f"[{item.name}]"]
            branches += [
                f"{name} = {json.dumps(entry, ensure_ascii=False)}"
                for name, entry in settings.items()
                if entry is not None
            ]
        else:
            lines.append(f"{item.name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join([*lines, *branches]) + "\n"


def _coerce(name: str, hint: Any, value: Any) -> Any:
    """Returns `value` as the annotated type (an int passes as a float), or raises ConfigError."""
    if get_origin(hint) is Literal:
        require(value in get_args(hint), f"{name} must be one of {', '.join(map(str, get_args(hint)))}, got {value!r}")
        return value
    if get_origin(hint) in (Union, types.UnionType):
        return None if value is None else _coerce(name, get_args(hint)[0], value)
    if hint is float and type(value) is int:
        return float(value)
    require(type(value) is hint, f"{name} must be {hint.__name__}, got {value!r}")
    require(hint is not float or math.isfinite(value), f"{name} must be a finite number, got {value!r}")
    return value
