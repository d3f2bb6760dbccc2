"""Errors that a user can cause, shared by every layer."""

from __future__ import annotations


class ConfigError(ValueError):
    """A knob that does not exist, or a value that it may not have. Exit status 2."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)
