"""Loads the compiled C libraries, which setup.py builds at installation. Calls by ctypes release the GIL."""

import ctypes
import hashlib
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Literal

SUFFIXES = EXTENSION_SUFFIXES[::-1]  # .so first; the others are those of a build of an earlier version


class NativeError(OSError):
    """A compiled library cannot be used. The message has the reason and the consequence."""

    def __init__(self, problem: Literal["build", "library", "cpu"], message: str) -> None:
        """`problem`: it is not built for this version, it needs a library that is missing, or the CPU is too old."""
        super().__init__(message)
        self.problem = problem


def open_native(folder: Path, name: str, interface: int, suffixes: Sequence[str] = SUFFIXES) -> ctypes.CDLL:
    """Loads the library built from `folder`/NAME.c; raises OSError with the reason if it is missing or outdated.

    Its version number must be `interface`. If the source exists, as in a checkout but not in a wheel, the library must
    also be built from exactly this source.
    """
    paths = [folder / f"_{name}{suffix}" for suffix in suffixes]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise OSError("not built: no C compiler was found, or the package was not reinstalled after an update")
    library = ctypes.CDLL(str(path))
    try:
        found = ctypes.c_int64.in_dll(library, "apex_interface").value
    except ValueError as error:
        raise OSError(f"{path} has no version number") from error
    if found != interface:
        raise OSError(f"{path} has version {found}, but version {interface} is required")
    source = folder / f"{name}.c"
    if source.exists() and _built_from(library) != hashlib.sha256(source.read_bytes()).hexdigest():
        raise OSError(f"{path} was built from another {source.name}; install its package again")
    return library


def _built_from(library: ctypes.CDLL) -> str:
    """Returns the SHA-256 of the source, which setup.py passes to the compiler; "" if the library does not have it."""
    try:
        return (ctypes.c_char * 64).in_dll(library, "apex_source").value.decode()
    except ValueError:
        return ""
