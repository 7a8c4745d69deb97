"""Durations as people write and read them."""

from __future__ import annotations

import re

from carryover.errors import ConfigError

_UNITS_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


def parse_duration(text: str) -> float:
    """Seconds of 90s, 30m, 2h, 1h30m or 1d.

    Raises:
        ConfigError: it is none.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text.strip())
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text.strip() or seconds <= 0:
        raise ConfigError(f"a duration is written as 90s, 30m, 2h or 1h30m, got {text!r}")
    return seconds


def show_duration(seconds: float) -> str:
    """Two units at most: 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"
