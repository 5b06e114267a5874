"""`poise cancel`, `hold` and `release`: for one job, for several, or for those that have something in common."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from poise.cli.live import PAGE, answer, connected, document, suggesting
from poise.cli.options import examples, json_option, print_json, with_options
from poise.scheduler.model.errors import PoiseError, RequestError, UnknownNameError, plain
from poise.scheduler.model.units import counted
from poise.service.client import Client
from poise.service.wire.views import CommandResult, Flag, JobRow, JobState, Role

Command = Callable[[Client, str], CommandResult]
LIVE_STATES = tuple(state for state in JobState if not state.is_final)

_CANCEL_EPILOG = """\b
Examples:
  poise cancel 17
  poise cancel resnet                          the job of this name, or whose name alone begins so
  poise cancel --app sweep
  poise cancel --state pending                 your jobs that wait for their first GPUs
  poise cancel --tenant vision --yes
"""
_CHOICE = (
    click.argument("jobs", nargs=-1, metavar="[JOB]..."),
    click.option("--app", help="All jobs of this app that have not ended."),
    click.option("--all", "everything", is_flag=True,
        help="All your jobs that have not ended; an operator's: those of all tenants."),
    click.option("--state", "states", multiple=True, metavar="STATE",
        help="Your jobs in this state, or those of --app or --tenant; several with commas."),
    click.option("--yes", is_flag=True, help="With --all, --state, or --tenant alone: do not ask first at a terminal."),
)  # fmt: skip
_jobs_and_choice = with_options(_CHOICE)


@dataclass(frozen=True, slots=True)
class Choice:
    """Jobs by what they have in common, as options say; everything: of all tenants, if an operator asks."""

    app: str | None
    tenant: str | None
    states: tuple[JobState, ...]
    everything: bool

    @property
    def is_wide(self) -> bool:
        """It is more than the jobs of an app: people are asked before something is done to these."""
        return self.everything or bool(self.states)

    def owner(self, client: Client) -> str | None:
        """The tenant whose jobs are meant; None: those of all tenants."""
        if self.tenant is not None:
            return self.tenant
        me = client.me()
        if me.role not in (Role.OPERATOR, Role.ADMIN):
            return me.tenant
        if not self.everything:
            raise RequestError("an operator says whose jobs are meant: --tenant NAME, or --all for those of all tenants")
        return None

    def text(self, owner: str | None) -> str:
        """These jobs in words."""
        states = f" {' or '.join(state.value for state in self.states)}" if self.states else ""
        app = "" if self.app is None else f" of app {self.app}"
        return f"{states}{app}{' of all tenants' if owner is None else f' of tenant {owner}'}"


def _choice(jobs: tuple[str, ...], states: tuple[str, ...], everything: bool, **chosen: str | None) -> Choice:
    """What the options choose, if that makes sense beside these jobs."""
    found: dict[JobState, None] = {}
    for word in (part.strip().upper() for each in states for part in each.split(",")):
        if word not in JobState.__members__:
            raise UnknownNameError("state", word.lower(), [state.lower() for state in LIVE_STATES])
        if JobState[word].is_final:
            known = ", ".join(state.lower() for state in LIVE_STATES)
            raise RequestError(f"--state {word.lower()}: nothing can be done to jobs that have ended; expected {known}")
        found[JobState[word]] = None
    choice = Choice(**chosen, states=tuple(found), everything=everything)
    if jobs and choice.is_wide:
        option = "--all" if everything else "--state"
        raise RequestError(
            f"{option} chooses jobs by what they have in common; leave {' '.join(jobs)[:60]} out, or {option}"
        )
    return choice


@click.command(epilog=_CANCEL_EPILOG)
@_jobs_and_choice
@click.option(
    "--tenant",
    help="All jobs of this tenant that have not ended; with --app, those of its app. Of other tenants only operators may.",
)
@json_option
def cancel(jobs: tuple[str, ...], yes: bool, as_json: bool, **chosen: Any) -> int:  # noqa: ANN401
    """Withdraw jobs. Those that run are stopped; what they have printed stays."""
    choice = _choice(jobs, **chosen)
    tenant = choice.tenant
    if not choice.is_wide and (tenant is None or choice.app is not None):
        return _apply(Client.cancel, jobs, choice, as_json=as_json, yes=yes)
    if jobs:
        raise RequestError("--tenant names all jobs of a tenant; leave the others out")
    with connected() as client:
        owner = choice.owner(client)
        there = client.queue(tenant=owner, app=choice.app, states=choice.states, limit=1).total
        if not there:
            those = f"there are no jobs{choice.text(owner)} that have not ended"
            raise RequestError(those if choice.is_wide else f"the tenant {tenant!r} has no jobs that have not ended")
        if not _agreed(f"Cancel {counted(there, 'job')}{choice.text(owner)}?", yes=yes):
            return 1
        done = client.cancel_all(owner, app=choice.app, states=choice.states)
        text = f"{counted(done.jobs, 'job')}{choice.text(owner)} cancelled"
        answer(done, lambda _: click.echo(text), as_json=as_json)
    return 0


_DONE = {"Cancel": "cancelled", "Hold": "held", "Release": "released"}


def _agreed(question: str, *, yes: bool) -> bool:
    """Whether to do something to many jobs: --yes says so, or whoever sits at the terminal, or there is none."""
    if yes or not can_ask() or click.confirm(question, err=True):
        return True
    click.echo(f"poise: nothing was {_DONE[question.split()[0]]}", err=True)
    return False


def can_ask() -> bool:
    """Whether standard input is a terminal, so that a question can be answered."""
    return sys.stdin.isatty()


HOLD_EPILOG = """\b
Examples:
  poise hold 17
  poise hold --app sweep
  poise hold --stop 17                         TERM at its deadline; what it has not saved is lost
"""
_tenant_of_choice = click.option("--tenant", help="Whose jobs are meant.  [default: your own; an operator: of the only app]")


@click.command(epilog=HOLD_EPILOG)
@_jobs_and_choice
@_tenant_of_choice
@click.option("--stop", is_flag=True, help="Make a run leave even if it cannot save: TERM at its deadline at the latest.")
@json_option
def hold(jobs: tuple[str, ...], yes: bool, stop: bool, as_json: bool, **chosen: Any) -> int:  # noqa: ANN401
    """Keep jobs from running until they are released. One that runs is asked to save its work and to leave.

    One that cannot save its work, or not yet, goes on and keeps its GPUs: it is held as soon as it can, or when it ends.
    """
    return _apply(Client.stop if stop else Client.hold, jobs, _choice(jobs, **chosen), as_json=as_json, yes=yes)


@click.command(epilog=examples("poise release 17", "poise release --app sweep", "poise release --all"))
@_jobs_and_choice
@_tenant_of_choice
@json_option
def release(jobs: tuple[str, ...], yes: bool, as_json: bool, **chosen: Any) -> int:  # noqa: ANN401
    """End a hold: the jobs may run again."""
    return _apply(Client.release, jobs, _choice(jobs, **chosen), as_json=as_json, yes=yes)


def _apply(command: Command, jobs: tuple[str, ...], choice: Choice, *, as_json: bool, yes: bool) -> int:
    """Send a command for each job, whatever becomes of the others; the exit code is that of the worst."""
    if choice.tenant is not None and choice.app is None and not choice.is_wide:
        raise RequestError(f"--tenant {choice.tenant} says whose app is meant; name the app with --app, or add --all")
    if not jobs and choice.app is None and not choice.is_wide:
        raise RequestError("name a job, several, an app with --app, or take --all")
    with connected() as client:
        chosen: list[str] = []
        if choice.is_wide:
            owner = choice.owner(client)
            chosen = _jobs_of_choice(client, choice, owner, command)
            verb = "Release" if command is Client.release else "Hold"
            if not _agreed(f"{verb} {counted(len(chosen), 'job')}{choice.text(owner)}?", yes=yes):
                return 1
        elif choice.app is not None:
            chosen = _jobs_of_app(client, choice.app, choice.tenant)
        found, code = _for_each(client, command, tuple(dict.fromkeys((*jobs, *chosen))))
    if as_json:
        print_json(found)
    else:
        for each in found:
            if "state" in each:
                click.echo(f"{each['job']} {each['state']}" + (f": {plain(each['text'])}" if each.get("text") else ""))
    return code


def _for_each(client: Client, command: Command, jobs: tuple[str, ...]) -> tuple[list[dict[str, str]], int]:
    """Send a command for each of these jobs; what came of it, and the exit code of the worst."""
    found: list[dict[str, str]] = []
    code = 0
    for job in jobs:
        try:
            with suggesting(client, job):
                done = document(command(client, job))
            found.append({name: value for name, value in done.items() if value is not None})
        except PoiseError as error:
            click.echo(plain(f"poise: {error}" if len(jobs) == 1 else f"poise: {job}: {error}"), err=True)
            found.append({"job": job, "error": str(error)})
            code = max(code, 2 if isinstance(error, RequestError) else 1)
    return found, code


def _jobs_of_choice(client: Client, choice: Choice, owner: str | None, command: Command) -> list[str]:
    """The jobs of a choice that a command would change: only those are released that are held."""
    is_release = command is Client.release
    rows = _rows(client, tenant=owner, app=choice.app, states=choice.states)
    found = [row.id for row in rows if (Flag.HELD in row.flags) is is_release]
    if not found:
        held = "are" if is_release else "are not yet"
        raise RequestError(f"there are no jobs{choice.text(owner)} that {held} held")
    return found


def _rows(client: Client, *, tenant: str | None, app: str | None, states: tuple[JobState, ...] = ()) -> list[JobRow]:
    """All these jobs that have not ended."""
    found: list[JobRow] = []
    while True:
        page = client.queue(app=app, tenant=tenant, states=states, limit=PAGE, offset=len(found))
        found += page.jobs
        if len(page.jobs) < PAGE:
            return found


def _jobs_of_app(client: Client, app: str, tenant: str | None) -> list[str]:
    """All jobs of an app that have not ended. An app belongs to a tenant: a user means that of the token's tenant."""
    me = client.me()
    owner = me.tenant if tenant is None and me.role not in (Role.OPERATOR, Role.ADMIN) else tenant
    found = _rows(client, tenant=owner, app=app)
    if not found:
        whose = "" if owner is None else f" of tenant {owner}"
        raise RequestError(f"the app {app!r}{whose} has no jobs that have not ended")
    tenants = sorted({row.tenant for row in found})
    if len(tenants) > 1:
        raise RequestError(f"the app {app!r} is of several tenants: {', '.join(tenants)}; say whose with --tenant")
    return [row.id for row in found]
