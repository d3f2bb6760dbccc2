"""The audit of `python -m chaos`: compares the actors' ledgers with the replay memory, bit for bit."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.schema import Schema
from apexreplay.errors import UsageError
from apexreplay.store.file import open_file
from apexreplay.store.layout import COMMIT, Regions
from chaos.digests import digest_store, first_live
from chaos.ledger import Entries

CHUNK = 4_096  # transitions read between two looks at the watermark
WRITE_LOOKS, WRITE_SECONDS = 10, 0.2  # number of looks, and seconds between them, until a key without a weight counts
Digests = NDArray[np.uint64]


class Verdict(NamedTuple):
    """Result of the audit, in transitions."""

    sent: int
    acknowledged: int
    stored: int
    lost: int  # acknowledged by the present store, but not in it
    gone_with_memory: int  # acknowledged by a store whose file is gone, and not in the next snapshot
    twice: int  # stored more than once
    never_sent: int  # stored but never sent; a changed bit counts here and as lost
    alike: int  # sent more than once under different numbers, which the audit cannot distinguish
    unseen: int  # overwritten before the audit read them
    changed: int  # keys whose transition was different at a later look
    wrong: int  # entries of the ledgers that a correct actor cannot write
    weightless: int  # stored but without a weight, so that they are never drawn

    @property
    def passed(self) -> bool:
        """Whether every acknowledged transition is stored exactly once, and nothing else is stored."""
        return not any(self[3:])

    def sentence(self) -> str:
        """Returns the verdict as a sentence."""
        parts = [f"{self.acknowledged:,} acknowledged, {self.stored:,} stored", f"lost {self.lost}"]
        parts += [f"stored twice {self.twice}", f"stored and never sent {self.never_sent}"]
        rest = ("gone_with_memory", "alike", "unseen", "changed", "wrong", "weightless")
        parts += [f"{name.replace('_', ' ')} {getattr(self, name)}" for name in rest if getattr(self, name)]
        return f"{'passed' if self.passed else 'FAILED'}: " + ", ".join(parts)


class Content(NamedTuple):
    """The transitions that one store has, and those that it has overwritten since its start."""

    store_incarnation: int
    first_key: int
    digests: Digests  # digests of the keys from `first_key` on; 0: not read
    unseen: int
    changed: int
    weightless: int

    def on_top_of(self, before: Content) -> Content:
        """Returns the joint content of the lost store `before` and of this store, which was restored from its snapshot.

        Transitions that `before` has acknowledged must be in the joint content. `before` had overwritten some of them.
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
    """Reads the transitions of one store, and new ones faster than they are overwritten.

    It takes no lock: the writer may be working, dead, or replaced. A store of another incarnation may have been
    restored from a snapshot and then continues its keys; of the previous store, only the overwritten keys remain.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        self._path = path
        self._schema = schema
        self._regions: Regions | None = None
        self._file = (0, 0)
        self._parts: list[Digests] = []
        self.store_incarnation = 0
        self.first_key = 0  # number of keys that were read
        self.end_key = 0
        self.unseen = 0
        self.changed = 0
        self.weightless = 0

    @property
    def content(self) -> Content:
        """Returns all digests that were read."""
        digests = _join(self._parts)
        return Content(self.store_incarnation, self.first_key, digests, self.unseen, self.changed, self.weightless)

    def read(self) -> bool:
        """Reads new transitions; returns False if there is no store at present."""
        regions = self._open()
        if regions is None:
            return False
        commit = int(regions.cells[COMMIT])
        if self.end_key > commit:  # Committed keys are never removed.
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
                # These keys were not overwritten, but their contents are invalid.
                if first_live(regions) <= keys.start:
                    raise
                continue
            # keys that were overwritten during the reading
            lost = max(0, min(first_live(regions), keys.stop) - keys.start)
            found[:lost] = 0
            self.unseen += lost
            self._parts.append(found)
            self.end_key = keys.stop
        return True

    def look_again(self) -> None:
        """Reads all live transitions again, and counts those that have changed."""
        regions = self._open()
        if regions is None:
            return
        before = _join(self._parts)
        for start in range(max(first_live(regions), self.first_key), self.end_key, CHUNK):
            keys = range(start, min(self.end_key, start + CHUNK))
            try:
                found = digest_store(regions, keys)
            except ValueError:  # overwritten meanwhile, or changed
                found = np.zeros(len(keys), np.uint64)
            live = np.arange(keys.start, keys.stop) >= first_live(regions)
            differs = found != before[keys.start - self.first_key : keys.stop - self.first_key]
            self.changed += int((differs & live).sum())
        for _ in range(WRITE_LOOKS):  # The writer sets weights last, and may be delayed before.
            self.weightless = self._count_weightless(regions)
            if not self.weightless:
                return
            time.sleep(WRITE_SECONDS)

    def _count_weightless(self, regions: Regions) -> int:
        """Returns keys whose leaf in the sum tree has no weight."""
        keys = np.arange(max(first_live(regions), self.first_key), self.end_key)
        bare = keys[regions.tree.weights(keys % regions.sizes.capacity) <= 0]
        return int((bare >= first_live(regions)).sum())  # A key loses its weight after it is overwritten.

    def _open(self) -> Regions | None:
        try:
            facts = os.stat(self._path)
            if self._regions is None or (facts.st_dev, facts.st_ino) != self._file:
                self._regions = open_file(self._path, self._schema.table, writable=False)
                self._file = facts.st_dev, facts.st_ino
        except (OSError, UsageError):  # The store is missing or not complete yet.
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
    """Compares. In a live run, acknowledgements must be read before the stores, and sent segments after."""
    incarnations = {store.store_incarnation for store in stores}
    sent = _join(list(entries.sent.values()))
    acknowledged = {key: digests for key, digests in entries.sent.items() if key in entries.acknowledged}
    here = _join([d for key, d in acknowledged.items() if entries.acknowledged[key] in incarnations])
    before = _join([d for key, d in acknowledged.items() if entries.acknowledged[key] not in incarnations])
    held = _join([store.digests for store in stores])
    seen = held[held != 0]  # 0: overwritten before it was read
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
    """Returns how many of `wanted` are not in `stored`."""
    return int((~np.isin(wanted, stored)).sum())
