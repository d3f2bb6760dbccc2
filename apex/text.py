"""Numbers, durations and sizes as short text for people."""

from __future__ import annotations

import math
from typing import Any


def known(value: Any) -> float | None:
    """A number that can be shown and reckoned with, else None: statuses have nulls, and a loss may be NaN."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def number(value: Any) -> str:
    """Three digits or so; "-" for what is not known."""
    value = known(value)
    if value is None:
        return "-"
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.2f}M"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def duration(seconds: Any) -> str:
    """Hours, minutes and seconds."""
    whole = int(known(seconds) or 0)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def clean(words: str) -> str:
    """Without control characters: what comes from a log or over a socket may not steer the terminal."""
    return "".join(c if c.isprintable() else " " for c in words)


def size(num_bytes: Any) -> str:
    """Bytes in the unit that suits them."""
    value = known(num_bytes)
    if value is None:
        return "-"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
