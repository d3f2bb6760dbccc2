"""The logs of a cluster's hosts, merged by time: CloudWatch groups /apex/CLUSTER/ROLE, one stream for each host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from apex.cloud.cluster.aws import Aws, AwsError
from apex.errors import ConfigError
from apex.types import PROGRAMS

GROUPS = (*PROGRAMS, "refused")  # the last: packets that the firewall refused
LATE = 30_000  # milliseconds that CloudWatch may show a line after a newer one

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
        self._from = int(since.timestamp() * 1000)
        self._seen: dict[tuple[str, str], int] = {}  # times of those lines that may be read again

    def read(self) -> Iterator[LogLine]:
        """The lines that were not yielded before, by time."""
        for line in sorted(line for role in self._groups for line in self._lines(role)):
            if (line.role, line.id) not in self._seen:
                self._seen[line.role, line.id] = line.milliseconds
                yield line
        self._from = max(self._from, max(self._seen.values(), default=0) - LATE)
        self._seen = {key: at for key, at in self._seen.items() if at >= self._from}

    def _lines(self, role: str) -> Iterator[LogLine]:
        where = {"logGroupName": self._groups[role], "startTime": self._from}
        try:
            for event in self._aws.pages("logs", "filter_log_events", "events", **where):
                yield LogLine(event["timestamp"], role, event["logStreamName"], event["eventId"], event["message"])
        except AwsError as error:
            if error.code != "ResourceNotFoundException":  # A group that this cluster does not have.
                raise


def duration(text: str) -> timedelta:
    """Reads 10m, 90s, 2h or 1d; raises ConfigError."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None:
        raise ConfigError(f"--since must be a number with s, m, h or d, as in 10m; got {text!r}")
    return timedelta(seconds=int(match[1]) * _UNITS[match[2]])
