"""The errors that programs report in one sentence, and the exit status that each leads to."""

from __future__ import annotations


class ApexError(Exception):
    """A program reports this error in one sentence and ends with `exit_status`."""

    exit_status = 1


class ConfigError(ApexError, ValueError):
    """A mistake of the user: a setting that does not exist, a value out of range, a file that cannot be used."""

    exit_status = 2


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)
