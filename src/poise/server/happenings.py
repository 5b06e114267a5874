"""The journal as sentences: who did what to which job, and why. A view, not a second record."""

import json
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from poise.model.action import Abandon, Action, Cancel, Launch, Preempt, Reject, Remark
from poise.model.cluster import Cluster
from poise.model.event import Cancelled, Carried, Event, Failed, Finished, Held, Released, Stopped, Submitted
from poise.model.job import Job
from poise.model.journal import Entry
from poise.model.units import counted
from poise.server.records import places
from poise.server.store import ASIDE
from poise.server.wishes import AWAITED, LEAVES, WHOLE
from poise.wire.views import Actor, Happening


def happenings(
    number: int, entry: Entry, notes: str | None, cluster: Cluster, tenants: Mapping[str, str]
) -> list[Happening]:
    """What happened at one instant, in order. `tenants`: whose jobs they are."""
    said = _notes(notes)

    def told(kind: str, actor: str, job: str | None, text: str) -> Happening:
        tenant = None if job is None else tenants.get(job)
        return Happening(number=number, time=entry.now, actor=actor, kind=kind, job=job, tenant=tenant, text=text)

    over = {action.job for action in entry.actions if isinstance(action, Reject | Abandon | Cancel)}
    facts = (_fact(event, said.get(place, {}), over, told) for place, event in enumerate(entry.events))
    wishes = (_wish(action, cluster, said.get(LEAVES, {}), told) for action in entry.actions)
    later = (told(*_later(by, holds, job)) for job, (by, holds) in said.get(AWAITED, {}).items())
    whole = said.get(WHOLE, {})
    aside = [told("set-aside", Actor.SERVICE, job, text) for job, text in whole.get(ASIDE, {}).items()]
    of_all = _changed(whole, number, entry.now) if whole and not aside else None
    return [each for each in (of_all, *aside, *facts, *later, *wishes) if each is not None]


def _later(by: str, holds: bool, job: str) -> tuple[str, str, str, str]:
    """Of a job that goes on until to hold it loses nothing."""
    if holds:
        return "held", by, job, "to be put on hold once it can save its work, or has ended; until then it goes on"
    return "released", by, job, "released before it was held"


def _notes(text: str | None) -> dict[int, dict[str, Any]]:
    """What else is said, by place; nothing if it is damaged."""
    try:
        return {int(place): note for place, note in json.loads(text).items()} if text else {}
    except (AttributeError, ValueError):
        return {}


def _changed(note: Mapping[str, Any], number: int, now: float) -> Happening:
    """What somebody changed for everybody."""
    tenant = note.get("tenant")
    if tenant is None:
        kind, text = "policy-changed", f"policy {note['policy']} from now on; before: {note['before']}"
    else:
        kind, text = "weight-changed", f"weighs {note['weight']:g} from now on; before: {note['before']:g}"
    return Happening(number=number, time=now, actor=note["by"], kind=kind, job=None, tenant=tenant, text=text)


_Told = Callable[[str, str, str | None, str], Happening]


def _fact(event: Event, note: Mapping[str, object], over: Set[str], told: _Told) -> Happening | None:
    """`over`: jobs that are given up in the same instant."""
    by = str(note.get("by", "its owner"))
    match event:
        case Submitted():
            job = event.job
            return told("submitted", by, job.id, f"submitted, for {counted(job.gpus, 'GPU')}")
        case Cancelled() if ASIDE not in note:
            return told("cancelled", by, event.job, "cancelled")
        case Held():
            return told("held", by, event.job, "put on hold")
        case Released():
            return told("released", by, event.job, "released")
        case Finished():
            return told("finished", Actor.JOB, event.job, f"run {event.epoch} finished: all work is done")
        case Failed():
            how = "" if event.cause.startswith("exit code") else _exit(note)
            next_one = "" if event.final or event.job in over else _next(note)
            return told("failed", Actor.JOB, event.job, f"run {event.epoch} failed: {event.cause}{how}{next_one}")
        case Stopped():
            how = f": {note['cause']}{_exit(note)}" if note.get("cause") else ""
            return told("stopped", Actor.JOB, event.job, f"run {event.epoch} has left{how}{_next(note)}")
        case _:
            return None


def _exit(note: Mapping[str, object]) -> str:
    return f" ({note['exit']})" if note.get("exit") else ""


def _next(note: Mapping[str, object]) -> str:
    """Where the next run begins, in the job's own steps; a command that reported none is known to be started again."""
    steps = note.get("steps")
    return f"; the next one {'starts its command again' if steps is None else f'goes on from step {steps:,.10g}'}"


def _wish(action: Action, cluster: Cluster, leaves: Mapping[str, str], told: _Told) -> Happening | None:
    match action:
        case Launch():
            where = ", ".join(f"{node} {list(slots)}" for node, slots in places(cluster, action.gpus).items())
            return told("launched", Actor.POLICY, action.job, f"run {action.epoch} is launched on {where}")
        case Preempt():
            return told("preempted", Actor.POLICY, action.job, leaves.get(action.job, f"preempted ({action.why})"))
        case Reject() | Abandon() | Cancel():
            return told("given-up", Actor.POLICY, action.job, action.reason)
        case Remark():
            return told("remark", Actor.POLICY, None, action.text)
        case _:
            return None


def jobs_named(entry: Entry, notes: str | None) -> Iterator[str]:
    """Jobs that an instant is about."""
    yield from _notes(notes).get(AWAITED, {})
    for each in (*entry.events, *entry.actions):
        job = getattr(each, "job", None)
        if isinstance(each, Carried):
            continue
        if isinstance(job, Job):
            yield job.id
        elif isinstance(job, str):
            yield job
