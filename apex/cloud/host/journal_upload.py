"""Sends the journal of a host's apex units to CloudWatch Logs: group /apex/CLUSTER/ROLE, one stream per host."""

import json
import logging
import os
import select
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from apexreplay.process.lifecycle import POLL_SECONDS, Stop

# NAMEs of the other units, apex-NAME
UNITS = ("end", "keys", "logs", "max-hours", "spot", "stall", "tensorboard", "upload")
MAX_EVENTS = 1_000  # events in one call; CloudWatch allows 10,000
MAX_BYTES = 900_000  # bytes in one call; CloudWatch allows 1 MiB
MAX_MILLISECONDS = 23 * 3_600_000  # time between first and last event of a call; CloudWatch allows 24 h
OVERHEAD_BYTES = 26  # bytes that CloudWatch counts for each event in addition to its text
MAX_TEXT = 200_000  # maximum bytes of one event; longer text is truncated
FLUSH_SECONDS = 5.0  # maximum time before a line is sent

log = logging.getLogger("apex")


class Entry(NamedTuple):
    """A line of the journal."""

    milliseconds: int  # since 1970
    text: str
    cursor: str


def follow(logs: Any, group: str, stream: str, roles: Iterable[str], place: Path, stop: Stop) -> None:
    """Sends the units' log until `stop` is requested or journalctl ends. `place`: file with the last cursor sent."""
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
    """Returns the journalctl command that prints the log of this host's units from the beginning.

    The command lists each unit by name. A pattern would match only units that are already in the journal when
    journalctl starts, and at the first boot the units of the roles are not.
    """
    units = (f"--unit={name}.service" for name in (*(f"apex@{role}" for role in roles), *(f"apex-{u}" for u in UNITS)))
    return ["journalctl", "--follow", "--output=json", "--no-tail", *units]


def parse(line: str) -> Entry | None:
    """Parses a line of `journalctl --output=json`; returns None if it has no message."""
    try:
        found = json.loads(line)
        message, unit = found["MESSAGE"], str(found.get("_SYSTEMD_UNIT", found.get("UNIT", "")))
        if isinstance(message, list):  # journalctl prints messages that are not UTF-8 as lists of byte values.
            message = bytes(message).decode(errors="replace")
        text = f"{unit.removesuffix('.service')}: {message}".encode()[:MAX_TEXT].decode(errors="ignore")
        return Entry(int(found["__REALTIME_TIMESTAMP"]) // 1_000, text, str(found["__CURSOR"]))
    except (ValueError, KeyError, TypeError):
        return None


def read_entries(journal: IO[bytes], stop: Stop) -> Iterator[Entry | None]:
    """Yields entries as they arrive, and None every FLUSH_SECONDS, so that the entries before None are sent."""
    rest, flush_at = b"", time.monotonic() + FLUSH_SECONDS
    while not stop.poll():
        if time.monotonic() >= flush_at:
            flush_at = time.monotonic() + FLUSH_SECONDS
            yield None
        if not select.select([journal], [], [], POLL_SECONDS)[0]:
            continue
        data = os.read(journal.fileno(), 65_536)  # readline would buffer data that select cannot see.
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if (entry := parse(line.decode(errors="replace"))) is not None:
                yield entry


def batches(entries: Iterable[Entry | None]) -> Iterator[list[Entry]]:
    """Groups entries into calls that CloudWatch accepts. None ends a group."""
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
    """Creates the stream unless it exists. Terraform creates the group and sets how long it keeps logs."""
    try:
        logs.create_log_stream(logGroupName=group, logStreamName=stream)
    except logs.exceptions.ResourceAlreadyExistsException:
        log.info("continuing the log stream %s", stream)


def put(logs: Any, group: str, stream: str, batch: list[Entry]) -> None:
    """Sends a group of entries in order of time, as CloudWatch requires."""
    events = [{"timestamp": entry.milliseconds, "message": entry.text or " "} for entry in sorted(batch)]
    logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)
