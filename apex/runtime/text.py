"""Formats numbers, durations and sizes as short text for people."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

MAX_COLUMNS = 100  # maximum width of output for people, even on a wider terminal


def known(value: Any) -> float | None:
    """Returns `value` if it is a finite number, else None: a status may contain null, and a loss may be NaN."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def number(value: Any) -> str:
    """Formats a number with about three digits; "-" if the value is not known."""
    value = known(value)
    if value is None:
        return "-"
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.2f}M"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def duration(seconds: Any) -> str:
    """Formats seconds as h:mm:ss."""
    whole = int(known(seconds) or 0)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def clean(words: str) -> str:
    """Replaces control characters by spaces, because text from a log or a socket must not control the terminal."""
    return "".join(c if c.isprintable() else " " for c in words)


def size(num_bytes: Any) -> str:
    """Formats a number of bytes in GiB, MiB or KiB."""
    value = known(num_bytes)
    if value is None:
        return "-"
    if value < 2**20:
        return f"{value / 2**10:.0f} KiB"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def number_text(value: float) -> str:
    """Formats a number with three significant digits: 1234567 as 1.23M, 200000 as 200k, 475 as 475, 0.0003 as 3e-4."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * unit:
            return f"{_plain(value / unit)}{letter}"
    if abs(value) < 0.01:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{_plain(float(digits))}e{int(exponent)}"
    return _plain(value)


def time_text(seconds: float) -> str:
    """Formats seconds as m:ss, or as h:mm:ss from one hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _plain(value: float) -> str:
    """Formats a number with three significant digits, or more if its integer part is longer, without trailing zeros."""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def last_lines(path: Path, count: int) -> list[str]:
    """Returns the last non-empty lines of a log; [] if the log cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65_536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()][-count:]
