"""How a situation comes to be: read back from the store, or carried over into a new chapter of the journal."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from poise.core.scheduler import Scheduler
from poise.engine.journal import Header, read_entry, read_header, read_job
from poise.engine.live import Grip
from poise.engine.replay import replay
from poise.model.action import WakeAt
from poise.model.event import Carried, Estimated, Woke
from poise.model.journal import Entry
from poise.server.intake import Intake
from poise.server.records import Record
from poise.server.situation import Books, Orders, Situation
from poise.server.store import Changes, Store
from poise.server.wishes import Adopt, Weigh


class Makers(Protocol):
    """What situations are made with."""

    @property
    def store(self) -> Store:
        """The journal."""

    @property
    def header(self) -> Header:
        """Cluster, policy and settings as they are wanted."""

    @property
    def scheduler_of(self) -> Callable[[Header], Scheduler]:
        """A fresh core."""

    @property
    def intake_of(self) -> Callable[[Header], Intake]:
        """What is believed of new jobs."""


def opened(makers: Makers, now: float) -> tuple[Situation, Changes | None, Orders]:
    """The situation as the store has it. If the service was started with something else last time, a new chapter is begun.

    So what was changed while it ran holds until it is started in another way.
    """
    store = makers.store
    last = store.chapter()
    if last is None:
        situation = Situation(makers.header, makers.scheduler_of(makers.header), makers.intake_of(makers.header))
        changes, orders = situation.begin(now, carried=(), estimates=(), asked=makers.header)
        return situation, changes, orders
    header = read_header(last[0])
    situation = Situation(header, makers.scheduler_of(header), makers.intake_of(header))
    replay(situation.scheduler, _watched(situation, map(read_entry, store.entries(last[2]))))
    situation.records = {row.id: Record.read(read_job(row.job), row.record) for row in store.unended()}
    situation.books = {name: Books(*books) for name, books in store.tenants().items()}
    situation.ended = Counter(store.ended())
    held = (record for record in situation.records.values() if record.current is not None)
    situation.running = {record.job.id: None for record in sorted(held, key=lambda record: record.since)}
    for record in situation.records.values():
        situation.watch(record)
    if read_header(last[1]) == makers.header:
        return situation, None, Orders()
    return _carried_over(makers, situation, makers.header, now)


def _watched(situation: Situation, entries: Iterable[Entry]) -> Iterable[Entry]:
    """Entries on their way to the core: what kinds of jobs it has been told of, and when it wants to be woken."""
    for entry in entries:
        for event in entry.events:
            if isinstance(event, Estimated):
                situation.intake.told(event.kind)
            elif isinstance(event, Woke):
                situation.wake = None
        for action in entry.actions:
            if isinstance(action, WakeAt):
                situation.wake = action.time
        yield entry


def renewed(makers: Makers, before: Situation, now: float, wish: Weigh | Adopt | None) -> tuple[Situation, Changes, Orders]:
    """A new chapter, under another policy or with another weight of a tenant; raises RequestError for what is none."""
    header = replace(before.header, policy=wish.policy) if isinstance(wish, Adopt) else before.header
    if isinstance(wish, Weigh):
        before.reweigh(wish.tenant, wish.weight)
    situation, changes, orders = _carried_over(makers, before, header, now)
    if isinstance(wish, Weigh):
        books = situation.books[wish.tenant]
        changes.tenants[wish.tenant] = (books.weight, books.gpu_seconds, books.preemptions)
    return situation, changes, orders


def _carried_over(makers: Makers, before: Situation, header: Header, now: float) -> tuple[Situation, Changes, Orders]:
    """Everybody stands where they stood. A run on GPUs that are not there any more has to leave."""
    situation = Situation(header, makers.scheduler_of(header), makers.intake_of(header))
    situation.records, situation.books = before.records, before.books
    situation.running, situation.closing, situation.ended = before.running, before.closing, before.ended
    estimates: list[Estimated] = []
    carried: list[Carried] = []
    for record in situation.records.values():
        if record.finished is not None:
            continue
        run = record.current
        if run is not None and not situation.holding(run):
            run.grip, run.cause = Grip.LEAVE, "its GPUs are not part of the cluster any more"
            situation.withdraw(record, now)
        told, fact = situation.carried(record, record.job, before.scheduler)
        estimates += told
        carried.append(fact)
    changes, orders = situation.begin(now, carried=carried, estimates=estimates, asked=makers.header)
    return situation, changes, orders
