"""The audit of `python -m chaos`: the ledgers of the actors against the content of the replay memory, bit for bit."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.errors import UsageError
from apex.replay_memory.store.file import open_file
from apex.replay_memory.store.layout import COMMIT, Regions
from apex.types import Schema
from chaos.digests import digest_store, first_live
from chaos.ledger import Entries

CHUNK = 4_096  # transitions that are read between two looks at the watermark
WRITE_LOOKS, WRITE_SECONDS = 10, 0.2  # at keys without a weight, and between two, until the audit believes it
Digests = NDArray[np.uint64]


class Verdict(NamedTuple):
    """What the audit found, in transitions."""

    sent: int
    acknowledged: int
    stored: int
    lost: int  # acknowledged by the store that is there, and not in it
    gone_with_memory: int  # acknowledged by a store whose file is gone, and not in the snapshot that came after
    twice: int  # stored more often than once
    never_sent: int  # stored, and not what anybody sent: a bit that changed counts here, and as lost
    alike: int  # sent more often than once under different numbers: then the audit could not tell
    unseen: int  # overwritten before the audit had read them: then it cannot tell either
    changed: int  # keys that a later look found to hold something else
    wrong: int  # entries of the ledgers that no honest actor makes
    weightless: int  # stored, and never drawn: as good as lost

    @property
    def passed(self) -> bool:
        """Whether every acknowledged transition is stored exactly once, and nothing else is."""
        return not any(self[3:])

    def sentence(self) -> str:
        """The verdict for people."""
        words = [f"{self.acknowledged:,} acknowledged, {self.stored:,} stored", f"lost {self.lost}"]
        words += [f"stored twice {self.twice}", f"stored and never sent {self.never_sent}"]
        rest = ("gone_with_memory", "alike", "unseen", "changed", "wrong", "weightless")
        words += [f"{name.replace('_', ' ')} {getattr(self, name)}" for name in rest if getattr(self, name)]
        return f"{'passed' if self.passed else 'FAILED'}: " + ", ".join(words)


class Content(NamedTuple):
    """What one store holds, with all that it ever held and has overwritten since."""

    store_incarnation: int
    first_key: int
    digests: Digests  # of the keys from `first_key` on; 0 stands for what nobody has read
    unseen: int
    changed: int
    weightless: int

    def on_top_of(self, before: Content) -> Content:
        """This store was made of a snapshot of `before`, which knows what had been overwritten by then.

        It stands for that one: what `before` has acknowledged must be here.
        """
        overwritten = before.digests[: max(0, self.first_key - before.first_key)]
        return Content(
            before.store_incarnation,
            before.first_key,
            np.concatenate([overwritten, self.digests]),
            before.unseen + self.unseen,
            before.changed + self.changed,
            self.weightless,
        )


class Follower:
    """Reads what one store holds, and goes on reading what is added, faster than it is overwritten.

    Nothing is locked: the writer works on, or is dead, or another one has begun. A store of another incarnation may
    have been restored from a snapshot, and goes on with its keys: of the one before remains what was overwritten then.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        self._path = path
        self._schema = schema
        self._regions: Regions | None = None
        self._file = (0, 0)
        self._parts: list[Digests] = []
        self.store_incarnation = 0
        self.first_key = 0  # of what was read
        self.end_key = 0
        self.unseen = 0
        self.changed = 0
        self.weightless = 0

    @property
    def content(self) -> Content:
        """All that was read."""
        digests = _join(self._parts)
        return Content(self.store_incarnation, self.first_key, digests, self.unseen, self.changed, self.weightless)

    def read(self) -> bool:
        """Takes what is new; False if there is no store at present."""
        regions = self._open()
        if regions is None:
            return False
        commit = int(regions.cells[COMMIT])
        if self.end_key > commit:  # Committed keys never go.
            self.changed += self.end_key - commit
            self.end_key = commit
        while self.end_key < commit:
            first = first_live(regions)
            if first > self.end_key:
                self.unseen += first - self.end_key
                self._parts.append(np.zeros(first - self.end_key, np.uint64))
                self.end_key = first
            keys = range(self.end_key, min(commit, self.end_key + CHUNK))
            try:
                found = digest_store(regions, keys)
            except ValueError:
                if first_live(regions) <= keys.start:  # Nobody has overwritten what makes no sense.
                    raise
                continue
            lost = max(0, min(first_live(regions), keys.stop) - keys.start)  # overwritten while they were read
            found[:lost] = 0
            self.unseen += lost
            self._parts.append(found)
            self.end_key = keys.stop
        return True

    def look_again(self) -> None:
        """Reads all that is live once more, and counts what is not what it was."""
        regions = self._open()
        if regions is None:
            return
        before = _join(self._parts)
        for start in range(max(first_live(regions), self.first_key), self.end_key, CHUNK):
            keys = range(start, min(self.end_key, start + CHUNK))
            try:
                found = digest_store(regions, keys)
            except ValueError:  # Overwritten meanwhile, or changed.
                found = np.zeros(len(keys), np.uint64)
            live = np.arange(keys.start, keys.stop) >= first_live(regions)
            differs = found != before[keys.start - self.first_key : keys.stop - self.first_key]
            self.changed += int((differs & live).sum())
        for _ in range(WRITE_LOOKS):  # A writer gives weights last, and may be held up before it does.
            self.weightless = self._count_weightless(regions)
            if not self.weightless:
                return
            time.sleep(WRITE_SECONDS)

    def _count_weightless(self, regions: Regions) -> int:
        """Keys without a weight in the sum-tree's leaves."""
        keys = np.arange(max(first_live(regions), self.first_key), self.end_key)
        bare = keys[regions.tree.weights(keys % regions.sizes.capacity) <= 0]
        return int((bare >= first_live(regions)).sum())  # A key loses its weight after it is dead.

    def _open(self) -> Regions | None:
        try:
            facts = os.stat(self._path)
            if self._regions is None or (facts.st_dev, facts.st_ino) != self._file:
                self._regions = open_file(self._path, self._schema, writable=False)
                self._file = facts.st_dev, facts.st_ino
        except (OSError, UsageError):  # It is away, or just being made.
            return None
        incarnation = int(self._regions.header["store_incarnation"][0])
        if incarnation != self.store_incarnation:
            first = first_live(self._regions)
            overwritten = _join(self._parts)[: max(0, first - self.first_key)]
            if not len(overwritten):
                self.first_key, self.unseen, self.changed = first, 0, 0
            self.store_incarnation, self._parts = incarnation, [overwritten]
            self.end_key = self.first_key + len(overwritten)
        return self._regions


def judge(entries: Entries, stores: Sequence[Content]) -> Verdict:
    """Compares. Of a living run what is acknowledged must be older than the stores' content, what is sent newer."""
    incarnations = {store.store_incarnation for store in stores}
    sent = _join(list(entries.sent.values()))
    acknowledged = {key: digests for key, digests in entries.sent.items() if key in entries.acknowledged}
    here = _join([d for key, d in acknowledged.items() if entries.acknowledged[key] in incarnations])
    before = _join([d for key, d in acknowledged.items() if entries.acknowledged[key] not in incarnations])
    held = _join([store.digests for store in stores])
    seen = held[held != 0]  # 0 stands for what was overwritten before it was read.
    stored = np.unique(seen)
    return Verdict(
        sent=len(sent),
        acknowledged=len(here) + len(before),
        stored=len(held),
        lost=_missing(here, stored),
        gone_with_memory=_missing(before, stored),
        twice=len(seen) - len(stored),
        never_sent=_missing(stored, np.unique(sent)),
        alike=len(sent) - len(np.unique(sent)),
        unseen=sum(store.unseen for store in stores),
        changed=sum(store.changed for store in stores),
        wrong=len(entries.wrong),
        weightless=sum(store.weightless for store in stores),
    )


def _join(parts: list[Digests]) -> Digests:
    return np.concatenate([np.empty(0, np.uint64), *parts])


def _missing(wanted: Digests, stored: Digests) -> int:
    """How many of `wanted` are not in `stored`."""
    return int((~np.isin(wanted, stored)).sum())
