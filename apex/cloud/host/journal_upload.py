"""Sends the journal of a host's apex units to CloudWatch Logs: group /apex/CLUSTER/ROLE, one stream per host."""

import json
import logging
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from apexreplay.files.atomic_files import replace_file
from apexreplay.process.lifecycle import Stop, sleep

# A unit without a line yet is found at the next look. Without --all, a message above 4 KB is null.
JOURNAL = ("journalctl", "--output=json", "--all", "--quiet", "--unit=apex*")
MAX_EVENTS = 1_000  # events in one call; CloudWatch allows 10,000
MAX_BYTES = 900_000  # bytes in one call; CloudWatch allows 1 MiB
MAX_MILLISECONDS = 23 * 3_600_000  # time between first and last event of a call; CloudWatch allows 24 h
OVERHEAD_BYTES = 26  # bytes that CloudWatch counts for each event in addition to its text
MAX_TEXT = 200_000  # maximum bytes of one event; longer text is truncated
LOOK_SECONDS = 5.0  # time between two looks at the journal

log = logging.getLogger("apex")


class Entry(NamedTuple):
    """A line of the journal."""

    milliseconds: int  # since 1970
    text: str
    cursor: str


def follow(logs: Any, group: str, stream: str, place: Path, stop: Stop) -> bool:
    """Sends the units' log until `stop` is requested, then the last lines. `place`: file with the last cursor sent.

    Returns False if journalctl refuses the cursor, which is then forgotten.
    """
    make_stream(logs, group, stream)
    while True:
        is_last = stop.poll()
        after = [f"--after-cursor={place.read_text()}"] if place.exists() else []
        with subprocess.Popen([*JOURNAL, *after], stdout=subprocess.PIPE, text=True, errors="replace") as journal:
            assert journal.stdout is not None
            for batch in batches(entry for line in journal.stdout if (entry := parse(line)) is not None):
                put(logs, group, stream, batch)
                replace_file(place, batch[-1].cursor.encode())
        if journal.returncode > 0 and after:  # A signal is the stop of this unit, after which the last lines are sent.
            log.error(
                "journalctl ended with status %d after %s; all lines are sent again", journal.returncode, after[0]
            )
            place.unlink()
            return False
        if is_last:
            return True
        sleep(LOOK_SECONDS, stop)


def parse(line: str) -> Entry | None:
    """Parses a line of `journalctl --output=json`; returns None if it has no message."""
    try:
        found = json.loads(line)
        message, unit = found["MESSAGE"], str(found.get("_SYSTEMD_UNIT", found.get("UNIT", "")))
        if message is None:
            return None
        if isinstance(message, list):  # journalctl prints messages that are not UTF-8 as lists of byte values.
            message = bytes(message).decode(errors="replace")
        text = f"{unit.removesuffix('.service')}: {message}".encode()[:MAX_TEXT].decode(errors="ignore")
        return Entry(int(found["__REALTIME_TIMESTAMP"]) // 1_000, text, str(found["__CURSOR"]))
    except (ValueError, KeyError, TypeError):
        return None


def batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Groups entries into calls that CloudWatch accepts."""
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        more = len(entry.text.encode()) + OVERHEAD_BYTES
        full = len(batch) == MAX_EVENTS or size + more > MAX_BYTES
        if batch and (full or entry.milliseconds - batch[0].milliseconds > MAX_MILLISECONDS):
            yield batch
            batch, size = [], 0
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
    ordered = sorted(batch, key=lambda entry: entry.milliseconds)  # keeps the order of lines of a millisecond
    events = [{"timestamp": entry.milliseconds, "message": entry.text or " "} for entry in ordered]
    logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)
