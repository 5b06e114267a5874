"""What happened, read off the journal in parts: forward from a number, or the latest."""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from poise.engine.journal import read_entry, read_header
from poise.scheduler.model.action import Abandon, Action, Cancel, JournalEntry, Launch, Preempt, Reject, Remark
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.errors import JournalError
from poise.scheduler.model.event import (
    Cancelled,
    Carried,
    Event,
    Failed,
    Finished,
    Held,
    Released,
    Stopped,
    Submitted,
)
from poise.scheduler.model.job import Job
from poise.scheduler.model.units import counted
from poise.service.server.commands import AWAITED, LEAVES, WHOLE
from poise.service.server.records import places
from poise.service.server.storage.store import ASIDE, Named, Reader, Written
from poise.service.wire.views import Actor, EventPage, EventRow

# The journal as sentences: who did what to which job, and why. A view, not a second record.


def event_sentences(
    number: int, entry: JournalEntry, notes: str | None, cluster: Cluster, tenants: Mapping[str, str]
) -> list[EventRow]:
    """What happened at one instant, in order. `tenants`: whose jobs they are."""
    said = _notes(notes)

    def told(kind: str, actor: str, job: str | None, text: str) -> EventRow:
        tenant = None if job is None else tenants.get(job)
        return EventRow(number=number, time=entry.now, actor=actor, kind=kind, job=job, tenant=tenant, text=text)

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


def _changed(note: Mapping[str, Any], number: int, now: float) -> EventRow:
    """What somebody changed for everybody."""
    tenant = note.get("tenant")
    if tenant is None:
        kind, text = "policy-changed", f"policy {note['policy']} from now on; before: {note['before']}"
    else:
        kind, text = "weight-changed", f"weighs {note['weight']:g} from now on; before: {note['before']:g}"
    return EventRow(number=number, time=now, actor=note["by"], kind=kind, job=None, tenant=tenant, text=text)


_Told = Callable[[str, str, str | None, str], EventRow]


def _fact(event: Event, note: Mapping[str, object], over: Set[str], told: _Told) -> EventRow | None:
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


def _wish(action: Action, cluster: Cluster, leaves: Mapping[str, str], told: _Told) -> EventRow | None:
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


def jobs_named(entry: JournalEntry, notes: str | None) -> Iterator[str]:
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


PART = 200
"""Entries of the journal that are read at once."""
MOST_ENTRIES = 5_000
"""Entries of the journal that one question looks at."""
SILENT = frozenset({"carried"})
"""Facts that nobody is told of, and that there may be very many of."""


class EventReader:
    """Answers one question about jobs that are named."""

    def __init__(self, reader: Reader, named: Named) -> None:
        self._reader = reader
        self._named = named
        self._chapters = reader.chapters()
        self._clusters: dict[int, Cluster] = {}

    def after(self, number: int, limit: int) -> EventPage:
        """What happened after that number. All of an instant is told or none of it, so it may be more than `limit`.

        `next` is beyond all that was looked at, told or not: whoever asks again from there misses nothing.
        """
        last = self._reader.last()  # what is committed from now on is not to be passed over
        found: list[EventRow] = []
        for _ in range(MOST_ENTRIES // PART):
            entries = self._reader.entries(self._named, after=number, limit=PART)
            for each in entries:
                number = each.number
                found += self._told(each)
                if len(found) >= limit:
                    return EventPage(events=tuple(found), next=number)
            if len(entries) < PART:
                return EventPage(events=tuple(found), next=max(number, last))
        return EventPage(events=tuple(found), next=number)

    def latest(self, most: int) -> EventPage:
        """The last so many things that happened, as far as that is not too long ago."""
        last = before = self._reader.last()
        found: list[EventRow] = []
        for _ in range(MOST_ENTRIES // PART):
            entries = self._reader.entries_back(self._named, until=before, limit=PART)
            for each in entries:
                found = [*self._told(each), *found]
                if len(found) >= most:
                    return EventPage(events=tuple(found[-most:]), next=last)
            if len(entries) < PART:
                break
            before = entries[-1].number - 1
        return EventPage(events=tuple(found), next=last)

    def _told(self, written: Written) -> list[EventRow]:
        try:
            entry = read_entry(written.document, but=SILENT)
        except JournalError:
            return [] if self._named != (None, None) else [_unreadable(written)]
        tenants = self._reader.tenants_of(jobs_named(entry, written.notes))
        told = event_sentences(written.number, entry, written.notes, self._cluster(written.number), tenants)
        job, tenant = self._named
        return [each for each in told if job in (None, each.job) and tenant in (None, each.tenant)]

    def _cluster(self, number: int) -> Cluster:
        """The cluster of the chapter that an entry belongs to."""
        first = self._chapters[bisect_right(self._chapters, number) - 1]
        if first not in self._clusters:
            self._clusters[first] = read_header(self._reader.header_at(first)).cluster
        return self._clusters[first]


def _unreadable(written: Written) -> EventRow:
    """What can be said of an entry that was damaged: that it is there."""
    text = f"entry {written.number:,} of the journal is damaged: what happened then cannot be told"
    return EventRow(number=written.number, time=0.0, actor=Actor.SERVICE, kind="damaged", job=None, tenant=None, text=text)
