"""Durations as text (`3h12m`) and as seconds, counted nouns, and the arithmetic of rounds."""

import math
import re
from math import floor

_SUFFIXES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SHOWN = 60
"""Characters of what is no duration that a message repeats."""
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def parse_seconds(text: str) -> float:
    """Read `90`, `1.5h` or `1h30m` as seconds; raises ValueError for anything else."""
    try:
        seconds = float(text)
    except ValueError:
        parts = _PART.findall(text)
        if not parts or "".join(number + suffix for number, suffix in parts) != text:
            raise ValueError(f"not a duration: {text[:_SHOWN]!r} (give seconds, or e.g. 90s, 15m, 1h30m, 7d)") from None
        seconds = sum(float(number) * _SUFFIXES[suffix] for number, suffix in parts)
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"not a duration: {text[:_SHOWN]!r} (it must be finite and not negative)")
    return seconds


def format_seconds(seconds: float) -> str:
    """Write seconds in their two largest units: `45s`, `3h12m`, `2d04h`."""
    if not math.isfinite(seconds):
        return "never"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.3g}s" if whole < 10 else f"{whole}s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minutes}m{second:02d}s"


def counted(number: int, thing: str) -> str:
    """A number with its noun, whose plural ends in s: `1 GPU`, `2,000 GPUs`."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def in_units(gpus: int, unit: int) -> str:
    """A number of GPUs that come in units, which nodes cannot divide: `2 × 4 GPUs, each 4 on one node`."""
    return f"{gpus // unit:,} × {counted(unit, 'GPU')}, each {unit:,} on one node"


# Rounds have equal length and are counted from `origin`. Every module computes the end of a round here, because two formulas
# that differ in the last bit would give one round two ends.


def is_round_end(origin: float, now: float, length: float) -> bool:
    """Whether a round ends, and the next begins, exactly now."""
    return now == origin + round((now - origin) / length) * length


def next_round_end(origin: float, now: float, length: float) -> float:
    """The first end of a round after now."""
    rounds = floor((now - origin) / length) + 1
    return origin + (rounds if origin + rounds * length > now else rounds + 1) * length
