"""The logs of a cluster's hosts, merged by time: CloudWatch groups /apex/CLUSTER/ROLE, one stream for each host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from apex.cloud.cluster.aws import Aws, AwsError
from apex.errors import ConfigError, require
from apex.types import PROGRAMS

GROUPS = (*PROGRAMS, "refused")  # the last: packets that the firewall refused
LATE = 30_000  # milliseconds that CloudWatch may show a line after a newer one
WINDOW = 3_600_000  # milliseconds that are read, sorted and shown at once

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class LogLine(NamedTuple):
    """Sorts by time."""

    milliseconds: int  # since 1970
    role: str
    host: str  # instance id
    id: str
    text: str

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.milliseconds / 1000, UTC)
        # Control characters of a compromised host must not reach the terminal.
        text = "".join(c if c.isprintable() else " " for c in self.text.rstrip())
        return f"{at:%Y-%m-%d %H:%M:%S}Z {self.role:<9} {self.host:<19} {text}"


class Tail:
    """Reads a cluster's log from a time on; yields each line once."""

    def __init__(self, aws: Aws, cluster: str, roles: Sequence[str], since: datetime) -> None:
        self._aws = aws
        self._groups = {role: f"/apex/{cluster}/{role}" for role in roles}
        self._from = _milliseconds(since)
        self._is_first = True  # The first read may span days; later ones are short.
        self._seen: dict[tuple[str, str], int] = {}  # times of those lines that may be read again

    def read(self, now: datetime) -> Iterator[LogLine]:
        """The lines that were not yielded before, by time."""
        newest, end = self._from, _milliseconds(now) if self._is_first else 0
        for start in range(self._from, max(end, self._from + 1), WINDOW):
            until = {"endTime": start + WINDOW - 1} if start + WINDOW < end else {}  # A host's clock may be ahead.
            for line in sorted(line for role in self._groups for line in self._lines(role, startTime=start, **until)):
                key = (line.role, line.id)
                if key not in self._seen:
                    self._seen[key] = line.milliseconds
                    newest = max(newest, line.milliseconds)
                    yield line
        self._is_first = False
        self._from = max(self._from, newest - LATE)
        self._seen = {key: at for key, at in self._seen.items() if at >= self._from}

    def _lines(self, role: str, **when: int) -> Iterator[LogLine]:
        group = self._groups[role]
        try:
            for event in self._aws.pages("logs", "filter_log_events", "events", logGroupName=group, **when):
                yield LogLine(event["timestamp"], role, event["logStreamName"], event["eventId"], event["message"])
        except AwsError as error:
            if error.code != "ResourceNotFoundException":  # An incomplete cluster lacks some groups.
                raise


def duration(text: str) -> timedelta:
    """Reads 10m, 90s, 2h or 1d; raises ConfigError."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None:
        raise ConfigError(f"--since must be a number with s, m, h or d, as in 10m; got {text!r}")
    return timedelta(seconds=int(match[1]) * _UNITS[match[2]])


def groups_for(role: str | None) -> tuple[str, ...]:
    """The roles whose logs are read; raises ConfigError for an unknown one."""
    require(role is None or role in GROUPS, f"--role must be one of {', '.join(GROUPS)}; got {role!r}")
    return PROGRAMS if role is None else (role,)


def _milliseconds(at: datetime) -> int:
    return int(at.timestamp() * 1000)
