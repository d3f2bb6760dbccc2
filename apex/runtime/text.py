"""Numbers, durations and sizes as short text for people."""

from __future__ import annotations

import math
from pathlib import Path
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


def number_text(value: float) -> str:
    """1234567 as 1.23M, 200000 as 200k, 475 as 475, 0.0003 as 3e-4: three digits that matter."""
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
    """Seconds as m:ss, from an hour on as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _plain(value: float) -> str:
    """Three digits that matter, those before the point whole, and no zeros behind it."""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def last_lines(path: Path, count: int) -> list[str]:
    """The last non-empty lines of a log; none when there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65_536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()][-count:]
