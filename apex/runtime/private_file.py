"""Files at places that every user of the host may write to, such as /dev/shm: opened only if they are ours alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from apex.errors import ConfigError


class ForeignFileError(ConfigError):
    """A file that another user has made, or can read or change."""


def open_private(path: Path, flags: int) -> int:
    """Opens a file as `os.open` does; a new one has mode 0600. Returns its descriptor.

    Raises ForeignFileError for a symbolic link, and unless the file is this user's and nobody else may use it; OSError
    as `os.open`.
    """
    if path.is_symlink():
        raise ForeignFileError(f"{path} is a symbolic link: another user may have planted it; remove it")
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    facts = os.fstat(descriptor)
    if facts.st_uid == os.geteuid() and stat.S_ISREG(facts.st_mode) and not facts.st_mode & 0o077:
        return descriptor
    os.close(descriptor)
    raise ForeignFileError(
        f"{path} belongs to user {facts.st_uid} and has mode {facts.st_mode & 0o777:o}, where user {os.geteuid()} and "
        "mode 600 are required: another user may have planted it; remove it"
    )
