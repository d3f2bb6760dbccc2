"""A folder whose files are listed in sealed manifests: JSON files that are written last, with the SHA-256 of each file.

Checkpoints and snapshots are such folders. Each file is written once, under a new name, and is flushed to disk before
the manifest that lists it gets its name. A crash at any moment therefore leaves the earlier manifests and their files
intact.
"""

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from apexreplay.errors import DataError
from apexreplay.files.atomic_files import Steps, digest, seal, sync, uninterrupted, unseal, write_beside

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # Other errors of reading may pass.


class SealedFile(NamedTuple):
    """A file as its manifest lists it."""

    name: str
    num_bytes: int
    sha256: str


class SealedFolder:
    """Writes, verifies and removes the files of one folder. `steps` is called before each step."""

    def __init__(
        self, path: Path, file_format: int, error: type[DataError], *, names: str = r".+", steps: Steps = uninterrupted
    ) -> None:
        """`file_format`: the only format of manifests that can be read. `error`: the error for unusable files.

        `names`: regular expression of the folder's own file names, without the parts of an incomplete name.
        """
        self.path = path
        self._before = steps
        self._format = file_format
        self._error = error
        self._names = re.compile(rf"({names})|\.({names})\.partial")

    def names(self) -> list[str]:
        """Returns the names of all files, in any order; those of incomplete files have the form `.NAME.partial`."""
        try:
            return [name for name in os.listdir(self.path) if self._names.fullmatch(name)]
        except FileNotFoundError:
            return []

    def write(self, name: str, *parts: Any, drops_cache: bool = False) -> SealedFile:
        """Writes the buffers `parts` to a new file and flushes it to disk; see `write_beside` for `drops_cache`."""
        self._before("write a file")
        partial = write_beside(self.path / name, *parts, drops_cache=drops_cache)
        self._before("rename a file")
        os.replace(partial, self.path / name)
        return SealedFile(name, sum(memoryview(part).nbytes for part in parts), digest(*parts))

    def seal(self, name: str, fields: dict[str, Any]) -> None:
        """Writes a manifest, which must list only files that were written before. Replaces an earlier one."""
        self._before("write the manifest")
        partial = write_beside(self.path / name, seal({"format": self._format, **fields}))
        sync(self.path)  # The files must be on disk before the manifest gets its final name.
        self._before("rename the manifest")
        os.replace(partial, self.path / name)
        self._before("flush the folder")
        sync(self.path)

    def manifest(self, name: str) -> dict[str, Any]:
        """Returns the fields of a manifest; raises the folder's error unless it is intact and of the right format."""
        with naming(self.path / name, self._error):
            data = (self.path / name).read_bytes()
            found = json.loads(data)["format"]
            if found != self._format:
                raise ValueError(f"its format is {found!r}, but this version reads only format {self._format}")
            fields = unseal(data)
            del fields["format"]
            return fields

    def read(self, file: SealedFile) -> bytes:
        """Returns the content of a file; raises the folder's error if it is missing or differs from its SHA-256."""
        self._before("read a file")
        with naming(self.path / file.name, self._error):
            data = (self.path / file.name).read_bytes()
            if digest(data) != file.sha256:
                raise ValueError("its SHA-256 differs from the recorded one")
            return data

    def keep(self, names: Iterable[str]) -> None:
        """Removes all other files of the folder, manifests first. Removes the folder if nothing remains."""
        others = set(self.names()).difference(names)
        for name in sorted(others, key=lambda name: not name.endswith(".json")):
            self._before("remove a file")
            (self.path / name).unlink(missing_ok=True)
        if self.path.is_dir() and not os.listdir(self.path):
            self.path.rmdir()


@contextmanager
def naming(path: Path, error: type[DataError]) -> Iterator[None]:
    """Turns errors of reading and decoding the file at `path` into `error`, whose message names the file."""
    try:
        yield
    except error:
        raise
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror}") from cause
    except json.JSONDecodeError as cause:
        raise error(f"{path} is damaged, or no file of this kind") from cause
    except KeyError as cause:
        raise error(f"{path} cannot be read: the field {cause} is missing") from cause
    except (AttributeError, TypeError, ValueError) as cause:
        raise error(f"{path} cannot be read: {cause}") from cause


def require_readable(error: DataError) -> None:
    """Raises an error of `naming` again, with a remedy, if the file exists and was not read: it may be intact."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno not in _NO_FILE:
        raise type(error)(error.problem, "try again, or move the file away to continue without it") from cause
