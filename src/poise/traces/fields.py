"""Checks of single values: present, finite, of the right kind, in range.

A value that its column does not allow raises FieldError, which knows the field but not the place; `Intake` knows the
place and turns it into a TraceError. The happy path does as little as it can: a hundred thousand rows come this way.
"""

import math
from datetime import datetime

from poise.model.cluster import MOST_GPUS

_SHOWN = 60
_INFINITY = math.inf
_EPOCH = datetime.fromisoformat("1970-01-01")


class FieldError(Exception):
    """A value that its field does not allow; `field` is None where it is the whole record that is wrong."""

    def __init__(self, field: str | None, problem: str) -> None:
        super().__init__(problem)
        self.field = field
        self.problem = problem


def refusal(field: str | None, expected: str, got: object) -> FieldError:
    """The error that says what was expected and what was there instead."""
    return FieldError(field, f"expected {expected}, got {shown(got)}")


def shown(value: object) -> str:
    """A value for a message: quoted, on one line, and short."""
    if value is None or value == "":
        return "nothing"
    if isinstance(value, list | dict):  # which may be huge, or too deep to be written
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def number(text: str, field: str) -> float:
    """A finite number, written as text."""
    try:
        value = float(text)
    except ValueError:
        raise refusal(field, "a number", text) from None
    if not -_INFINITY < value < _INFINITY or "_" in text or not text.isascii():
        raise refusal(field, "a finite number", text)
    return value


def amount(text: str, field: str) -> float:
    """A finite number of at least 0, written as text: seconds or steps."""
    try:
        value = float(text)
    except ValueError:
        raise refusal(field, "a number", text) from None
    if not 0.0 <= value < _INFINITY or "_" in text or not text.isascii():
        raise refusal(field, "a finite number of at least 0", text)
    return value


def whole(text: str, field: str, least: int = 1, most: int = MOST_GPUS) -> int:
    """A whole number in [least, most], written as text; `4.0` is whole too. By default the size of a gang."""
    try:
        value = int(text)
    except ValueError:
        value = _whole_float(text, field, least, most)
    if not least <= value <= most or "_" in text or not text.isascii():
        raise refusal(field, f"a whole number from {least:,} to {most:,}", text)
    return value


def label(text: str, field: str) -> str:
    """A name: at least one character, all of them printable."""
    if not text or not text.isprintable():
        raise refusal(field, "a name of printable characters", text)
    return text


def moment(text: str, field: str) -> float:
    """Seconds since 1970-01-01 of a calendar time such as `2017-10-09 07:01:55`; UTC unless it names its zone."""
    try:
        when = datetime.fromisoformat(text)
        seconds = when.timestamp() if when.tzinfo else (when - _EPOCH).total_seconds()
    except (ValueError, OverflowError):
        raise refusal(field, "a time such as 2017-10-09 07:01:55", text) from None
    if seconds < 0:
        raise refusal(field, "a time after 1970", text)
    return seconds


def _whole_float(text: str, field: str, least: int, most: int) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not value.is_integer():
        raise refusal(field, f"a whole number from {least:,} to {most:,}", text)
    return int(value)
