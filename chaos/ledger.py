"""The ledger of an actor process: segments that were sent, and segments that were acknowledged.

Each process has a file of its own, to which each entry is appended with one write(2). The page cache outlives the
process, so that SIGKILL loses no entry. Sent segments are written before they are sent, acknowledgements before they
are processed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apexreplay.client.reliable_sender import Outlet, Receipts
from apexreplay.types import Receipt, Segment, Stream
from chaos.digests import digest_segment

# Entries are little-endian. `count` digests follow each entry SENT.
ENTRY = np.dtype(
    [
        ("kind", "<u4"),
        ("count", "<u4"),
        ("actor_id", "<i8"),
        ("incarnation", "<i8"),
        ("number", "<i8"),
        ("extra", "<u8"),
    ]
)
SENT, ACKNOWLEDGED, WRONG = 1, 2, 3  # `extra`: base; incarnation of the store; base that no receipt confirms


class Entries(NamedTuple):
    """The contents of ledgers."""

    sent: dict[tuple[int, int, int], NDArray[np.uint64]]  # digests by actor id, incarnation and number
    acknowledged: dict[tuple[int, int, int], int]  # acknowledged segments by the store's incarnation
    wrong: list[str]  # sentences about entries that a correct actor cannot write

    def copy(self) -> Entries:
        """Returns a copy of the present contents; the digests themselves never change."""
        return Entries(dict(self.sent), dict(self.acknowledged), list(self.wrong))


class Ledger:
    """Writes the ledger of one process."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}-{os.urandom(6).hex()}.ledger"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._in_flight: dict[Stream, dict[int, int]] = {}  # number -> transitions, for each stream
        self._next: dict[Stream, int] = {}

    def note_sent(self, segment: Segment) -> None:
        """Writes an entry before a segment is sent for the first time."""
        stream = segment.stream
        waiting = self._in_flight.setdefault(stream, {})
        if segment.number < self._next.get(stream, 0):
            return  # It was sent before.
        base = min(waiting, default=segment.number)
        if segment.base > base:
            self._write(WRONG, 0, stream, segment.number, segment.base)
        waiting[segment.number] = len(segment.records)
        self._next[stream] = segment.number + 1
        self._write(SENT, len(segment.records), stream, segment.number, segment.base, digest_segment(segment))

    def note_receipt(self, receipt: Receipt) -> None:
        """Writes the segments that this receipt acknowledges first."""
        stream = receipt.stream
        waiting = self._in_flight.get(stream, {})
        stored = receipt.bitmap << 1
        for number in sorted(waiting):
            ahead = number - receipt.contiguous
            if ahead < 0 or stored >> ahead & 1:
                self._write(ACKNOWLEDGED, waiting.pop(number), stream, number, receipt.store_incarnation)

    def _write(
        self,
        kind: int,
        count: int,
        stream: Stream,
        number: int,
        extra: int,
        digests: NDArray[np.uint64] | None = None,
    ) -> None:
        entry = np.array([(kind, count, *stream, number, extra)], ENTRY).tobytes()
        data = entry + (b"" if digests is None else digests.tobytes())
        if os.write(self._descriptor, data) != len(data):
            raise OSError("the ledger cannot be written: free space on the disk, because the audit needs the ledger")


class WitnessedOutlet:
    """A segment sender that writes to the ledger before it sends."""

    def __init__(self, outlet: Outlet, ledger: Ledger, decode: Callable[[Sequence[bytes]], Segment]) -> None:
        self._outlet = outlet
        self._ledger = ledger
        self._decode = decode

    def send(self, message: list[bytes]) -> bool:
        """See Outlet."""
        self._ledger.note_sent(self._decode(message))
        return self._outlet.send(message)

    def reconnect(self) -> None:
        """See Outlet."""
        self._outlet.reconnect()


class WitnessedReceipts:
    """A receipt reader that writes to the ledger before the actor receives the receipt."""

    def __init__(self, receipts: Receipts, ledger: Ledger) -> None:
        self._receipts = receipts
        self._ledger = ledger

    def receive(self, timeout: float = 0.0) -> list[Receipt]:
        """See Receipts."""
        receipts = self._receipts.receive(timeout)
        for receipt in receipts:
            self._ledger.note_receipt(receipt)
        return receipts


class LedgerReader:
    """Reads all ledgers of a folder, and later the new entries."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.actors: dict[int, set[int]] = {}  # actor ids by process
        self.num_acknowledged = 0  # number of transitions
        self.newest_incarnation = 0  # streams with an acknowledged segment
        self.entries = Entries({}, {}, [])

    def read(self) -> None:
        """Reads new entries. The last entry of a killed process may be incomplete; it was not sent yet."""
        for path in sorted(self._folder.glob("*.ledger")):
            begin = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(begin)
                ids = self.actors.setdefault(int(path.name.partition("-")[0]), set())
                self._read[path] = begin + self._take(memoryview(file.read()), ids)

    def _take(self, data: memoryview, ids: set[int]) -> int:
        at = 0
        while at + ENTRY.itemsize <= len(data):
            entry = np.frombuffer(data, ENTRY, 1, at)[0]
            kind, count = int(entry["kind"]), int(entry["count"])
            end = at + ENTRY.itemsize + (8 * count if kind == SENT else 0)
            if end > len(data):
                break
            key = int(entry["actor_id"]), int(entry["incarnation"]), int(entry["number"])
            if kind == SENT:
                if key in self.entries.sent:
                    self.entries.wrong.append(
                        f"actor {key[0]}, incarnation {key[1]}: segment {key[2]} was created twice"
                    )
                ids.add(key[0])
                self.entries.sent[key] = np.frombuffer(data, np.uint64, count, at + ENTRY.itemsize).copy()
            elif kind == ACKNOWLEDGED:
                self.entries.acknowledged[key] = int(entry["extra"])
                self.num_acknowledged += count
                self.newest_incarnation = max(self.newest_incarnation, key[1])
            else:
                self.entries.wrong.append(
                    f"actor {key[0]}, incarnation {key[1]}: segment {key[2]} has the base {entry['extra']}, which no "
                    "receipt confirms"
                )
            at = end
        return at
