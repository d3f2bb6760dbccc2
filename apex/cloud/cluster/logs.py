"""The logs of a cluster's hosts, merged by time: CloudWatch groups /apex/CLUSTER/ROLE, one stream for each host."""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from apex.cloud.cluster.aws import Aws
from apex.errors import AwsError
from apex.types import PROGRAMS
from apexreplay.errors import UsageError
from apexreplay.process.text import clean

GROUPS = (*PROGRAMS, "refused")  # "refused": packets that the firewall rejected
LATE = 30_000  # milliseconds by which CloudWatch may deliver a line later than newer lines

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class LogLine(NamedTuple):
    """A log line. Lines sort by time."""

    milliseconds: int  # since 1970
    role: str
    host: str  # instance id
    id: str
    text: str

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.milliseconds / 1000, UTC)
        return f"{at:%Y-%m-%d %H:%M:%S}Z {self.role:<9} {self.host:<19} {clean(self.text.rstrip())}"


class Tail:
    """Reads a cluster's logs from the time `since` on, each line once."""

    def __init__(self, aws: Aws, cluster: str, roles: Sequence[str], since: datetime) -> None:
        self._aws = aws
        self._groups = {role: f"/apex/{cluster}/{role}" for role in roles}
        self._from = int(since.timestamp() * 1000)
        self._seen: dict[tuple[str, str], int] = {}  # (role, event id) -> time of each line that AWS may return again

    def read(self) -> Iterator[LogLine]:
        """Yields new lines in order of time."""
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
            if error.code != "ResourceNotFoundException":  # This cluster lacks the group.
                raise


def duration(text: str) -> timedelta:
    """Parses a duration such as 10m, 90s, 2h or 1d. Raises UsageError if it is invalid."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None:
        raise UsageError(f"--since must be a number followed by s, m, h or d, such as 10m; got {text!r}")
    return timedelta(seconds=int(match[1]) * _UNITS[match[2]])
