"""Imports the user's code for a setting of the form package.module:name."""

import importlib
import os
import sys
from typing import Any

from apex.errors import ConfigError, UsageError, require


def add_current_folder() -> None:
    """Appends the current folder to sys.path, so that installed modules take precedence.

    Processes of a run start with `python -P`, so that a file named like a library module is not imported by accident.
    Only a setting that names a module of the user needs the current folder.
    """
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)  # Not removed again: the user's module may import others later.


def find_factory(setting: str, path: str) -> Any:
    """Returns the function or class at `path` (package.module:name); also looks in the current folder.

    Raises ConfigError, which names `setting`, if the module cannot be imported or has no such function or class.
    """
    module_name, _, name = path.partition(":")
    add_current_folder()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{setting} {path!r}: cannot import {module_name!r} in the folder {os.getcwd()}: {reason}"
        ) from error
    factory = getattr(module, name, None)
    require(callable(factory), f"{setting} {path!r}: {module_name!r} has no function or class {name!r}")
    return factory


def call_factory(setting: str, path: str, *arguments: Any) -> Any:
    """Calls the function or class at `path`, as `find_factory` does; raises UsageError if it raises an exception."""
    factory = find_factory(setting, path)
    try:
        return factory(*arguments)
    except Exception as error:
        raise UsageError(f"{setting} {path!r} raised {type(error).__name__}: {error}") from error
