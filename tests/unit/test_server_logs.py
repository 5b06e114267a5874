"""Structured logs: one line per event, whatever is in it, and nothing that looks like a token."""

import io
import json
import logging
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.service.server.logs import Level, Logbook, LogFormat, forward

TOKEN = "poise_" + "Ab0_-" * 8 + "xyz"


def lines(form: LogFormat, *events: tuple[str, dict[str, Any]]) -> list[str]:
    stream = io.StringIO()
    log = Logbook(stream, form=form)
    for event, values in events:
        log.info(event, **values)
    text = stream.getvalue()
    assert text.endswith("\n")
    return text.removesuffix("\n").split("\n")


PLAIN = st.text() | st.integers() | st.floats() | st.none() | st.binary()
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(PLAIN, PLAIN, max_size=3) | st.tuples(PLAIN)


def _no_number(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


@given(values=st.dictionaries(st.sampled_from(["job", "text", "gpus"]), VALUES))
def test_event_is_one_line_in_either_format_whatever_its_values(values: dict[str, Any]) -> None:
    for form in LogFormat:
        (line,) = lines(form, ("launch", values))
        assert "launch" in line
        assert line.isprintable()
        if form is LogFormat.JSON:
            json.loads(line, parse_constant=_no_number)


def test_numbers_lists_and_tables_stay_what_they_are() -> None:
    values = {"gpus": {"v100-0": (0, 1)}, "codes": (0, None), "odd": {(1, 2): float("nan")}}
    (line,) = lines(LogFormat.JSON, ("launch", values))
    document = json.loads(line)
    assert (document["gpus"], document["codes"], document["odd"]) == ({"v100-0": [0, 1]}, [0, None], "{(1, 2): nan}")
    (line,) = lines(LogFormat.TEXT, ("launch", values))
    assert line.split(" ", 1)[1] == 'info    launch gpus={"v100-0":[0,1]} codes=[0,null] odd="{(1, 2): nan}"'


def test_json_line_has_time_level_event_and_values() -> None:
    (line,) = lines(LogFormat.JSON, ("launch", {"job": "job-1", "gpus": 4, "text": 'a "b"\n', "none": None}))
    document = json.loads(line)
    assert document.pop("time").endswith("Z")
    assert document == {"level": "info", "event": "launch", "job": "job-1", "gpus": 4, "text": 'a "b"\n', "none": None}


def test_text_line_quotes_what_is_not_one_word() -> None:
    (line,) = lines(LogFormat.TEXT, ("launch", {"job": "job-1", "text": "two words", "empty": "", "lines": "a\nb"}))
    assert line.split(" ", 1)[1] == 'info    launch job=job-1 text="two words" empty="" lines="a\\nb"'


@pytest.mark.parametrize("form", LogFormat)
def test_token_is_masked_anywhere_in_a_line(form: LogFormat) -> None:
    stream = io.StringIO()
    log = Logbook(stream, form=form)
    log.warning(TOKEN, text=f"Bearer {TOKEN}", more=[TOKEN])
    log.error("bug", error=ValueError(TOKEN))
    assert TOKEN not in stream.getvalue()
    assert stream.getvalue().count("poise_***") >= 5


def test_long_value_is_cut() -> None:
    (line,) = lines(LogFormat.JSON, ("launch", {"text": "x" * 100_000}))
    assert len(line) < 5_000


def test_events_below_the_least_level_are_not_written() -> None:
    stream = io.StringIO()
    log = Logbook(stream, least=Level.WARNING)
    log.write(Level.DEBUG, "a", {})
    log.info("b")
    log.warning("c")
    log.error("d")
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["c", "d"]


def test_stream_that_cannot_be_written_stops_nothing() -> None:
    stream = Mock(write=Mock(side_effect=OSError(28, "No space left on device")))
    Logbook(stream).error("disk-full")
    assert stream.write.called


def test_what_a_library_logs_goes_to_our_log() -> None:
    stream = io.StringIO()
    forward("poise-test-library", Logbook(stream, form=LogFormat.JSON), Level.WARNING)
    library = logging.getLogger("poise-test-library.part")
    library.info("nothing")
    library.warning("watch %s", TOKEN)
    (line,) = stream.getvalue().splitlines()
    document = json.loads(line)
    assert document["text"] == "watch poise_***"
    assert (document["event"], document["logger"]) == ("library", "poise-test-library.part")
