"""Moments as people write them: a time of day is the next one, and what names no zone is local time."""

from collections.abc import Iterator
from time import tzset

import pytest

from poise.service.wire.moments import EXPECTED, format_moment, parse_moment

NOW = 1_792_000_000.0  # 2026-10-14 17:46:40Z, in Berlin 19:46:40
HOUR = 3600.0


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    tzset()
    yield
    monkeypatch.undo()
    tzset()


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("20:00", "2026-10-14 18:00:00Z"),
        ("6:30", "2026-10-15 04:30:00Z"),
        ("19:46:40", "2026-10-14 17:46:40Z"),
        ("19:46:39", "2026-10-15 17:46:39Z"),
        ("noon", "2026-10-15 10:00:00Z"),
        ("midnight", "2026-10-14 22:00:00Z"),
        ("today", "2026-10-13 22:00:00Z"),
        ("Tomorrow", "2026-10-14 22:00:00Z"),
        ("now", "2026-10-14 17:46:40Z"),
        ("now+2h", "2026-10-14 19:46:40Z"),
        ("+1h30m", "2026-10-14 19:16:40Z"),
        ("now+1hour", "2026-10-14 18:46:40Z"),
        ("now+2days", "2026-10-16 17:46:40Z"),
        ("now+60", "2026-10-14 17:47:40Z"),
        ("2026-11-20", "2026-11-19 23:00:00Z"),
        ("2026-11-20T16:00", "2026-11-20 15:00:00Z"),
        ("2026-11-20 16:00:30", "2026-11-20 15:00:30Z"),
        ("2026-07-01T16:00", "2026-07-01 14:00:00Z"),
        ("2026-11-20T16:00Z", "2026-11-20 16:00:00Z"),
        ("2026-11-20t6:00z", "2026-11-20 06:00:00Z"),
        ("2026-11-20T16:00:00-05:00", "2026-11-20 21:00:00Z"),
        ("2026-10-25T02:30", "2026-10-25 00:30:00Z"),  # the clock shows it twice
    ],
)
def test_a_moment_without_a_zone_is_local_time(text: str, means: str) -> None:
    assert format_moment(parse_moment(text, NOW)) == means


@pytest.mark.parametrize(
    "text",
    ["", "soon", "25:00", "16", "16:60", "2026-13-01", "2026-02-30", "16:00Z", "now+", "now-1h", "+-1h", "now+1month", "1h",
     "9999-12-31T23:59:59-14:00", "0001-01-01", "1969-12-31T00:00Z", "now+1e300", "+inf", "²:00", "2026-11-20T16:00+99:00"],
)  # fmt: skip
def test_what_is_no_moment_is_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        parse_moment(text, NOW)
    assert str(caught.value) == f"expected {EXPECTED}, got {text!r}"


def test_what_comes_later_counts_from_the_present_to_the_fraction() -> None:
    assert parse_moment("now+1h", NOW + 0.25) == NOW + HOUR + 0.25
