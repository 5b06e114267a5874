"""The journal as sentences: who did what to which job, and why. A view, not a second record.

`EventReader` reads entries in parts, forward from a number or the latest ones; below it, each kind of fact and action has
its sentence. It works on the store alone, so readers do not hold the engine's lock.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
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
from poise.service.server.records import slots_by_node
from poise.service.server.service_state import ACCEPTED, CONDITION, DEFERRED, INTERRUPTED, NODES, STOPS, WHOLE, NodeNote
from poise.service.server.storage.store import ASIDE, EntryFilter, Reader, StoredEntry
from poise.service.wire.views import Actor, EventPage, EventRow

PART = 200  # entries of the journal that are read at once
MOST_ENTRIES = 5_000  # entries of the journal that one request looks at
SILENT = frozenset({"carried"})  # facts without a sentence, of which one entry may have very many: they are not even decoded


class EventReader:
    """Answers one request about the jobs that it names."""

    def __init__(self, reader: Reader, named: EntryFilter) -> None:
        self._reader = reader
        self._named = named
        self._chapters = reader.chapters()
        self._clusters: dict[int, Cluster] = {}

    def after(self, number: int, limit: int) -> EventPage:
        """Events after that number. An entry is told as a whole or not at all, so there may be more than `limit`.

        `next` is beyond all entries that were looked at, told or not: a client that asks again from there misses nothing.
        """
        last = self._reader.last()  # before reading: what is committed meanwhile must not be skipped
        found: list[EventRow] = []
        for _ in range(MOST_ENTRIES // PART):
            entries = self._reader.entries(self._named, number, PART)
            for each in entries:
                number = each.number
                found += self._sentences(each)
                if len(found) >= limit:
                    return EventPage(events=tuple(found), next=number)
            if len(entries) < PART:
                return EventPage(events=tuple(found), next=max(number, last))
        return EventPage(events=tuple(found), next=number)

    def latest(self, most: int) -> EventPage:
        """The last `most` events, as far as they are within the last entries."""
        last = before = self._reader.last()
        found: list[EventRow] = []
        for _ in range(MOST_ENTRIES // PART):
            entries = self._reader.entries(self._named, before, PART, back=True)
            for each in entries:
                found = [*self._sentences(each), *found]
                if len(found) >= most:
                    return EventPage(events=tuple(found[-most:]), next=last)
            if len(entries) < PART:
                break
            before = entries[-1].number - 1
        return EventPage(events=tuple(found), next=last)

    def _sentences(self, written: StoredEntry) -> list[EventRow]:
        """The sentences of one entry that are about the jobs asked for."""
        job, tenant = self._named
        try:
            entry = read_entry(written.document, but=SILENT)
        except JournalError:
            text = f"entry {written.number:,} of the journal is damaged: what happened then cannot be told"
            damaged = _EntryText(written.number, 0.0, {}).row("damaged", Actor.SERVICE, None, text)
            return [damaged] if job is tenant is None else []
        try:
            notes = {int(key): note for key, note in json.loads(written.notes or "{}").items()}
        except (AttributeError, ValueError):  # damaged: sentences go without
            notes = {}
        first = self._chapters[bisect_right(self._chapters, written.number) - 1]
        if first not in self._clusters:
            self._clusters[first] = read_header(self._reader.header_at(first)).cluster
        about_jobs = (notes.get(key, {}) for key in (DEFERRED, ACCEPTED, INTERRUPTED))
        jobs = [job for each in about_jobs for job in each]  # that the entry is about
        for each in (*entry.events, *entry.actions):
            about = None if isinstance(each, Carried) else getattr(each, "job", None)
            if about is not None:
                jobs.append(about.id if isinstance(about, Job) else about)
        tenants = self._reader.tenants_of(jobs)
        rows = _EntryText(written.number, entry.now, tenants).rows(entry, notes, self._clusters[first])
        return [each for each in rows if job in (None, each.job) and tenant in (None, each.tenant)]


@dataclass(frozen=True, slots=True)
class _EntryText:
    """Tells one entry of the journal. `tenants`: by job, whose it is."""

    number: int
    time: float
    tenants: Mapping[str, str]

    def row(
        self, kind: str, actor: str, job: str | None, text: str, tenant: str | None = None, node: str | None = None
    ) -> EventRow:
        tenant = tenant if job is None else self.tenants.get(job)
        return EventRow(
            number=self.number, time=self.time, actor=actor, kind=kind, job=job, tenant=tenant, text=text, node=node
        )

    def rows(self, entry: JournalEntry, notes: Mapping[int, Any], cluster: Cluster) -> Iterator[EventRow]:
        """What happened, in order: changes for all jobs, nodes, facts, deferred holds, decisions."""
        whole = notes.get(WHOLE, {})
        for job, text in whole.get(ASIDE, {}).items():
            yield self.row("set-aside", Actor.SERVICE, job, text)
        if "tenant" in whole:
            text = f"weighs {whole['weight']:g} from now on; before: {whole['before']:g}"
            yield self.row("weight-changed", whole["by"], None, text, whole["tenant"])
        elif "policy" in whole:
            text = f"policy {whole['policy']} from now on; before: {whole['before']}"
            yield self.row("policy-changed", whole["by"], None, text)
        yield from self._nodes(notes)
        given_up = {action.job for action in entry.actions if isinstance(action, Reject | Abandon | Cancel)}
        for position, event in enumerate(entry.events):
            if (fact := self._fact(event, notes.get(position, {}), given_up)) is not None:
                yield fact
        for job, (by, is_held) in notes.get(DEFERRED, {}).items():
            later = "to be put on hold once it can save its work, or has ended; until then it goes on"
            text = later if is_held else "released before it was held"
            yield self.row("held" if is_held else "released", by, job, text)
        for action in entry.actions:
            if (decision := self._decision(action, cluster, notes.get(STOPS, {}))) is not None:
                yield decision

    def _nodes(self, notes: Mapping[int, Any]) -> Iterator[EventRow]:
        """What happened to nodes, to runs on nodes that were lost, and to jobs before there was any node."""
        for happened in notes.get(NODES, ()):
            note = NodeNote(*happened)
            yield self.row(note.kind, note.by, None, f"node {note.node}: {note.text}", node=note.node)
        for job, text in notes.get(INTERRUPTED, {}).items():
            yield self.row("interrupted", Actor.SERVICE, job, text)
        for job, by in notes.get(ACCEPTED, {}).items():
            yield self.row("submitted", by, job, "submitted, before there was any node")

    def _fact(self, event: Event, note: Mapping[str, object], given_up: Set[str]) -> EventRow | None:
        """`given_up`: jobs that end in the same instant, and so have no next run."""
        by, how = str(note.get("by", "its owner")), f" ({note['exit']})" if note.get("exit") else ""
        # Where the next run begins, in the job's own steps; a command that reported none is just started again.
        steps = note.get("steps")
        goes_on = f"; the next one {'starts its command again' if steps is None else f'goes on from step {steps:,.10g}'}"
        match event:
            case Submitted():
                return self.row("submitted", by, event.job.id, f"submitted, for {counted(event.job.gpus, 'GPU')}")
            case Cancelled() if ASIDE not in note:
                cause = f": {note[CONDITION]}" if CONDITION in note else ""
                return self.row("cancelled", by, event.job, f"cancelled{cause}")
            case Held():
                text = str(note.get(CONDITION, "put on hold"))
                return self.row("waits" if CONDITION in note else "held", by, event.job, text)
            case Released():
                text = f"may start: {note[CONDITION]}" if CONDITION in note else "released"
                return self.row("may-start" if CONDITION in note else "released", by, event.job, text)
            case Finished():
                return self.row("finished", Actor.JOB, event.job, f"run {event.epoch} finished: all work is done")
            case Failed():
                how = "" if event.cause.startswith("exit code") else how
                goes_on = "" if event.final or event.job in given_up else goes_on
                return self.row("failed", Actor.JOB, event.job, f"run {event.epoch} failed: {event.cause}{how}{goes_on}")
            case Stopped():
                cause = f": {note['cause']}{how}" if note.get("cause") else ""
                return self.row("stopped", Actor.JOB, event.job, f"run {event.epoch} has left{cause}{goes_on}")
            case _:
                return None

    def _decision(self, action: Action, cluster: Cluster, leaves: Mapping[str, str]) -> EventRow | None:
        match action:
            case Launch():
                where = ", ".join(f"{node} {list(slots)}" for node, slots in slots_by_node(cluster, action.gpus).items())
                return self.row("launched", Actor.POLICY, action.job, f"run {action.epoch} is launched on {where}")
            case Preempt():
                text = leaves.get(action.job, f"preempted ({action.why})")
                return self.row("preempted", Actor.POLICY, action.job, text)
            case Reject() | Abandon() | Cancel():
                return self.row("given-up", Actor.POLICY, action.job, action.reason)
            case Remark():
                return self.row("remark", Actor.POLICY, None, action.text)
            case _:
                return None
