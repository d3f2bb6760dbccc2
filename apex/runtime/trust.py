"""Decides which modules this process may import by a name that it was given. Importing a module executes its code.

A file or a message may only name modules that the user has named to this process (`allow`), or has trained with on this
machine (`remember`). The latter are in one list per user, `apex/trusted-modules` below $XDG_CONFIG_HOME or ~/.config.
"""

import argparse
import fcntl
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from apex.errors import ConfigError
from apexreplay.errors import ForeignFileError, require
from apexreplay.files.private_file import open_private

OWN = "apex"  # this package

log = logging.getLogger("apex")
_allowed: set[str] = set()  # modules that the user has named to this process. Forked children have a copy.


def allow(modules: str | Iterable[str]) -> None:
    """Trusts modules, package.module or package.module:name, until this process ends."""
    _allowed.update(name.partition(":")[0] for name in ([modules] if isinstance(modules, str) else modules))


def add_allow(parser: argparse.ArgumentParser) -> None:
    """Adds the option --allow, which takes effect as soon as the command line is parsed."""
    text = "import this module if a file or a learner names it; only if you trust its code; may be repeated"
    parser.add_argument("--allow", type=allow, metavar="MODULE", help=text)


def allow_options() -> list[str]:
    """Returns the options with which another program of this user trusts the same modules."""
    return [word for module in sorted(_allowed) for word in ("--allow", module)]


def require_trusted(setting: str, value: str, module: str) -> None:
    """Raises UsageError unless the user trusts `module`, which the value of a setting names. Imports nothing."""
    is_name = all(part.isidentifier() for part in module.split("."))
    require(is_name, f"{setting} {value!r}: {module!r} is not the name of a module", ConfigError)
    if package_of(module) == OWN or module in _allowed:
        return
    entries = [line for line in _read_list() if line.startswith(f"{module} ")]
    require(
        bool(entries) and _entry(module) in entries,
        f"{setting} {value!r} would import {module!r}, a module with which you have not trained here",
        remedy=f"read its code; if you trust it, add --allow {module} (in Python: allow={module!r})",
    )
    _allowed.add(module)


def package_of(module: str) -> str:
    """Returns the name of a module's top-level package."""
    return module.partition(".")[0]


def find_package(module: str) -> ModuleSpec | None:
    """Finds the top-level package of a module; also in the current folder, but only if it is nowhere else.

    Processes of a run start with `python -P`, so that a file named like a library module is not imported by accident.
    Only a trusted module of the user that is in the current folder needs that folder: an installed one would find
    there what is not installed, such as an optional dependency.
    """
    spec, here = _find_spec(module), os.getcwd()
    if spec is None and "" not in sys.path and here not in sys.path:
        sys.path.append(here)  # Not removed again: the user's module may import others later.
        spec = _find_spec(module)
    return spec


def _find_spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package_of(module))  # Imports nothing, as the name has no dot.
    except (ImportError, ValueError):
        return None


def remember(modules: Sequence[str]) -> None:
    """Adds modules, with which the user begins to train, to the user's list. Logs a warning if that is impossible."""
    path, entries = _list(), {entry for entry in map(_entry, modules) if entry}
    if not entries:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = open_private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with open(descriptor, "r+", errors="surrogateescape") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # One write. If a crash cuts it off, the last entry matches no file and the next one begins a new line.
            file.write("".join(f"\n{entry}" for entry in sorted(entries - set(file.read().split("\n")))))
    except (OSError, ForeignFileError) as error:
        log.warning("cannot record that you train with %s: %s", ", ".join(modules), error)


def _entry(module: str) -> str:
    """Returns the line of a module in the list: its name and the file of its package; "" if there is no such package.

    So a package of the same name elsewhere, for example in the current folder, is another entry.
    """
    spec = find_package(module)
    place = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
    return f"{module} {os.path.realpath(place)}" if place else ""


def _list() -> Path:
    folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():
        folder = Path("/", os.path.expanduser("~"), ".config")  # /~, which does not exist, if there is no home folder
    return folder / "apex" / "trusted-modules"


def _read_list() -> list[str]:
    """Returns the lines of the list; raises ForeignFileError unless it belongs to this user alone."""
    try:
        with open(open_private(_list(), os.O_RDONLY | os.O_NONBLOCK), errors="surrogateescape") as file:
            return file.read().split("\n")
    except OSError:  # There is no list yet.
        return []
