"""The user's own code behind a setting that reads package.module:name."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from apex.errors import ConfigError, require


def add_current_folder() -> None:
    """Lets this process import modules from the current folder, after all others.

    Programs of a run are started with `python -P`, so a file named like a library's module is not imported by accident.
    Only a setting that names the user's own module asks for this folder.
    """
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)  # It stays: the user's module may import others later.


def find_factory(setting: str, path: str) -> Any:
    """The function or class that `path` names; modules in the current directory are found too.

    Raises ConfigError, which names the setting, where there is none.
    """
    module_name, _, name = path.partition(":")
    add_current_folder()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{setting} {path!r}: cannot import {module_name!r} here ({os.getcwd()}): {reason}"
        ) from error
    factory = getattr(module, name, None)
    require(callable(factory), f"{setting} {path!r}: {module_name!r} has no function or class {name!r} to be called")
    return factory
