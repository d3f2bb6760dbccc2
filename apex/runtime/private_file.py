"""Opens files in folders that every user can write, such as /dev/shm, only if no other user can access the file."""

import os
import stat
from pathlib import Path

from apex.errors import ForeignFileError


def open_private(path: Path, flags: int) -> int:
    """Opens a file as `os.open` does and returns its descriptor. A new file has mode 0600.

    Raises ForeignFileError if the file is a symbolic link, belongs to another user, or is accessible to other users.
    Raises OSError as `os.open` does.
    """
    if path.is_symlink():
        raise ForeignFileError(f"{path} is a symbolic link: another user may have planted it", "remove it")
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    facts = os.fstat(descriptor)
    if facts.st_uid == os.geteuid() and stat.S_ISREG(facts.st_mode) and not facts.st_mode & 0o077:
        return descriptor
    os.close(descriptor)
    raise ForeignFileError(
        f"{path} belongs to user {facts.st_uid} and has mode {facts.st_mode & 0o777:o}, but user {os.geteuid()} and "
        "mode 600 are required: another user may have planted it",
        "remove it",
    )
