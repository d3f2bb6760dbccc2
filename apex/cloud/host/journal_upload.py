"""The journal of a host's apex units, to CloudWatch Logs: group /apex/CLUSTER/ROLE, one stream per host."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from apex.runtime.lifecycle import POLL_SECONDS, Stop

UNITS = ("end", "keys", "logs", "max-hours", "spot", "tensorboard", "upload")  # beside the roles': apex-NAME
MAX_EVENTS = 1_000  # in one call; CloudWatch takes 10,000 events and 1 MiB
MAX_BYTES = 900_000
MAX_MILLISECONDS = 23 * 3_600_000  # from the first to the last; CloudWatch refuses a call that spans a day
OVERHEAD_BYTES = 26  # CloudWatch counts so many for an event, beside its text
MAX_TEXT = 200_000  # bytes of one event
FLUSH_SECONDS = 5.0  # a line waits no longer for others

log = logging.getLogger("apex")


class Entry(NamedTuple):
    """A line of the journal."""

    milliseconds: int  # since 1970
    text: str
    cursor: str


def follow(logs: Any, group: str, stream: str, roles: Iterable[str], place: Path, stop: Stop) -> None:
    """Sends what the units log, until `stop` or until journalctl ends. `place` keeps the last cursor that was sent."""
    make_stream(logs, group, stream)
    after = [f"--after-cursor={place.read_text()}"] if place.exists() else []
    with subprocess.Popen([*command(roles), *after], stdout=subprocess.PIPE) as journal:
        try:
            assert journal.stdout is not None
            for batch in batches(read_entries(journal.stdout, stop)):
                put(logs, group, stream, batch)
                place.write_text(batch[-1].cursor)
        finally:
            journal.terminate()


def command(roles: Iterable[str]) -> list[str]:
    """Prints what the units of a host with these roles log, from the beginning on.

    Each unit has its name there: a pattern stands only for units that are in the journal when journalctl starts, and
    at the first boot the roles' are not there yet.
    """
    units = (f"--unit={name}.service" for name in (*(f"apex@{role}" for role in roles), *(f"apex-{u}" for u in UNITS)))
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


def read_entries(journal: IO[bytes], stop: Stop) -> Iterator[Entry | None]:
    """Entries as they come, and None every FLUSH_SECONDS: those before it wait no longer."""
    rest, flush_at = b"", time.monotonic() + FLUSH_SECONDS
    while not stop.requested:
        if time.monotonic() >= flush_at:
            flush_at = time.monotonic() + FLUSH_SECONDS
            yield None
        if not select.select([journal], [], [], POLL_SECONDS)[0]:
            continue
        data = os.read(journal.fileno(), 65_536)  # readline would read ahead, which select does not see.
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if (entry := parse(line.decode(errors="replace"))) is not None:
                yield entry


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
    """Makes the stream, unless it exists. The group is Terraform's, which knows how long to keep it."""
    try:
        logs.create_log_stream(logGroupName=group, logStreamName=stream)
    except logs.exceptions.ResourceAlreadyExistsException:
        log.info("continuing the log stream %s", stream)


def put(logs: Any, group: str, stream: str, batch: list[Entry]) -> None:
    """Sends a group of entries. CloudWatch wants them by time."""
    events = [{"timestamp": entry.milliseconds, "message": entry.text or " "} for entry in sorted(batch)]
    logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)
