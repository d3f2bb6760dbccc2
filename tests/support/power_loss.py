"""A model of a disk that loses its power: which files a folder may have afterwards."""

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHANGES = ("replace", "rename", "link", "unlink", "mkdir", "rmdir")  # functions of `os` that change names in a folder
Tree = dict[str, bytes | None]  # relative path -> content; None: a folder


class Disk:
    """Records how a folder may look after a power loss before each change of a name, and before each flush.

    A file keeps the content of its last flush; without a flush, it keeps half of its bytes. A name has the value of the
    last flush of its folder, or a later one; the names of a folder are lost or kept independently.
    """

    def __init__(self, root: Path, skipped: str = "") -> None:
        """`skipped`: a place that flushes, such as `sites` has; its flushes have no effect."""
        self.losses: dict[tuple[int, frozenset], Tree] = {}  # by number of finished steps and content
        self.sites: set[str] = set()  # FUNCTION:LINE of each place that flushes a file or a folder
        self._root = root
        self._skipped = skipped
        self._done = 0
        self._held: dict[int, int] = {}  # inode -> descriptor, so that its number is not used again
        self._flushed: dict[int, bytes] = {}  # inode of a file -> content at its last flush
        self._names: dict[int, dict[str, list[int | None]]] = {}  # inode of a folder -> name -> values since its flush
        self._look()
        for folder in list(self._names):
            self._flush(folder)

    def run(self, steps: list[Callable[[], object]]) -> None:
        """Runs the steps one after the other."""
        for step in steps:
            step()
            self._done += 1
            self._lose_power()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watches the functions of `os` during the context."""
        originals = {name: getattr(os, name) for name in (*CHANGES, "fsync")}
        for name in CHANGES:
            setattr(os, name, self._watched(originals[name]))
        os.fsync = self._fsync
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(os, name, original)
            for descriptor in self._held.values():
                os.close(descriptor)

    def _watched(self, original):
        def change(*args, **kwargs):
            self._lose_power()
            return original(*args, **kwargs)

        return change

    def _fsync(self, descriptor: int) -> None:
        self._lose_power()
        frame = sys._getframe(1)
        while frame.f_code.co_name == "sync":
            frame = frame.f_back
        site = f"{frame.f_code.co_name}:{frame.f_lineno}"
        self.sites.add(site)
        if site != self._skipped:
            self._flush(os.fstat(descriptor).st_ino)

    def _flush(self, inode: int) -> None:
        if inode in self._names:
            self._names[inode] = {name: values[-1:] for name, values in self._names[inode].items()}
        elif inode in self._held:
            self._flushed[inode] = self._content(inode)

    def _look(self, folder: Path | None = None) -> None:
        """Records the present names of all folders."""
        folder = folder or self._root
        inode = folder.stat().st_ino
        known, present = self._names.setdefault(inode, {}), {}
        for entry in os.scandir(folder):
            present[entry.name] = found = entry.inode()
            if found not in self._held:
                self._held[found] = os.open(entry.path, os.O_RDONLY)
            if stat.S_ISDIR(entry.stat().st_mode):
                self._look(folder / entry.name)
        for name in {*known, *present}:
            values = known.setdefault(name, [None])
            if values[-1] != present.get(name):
                values.append(present.get(name))

    def _lose_power(self) -> None:
        self._look()
        for kept in self._outcomes():
            tree: Tree = {}
            self._build(self._root.stat().st_ino, "", kept, tree)
            self.losses.setdefault((self._done, frozenset(tree.items())), tree)

    def _outcomes(self) -> Iterator[dict]:
        """Yields values of the unflushed names: all old, all new, and each value with all others old or all new."""
        pending = {(i, name): v for i, names in self._names.items() for name, v in names.items() if len(v) > 1}
        for which in (0, -1):
            base = {place: values[which] for place, values in pending.items()}
            yield base
            for place, values in pending.items():
                yield from ({**base, place: value} for value in values)

    def _build(self, inode: int, prefix: str, kept: dict, tree: Tree) -> None:
        for name, values in self._names[inode].items():
            value = kept.get((inode, name), values[-1])
            if value in self._names:
                tree[prefix + name] = None
                self._build(value, f"{prefix}{name}/", kept, tree)
            elif value is not None:
                data = self._content(value)
                tree[prefix + name] = data if self._flushed.get(value) == data else data[: len(data) // 2]

    def _content(self, inode: int) -> bytes:
        descriptor = self._held[inode]
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def write(tree: Tree, folder: Path) -> Path:
    """Writes a tree to a new folder; returns the folder."""
    folder.mkdir()
    for name, content in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content)
                path.chmod(0o600)
    return folder
