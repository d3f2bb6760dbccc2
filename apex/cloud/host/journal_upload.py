"""The journal of a machine's apex units, to CloudWatch Logs: group /apex/CLUSTER/ROLE, one stream per machine."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

UNITS = ("end", "fetch", "keys", "logs", "max-hours", "spot", "tensorboard", "upload")  # beside the role's: apex-NAME
MAX_EVENTS = 1_000  # in one call; CloudWatch takes 10,000 events and 1 MiB
MAX_BYTES = 900_000
MAX_MILLISECONDS = 23 * 3_600_000  # from the first to the last; CloudWatch refuses a call that spans a day
OVERHEAD_BYTES = 26  # CloudWatch counts so many for an event, beside its text
MAX_TEXT = 200_000  # bytes of one event

log = logging.getLogger("apex")


class Entry(NamedTuple):
    """A line of the journal."""

    milliseconds: int  # since 1970
    text: str
    cursor: str


def command(role: str) -> list[str]:
    """Tells what the units of a machine of this role say, from the beginning on.

    Each by its name: a pattern stands for those alone that are in the journal when journalctl starts, and at the first
    boot the role's is not there yet.
    """
    units = (f"--unit={name}.service" for name in (f"apex@{role}", *(f"apex-{name}" for name in UNITS)))
    return ["journalctl", "--follow", "--output=json", "--no-tail", *units]


def parse(line: str) -> Entry | None:
    """A line of `journalctl --output=json`; None for one without a message that is text."""
    try:
        found = json.loads(line)
        message, unit = found["MESSAGE"], str(found.get("_SYSTEMD_UNIT", found.get("UNIT", "")))
        if isinstance(message, list):  # The journal gives bytes that are no text as numbers.
            message = bytes(message).decode(errors="replace")
        text = f"{unit.removesuffix('.service')}: {message}".encode()[:MAX_TEXT].decode(errors="ignore")
        return Entry(int(found["__REALTIME_TIMESTAMP"]) // 1_000, text, str(found["__CURSOR"]))
    except (ValueError, KeyError, TypeError):
        return None


def batches(entries: Iterable[Entry | None]) -> Iterator[list[Entry]]:
    """Groups entries as one call takes them; None, which says that there is nothing for now, ends a group."""
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        more = 0 if entry is None else len(entry.text.encode()) + OVERHEAD_BYTES
        full = len(batch) == MAX_EVENTS or size + more > MAX_BYTES
        if batch and (entry is None or full or entry.milliseconds - batch[0].milliseconds > MAX_MILLISECONDS):
            yield batch
            batch, size = [], 0
        if entry is not None:
            batch.append(entry)
            size += more
    if batch:
        yield batch


def make_stream(logs: Any, group: str, stream: str) -> None:
    """Makes the stream, unless it is there. The group is Terraform's, which knows how long to keep it."""
    try:
        logs.create_log_stream(logGroupName=group, logStreamName=stream)
    except logs.exceptions.ResourceAlreadyExistsException:
        log.info("goes on with the log stream %s", stream)


def put(logs: Any, group: str, stream: str, batch: list[Entry]) -> None:
    """Sends a group of entries. CloudWatch wants them by time."""
    events = [{"timestamp": entry.milliseconds, "message": entry.text or " "} for entry in sorted(batch)]
    logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)
