"""Curves: the figures of all roles reach this one writer, which keeps them for TensorBoard and as JSON lines.

tensorboardX gives the event's form. Its writer thread is not used: it ends at a full disk, and whoever adds the
eleventh event after that waits for ever.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import re
import socket
import struct
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboardX.record_writer import masked_crc32c  # type: ignore[import-untyped]
from tensorboardX.summary import custom_scalars, histogram_raw, scalar, text  # type: ignore[import-untyped]

from apex.runs.metrics.tensorboard_layout import LAYOUT
from apex.runtime.append_file import AppendFile

FLUSH_SECONDS = 1.0  # `accept` flushes when the last time is so long ago
MAX_BINS = 1_000
MAX_TAGS = 100_000  # as far as their names come by a socket
MAX_TEXT = 1_000  # characters

_ROLE = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}")
_EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)\.")
_KEYS = {"role", "steps", "time", "scalars", "histograms", "texts"}

log = logging.getLogger("apex")


class _Histogram(NamedTuple):
    counts: list[float]
    edges: list[float]


class _Message(NamedTuple):
    """A message that was found well-formed."""

    role: str
    steps: int | None
    time: float
    scalars: dict[str, float]
    histograms: dict[str, _Histogram]
    texts: dict[str, str]


class MetricsWriter:
    """Writes below a run's folder: `tensorboard/RUN/events...` and `curves/ROLE.jsonl`, one line per message.

    TensorBoard calls a run by the folder of its events.

    A full disk does not end a run: what cannot be written waits in memory, then is dropped and counted.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = 0  # the newest that any message gave
        self.num_refused = 0
        self._folder = folder
        self._clock = clock
        self._flush_at = clock() + FLUSH_SECONDS
        self._latest: dict[str, float] = {}
        self._full = False  # whether it was said that there are MAX_TAGS
        self._curves: dict[str, AppendFile] = {}
        events = folder / "tensorboard" / folder.resolve().name
        self._events = AppendFile(events / _next_name(events))
        self._add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    @property
    def num_dropped(self) -> int:
        """Lines and events that were given up because they could not be written."""
        return self._events.num_dropped + sum(file.num_dropped for file in self._curves.values())

    def accept(self, message: dict[str, Any], *, bounded: bool = False) -> None:
        """Takes one message; raises ValueError, and counts, if it is not as the protocol has it.

        {"role": "learner", "steps": 123 or null, "time": unix seconds, "scalars": {tag: value},
        "histograms": {tag: {"counts": [K], "edges": [K + 1]}}, "texts": {tag: text}}; the last two may be absent.
        Without steps it gets the newest that are known. A value that is not finite is null in the JSON lines.
        `bounded`: its tags came by a socket. Once there are MAX_TAGS, new ones among them are left out.
        """
        try:
            checked = _check(message)
        except ValueError:
            self.num_refused += 1
            raise
        if bounded:
            checked = checked._replace(scalars=self._within_limit(checked.scalars))
        self.steps = max(self.steps, checked.steps or 0)
        steps = self.steps if checked.steps is None else checked.steps
        self._latest |= checked.scalars
        self._write_line(checked, steps)
        for tag, value in checked.scalars.items():
            self._add_summary(scalar(tag, value), steps, checked.time)
        for tag, histogram in checked.histograms.items():
            self._add_summary(_summarize(tag, histogram), steps, checked.time)
        for tag, words in checked.texts.items():
            self._add_summary(text(tag, words), steps, checked.time)
        if self._clock() >= self._flush_at:
            self.flush()

    def begin(self, steps: int) -> None:
        """Has TensorBoard leave out what earlier lives of the run have written of these steps and later ones.

        How it arranges the charts comes next, for it would be left out as well.
        """
        self._add_event(Event(wall_time=time.time(), step=steps, session_log=SessionLog(status=SessionLog.START)))
        charts = {
            category: {title: ("Multiline", tags) for title, tags in of_category.items()}
            for category, of_category in LAYOUT.items()
        }
        self._add_summary(custom_scalars(charts), steps, time.time())

    def latest(self, tag: str) -> float | None:
        """The newest value of a tag; None before there is one, and while it is not finite."""
        value = self._latest.get(tag, math.nan)
        return value if math.isfinite(value) else None

    def flush(self) -> None:
        """Hands all that is pending to the operating system: a killed process loses none of it."""
        self._flush_at = self._clock() + FLUSH_SECONDS
        for file in (self._events, *self._curves.values()):
            file.flush()

    def close(self) -> None:
        """Flushes and closes the files."""
        self.flush()
        for file in (self._events, *self._curves.values()):
            file.close()

    def _within_limit(self, scalars: dict[str, float]) -> dict[str, float]:
        """Those whose tags are known, and as many new ones as there is room for."""
        room = max(0, MAX_TAGS - len(self._latest))
        new = [tag for tag in scalars if tag not in self._latest]
        if len(new) <= room:
            return scalars
        if not self._full:
            self._full = True
            log.warning("there are %d curves: no more are begun, e.g. %s", MAX_TAGS, new[-1])
        dropped = set(new[room:])
        return {tag: value for tag, value in scalars.items() if tag not in dropped}

    def _write_line(self, message: _Message, steps: int) -> None:
        line: dict[str, Any] = {
            "steps": steps,
            "time": message.time,
            "scalars": {tag: value if math.isfinite(value) else None for tag, value in message.scalars.items()},
        }
        if message.histograms:
            line["histograms"] = {tag: histogram._asdict() for tag, histogram in message.histograms.items()}
        if message.texts:
            line["texts"] = message.texts
        if message.role not in self._curves:
            self._curves[message.role] = AppendFile(self._folder / "curves" / f"{message.role}.jsonl", lines=True)
        self._curves[message.role].append(json.dumps(line, allow_nan=False).encode() + b"\n")

    def _add_summary(self, summary: Summary, steps: int, wall_time: float) -> None:
        self._add_event(Event(wall_time=wall_time, step=steps, summary=summary))

    def _add_event(self, event: Event) -> None:
        """One record: uint64 length, its checksum, the event, its checksum."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        parts = (length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data)))
        self._events.append(b"".join(parts))


def read_curve(path: Path) -> list[dict[str, Any]]:
    """The messages of a `curves/ROLE.jsonl`; a line that a crash has torn is left out."""
    messages = []
    for line in path.read_bytes().split(b"\n"):
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict):
            messages.append(message)
    return messages


def _next_name(folder: Path) -> str:
    """A name for the events of a writer that goes on after all before it, also where the clock was set back since.

    TensorBoard reads the files of a folder in the order of their names, and returns to none.
    """
    before = [int(found[1]) for path in folder.glob("*") if (found := _EVENTS.match(path.name))]
    seconds = max(time.time_ns() // 10**9, max(before, default=0) + 1)
    return f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{time.time_ns()}"


def _check(message: dict[str, Any]) -> _Message:
    """Reads a message; raises ValueError that names what is wrong."""
    _require(isinstance(message, dict), "a metrics message must be an object", message)
    unknown = sorted(map(str, set(message) - _KEYS))
    _require(not unknown, f"a metrics message has {', '.join(sorted(_KEYS))} only", unknown)
    role, steps, seconds = message.get("role"), message.get("steps"), message.get("time")
    _require(isinstance(role, str) and _ROLE.fullmatch(role) is not None, "role must be a plain lower-case word", role)
    whole = isinstance(steps, numbers.Integral) and not isinstance(steps, bool)
    _require(steps is None or (whole and 0 <= int(steps) < 2**63), "steps must be a whole number or null", steps)
    _require(_is_number(seconds) and math.isfinite(float(seconds or 0)), "time must be in unix seconds", seconds)
    scalars, histograms, texts = (message.get(name, {}) for name in ("scalars", "histograms", "texts"))
    _require(isinstance(scalars, dict), "scalars must be an object", scalars)
    _require(isinstance(histograms, dict), "histograms must be an object", histograms)
    _require(isinstance(texts, dict), "texts must be an object", texts)
    for tag in (*scalars, *histograms, *texts):
        _require(isinstance(tag, str) and _TAG.fullmatch(tag) is not None, "not a tag", tag)
    for tag, value in scalars.items():
        _require(_is_number(value), f"{tag} must be a number", value)
    for tag, words in texts.items():
        plain = isinstance(words, str) and words.isprintable() and len(words) <= MAX_TEXT
        _require(plain, f"{tag} must be a line of at most {MAX_TEXT} printable characters", words)
    return _Message(
        role=str(role),
        steps=None if steps is None else int(steps),
        time=float(seconds or 0),
        scalars={tag: float(value) for tag, value in scalars.items()},
        histograms={tag: _check_histogram(tag, histogram) for tag, histogram in histograms.items()},
        texts=texts,
    )


def _check_histogram(tag: str, histogram: Any) -> _Histogram:
    _require(isinstance(histogram, dict) and set(histogram) == {"counts", "edges"}, f"{tag}: counts, edges", histogram)
    counts, edges = histogram["counts"], histogram["edges"]
    for name, values in (("counts", counts), ("edges", edges)):
        _require(isinstance(values, list), f"{tag}: {name} must be a list", values)
        finite = all(_is_number(value) and math.isfinite(value) for value in values)
        _require(finite, f"{tag}: {name} must be finite numbers", values)
    sizes = (len(counts), len(edges))
    _require(0 < len(counts) <= MAX_BINS and len(edges) == len(counts) + 1, f"{tag}: one edge more than counts", sizes)
    _require(min(counts) >= 0, f"{tag}: counts must be >= 0", min(counts))
    _require(all(a < b for a, b in pairwise(edges)), f"{tag}: edges must increase", edges)
    return _Histogram([float(count) for count in counts], [float(edge) for edge in edges])


def _summarize(tag: str, histogram: _Histogram) -> Summary:
    """The sums that TensorBoard wants are those of the middles of the bins."""
    counts, edges = histogram
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    total = math.fsum(n * x for n, x in zip(counts, middles, strict=True))
    squares = math.fsum(n * x * x for n, x in zip(counts, middles, strict=True))
    return histogram_raw(tag, edges[0], edges[-1], sum(counts), total, squares, edges[1:], counts)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _require(condition: bool, message: str, value: Any) -> None:
    if not condition:
        raise ValueError(f"{message}, got {str(value)[:80]!r}")
