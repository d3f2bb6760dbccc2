"""Formats numbers, durations and sizes as short text for people."""

import math
from pathlib import Path
from typing import Any

MAX_COLUMNS = 100  # maximum width of output for people, even on a wider terminal


def known(value: Any) -> float | None:
    """Returns `value` if it is a finite number, else None: a status may contain null, and a loss may be NaN."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


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


def clean(text: str) -> str:
    """Replaces control characters by spaces, because text from a log or a socket must not control the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def size(num_bytes: Any) -> str:
    """Formats a number of bytes in GiB, MiB or KiB."""
    value = known(num_bytes)
    if value is None:
        return "-"
    if value < 2**20:
        return f"{value / 2**10:.0f} KiB"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def last_lines(path: Path, count: int) -> list[str]:
    """Returns the last non-empty lines of a log; [] if the log cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65_536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()][-count:]
