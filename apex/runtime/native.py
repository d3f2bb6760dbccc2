"""The compiled parts: plain C that setup.py builds at installation, loaded by ctypes, which lets go of the lock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def open_native(folder: Path, name: str, interface: int, suffixes: Sequence[str] = EXTENSION_SUFFIXES) -> ctypes.CDLL:
    """The library built from `folder`/NAME.c; raises OSError, with the reason, if there is none of this version."""
    paths = [folder / f"_{name}{suffix}" for suffix in suffixes]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise OSError("not built: no C compiler, or not installed since an update")
    library = ctypes.CDLL(str(path))
    try:
        found = ctypes.c_int64.in_dll(library, "apex_interface").value
    except ValueError as error:
        raise OSError(f"{path} does not say of which version it is") from error
    if found != interface:
        raise OSError(f"{path} is of another version ({found}, but this is {interface})")
    return library
