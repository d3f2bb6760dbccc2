"""Reads the file of a sweep: the start settings, and for each setting to search its choices or its range."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apex.command_line import SETTINGS, SHORT_NAMES, parse_config
from apex.config import Config, flatten, from_dict
from apex.config.codec import unflatten
from apex.config.validation import did_you_mean, require_setting
from apex.environments.foreign import require_trust
from apex.errors import ConfigError

OWN = ("seed", "run.", "transport.")  # settings that a sweep chooses, or that change no result
FORM = "give a list of choices, or {low = 1e-4, high = 1e-2, log = true}; log is optional"

Search = dict[str, Any]  # setting -> list of choices, or {"low": number, "high": number, "log": bool}


def read_sweep(path: Path, words: list[str]) -> tuple[Config, Search]:
    """Returns the start settings, which the options `words` override, and the search. Raises UsageError."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the sweep {path}: {cause}", "name a TOML file") from error
    good = {"search"} <= {*tables} <= {"start", "search"} and all(isinstance(each, dict) for each in tables.values())
    require_setting(good, f"{path} must have the tables start and search, got {', '.join(tables) or 'none'}")
    options = [word for name, value in _leaves(tables.get("start", {})) for word in options_of(name, value)]
    start = parse_config([*options, *words], prog="apex sweep", given=False)
    search = {SHORT_NAMES.get(name, name.replace("-", "_")): values for name, values in _leaves(tables["search"])}
    require_setting(bool(search), f"{path}: the table search is empty", FORM)
    return start, {name: _checked(name, values, start) for name, values in search.items()}


def with_settings(start: Config, settings: dict[str, Any]) -> Config:
    """Returns `start` with other values of {dotted name: value}."""
    return from_dict(unflatten(settings), start)


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of each entry that is no table of further settings."""
    for name, value in table.items():
        if isinstance(value, dict) and not {"low", "high"} & {*value}:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def options_of(name: str, value: Any) -> list[str]:
    """Returns a start setting as options of `apex train`."""
    if isinstance(value, bool):
        setting = SHORT_NAMES.get(name.replace("_", "-"), name)
        return [f"--{setting if value else setting.replace('.', '.no-')}"]
    return [f"--{name}={each}" for each in (value if isinstance(value, list) else [value])]


def _checked(setting: str, values: Any, start: Config) -> Any:
    """Returns the values of a setting. Raises UsageError unless each of them is possible beside the start settings."""
    near = did_you_mean(setting, SETTINGS) or "run apex train --help-all for a list"
    require_setting(setting in SETTINGS, f"unknown setting {setting}", near)
    require_setting(not setting.startswith(OWN), f"{setting} cannot be searched", "set it in the table start")
    is_range = isinstance(values, dict) and {"low", "high"} <= {*values} <= {"low", "high", "log"}
    require_setting(is_range or (isinstance(values, list) and len(values) > 1), f"{setting}: got {values}", FORM)
    configs = [
        with_settings(start, {setting: values[i]}) for i in (("low", "high") if is_range else range(len(values)))
    ]
    for config in configs:
        require_trust(config)
    found = [flatten(config)[setting] for config in configs]
    if not is_range:
        return found
    (low, high), log = found, values.get("log", False)
    good = type(low) in (int, float) and isinstance(log, bool) and low < high and (low > 0 or not log)
    require_setting(good, f"{setting}: low must be below high, and above 0 with log, got {values}", FORM)
    return {"low": low, "high": high, "log": log}
