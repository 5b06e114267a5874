"""Durations for people (`3h12m`) and for machines (seconds), and things that are counted."""

import math
import re
from math import floor

_SUFFIXES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def parse_seconds(text: str) -> float:
    """Seconds from `90`, `1.5h`, `1h30m`; raises ValueError on anything else."""
    try:
        seconds = float(text)
    except ValueError:
        parts = _PART.findall(text)
        if not parts or "".join(number + suffix for number, suffix in parts) != text:
            raise ValueError(f"not a duration: {text!r} (give seconds, or e.g. 90s, 15m, 1h30m, 7d)") from None
        seconds = sum(float(number) * _SUFFIXES[suffix] for number, suffix in parts)
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"not a duration: {text!r} (it must be finite and not negative)")
    return seconds


def format_seconds(seconds: float) -> str:
    """The two largest units that matter: `45s`, `3h12m`, `2d04h`."""
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
    """So many of a thing whose plural ends in s: `1 GPU`, `2,000 GPUs`."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


# Rounds of equal length from the first moment on, and when they end. One arithmetic, so that equal moments are equal.


def is_round_end(origin: float, now: float, length: float) -> bool:
    """A round ends, and the next begins, at this very moment."""
    return now == origin + round((now - origin) / length) * length


def next_round_end(origin: float, now: float, length: float) -> float:
    """The first end of a round that is later than this moment."""
    rounds = floor((now - origin) / length) + 1
    return origin + (rounds if origin + rounds * length > now else rounds + 1) * length
