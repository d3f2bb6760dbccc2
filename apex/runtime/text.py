"""Formats numbers and durations as short text for people, and reads the ends of logs."""

from pathlib import Path
from typing import Any

from apexreplay.process.text import known

MAX_COLUMNS = 100  # maximum width of output for people, even on a wider terminal


def number(value: Any) -> str:
    """Formats a number with about three digits, as 1.23M, 200,000, 475, 12.3 or 0.0003; "-" if it is not known."""
    value = known(value)
    if value is None:
        return "-"
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.2f}".rstrip("0").rstrip(".") + "M"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def duration(seconds: Any) -> str:
    """Formats seconds as h:mm:ss."""
    whole = int(known(seconds) or 0)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def last_lines(path: Path, count: int) -> list[str]:
    """Returns the last non-empty lines of a log; [] if the log cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65_536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()][-count:]
