"""Logs as `poise.Client` reads and follows them."""

from collections.abc import Callable

import httpx
import pytest
from tests.fake_desk import talking

from poise.service.client import streams

pytestmark = pytest.mark.usefixtures("no_pauses")


def a_log(text: str, ended_after: int) -> Callable[[httpx.Request], httpx.Response]:
    """A log of which a few bytes more are there at each look, and which ends after so many looks."""
    looks = 0

    def reply(request: httpx.Request) -> httpx.Response:
        nonlocal looks
        looks += 1
        there = text if looks >= ended_after else text[: 5 * looks]
        asked = int(request.url.params["offset"])
        start = max(0, len(there) + asked) if asked < 0 else min(asked, len(there))
        part = there[start : start + int(request.url.params["limit"])]
        return httpx.Response(
            200, json={"text": part, "offset": start, "next": start + len(part), "ended": looks >= ended_after}
        )

    return reply


def test_a_log_is_followed_to_its_end_across_lost_connections() -> None:
    text = "".join(f"line {number}\n" for number in range(50))
    client, _ = talking(httpx.ReadError, a_log(text, ended_after=20), patience=600.0)
    assert "".join(client.job("j1").logs(follow=True)) == text


def test_a_log_is_read_whole_in_parts() -> None:
    text = "x" * (2 * streams.PART + 5)
    client, desk = talking(a_log(text, ended_after=0))
    assert client.job("j1").logs() == text
    assert len(desk.seen) == 4


@pytest.mark.parametrize(("lines", "want"), [(0, ""), (2, "line 8\nline 9\n"), (100, None)])
def test_the_tail_of_a_log_is_its_last_lines(lines: int, want: str | None) -> None:
    text = "".join(f"line {number}\n" for number in range(10))
    client, _ = talking(a_log(text, ended_after=0))
    assert client.tail("j1", lines) == (text if want is None else want, len(text))


def test_the_tail_of_a_log_of_long_lines_is_looked_for_further_back() -> None:
    text = "".join(f"{number}{'.' * streams.PART}\n" for number in range(9))
    client, _ = talking(a_log(text, ended_after=0))
    found, offset = client.tail("j1", 3)
    assert [line[0] for line in found.splitlines()] == ["6", "7", "8"]
    assert offset == len(text)


def test_a_bar_of_progress_that_is_drawn_again_is_one_line() -> None:
    text = "begin\n" + "".join(f"\r{percent}%" for percent in range(100)) + "\ndone\x0c\u2028\n"
    client, _ = talking(a_log(text, ended_after=0))
    assert client.tail("j1", 2)[0] == text.removeprefix("begin\n")


def test_the_tail_of_a_log_whose_beginning_was_deleted_is_what_is_left() -> None:
    text, deleted = "left\n" * 3, 10_000

    def reply(request: httpx.Request) -> httpx.Response:
        asked, end = int(request.url.params["offset"]), deleted + len(text)
        start = min(max(deleted, end + asked if asked < 0 else asked), end)
        return httpx.Response(200, json={"text": text[start - deleted :], "offset": start, "next": end, "ended": True})

    client, desk = talking(reply)
    assert client.tail("j1", 100) == (text, deleted + len(text))
    assert len(desk.seen) <= 4
