"""What the hosts of a cluster log, merged by time: CloudWatch groups /apex/CLUSTER/ROLE, one stream for each host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from apex.cloud.cluster.aws import Aws, AwsError
from apex.errors import ConfigError, require
from apex.types import PROGRAMS

REFUSED = "refused"  # not a role: what the firewall refused
GROUPS = (*PROGRAMS, REFUSED)
LATE = 30_000  # milliseconds that CloudWatch may show a line after one that is newer
WINDOW = 3_600_000  # milliseconds that are read, sorted and shown at once

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class LogLine(NamedTuple):
    """In the order of time."""

    milliseconds: int  # since 1970
    role: str
    host: str  # instance id
    id: str
    text: str

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.milliseconds / 1000, UTC)
        # A host that was taken over may not steer the terminal.
        text = "".join(c if c.isprintable() else " " for c in self.text.rstrip())
        return f"{at:%Y-%m-%d %H:%M:%S}Z {self.role:<9} {self.host:<19} {text}"


class Tail:
    """Reads a cluster's log from a time on; each line once, however often it looks."""

    def __init__(self, aws: Aws, cluster: str, roles: Sequence[str], since: datetime) -> None:
        self._aws = aws
        self._groups = {role: f"/apex/{cluster}/{role}" for role in roles}
        self._from = _milliseconds(since)
        self._is_long = True  # what there is to read; after the first look it is little, however long ago it was
        self._seen: dict[tuple[str, str], int] = {}  # of those lines that may be shown again: when they are from

    def look(self, now: datetime) -> Iterator[LogLine]:
        """What has not been shown yet, by time."""
        newest, end = self._from, _milliseconds(now) if self._is_long else 0
        for start in range(self._from, max(end, self._from + 1), WINDOW):
            until = {"endTime": start + WINDOW - 1} if start + WINDOW < end else {}  # A host's clock may be ahead.
            for line in sorted(line for role in self._groups for line in self._read(role, startTime=start, **until)):
                key = (line.role, line.id)
                if key not in self._seen:
                    self._seen[key] = line.milliseconds
                    newest = max(newest, line.milliseconds)
                    yield line
        self._is_long = False
        self._from = max(self._from, newest - LATE)
        self._seen = {key: at for key, at in self._seen.items() if at >= self._from}

    def _read(self, role: str, **when: int) -> Iterator[LogLine]:
        group = self._groups[role]
        try:
            for event in self._aws.pages("logs", "filter_log_events", "events", logGroupName=group, **when):
                yield LogLine(event["timestamp"], role, event["logStreamName"], event["eventId"], event["message"])
        except AwsError as error:
            if error.code != "ResourceNotFoundException":  # A half-made cluster lacks some.
                raise


def duration(text: str) -> timedelta:
    """10m, 90s, 2h, 1d; raises ConfigError."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None:
        raise ConfigError(f"--since must be a number with s, m, h or d, as in 10m; got {text!r}")
    return timedelta(seconds=int(match[1]) * _UNITS[match[2]])


def groups_for(role: str | None) -> tuple[str, ...]:
    """Which logs are read; raises ConfigError for what has none."""
    require(role is None or role in GROUPS, f"--role must be one of {', '.join(GROUPS)}; got {role!r}")
    return PROGRAMS if role is None else (role,)


def _milliseconds(at: datetime) -> int:
    return int(at.timestamp() * 1000)
