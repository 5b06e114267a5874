"""How a situation comes to be: read back from the store, or carried over into a new chapter of the journal."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from poise.engine.journal import Header, read_entry, read_header
from poise.engine.loop import replay
from poise.scheduler.model.action import JournalEntry, PreemptionCause, WakeAt
from poise.scheduler.model.errors import JournalError
from poise.scheduler.model.event import Belated, Cancelled, Carried, Submitted, Woke
from poise.service.backends.api import DesiredState, RunNotice
from poise.service.server.commands import WHOLE, SetPolicy, SetWeight, policy_note, weight_note
from poise.service.server.dependencies import Dependencies
from poise.service.server.quotas import HOUR, SLOT, Sent, slot_of
from poise.service.server.service_state import BatchFacts, CommittedReply, ServiceState, TenantTotals
from poise.service.server.storage.damaged_jobs import DamagedJobs, DamagedRowError
from poise.service.server.storage.damaged_jobs import read as read_row
from poise.service.server.storage.store import ASIDE, Changes, Store
from poise.service.wire.views import Actor

_NOBODY_LOOKS = nullcontext()
GONE_GPUS = "its GPUs are not part of the cluster any more"
"""Why a run has to leave."""


def _none_before(_job: str) -> int:
    return 0


def opened(parts: Dependencies, now: float) -> tuple[ServiceState, CommittedReply | None]:
    """The situation as the store has it; the first one, with what comes of it, if it has none."""
    store = parts.store
    if store.is_to_be_restored:
        return restored(parts, now)
    last = store.chapter()
    if last is None:
        situation = ServiceState(parts.header, parts.scheduler_of(parts.header), parts.intake_of(parts.header))
        return situation, situation.ask(now, BatchFacts())
    situation = _recorded(parts, read_header(last[0]), now)
    replay(situation.scheduler, _watched(situation, map(read_entry, store.entries(last[2]))))
    situation.stranded = {name: _why_stranded(situation, name) for name in _unknown(situation)}
    return situation, None


def is_as_asked(parts: Dependencies) -> bool:
    """The service was started in the same way last time. Who names no policy wants the one that is in force.

    So what was changed while it ran holds until it is started in another way.
    """
    last = parts.store.chapter()
    asked = parts.header if last is None else read_header(last[1])
    return parts.header == (replace(asked, policy=parts.header.policy) if parts.keeps_policy else asked)


def restored(parts: Dependencies, now: float) -> tuple[ServiceState, CommittedReply]:
    """The situation as the records have it, in a new chapter: for a journal that this core would not have written.

    A Poise that decides in another way than the one before it finds such a journal; so does one whose journal was damaged.
    What only the core knew is lost: how far jobs have come that do not report it. After a repair there may be later runs of
    a job than its record knows of: its next one comes after all of them.
    """
    store = parts.store
    last = store.chapter()
    if last is None and not store.is_to_be_restored:
        raise JournalError("there is nothing to begin with")
    situation = _recorded(parts, parts.header if last is None else read_header(last[0]), now)
    header = situation.header if is_as_asked(parts) else parts.header
    epochs = parts.epoch_of if store.is_to_be_restored else _none_before
    return _carried_over(parts, situation, header, now, epochs=epochs)


def _unknown(situation: ServiceState) -> list[str]:
    """Jobs that have not ended and that the core was not told of."""
    rows, records = situation.scheduler.state.rows, situation.records
    return [name for name, record in records.items() if record.finished is None and name not in rows]


def _why_stranded(situation: ServiceState, name: str) -> str:
    return situation.intake.stranded(situation.records[name].job) or "cannot run as asked"


def _recorded(parts: Dependencies, header: Header, now: float) -> ServiceState:
    """All that the store knows but the core's state."""
    store = parts.store
    situation = ServiceState(header, parts.scheduler_of(header), parts.intake_of(header))
    for row in store.unended():
        try:
            situation.records[row.id] = read_row(row)
        except DamagedRowError as error:
            situation.damaged.append((row, str(error)))
    situation.books = {name: TenantTotals(*books) for name, books in store.tenants().items()}
    situation.ended = Counter(store.ended())
    held = (record for record in situation.records.values() if record.current is not None)
    situation.running = {record.job.id: None for record in sorted(held, key=lambda record: record.since)}
    for record in situation.records.values():
        situation.watch(record)
    situation.count(situation.records)
    _recall(situation, store, now)
    return situation


def _recall(situation: ServiceState, store: Store, now: float) -> None:
    """Who has queued how much, and has sent how much within the last hour."""
    since = now - HOUR - SLOT
    sent = [*store.sent_since(since)]
    for record in situation.records.values():
        situation.usage.enter(record)
        if record.by is not None and record.job.submitted >= since:
            sent.append(Sent(record.job.tenant, record.by, slot_of(record.job.submitted), 1, record.size))
    situation.usage.recall(sent)


def _watched(situation: ServiceState, entries: Iterable[JournalEntry]) -> Iterable[JournalEntry]:
    """Entries on their way to the core: what kinds of jobs it has been told of, and when it wants to be woken."""
    for entry in entries:
        for event in entry.events:
            if isinstance(event, Submitted | Carried):
                situation.intake.told(event.job, event.kind)
            elif isinstance(event, Woke):
                situation.wake = None
        for action in entry.actions:
            if isinstance(action, WakeAt):
                situation.wake = action.time
        if any(isinstance(event, Belated) for event in entry.events):
            situation.wake = entry.now  # nothing was decided then
        yield entry


def renewed(
    parts: Dependencies,
    before: ServiceState,
    header: Header,
    now: float,
    wish: SetWeight | SetPolicy | None,
    lock: AbstractContextManager[object],
) -> tuple[ServiceState, CommittedReply]:
    """A new chapter, as a header has it, but under the policy or with the tenant's weight that somebody wishes for.

    Raises RequestError for a policy that is none.

    lock   held while the records change; until then others may look at the situation as it was before
    """
    if isinstance(wish, SetPolicy):
        header = replace(header, policy=wish.policy)
    with lock:
        weight = before.weight_of(wish.tenant) if isinstance(wish, SetWeight) else 1.0
        reweighed = before.reweigh(wish.tenant, wish.weight) if isinstance(wish, SetWeight) else {}
    situation, answer = _carried_over(parts, before, header, now, lock)
    answer.facts.reweighed = reweighed
    if isinstance(wish, SetWeight):
        answer.tenants.add(wish.tenant)
        answer.facts.notes[WHOLE] = weight_note(wish, weight)
    elif wish is not None:
        answer.facts.notes[WHOLE] = policy_note(wish.by.name, before.header.policy, header.policy)
    return situation, answer


def _carried_over(
    parts: Dependencies,
    before: ServiceState,
    header: Header,
    now: float,
    lock: AbstractContextManager[object] = _NOBODY_LOOKS,
    epochs: Callable[[str], int] = _none_before,
) -> tuple[ServiceState, CommittedReply]:
    """Everybody stands where they stood. A run on GPUs that are not there any more has to leave.

    A job that cannot run on such a cluster at all is not put to the core: it waits for another cluster, or for its owner.

    epochs   by job, of a run that there was, whatever its record says
    """
    situation = ServiceState(header, parts.scheduler_of(header), parts.intake_of(header))
    situation.records, situation.books = before.records, before.books
    situation.running, situation.closing, situation.damaged = before.running, before.closing, before.damaged
    situation.ended, situation.tally, situation.usage = before.ended, before.tally, before.usage
    facts, leaves = BatchFacts(), []
    carried: list[Carried] = []
    for record in situation.records.values():
        if record.finished is not None:
            continue
        run, stranded, latest = record.current, situation.intake.stranded(record.job), epochs(record.job.id)
        is_outlived = run is not None and latest > run.epoch
        if run is not None and (stranded or is_outlived or not situation.holding(run)):
            text = "the journal has lost what came after it" if is_outlived else GONE_GPUS
            notice = RunNotice(PreemptionCause.UNPLANNED.value, text, record.deadline)
            run.grip, run.cause = DesiredState.LEAVE, notice.text
            leaves.append((record.job.id, run.epoch, notice))
            situation.withdraw(record, now, facts)
        if stranded:
            situation.stranded[record.job.id] = stranded
            continue
        told, fact = situation.carried(record, record.job, before.scheduler)
        facts.events += told
        carried.append(replace(fact, epoch=max(fact.epoch, latest)))
    facts.events += carried
    if header.policy != before.header.policy:
        facts.notes[WHOLE] = policy_note(Actor.SERVICE, before.header.policy, header.policy)
    answer = situation.begin(now, facts, lock)
    answer.orders.leaves += leaves
    return situation, answer


def told_aside(situation: ServiceState, asides: list[DamagedJobs], now: float) -> tuple[CommittedReply, Changes]:
    """Tell the core that these jobs are not there any more, and keep them as what they are now. Nothing is decided yet."""
    facts = BatchFacts()
    facts.add(Belated())
    for each in asides:
        name = each.row.id
        situation.records[name] = each.record
        situation.usage.enter(each.record)  # it leaves when this is kept, as all that ends does
        facts.add(Cancelled(name), **{ASIDE: True})
        facts.touched.add(name)
        facts.reweighed[name] = each.row.job
    facts.notes[WHOLE] = {"by": Actor.SERVICE.value, ASIDE: {each.row.id: each.record.cause for each in asides}}
    answer = situation.ask(now, facts)
    changes = situation.changes(answer)
    changes.aside = [each.row for each in asides]
    return answer, changes
