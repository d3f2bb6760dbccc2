"""A server of tables that runs alone: a process for each table, and this one, which answers clients that join."""

import asyncio
import fcntl
import logging
import os
import resource
import secrets
import sys
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from apexreplay.errors import FAILED, FINISHED, DataError, UnsavedMemoryError, UsageError
from apexreplay.files.atomic_files import replace_file, seal, unseal
from apexreplay.files.file_lock import LOCK_ATTEMPTS, FileLock
from apexreplay.process.children import check_children, start_child, stop_children
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.sampling.batch_drawer import DrawSettings
from apexreplay.server.control_server import ControlServer, ServedTable
from apexreplay.server.leases import AwakeClock, Leases, newest_incarnation
from apexreplay.server.open_store import reclaim
from apexreplay.server.place import MEMORY_SAMPLERS, Place, first_port
from apexreplay.server.service import ServerSettings, run_tasks, serve
from apexreplay.server.table_settings import TableSettings
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.store.location import claim_run, memory_id, remove, store_path
from apexreplay.transport.endpoints import max_segment_bytes
from apexreplay.transport.roles import read_keys
from apexreplay.transport.sockets import InsecureBindWarning, open_context
from apexreplay.wire.codec import Codec
from apexreplay.wire.json_codec import encode_json
from apexreplay.wire.status import ReplayStatus

STATUS_SECONDS = 1.0
EPOCH_ZERO = 1_704_067_200  # Unix time of 2024-01-01, from which a start without a number is numbered
LAST_SNAPSHOT_SECONDS = 60.0  # maximum time for the last snapshot of a table
STOP_SECONDS = LAST_SNAPSHOT_SECONDS + 15.0  # maximum time in which the tables end
FOLDER_REMEDY = "free some space, or check the disk and the permissions of the folder"
REMEDY = "create it with apexreplay keys DIR, or leave --keys out on a trusted network"

log = logging.getLogger("apexreplay")


def run_server(
    tables: Sequence[TableSettings], place: Place, stop: Stop, on_ready: Callable[[], None] = lambda: None
) -> int:
    """Serves the tables until `stop` is requested; returns the exit status: FAILED if a table could not be saved.

    With `place.snapshots`, the memory of a killed server is used again by the next one with the same folder. Raises
    UsageError if a table does not fit the memory or a running server has this folder, AddressError for a port in use,
    and ChildDiedError.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # Each connection takes a file.
    served, clock = [], AwakeClock()
    read_keys(place.keys, "server")  # before a memory is restored, or removed for space
    with ExitStack() as stack:
        if place.snapshots is not None:
            stack.callback(_lock(place.snapshots).release)
        start, run_ids = _open_folder(place.snapshots, [each.table.name for each in tables])
        for run_id in run_ids:
            stack.enter_context(claim_run(run_id, place.snapshots))
        _make_room(tables, run_ids)
        children = []
        try:
            for index, (settings, run_id) in enumerate(zip(tables, run_ids, strict=True)):
                reader, writer = Pipe(duplex=False)
                task = settings, place, index, start, run_id, writer
                children.append(start_child(f"table-{settings.table.name}", _serve_table, *task))
                writer.close()
                leases = Leases(settings.num_streams, MEMORY_SAMPLERS, start, clock=clock)
                served.append(ServedTable(settings, index, run_id, reader, leases))
            with open_context(read_keys(place.keys, "server")) as context:
                control = ControlServer(context, place, served)

                async def watch() -> None:
                    is_ready = False
                    while not stop.poll():
                        clock()
                        context.check()
                        check_children(children)
                        if control.collect() and not is_ready:
                            is_ready = True
                            log.info("ready: tcp://%s:%d", place.bind, place.port)
                            on_ready()
                        await asyncio.sleep(POLL_SECONDS)

                run_tasks(watch(), control.answer(stop))
        finally:
            stop_children(children, STOP_SECONDS)
    return FAILED if any(child.exitcode for child in children) else FINISHED


def _make_room(tables: Sequence[TableSettings], run_ids: Sequence[int]) -> None:
    """Makes room for the new memories of all tables together: each process would only see the need of its own."""
    pairs = [(store_path(run_id), each) for each, run_id in zip(tables, run_ids, strict=True)]
    new = [(path, each.store.sizes.file_bytes(each.table)) for path, each in pairs if not path.exists()]
    if new:
        reclaim(new[0][0], sum(num_bytes for _, num_bytes in new))


def _lock(folder: Path) -> FileLock:
    """Locks a folder of snapshots for this server; raises UsageError if another server has it."""
    path = folder / "server.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        busy = UsageError(f"{folder} is in use by another server", "stop it, or choose another folder")
        return FileLock(path, LOCK_ATTEMPTS, busy)
    except OSError as error:
        raise DataError(f"cannot use {folder}: {error.strerror}", "choose another folder") from error


def _open_folder(folder: Path | None, names: Sequence[str]) -> tuple[int, list[int]]:
    """Returns the number of this start, and an id for each table; the ids are the same at each start with `folder`."""
    if folder is None:
        return 1, [secrets.randbits(52) + 1 for _ in names]
    path = folder / "server.json"
    saved: dict[str, Any] = {"start": 0, "tables": {}}
    try:
        if path.exists():
            saved = unseal(path.read_bytes())
        elif found := _saved_ids(folder):  # Somebody has removed a damaged file.
            saved = {"start": int(time.time()) - EPOCH_ZERO, "tables": found}
        run_ids = {name: saved["tables"].get(name) or secrets.randbits(52) + 1 for name in names}
        start = int(saved["start"]) + 1
        replace_file(path, seal({"start": start, "tables": {**saved["tables"], **run_ids}}))
    except OSError as error:  # Without the file, the memory of a killed server would not be found.
        raise DataError(f"cannot read or write {path}: {error.strerror}", FOLDER_REMEDY) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot use {path}: {error}", "choose another folder, or remove the file") from error
    return start, [run_ids[name] for name in names]


def _saved_ids(folder: Path) -> dict[str, int]:
    """Returns the ids of the tables that have snapshots."""
    found: dict[str, int] = {}
    for path in folder.iterdir() if folder.exists() else ():
        with suppress(OSError):  # It is no folder of a table, such as lost+found.
            if path.is_dir() and (snapshot := SnapshotFolder(path).newest()) is not None:
                found[path.name] = snapshot.run_id
    return found


def _has_unread(pipe: Connection) -> bool:
    """Whether a pipe has bytes that its other end has not read: a full one would stop the writer."""
    return any(fcntl.ioctl(pipe.fileno(), termios.FIONREAD, bytes(4)))


# --- the process of a table -------------------------------------------------------------------------------------------


class _LastMemory:
    """Records in the file NAME.memory, in the folder of the snapshots, which host has served the table last."""

    def __init__(self, snapshots: Path, name: str) -> None:
        self._path = snapshots / f"{name}.memory"
        self._here = memory_id()
        try:
            self._last = unseal(self._path.read_bytes())["memory"] if self._path.exists() else ""
        except OSError as error:
            raise DataError(f"cannot read {self._path}: {error.strerror}", FOLDER_REMEDY) from error
        except (ValueError, KeyError, TypeError) as error:
            remedy = "remove it if no other host has served the table since"
            raise DataError(f"{self._path} is damaged: {error}", remedy) from error

    def remove_outdated(self, store: Path) -> None:
        """Removes the memory at `store` if another host has served the table since."""
        if self._last not in ("", self._here) and remove(store):
            log.warning("removed %s, which is out of date: another host has served the table since", store)

    def note(self) -> None:
        """Records this host. Called once the server can store items: a failed start must not outdate other memories."""
        if self._last != self._here:
            try:
                replace_file(self._path, seal({"memory": self._here}))
            except OSError as error:
                raise DataError(f"cannot write {self._path}: {error.strerror}", FOLDER_REMEDY) from error


class _Link:
    """What the process of a table needs of the server: it reports its status."""

    inserts_wanted = False
    finished = True  # It saves a last snapshot and removes the memory when it is stopped.
    lost = False
    answers = True

    def __init__(self, status: Callable[[], ReplayStatus], pipe: Connection) -> None:
        self._status = status
        self._pipe = pipe
        self._polls = 0

    def check(self) -> None:
        """Reports the status about every STATUS_SECONDS, if the last report was read. Called every POLL_SECONDS."""
        if self._polls % round(STATUS_SECONDS / POLL_SECONDS) == 0 and not _has_unread(self._pipe):
            self._pipe.send_bytes(encode_json(self._status()))
        self._polls += 1

    def close(self) -> None:
        """Closes the pipe."""
        self._pipe.close()


def _serve_table(
    stop: Stop, settings: TableSettings, place: Place, index: int, start: int, run_id: int, pipe: Connection
) -> None:
    first = first_port(place, index)

    def address(port: int) -> str:
        return f"tcp://{place.bind}:{port}"

    folder = None if place.snapshots is None else SnapshotFolder(place.snapshots / settings.table.name)
    last = None if place.snapshots is None else _LastMemory(place.snapshots, settings.table.name)
    if last is not None:
        last.remove_outdated(store_path(run_id))

    def join(status: Callable[[], ReplayStatus]) -> _Link:
        if last is not None:
            last.note()
        return _Link(status, pipe)

    server = ServerSettings(
        codec=Codec(run_id, settings.table),
        path=store_path(run_id),
        store=settings.store,
        draw=DrawSettings(0, 1, settings.max_batch, 2**62, settings.limiter, settings.selection),
        num_rows=settings.num_samplers + MEMORY_SAMPLERS,
        batch_endpoints=[address(first + 3 + sampler) for sampler in range(settings.num_samplers)],
        seed=secrets.randbits(32),
        snapshots=folder,
        snapshot_seconds=place.snapshot_seconds,
        last_snapshot_seconds=LAST_SNAPSHOT_SECONDS,
        endpoints={name: address(first + at) for at, name in enumerate(("experience", "priorities", "receipts"))},
        max_segment_items=settings.segment_length,
        max_segments=settings.window,  # Each writer has a connection of its own.
        max_segment_bytes=max_segment_bytes(settings.table, settings.segment_length),
        read_keys=partial(read_keys, place.keys, "server"),
        stuck_seconds=0.0,
        warning=InsecureBindWarning("" if place.keys or place.bind.startswith("127.") else place.bind, REMEDY),
        newest_incarnation=newest_incarnation(start),
    )
    try:
        serve(server, join, stop)
    except UnsavedMemoryError as error:
        log.error("%s: %s", settings.table.name, error)
        sys.exit(error.exit_status)
