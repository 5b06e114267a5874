"""Waiting until jobs have ended: one after the other, so that a thousand of them cost few more questions than one."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from poise.client.errors import UnavailableError, WaitTimeoutError
from poise.client.following import Pauses
from poise.model.units import counted
from poise.wire.views import JobRow, State

if TYPE_CHECKING:
    from poise.client.client import Client


def quietly(_row: JobRow) -> None:
    """Tell nobody."""


def wait_for(
    client: "Client", jobs: Sequence[str], *, timeout: float | None, told: Callable[[JobRow], None] = quietly
) -> dict[str, State]:
    """The final state of each job, once all have one; WaitTimeoutError after `timeout` seconds.

    told   hears of the job that is waited for, whenever its state has changed
    """
    deadline = None if timeout is None else monotonic() + timeout
    found: dict[str, State] = {}
    for job in jobs:
        state = _last(client, job, deadline, told)
        if state is None or not state.is_final:
            raise WaitTimeoutError(_late(jobs[len(found) :], state, timeout or 0.0))
        found[job] = state
    return found


def _last(client: "Client", job: str, deadline: float | None, told: Callable[[JobRow], None]) -> State | None:
    """The final state of a job, or the one that it was last seen in when the time was up; None: it was not seen."""
    pauses = Pauses()
    before: State | None = None
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


def _late(jobs: Sequence[str], state: State | None, timeout: float) -> str:
    first = f"job {jobs[0]} {'has not ended' if state is None else f'is {state}'} after {timeout:g} s"
    if len(jobs) == 1:
        return f"{first}; it goes on"
    return f"{first}, and {counted(len(jobs) - 1, 'job')} after it may not have ended either; they go on"
