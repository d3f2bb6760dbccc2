"""Writes the metrics of a run as TensorBoard events and as JSON lines (curves), and reads and cuts the curves.

tensorboardX encodes the events. Its writer thread is not used: the thread ends when the disk is full, and the program
then blocks permanently when it adds the eleventh event.
"""

import json
import logging
import math
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboardX.record_writer import masked_crc32c  # type: ignore[import-untyped]
from tensorboardX.summary import custom_scalars, histogram_raw, scalar, text  # type: ignore[import-untyped]

from apex.runs.metrics.append_file import AppendFile
from apex.runs.metrics.tensorboard_layout import LAYOUT
from apexreplay.files.atomic_files import replace_file
from apexreplay.wire.histogram import Histogram
from apexreplay.wire.json_codec import encode_json

FLUSH_SECONDS = 1.0  # interval at which `accept` flushes
# Length from which the next file of a curve, or of events, is begun. A mirror uploads the last file each minute.
MAX_FILE_BYTES = 1 << 22
MAX_ROW_BYTES = 1 << 16  # more than a row with all its histograms and texts has
CUT = "cut"  # subfolder of `curves` for rows of steps that are repeated

log = logging.getLogger("apex")

_EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class MetricRow(NamedTuple):
    """Metrics of one role at one time."""

    role: str
    steps: int  # steps of the run
    scalars: dict[str, float]  # by TensorBoard tag
    time: float | None = None  # Unix time in seconds; None: now
    histograms: Mapping[str, Histogram] = {}
    texts: Mapping[str, str] = {}


class MetricsWriter:
    """Writes `tensorboard/RUN/events...` and `curves/ROLE.jsonl`, one line per row, below a run's folder.

    After MAX_FILE_BYTES, the next file follows: `ROLE-0001.jsonl`.

    TensorBoard names a run after the folder of its events. A full disk does not end the run: unwritten records wait in
    memory up to a limit; further records are dropped and counted.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._flush_at = clock() + FLUSH_SECONDS
        self._latest: dict[str, float] = {}
        self._curves: dict[str, AppendFile] = {}
        self._tensorboard = folder / "tensorboard" / folder.resolve().name
        self._begin_events()

    def accept(self, row: MetricRow) -> None:
        """Writes one row. A value that is not finite becomes null in the JSON lines."""
        now = time.time() if row.time is None else row.time
        self._latest |= row.scalars
        self._write_line(row, now)
        for tag, value in row.scalars.items():
            self._add_summary(scalar(tag, value), row.steps, now)
        for tag, histogram in row.histograms.items():
            self._add_summary(_summarize(tag, histogram), row.steps, now)
        for tag, markdown in row.texts.items():
            self._add_summary(text(tag, markdown), row.steps, now)
        if self._clock() >= self._flush_at:
            self.flush()

    def begin(self, steps: int) -> None:
        """Makes TensorBoard ignore all events from step `steps` on that earlier starts of the run have written.

        Then writes the layout of the charts again, because TensorBoard also ignores the earlier layout.
        """
        self._add_event(Event(wall_time=time.time(), step=steps, session_log=SessionLog(status=SessionLog.START)))
        charts = {
            category: {title: ("Multiline", tags) for title, tags in of_category.items()}
            for category, of_category in LAYOUT.items()
        }
        self._add_event(Event(wall_time=time.time(), step=steps, summary=custom_scalars(charts)))

    def latest(self, tag: str) -> float | None:
        """Returns the newest value of a tag; None if there is no value or it is not finite."""
        value = self._latest.get(tag, math.nan)
        return value if math.isfinite(value) else None

    def flush(self) -> None:
        """Passes all records to the operating system, so that a killed process loses none of them."""
        self._flush_at = self._clock() + FLUSH_SECONDS
        for file in (self._events, *self._curves.values()):
            file.flush()
        if self._events.num_bytes >= MAX_FILE_BYTES:
            self._events.close()
            self._begin_events()
        for role in [role for role, file in self._curves.items() if file.num_bytes >= MAX_FILE_BYTES]:
            self._curves.pop(role).close()

    def close(self) -> None:
        """Flushes and closes the files."""
        self.flush()
        for file in (self._events, *self._curves.values()):
            file.close()

    def _write_line(self, row: MetricRow, now: float) -> None:
        line: dict[str, Any] = {"steps": row.steps, "time": now, "scalars": row.scalars}
        line |= {name: value for name in ("histograms", "texts") if (value := getattr(row, name))}
        if row.role not in self._curves:
            self._curves[row.role] = AppendFile(_open_part(self._folder / "curves" / f"{row.role}.jsonl"), lines=True)
        self._curves[row.role].append(encode_json(line) + b"\n")

    def _begin_events(self) -> None:
        self._events = AppendFile(self._tensorboard / _next_name(self._tensorboard))
        self._add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def _add_summary(self, summary: Summary, steps: int, wall_time: float) -> None:
        self._add_event(Event(wall_time=wall_time, step=steps, summary=summary))

    def _add_event(self, event: Event) -> None:
        """Appends one record: uint64 length, its checksum, the event, its checksum."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        parts = (length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data)))
        self._events.append(b"".join(parts))


def read_curve(path: Path, last_bytes: float = math.inf) -> list[dict[str, Any]]:
    """Returns the rows of `curves/ROLE.jsonl` and the files that follow it, [] without a file.

    Omits a line that is incomplete after a crash. `last_bytes`: returns only the rows that are whole in so many bytes
    at the end of the curve.
    """
    texts: list[bytes] = []  # of the files, the newest first
    for part in reversed(_parts(path)):
        with suppress(FileNotFoundError), part.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(int(max(0, size - last_bytes)))
            texts.append(file.read())
            last_bytes -= size
        if last_bytes <= 0:
            break
    return list(_parse(b"\n".join(reversed(texts)).split(b"\n")))


def iterate_curve(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of `read_curve`. Those of a week would take many gigabytes as a list."""
    for part in _parts(path):
        with suppress(FileNotFoundError), part.open("rb") as file:
            yield from _parse(file)


def _parse(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def cut_curves(folder: Path, steps: int, updates: int) -> int:
    """Moves the rows beyond `steps` or `updates` from each `ROLE.jsonl` to `cut/ROLE.jsonl`; returns their number.

    A resumed run repeats these. If only the learner was lost, it repeats updates, but no steps.

    The rows are first appended to `cut/ROLE.jsonl`. Then `ROLE.jsonl` is replaced atomically. A crash between these
    two steps leaves the rows in both files. If the disk is full, a curve stays unchanged.
    """
    num_rows = 0
    for path in sorted(folder.glob("*.jsonl")):
        try:
            kept: list[bytes] = []
            late: list[bytes] = []
            for row in path.read_bytes().splitlines(keepends=True):
                (late if _is_beyond(row, steps, updates) else kept).append(row)
            if not late:
                continue
            (folder / CUT).mkdir(exist_ok=True)
            with (folder / CUT / path.name).open("ab") as file:
                file.writelines(late)
            replace_file(path, b"".join(kept))
        except OSError as error:
            log.error("cannot remove the repeated rows from %s: %s", path, error)
            continue
        num_rows += len(late)
    if num_rows:
        log.info("moved %d rows of curves beyond step %d or update %d to %s", num_rows, steps, updates, folder / CUT)
    return num_rows


def _parts(path: Path) -> list[Path]:
    """Returns the files of a curve, the oldest first. The first may be missing."""
    return [path, *sorted(path.parent.glob(f"{path.stem}-[0-9][0-9][0-9][0-9]{path.suffix}"))]


def _open_part(path: Path) -> Path:
    """Returns the file of a curve to which the next rows belong."""
    *others, last = _parts(path)
    with suppress(FileNotFoundError):
        if last.stat().st_size >= MAX_FILE_BYTES:
            return path.with_stem(f"{path.stem}-{len(others) + 1:04d}")
    return last


def _next_name(folder: Path) -> str:
    """Returns a file name that sorts after all names in `folder`, even if the clock was set back.

    TensorBoard reads the files of a folder once, in the order of their names.
    """
    before = [int(found[1]) for path in folder.glob("*") if (found := _EVENTS.match(path.name))]
    seconds = max(time.time_ns() // 10**9, max(before, default=0) + 1)
    return f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{time.time_ns()}"


def _summarize(tag: str, histogram: Histogram) -> Summary:
    """Converts a histogram for TensorBoard, which expects sums over the centers of the bins."""
    counts, edges = histogram.counts, histogram.edges
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    total = math.fsum(n * x for n, x in zip(counts, middles, strict=True))
    squares = math.fsum(n * x * x for n, x in zip(counts, middles, strict=True))
    return histogram_raw(tag, edges[0], edges[-1], sum(counts), total, squares, edges[1:], counts)


def _is_beyond(row: bytes, steps: int, updates: int) -> bool:
    """Returns whether a row has more steps or updates; False for an incomplete row after a crash."""
    try:
        fields = json.loads(row)
        return bool(fields["steps"] > steps or fields["scalars"].get("learner/updates", 0) > updates)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
