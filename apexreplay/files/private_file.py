"""Files and folders that no other user can access, in folders that every user can write, such as /dev/shm."""

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from apexreplay.errors import DataError, ForeignFileError, require


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


def private_folder(root: Path, name: str) -> Path:
    """Returns this user's folder in `root`, and creates it if needed: `name`, or `name-...` if others have that name.

    No other user can replace the folder if `root` has the sticky bit. Raises ForeignFileError if others can access it.
    """
    make: list[Callable[[], object]] = [partial(tempfile.mkdtemp, prefix=f"{name}-", dir=root)]
    make.append(partial(os.mkdir, root / name, 0o700))  # The last one is called first.
    while True:
        for path in [root / name, *sorted(root.glob(f"{name}-*"))]:
            with suppress(FileNotFoundError):
                facts = path.lstat()
                if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
                    problem = f"other users can access {path}, which has mode {facts.st_mode & 0o777:o}"
                    require(not facts.st_mode & 0o077, problem, ForeignFileError, remedy=f"chmod 700 {path}")
                    return path
        try:
            with suppress(FileExistsError):
                make.pop()()
        except OSError as error:
            problem = f"cannot create the folder {root / name}: {error.strerror}"
            raise DataError(problem, f"make {root} writable, or free some space there") from error
