"""Values that a caller in Python hands over, which may be anything: each is what it should be, or an OptionError says so."""

import os
import reprlib
from collections.abc import Iterable, Iterator
from math import isfinite, isnan, nan
from pathlib import Path

from poise.scheduler.model.errors import OptionError
from poise.scheduler.model.units import parse_seconds

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2


def seconds(value: object, name: str) -> float:
    """Return a duration in seconds."""
    if isinstance(value, str):
        try:
            return parse_seconds(value)
        except ValueError as error:
            raise OptionError(name, str(error)) from None
    number = as_number(value)
    if not (isfinite(number) and number >= 0):
        raise refused(name, "seconds, at least 0, or text such as 90s, 15m, 1h30m", value)
    return number


def whole(value: object, name: str, least: int, most: int | None = None) -> int:
    """Return a whole number within bounds."""
    number = as_number(value)
    if not (isfinite(number) and number == int(number) and least <= number and (most is None or number <= most)):
        bounds = f"of at least {least:,}" if most is None else f"from {least:,} to {most:,}"
        raise refused(name, f"a whole number {bounds}", value)
    return int(value)  # type: ignore[call-overload, no-any-return]  # a float would round a large one


def number(value: object, name: str) -> float:
    """Return a number, which may be any but NaN."""
    found = as_number(value)
    if isnan(found):
        raise refused(name, "a number", value)
    return found


def as_number(value: object) -> float:
    """Return the number that a value is, of Python or numpy, always as a float; NaN if it is none. Truth values are none."""
    if isinstance(value, bool | str | bytes) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return nan
    try:
        return float(value)  # type: ignore[arg-type]  # it has __float__ or __index__
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one of a tensor with several elements
        return nan


def refused(name: str, expected: str, value: object) -> OptionError:
    """Return the error about a value that an argument does not take."""
    return OptionError(name, f"expected {expected}, got {shown(value)}")


def flag(value: object, name: str) -> bool:
    """Return a truth value."""
    if not isinstance(value, bool):
        raise refused(name, "True or False", value)
    return value


def path_of(value: object, name: str = "path") -> Path:
    """Return a path that is given as text or as a path, if a file can have it."""
    if not isinstance(value, str | os.PathLike):
        raise refused(name, "a path", value)
    path = Path(value)
    try:
        os.lstat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long; a zero byte, half a character
        raise OptionError(name, f"{shown(str(path))}: {getattr(error, 'strerror', None) or error}") from None
    return path


def file_of(value: object, name: str = "path") -> Path:
    """Return the path of a file to be written."""
    path = path_of(value, name)
    if path.is_dir():
        raise OptionError(name, f"{path}: is a folder; name a file")
    return path


def items_of(value: object) -> Iterator[object] | None:
    """Return what holds several things as an iterator; None for anything else, also text."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        return None
    try:
        return iter(value)
    except (TypeError, ValueError):  # an array without a dimension, a closed file
        return None


def shown(value: object) -> str:
    """Return a value for a message, short."""
    return _SHORT.repr(value)
