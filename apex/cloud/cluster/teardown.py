"""The end of a cluster, however much of it there is: all that bears its name, again and again until nothing is left.

Weights stay: the bucket is not the cluster's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from apex.cloud.cluster.aws import Aws, AwsError, NotReachedError, plural
from apex.cloud.cluster.resources import HOSTS, REST, ResourceKind

LOOK_SECONDS = 5.0  # between two rounds
PATIENCE_SECONDS = 600.0  # without a thing less. An instance with a GPU may take minutes to end.


class Left(NamedTuple):
    """A thing that is there, or a kind of which nobody can say."""

    kind: str
    name: str
    error: AwsError | None  # why, where AWS said so

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip() + (f": {self.error}" if self.error else "")


class Teardown:
    """Removes a cluster. `tell` gets a line for each thing that goes, `sleep` waits between two rounds."""

    def __init__(
        self,
        aws: Aws,
        cluster: str,
        tell: Callable[[str], None],
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._aws = aws
        self._cluster = cluster
        self._tell = tell
        self._sleep = sleep
        self._clock = clock
        self._told: set[tuple[str, str]] = set()

    def run(self) -> list[Left]:
        """Removes what there is; returns what could not be."""
        for kinds in (HOSTS, REST):
            if left := self._empty(kinds):
                return left + ([] if kinds is REST else look(self._aws, self._cluster, REST))
        return []

    def _empty(self, kinds: Sequence[ResourceKind]) -> list[Left]:
        """Round after round, because things hold one another; until nothing is left, or no round gets any further."""
        before: set[tuple[str, str]] | None = None
        until = 0.0
        while True:
            left = [item for kind in kinds for item in self._patiently(kind)]
            now = {(item.kind, item.name) for item in left}
            if not left or (now == before and _is_hopeless(left)):
                return left
            if before is None or before - now:
                until = self._clock() + PATIENCE_SECONDS
            if self._clock() >= until:
                return left
            if now != before:
                self._tell(f"waits for {summary(left)}")
            before = now
            self._sleep(LOOK_SECONDS)

    def _patiently(self, kind: ResourceKind) -> Iterator[Left]:
        """A round, which a network that is away for a while does not end."""
        try:
            yield from self._round(kind)
        except NotReachedError as error:
            yield Left(kind.name, "", error)

    def _round(self, kind: ResourceKind) -> Iterator[Left]:
        """Removes all of a kind; yields what is there afterwards, with the reason."""
        errors: dict[str, AwsError] = {}
        there = _find(kind, self._aws, self._cluster)
        for found in there:
            if found.error is not None:
                yield found
                return
            if (kind.name, found.name) not in self._told:
                self._told.add((kind.name, found.name))
                self._tell(f"removes {found}")
            try:
                kind.remove(self._aws, found.name)
            except AwsError as error:
                errors[found.name] = error
        for found in _find(kind, self._aws, self._cluster) if there else []:
            yield found if found.error is not None else found._replace(error=errors.get(found.name))


def look(aws: Aws, cluster: str, kinds: Sequence[ResourceKind] = (*HOSTS, *REST)) -> list[Left]:
    """What there is of a cluster. Raises NotReachedError."""
    return [found for kind in kinds for found in _find(kind, aws, cluster)]


def summary(found: Sequence[Left]) -> str:
    """Counts by kind, in a sentence."""
    kinds = list(dict.fromkeys(item.kind for item in found))
    return ", ".join(plural(sum(item.kind == kind for item in found), kind) for kind in kinds)


def _is_hopeless(left: Sequence[Left]) -> bool:
    """Whether nothing is on its way, and somebody's permission is what the others wait for."""
    errors = [item.error for item in left if item.error is not None]
    return len(errors) == len(left) and any(error.denied for error in errors)


def _find(kind: ResourceKind, aws: Aws, cluster: str) -> list[Left]:
    try:
        return [Left(kind.name, name, None) for name in kind.find(aws, cluster)]
    except NotReachedError:
        raise
    except AwsError as error:
        return [Left(kind.name, "", error)]
