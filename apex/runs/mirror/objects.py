"""Where the mirror of a run keeps its objects: in a folder, or in an object store that fsspec knows."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from apex.runtime.optional_imports import remedy
from apexreplay.errors import ForeignFileError, UsageError, require
from apexreplay.files.atomic_files import replace_file


class Objects(Protocol):
    """The objects of one run. Names are relative paths. An object is replaced completely or not at all."""

    def names(self) -> list[str]:
        """Returns the names of all objects."""

    def has(self, name: str) -> bool:
        """Returns whether there is an object of this name."""

    def read(self, name: str) -> bytes:
        """Returns an object."""

    def write(self, name: str, data: bytes) -> None:
        """Creates or replaces an object."""

    def upload(self, path: Path, name: str) -> None:
        """Creates or replaces an object from a file."""

    def download(self, name: str, path: Path) -> None:
        """Writes an object to a file."""

    def delete(self, names: list[str]) -> None:
        """Deletes objects that newer ones have replaced. A store that deletes by age keeps them."""


class FolderObjects:
    """The objects are files below `root`, which only this user can read."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def names(self) -> list[str]:
        """See `Objects`. Raises ForeignFileError if the folder belongs to another user."""
        self._require_own()
        found = (path for path in self._root.rglob("*") if path.is_file() and not path.name.startswith("."))
        return [path.relative_to(self._root).as_posix() for path in found]

    def has(self, name: str) -> bool:
        """See `Objects`. Raises ForeignFileError if the folder belongs to another user."""
        self._require_own()
        return (self._root / name).exists()

    def read(self, name: str) -> bytes:
        """See `Objects`."""
        return (self._root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """See `Objects`."""
        if not self._root.exists():
            self._root.parent.mkdir(parents=True, exist_ok=True)
            self._root.mkdir(mode=0o700)  # A user who could read the run id in the manifest could join the run.
        replace_file(self._root / name, data)

    def upload(self, path: Path, name: str) -> None:
        """See `Objects`."""
        self.write(name, path.read_bytes())

    def download(self, name: str, path: Path) -> None:
        """See `Objects`."""
        shutil.copyfile(self._root / name, path)

    def delete(self, names: list[str]) -> None:
        """See `Objects`."""
        for path in (self._root / name for name in names):
            path.unlink(missing_ok=True)
            with suppress(OSError):  # The folder has other files, or is gone.
                path.parent.rmdir()

    def _require_own(self) -> None:
        own = not self._root.exists() or self._root.stat().st_uid == os.geteuid()
        require(own, f"{self._root} belongs to another user", ForeignFileError, remedy="choose another run.mirror")


class FsspecObjects:
    """The objects below a URL, such as s3://bucket/runs/pong. The package of the protocol finds the credentials."""

    def __init__(self, url: str) -> None:
        """Raises UsageError if the package of the protocol is not installed."""
        import fsspec  # Runs without a mirror do not need it.

        self._url = url
        try:
            self._files: Any
            self._files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            extra = url.partition("://")[0]
            raise UsageError(f"{url} needs another package ({error})", remedy(extra)) from error
        self._root = f"{root.rstrip('/')}/"

    def __str__(self) -> str:
        return self._url

    def names(self) -> list[str]:
        """See `Objects`."""
        return [path.removeprefix(self._root) for path in self._files.find(self._root)]

    def has(self, name: str) -> bool:
        """See `Objects`."""
        return bool(self._files.exists(self._root + name))

    def read(self, name: str) -> bytes:
        """See `Objects`."""
        return bytes(self._files.cat_file(self._root + name))

    def write(self, name: str, data: bytes) -> None:
        """See `Objects`. Raises UsageError if the bucket does not exist."""
        try:
            self._files.pipe_file(self._root + name, data)
        except FileNotFoundError as error:
            raise UsageError(f"{self._url}: this bucket does not exist", "create it, or use another one") from error

    def upload(self, path: Path, name: str) -> None:
        """See `Objects`."""
        self._files.put_file(str(path), self._root + name)

    def download(self, name: str, path: Path) -> None:
        """See `Objects`."""
        self._files.get_file(self._root + name, str(path))

    def delete(self, names: list[str]) -> None:
        """See `Objects`."""
        for name in names:  # `rm` of a list would read patterns in a name.
            with suppress(FileNotFoundError):
                self._files.rm_file(self._root + name)


def open_objects(mirror: str, run: str) -> Objects:
    """Returns the objects of the run named `run` in `mirror`: a folder, or a URL (see `run.mirror`)."""
    if "://" in mirror:
        return FsspecObjects(f"{mirror.rstrip('/')}/{run}")
    return FolderObjects(Path(mirror).expanduser() / run)
