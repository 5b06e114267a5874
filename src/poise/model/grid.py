"""Rounds of equal length from the first moment on, and when they end. One arithmetic, so that equal moments are equal."""

from math import floor


def is_end(origin: float, now: float, length: float) -> bool:
    """A round ends, and the next begins, at this very moment."""
    return now == origin + round((now - origin) / length) * length


def end_after(origin: float, now: float, length: float) -> float:
    """The first end of a round that is later than this moment."""
    rounds = floor((now - origin) / length) + 1
    return origin + (rounds if origin + rounds * length > now else rounds + 1) * length
