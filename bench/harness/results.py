"""Records of measurements, and their places in documents."""

import json
import time
from pathlib import Path

from apexreplay.errors import require
from apexreplay.files.atomic_files import replace_file
from bench.harness.command import Figures
from bench.learning.records import describe_code, describe_machine


def write_record(path: Path, command: str, figures: Figures) -> None:
    """Writes the figures with their command, date, commit and machine."""
    commit, dirty = describe_code()
    record = {
        "command": command,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit,
        "dirty": dirty,
        "hardware": describe_machine(),
        "figures": figures,
    }
    replace_file(path, (json.dumps(record, indent=1) + "\n").encode())


def replace_between(document: Path, begin: str, end: str, content: str) -> str:
    """Returns the document's text with `content` between two lines. Raises UsageError if it has no place for it."""
    text = document.read_text()
    require(
        text.count(begin) == text.count(end) == 1 and text.index(begin) < text.index(end),
        f"{document} must have one line {begin}, and after it one line {end}",
    )
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"
