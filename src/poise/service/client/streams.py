"""Things that grow: logs and events, read on as more comes."""

import re
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING

from poise.scheduler.model.units import counted
from poise.service.client.connection import Connection
from poise.service.client.errors import UnavailableError, WaitTimeoutError
from poise.service.wire.views import EventPage, EventRow, JobRow, JobState, Log

if TYPE_CHECKING:
    from poise.service.client.client import Client

SHORTEST_LOOK, LONGEST_LOOK = 0.1, 2.0
"""Seconds between two looks; longer while nothing happens."""
PART = 65_536
"""Bytes of a log that are asked for at once."""
MOST_EVENTS = 1_000
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
"""A bar of progress that is drawn again and again in one line is one line."""


class Pauses:
    """Seconds to wait: short after news, longer and longer without."""

    def __init__(self) -> None:
        self._next = SHORTEST_LOOK

    def take(self, *, after_news: bool, until: float | None = None) -> None:
        """Wait, but not beyond a moment of the monotonic clock."""
        self._next = SHORTEST_LOOK if after_news else min(1.5 * self._next, LONGEST_LOOK)
        sleep(self._next if until is None else max(0.0, min(self._next, until - monotonic())))


def log_part(link: Connection, job: str, replica: int, offset: int) -> Log:
    """A part of a replica's log; a negative offset counts from the end."""
    return link.get(Log, f"/v1/jobs/{job}/logs", replica=replica, offset=offset, limit=PART)


def log_parts(link: Connection, job: str, replica: int, offset: int) -> Iterator[Log]:
    """The log from an offset on, as far as it is written."""
    while True:
        part = log_part(link, job, replica, offset)
        if not _has_more(part, offset):
            return
        yield part
        offset = part.next


def growing_log(link: Connection, job: str, replica: int, offset: int) -> Iterator[Log]:
    """The log from an offset on, until nothing will be added any more."""
    pauses = Pauses()
    while True:
        part = log_part(link, job, replica, offset)
        has_more = _has_more(part, offset)
        if has_more:
            yield part
        elif part.ended:
            return
        offset = part.next
        if part.next - part.offset < PART // 2:  # otherwise there may be more already
            pauses.take(after_news=has_more)


def last_lines(link: Connection, job: str, replica: int, lines: int) -> tuple[str, int]:
    """The last lines of a log, and the offset at which it goes on."""
    window, before = PART // 2, None
    while True:
        first = log_part(link, job, replica, -window)
        parts = [first, *log_parts(link, job, replica, first.next)]
        text = "".join(part.text for part in parts)
        is_all = first.offset == 0 or (before is not None and first.offset >= before)  # what came earlier may be deleted
        if is_all or text.count("\n") > lines:
            return "".join(_LINE.findall(text)[-lines:] if lines else []), parts[-1].next
        window, before = 4 * window, first.offset


def _has_more(part: Log, offset: int) -> bool:
    return bool(part.text) or part.next > offset >= 0


def growing_events(link: Connection, after: int, job: str | None, tenant: str | None) -> Iterator[EventRow]:
    """What happens after a number of the journal (negative: the last so many and on), without end."""
    pauses = Pauses()
    while True:
        found = link.get(EventPage, "/v1/events", after=after, job=job, tenant=tenant, limit=MOST_EVENTS)
        yield from found.events
        after = found.next
        if len(found.events) < MOST_EVENTS:
            pauses.take(after_news=bool(found.events))


# Waiting until jobs have ended: one after the other, so that a thousand of them cost few more questions than one.


def quietly(_row: JobRow) -> None:
    """Tell nobody."""


def wait_for(
    client: "Client", jobs: Sequence[str], *, timeout: float | None, told: Callable[[JobRow], None] = quietly
) -> dict[str, JobState]:
    """The final state of each job, once all have one; WaitTimeoutError after `timeout` seconds.

    told   hears of the job that is waited for, whenever its state has changed
    """
    deadline = None if timeout is None else monotonic() + timeout
    found: dict[str, JobState] = {}
    for job in jobs:
        state = _last(client, job, deadline, told)
        if state is None or not state.is_final:
            raise WaitTimeoutError(_late(jobs[len(found) :], state, timeout or 0.0))
        found[job] = state
    return found


def _last(client: "Client", job: str, deadline: float | None, told: Callable[[JobRow], None]) -> JobState | None:
    """The final state of a job, or the one that it was last seen in when the time was up; None: it was not seen."""
    pauses = Pauses()
    before: JobState | None = None
    while True:
        try:
            row = client.show(job).job
        except UnavailableError:
            if deadline is None or monotonic() < deadline:
                raise
            return before
        if row.state is not before:
            told(row)
        if row.state.is_final or (deadline is not None and monotonic() >= deadline):
            return row.state
        pauses.take(after_news=row.state is not before, until=deadline)
        before = row.state


def _late(jobs: Sequence[str], state: JobState | None, timeout: float) -> str:
    first = f"job {jobs[0]} {'has not ended' if state is None else f'is {state}'} after {timeout:g} s"
    if len(jobs) == 1:
        return f"{first}; it goes on"
    return f"{first}, and {counted(len(jobs) - 1, 'job')} after it may not have ended either; they go on"
