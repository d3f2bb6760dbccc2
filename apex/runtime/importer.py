"""Imports the user's code for a setting of the form package.module:name, if the user trusts the module."""

import importlib
import os
from difflib import get_close_matches
from types import FunctionType, ModuleType
from typing import Any

from apex.errors import ConfigError
from apex.runtime.trust import OWN, find_package, package_of, require_trusted
from apexreplay.errors import UsageError, describe_exception, require

MAX_NAMES = 5  # in an error message


def import_module(setting: str, path: str) -> ModuleType:
    """Imports the module of `path` (package.module:name); also looks in the current folder.

    Raises UsageError if the user does not trust the module, ConfigError, which names `setting`, if the import fails.
    """
    module_name, _, name = path.partition(":")
    module = module_name.removesuffix(".py").replace("/", ".")
    problem = f"{setting} {path!r} names a file"
    require(not module_name.endswith(".py"), problem, ConfigError, remedy=f"name its module: {module}:{name}")
    require_trusted(setting, path, module_name)
    find_package(module_name)
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        problem = f"{setting} {path!r}: cannot import {module_name!r} in the folder {os.getcwd()}"
        raise ConfigError(f"{problem}: {describe_exception(error)}") from error


def find_factory(setting: str, path: str, kind: type) -> Any:
    """Returns the function or class at `path`. A class must be a subclass of `kind`.

    A function must be defined in the package of its module, and not in this package: `os.system` is no factory of a
    module that imports it. If `kind` is `object`, a class must be defined there too. Raises ConfigError for anything
    else, which is not called, and as `import_module` does.
    """
    module, name = import_module(setting, path), path.partition(":")[2]
    package = package_of(module.__name__)

    def fits(value: object) -> bool:
        if isinstance(value, type) and kind is not object:
            return issubclass(value, kind)
        can_be_own = isinstance(value, type) or (isinstance(value, FunctionType) and package != OWN)
        return can_be_own and package_of(str(value.__module__)) == package

    found, remedy = getattr(module, name, None), "define a function in this module that returns it"
    if found is None:
        there = [key for key, value in vars(module).items() if fits(value)]
        near = get_close_matches(name, there, n=1)
        remedy = f"its own are {', '.join(there[:MAX_NAMES])}" if there else ""
        remedy = f"did you mean {module.__name__}:{near[0]}?" if near else remedy
    what = "class" if kind is object else f"subclass of {kind.__name__}"
    problem = f"{setting} {path!r}: {module.__name__!r} defines no function or {what} {name!r}"
    require(fits(found), problem, ConfigError, remedy=remedy)
    return found


def call_factory(setting: str, path: str, kind: type, *arguments: Any) -> Any:
    """Calls the function or class at `path`, as `find_factory` does; raises UsageError if it raises an exception."""
    factory = find_factory(setting, path, kind)
    try:
        return factory(*arguments)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{setting} {path!r} raised {describe_exception(error)}") from error
