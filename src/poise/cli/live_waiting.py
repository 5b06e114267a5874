"""Verbs that wait until jobs have ended: `poise wait`, `submit --wait` and `submit --follow`."""

from collections.abc import Iterable, Sequence

import click

from poise.cli import INTERRUPTED
from poise.cli.live_rows import state_of
from poise.cli.live_screen import Screen
from poise.client import Client, WaitTimeoutError
from poise.client.waiting import wait_for
from poise.wire.plain import plain
from poise.wire.views import JobRow, State

LATE = 124
"""The exit code where the time is up, as that of timeout(1)."""
MOST_NAMED = 10
"""Jobs that are named in a line of advice."""


def tell(row: JobRow) -> None:
    """Say on standard error how a job stands that is waited for."""
    name = f" {row.name}" if row.name != row.id else ""
    click.echo(plain(f"{row.id}{name}: {state_of(row)}, {row.reason.text}"), err=True)


def tell_nobody(_row: JobRow) -> None:
    """Say nothing."""


def waited(client: Client, jobs: Sequence[str], timeout: float | None, *, quiet: bool) -> tuple[dict[str, State], int]:
    """The final states of jobs, and the exit code: 0 if all succeeded, 1 if not, 124 where the time is up, 130 on Ctrl-C."""
    try:
        states = wait_for(client, jobs, timeout=timeout, told=tell_nobody if quiet else tell)
    except WaitTimeoutError as error:
        click.echo(f"poise: {error}", err=True)
        return {}, LATE
    except KeyboardInterrupt:
        return {}, interrupted(jobs)
    return states, code_of(states.values())


def code_of(states: Iterable[State]) -> int:
    """0: all have succeeded."""
    return 0 if all(state is State.SUCCEEDED for state in states) else 1


def interrupted(jobs: Sequence[str]) -> int:
    """After Ctrl-C: the jobs know nothing of it."""
    few = " ".join(jobs[:MOST_NAMED]) + (" …" if len(jobs) > MOST_NAMED else "")
    logs = f" · poise logs -f {few}" if len(jobs) == 1 else ""
    goes = "the job goes on" if len(jobs) == 1 else "the jobs go on"
    click.echo(f"\npoise: {goes}; poise wait {few}{logs} · poise cancel {few}", err=True)
    return INTERRUPTED


def followed(client: Client, job: str) -> int:
    """Print what a job prints until it has ended; the exit code is that of `waited`."""
    screen = Screen()
    try:
        with screen:
            for part in client.follow_log(job):
                screen.show(part)
    except KeyboardInterrupt:
        return interrupted([job])
    states, code = waited(client, [job], None, quiet=True)
    for state in states.values():
        click.echo(f"{job} {state}", err=True)
    return code
