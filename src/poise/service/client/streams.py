"""Logs, events and job states, read on as more comes.

The server is polled: soon again after news, less and less often without.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING

from poise.scheduler.model.units import counted
from poise.service.client.connection import Connection, UnavailableError, WaitTimeoutError
from poise.service.wire.views import EventPage, EventRow, JobRow, JobState, Log

if TYPE_CHECKING:
    from poise.service.client.client import Client

SHORTEST_POLL, LONGEST_POLL = 0.1, 2.0  # seconds between two polls; longer while nothing happens
PART = 65_536  # bytes of a log that are asked for at once
MOST_EVENTS = 1_000
_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # a progress bar that is redrawn in one line counts as one line


class PollInterval:
    """Sleeps between two polls: briefly after news, longer and longer without."""

    def __init__(self) -> None:
        self._next = SHORTEST_POLL

    def sleep(self, *, after_news: bool, until: float | None = None) -> None:
        """Sleep, but not beyond `until` of the monotonic clock."""
        self._next = SHORTEST_POLL if after_news else min(1.5 * self._next, LONGEST_POLL)
        sleep(self._next if until is None else max(0.0, min(self._next, until - monotonic())))


def log_part(link: Connection, job: str, replica: int, offset: int) -> Log:
    """A part of a replica's log; a negative offset counts from the end."""
    return link.get(Log, f"/v1/jobs/{job}/logs", replica=replica, offset=offset, limit=PART)


def log_parts(link: Connection, job: str, replica: int, offset: int) -> Iterator[Log]:
    """The log from an offset on, as far as it is written."""
    while _has_more(part := log_part(link, job, replica, offset), offset):
        yield part
        offset = part.next


def follow_log(link: Connection, job: str, replica: int, offset: int) -> Iterator[Log]:
    """The log from an offset on, until nothing will be added any more."""
    interval = PollInterval()
    while True:
        part = log_part(link, job, replica, offset)
        has_more = _has_more(part, offset)
        if has_more:
            yield part
        elif part.ended:
            return
        offset = part.next
        if part.next - part.offset < PART // 2:  # otherwise there may be more already
            interval.sleep(after_news=has_more)


def follow_job(
    client: "Client", link: Connection, job: str, offset: int, on_change: Callable[[JobRow], None]
) -> Iterator[Log]:
    """The log of rank 0 from an offset on, until the job has ended and nothing will be added.

    on_change   is called with the job whenever its state, or the reason why it is so, has changed
    """
    interval = PollInterval()
    before: tuple[JobState, str] | None = None
    while True:
        row = client.show(job).job
        now = row.state, row.reason.code
        if now != before:
            on_change(row)
        part = log_part(link, job, 0, offset)
        has_more = _has_more(part, offset)
        if has_more:
            yield part
        elif part.ended:
            return
        offset = part.next
        if part.next - part.offset < PART // 2:
            interval.sleep(after_news=has_more or now != before)
        before = now


def last_lines(link: Connection, job: str, replica: int, lines: int) -> tuple[str, int]:
    """The last lines of a log, and the offset at which it continues."""
    window, before = PART // 2, None
    while True:
        first = log_part(link, job, replica, -window)
        parts = [first, *log_parts(link, job, replica, first.next)]
        text = "".join(part.text for part in parts)
        # A larger window that starts no earlier has reached the start of what is kept: earlier parts may be deleted.
        is_all = first.offset == 0 or (before is not None and first.offset >= before)
        if is_all or text.count("\n") > lines:
            return "".join(_LINE.findall(text)[-lines:] if lines else []), parts[-1].next
        window, before = 4 * window, first.offset


def _has_more(part: Log, offset: int) -> bool:
    return bool(part.text) or part.next > offset >= 0


def follow_events(link: Connection, after: int, job: str | None, tenant: str | None) -> Iterator[EventRow]:
    """The events after a number of the journal (negative: the last that many, and on), without end."""
    interval = PollInterval()
    while True:
        found = link.get(EventPage, "/v1/events", after=after, job=job, tenant=tenant, limit=MOST_EVENTS)
        yield from found.events
        after = found.next
        if len(found.events) < MOST_EVENTS:
            interval.sleep(after_news=bool(found.events))


def wait_for(
    client: "Client", jobs: Sequence[str], *, timeout: float | None, on_change: Callable[[JobRow], None] | None = None
) -> dict[str, JobState]:
    """The final state of each job, once all have one; WaitTimeoutError after `timeout` seconds.

    One job is polled after the other: waiting for a thousand costs few more requests than waiting for one.

    on_change   is called with the job that is being waited for, whenever its state has changed
    """
    deadline = None if timeout is None else monotonic() + timeout
    found: dict[str, JobState] = {}
    for job in jobs:
        state = _last_state(client, job, deadline, on_change)
        if state is None or not state.is_final:
            late = f"job {job} {'has not ended' if state is None else f'is {state}'} after {timeout or 0.0:g} s"
            others = len(jobs) - len(found) - 1
            more = f", and {counted(others, 'job')} after it may not have ended either; they go on"
            raise WaitTimeoutError(late + (more if others else "; it goes on"))
        found[job] = state
    return found


def _last_state(
    client: "Client", job: str, deadline: float | None, on_change: Callable[[JobRow], None] | None
) -> JobState | None:
    """The final state of a job, or the one that it was last seen in when the time was up; None: it was not seen."""
    interval = PollInterval()
    before: JobState | None = None
    while True:
        try:
            row = client.show(job).job
        except UnavailableError:
            if deadline is None or monotonic() < deadline:
                raise
            return before
        if row.state is not before and on_change is not None:
            on_change(row)
        if row.state.is_final or (deadline is not None and monotonic() >= deadline):
            return row.state
        interval.sleep(after_news=row.state is not before, until=deadline)
        before = row.state
