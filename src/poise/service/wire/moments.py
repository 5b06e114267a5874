"""Moments as people write them (`16:00`, `2026-11-20T16:00Z`, `now+2h`, `tomorrow`), and as timestamps since 1970.

A moment that names no zone is meant as the clock on the wall shows it where it was typed: in the local time of the
submitter, whatever zone the service is in. What is sent and stored is a timestamp.
"""

import re
from datetime import UTC, date, datetime, time, timedelta
from time import time as wall_time  # noqa: TID251 - people write moments as they are seen from the present

from poise.scheduler.model.units import parse_seconds

EXPECTED = (
    "a moment such as 16:00, tomorrow, now+2h, 2026-11-20 or 2026-11-20T16:00, with Z or +01:00 if it is not local time"
)
LATEST = 253_402_300_799.0
"""The last second of the year 9999, after which no calendar goes on."""
_SHOWN = 40  # characters of a wrong moment that a message repeats
_LATER = re.compile(r"(?:now)?\+\s*(\S+?)")
_SLURM_UNIT = re.compile(r"([0-9]+)(second|minute|hour|day|week)s?")
_OF_DAY = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?")
_MOMENT = re.compile(
    r"(?P<day>[0-9]{4}-[0-9]{2}-[0-9]{2})(?:[T ](?P<time>[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?))?"
    r"(?P<zone>Z|[+-][0-9]{2}:[0-9]{2})?"
)
_NAMED = {"midnight": time(0), "noon": time(12)}


def parse_moment(text: str, now: float) -> float:
    """The timestamp of a moment; ValueError says in one line what is expected.

    A time of day is the next one: today's, or tomorrow's if that has passed. A day begins at midnight.

    now   the present, as a timestamp
    """
    found = text.strip()
    try:
        at = _parsed(found, now)
    except (ValueError, OverflowError, OSError):  # the last two: a year that no calendar of this machine has
        at = None
    if at is None or not 0 <= at <= LATEST:
        raise ValueError(f"expected {EXPECTED}, got {text[:_SHOWN]!r}")
    return at


def moment_from_now(text: str) -> float:
    """The timestamp of a moment, read at the present; ValueError says what is expected."""
    return parse_moment(text, wall_time())


def format_moment(at: float) -> str:
    """A timestamp for people, to the second, in UTC."""
    return datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _parsed(text: str, now: float) -> float | None:
    """The timestamp; None or ValueError: it is no moment."""
    word = text.lower()
    today = datetime.fromtimestamp(now).date()  # noqa: DTZ006 - local time is what is meant
    if word == "now":
        return now
    if word == "today":
        return _local(today, time(0))
    if word == "tomorrow":
        return _local(today + timedelta(days=1), time(0))
    if later := _LATER.fullmatch(word):
        unit = _SLURM_UNIT.fullmatch(later[1])
        return now + parse_seconds(f"{unit[1]}{unit[2][0]}" if unit else later[1])
    if word in _NAMED or _OF_DAY.fullmatch(word):
        of_day = _NAMED[word] if word in _NAMED else _time(word)
        at = _local(today, of_day)
        return at if at >= now else _local(today + timedelta(days=1), of_day)
    match = _MOMENT.fullmatch(text.upper())
    if match is None:
        return None
    day, of_day = date.fromisoformat(match["day"]), _time(match["time"]) if match["time"] else time(0)
    if match["zone"] is None:
        return _local(day, of_day)
    return datetime.fromisoformat(f"{day}T{of_day}{match['zone']}").timestamp()


def _time(text: str) -> time:
    hour, minute, *second = map(int, text.split(":"))
    return time(hour, minute, second[0] if second else 0)


def _local(day: date, of_day: time) -> float:
    """The timestamp of a moment of local time. Of an hour that the clock shows twice, the first is meant."""
    return datetime.combine(day, of_day).timestamp()
