"""Recovery: how a state comes to be, from what the store has or from the state before it.

`recover`     at every start, and after a commit that failed: read the records and replay the last chapter into a fresh core;
              where that is not possible, begin a new chapter from the records alone
`renewed`     while the service runs: another policy, other weights, a chapter that has become long, or nodes that joined
`set_aside`   after a start: go on without jobs whose rows were damaged

A new chapter begins with a `Carried` fact per job: what it has received and where it runs (docs/design/0009-live.md). Facts
about nodes that are lost, drained or used by others follow. All of them return the new state with the outcome of its first
batch, which the engine commits before it does anything else.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from poise.engine.journal import Header, header_line, job_line, read_entry, read_header
from poise.engine.loop import collector_paused, replay
from poise.scheduler.model.action import JournalEntry, PreemptionCause, WakeAt
from poise.scheduler.model.errors import ReplayError
from poise.scheduler.model.event import Belated, Cancelled, Carried, Colocated, Estimated, Submitted, Woke
from poise.scheduler.model.units import counted
from poise.scheduler.policies.catalogue import is_known
from poise.service.backends.api import DesiredState, NodeReport, RunNotice
from poise.service.server.batch import ends_of
from poise.service.server.dependencies import Dependencies, live_cluster
from poise.service.server.node_records import NodeRecord, joined, node_facts
from poise.service.server.quotas import HOUR, SLOT, Sent, slot_of
from poise.service.server.records import JobRecord
from poise.service.server.service_api import SetPolicy, SetWeight
from poise.service.server.service_state import WHOLE, Batch, Outcome, ServiceState, TenantTotals
from poise.service.server.storage.damaged_jobs import DamagedRowError, read_record, request_of
from poise.service.server.storage.damaged_jobs import set_aside as failed_job
from poise.service.server.storage.store import ASIDE, DamageError
from poise.service.wire.request import JobRequest
from poise.service.wire.views import Actor

GONE_GPUS = "its GPUs are not part of the cluster any more"
_CONDITIONS = ('"after":', '"begin":', '"array_cap":')  # fields of a request that say when its job may start
LOST_END = "the journal has lost what came after it"
_Lock = AbstractContextManager[object]
_NO_LOCK = nullcontext()


def recover(deps: Dependencies, now: float) -> tuple[ServiceState, Outcome | None]:
    """The state as the store has it, with the outcome of the first batch if a chapter has to begin."""
    with deps.store.reporting_damage(), collector_paused():
        try:
            return _restored(deps, now) if deps.store.is_repaired else _replayed(deps, now)
        except (ReplayError, DamageError) as error:
            what = "replay-differs" if isinstance(error, ReplayError) else "journal-damaged"
            deps.log.error(what, problem=str(error))  # noqa: TRY400
            return _restored(deps, now)


def _replayed(deps: Dependencies, now: float) -> tuple[ServiceState, Outcome | None]:
    """The state as the journal has it; raises ReplayError if this core would not have written that."""
    last = deps.store.chapter()
    if last is None:
        state = ServiceState(deps.header, deps.new_scheduler(deps.header), deps.new_admission(deps.header))
        return state, state.apply(Batch(now, chapter=(header_line(deps.header), header_line(deps.header))))
    header = read_header(last[0])
    if not is_known(header.policy):
        raise ReplayError(f"its policy {header.policy!r} is not there any more")
    state = _from_records(deps, header, now)
    replay(state.scheduler, _observed(state, map(read_entry, deps.store.entries(last[2]))))
    core = state.scheduler.state
    for name, record in state.records.items():
        if record.finished is None and name not in core.rows:
            state.stranded[name] = state.admission.why_stranded(record.job) or "cannot run as asked"
        elif name in state.conditions and not record.held and core.rows[name] not in core.on_hold:
            state.conditions.note_open(name)
    return state, None


def _restored(deps: Dependencies, now: float) -> tuple[ServiceState, Outcome]:
    """The state as the records have it, in a new chapter: for a journal that this core would not have written.

    That happens after an upgrade to a Poise that decides differently, and after damage. What only the core knew is lost: the
    progress of jobs that do not report it. After a repair there may be later runs of a job than its record knows of: its
    next run comes after all of them.
    """
    last = deps.store.chapter()
    before = deps.header if last is None else read_header(last[0])
    state = _from_records(deps, before if is_known(before.policy) else replace(before, policy=deps.header.policy), now)
    header = state.header if is_started_as_before(deps) else wanted_header(deps, state.header)
    return _carry_over(deps, state, header, Batch(now))


def is_started_as_before(deps: Dependencies) -> bool:
    """The service was started with the same options as last time: what was changed while it ran then still holds.

    Without a policy or a cluster among the options, the one in force is wanted.
    """
    last = deps.store.chapter()
    asked = deps.header if last is None else read_header(last[1])
    return deps.header == wanted_header(deps, deps.header, asked)


def wanted_header(deps: Dependencies, in_force: Header, asked: Header | None = None) -> Header:
    """The header that options ask for, with what they leave open as it is in force.

    asked   None: the options of this start
    """
    asked = deps.header if asked is None else asked
    if deps.keeps_policy:
        asked = replace(asked, policy=in_force.policy)
    return replace(asked, cluster=in_force.cluster) if deps.keeps_cluster else asked


def renewed(
    deps: Dependencies,
    before: ServiceState,
    header: Header,
    now: float,
    command: SetWeight | SetPolicy | None,
    lock: _Lock,
    joining: Mapping[str, NodeReport] | None = None,
) -> tuple[ServiceState, Outcome]:
    """A new chapter with this header, and with the policy or the tenant's weight that a command sets.

    Raises RequestError for an unknown policy, and if no core can be made for the cluster with these nodes.

    lock      held while the records change; until then readers see the state before
    joining   nodes that are new, or not as they were, by name
    """
    batch = Batch(now)
    if joining:
        header = replace(header, cluster=live_cluster(joined(header.cluster, (each.node for each in joining.values()))))
        deps.new_scheduler(header)  # before any record changes: options may not fit such a cluster
        with lock:
            _take_in(before, joining, batch)
    if isinstance(command, SetPolicy):
        header = replace(header, policy=command.policy)
        batch.notes[WHOLE] = {"by": command.by.name, "policy": header.policy, "before": before.header.policy}
    elif isinstance(command, SetWeight):
        with lock:
            set_weight(before, command, batch)
    return _carry_over(deps, before, header, batch, lock)


def _take_in(state: ServiceState, joining: Mapping[str, NodeReport], batch: Batch) -> None:
    """Note what nodes are like that the next chapter begins with."""
    for name, news in joining.items():
        node, record = news.node, state.nodes.setdefault(name, NodeRecord(name))
        was_lost = record.is_lost
        record.report(news, batch.now)
        gpus = f"{counted(node.gpus, 'GPU')} of type {node.gpu_type}, in {node.rack}"
        if name not in state.places:
            batch.note_node("node-joined", name, Actor.SERVICE.value, f"has joined, with {gpus}: {news.evidence}")
        else:
            back = "is back, and " if was_lost else ""
            batch.note_node("node-changed", name, Actor.SERVICE.value, f"{back}has {gpus} now: {news.evidence}")


def set_weight(state: ServiceState, command: SetWeight, batch: Batch) -> None:
    """Change the weight of a tenant and of all its jobs. The core learns of it in the next chapter."""
    tenant, weight = command.tenant, command.weight
    batch.notes[WHOLE] = {"by": command.by.name, "tenant": tenant, "weight": weight, "before": state.weight_of(tenant)}
    batch.charged.add(tenant)
    state.totals_of(tenant).weight = weight
    for record in state.records.values():
        if record.job.tenant == tenant:
            record.job = replace(record.job, weight=record.weight * weight, tenant_weight=weight)
            batch.reweighed[record.job.id] = job_line(record.job)


def set_aside(state: ServiceState, now: float) -> Outcome:
    """Tell the core that the damaged jobs are gone, and keep them as failed. Nothing is decided before the next wake-up.

    What is left of their runs is ended by the back end, like any run that was not ordered.
    """
    batch = Batch(now)
    batch.add(Belated())
    causes: dict[str, str | None] = {}
    for row, problem in state.damaged:
        damaged = failed_job(row, problem, now)
        state.records[row.id] = damaged.record
        state.usage.enter(damaged.record)  # it leaves when this is committed, as every job that ends does
        batch.add(Cancelled(row.id), **{ASIDE: True})
        batch.touched.add(row.id)
        batch.reweighed[row.id] = damaged.row.job
        batch.aside.append(damaged.row)
        state.conditions.note_end(row.id, damaged.record.state)
        state.conditions.note_gone(row.id)
        causes[row.id] = damaged.record.cause
    batch.notes[WHOLE] = {"by": Actor.SERVICE.value, ASIDE: causes}
    state.damaged = []
    outcome = state.apply(batch)
    state.wake = now
    return outcome


def _from_records(deps: Dependencies, header: Header, now: float) -> ServiceState:
    """All that the store knows except the core's own state."""
    store = deps.store
    state = ServiceState(header, deps.new_scheduler(header), deps.new_admission(header))
    conditional: list[tuple[JobRecord, JobRequest]] = []
    for row in store.unended():
        try:
            record = state.records[row.id] = read_record(row)
            if any(name in row.request for name in _CONDITIONS):  # few have any; the others are not parsed
                conditional.append((record, request_of(row.request)))
        except DamagedRowError as error:
            state.damaged.append((row, str(error)))
    for record, request in conditional:  # once all are known: they wait for one another
        state.conditions.recall(record, request, lambda jobs: ends_of(state, store, jobs))
    state.totals = {name: TenantTotals(*totals) for name, totals in store.tenants().items()}
    state.ended = Counter(store.ended())
    state.nodes = {name: NodeRecord.read(text) for name, text in store.nodes().items()}
    holders = (record for record in state.records.values() if record.current is not None)
    state.running = {record.job.id: None for record in sorted(holders, key=lambda record: record.since)}
    # Quotas: what is queued, and what was sent within the last hour, also by jobs that have ended since.
    since = now - HOUR - SLOT
    sent = [*store.sent_since(since)]
    for record in state.records.values():
        state.note_stopping(record)
        state.usage.enter(record)
        if record.by is not None and record.job.submitted >= since:
            sent.append(Sent(record.job.tenant, record.by, slot_of(record.job.submitted), 1, record.size))
    state.count(state.records)
    state.usage.recall(sent)
    return state


def _observed(state: ServiceState, entries: Iterable[JournalEntry]) -> Iterator[JournalEntry]:
    """Pass entries on to the replay; note which kinds of jobs the core knows, and when it asked to be woken."""
    for entry in entries:
        for event in entry.events:
            if isinstance(event, Submitted | Carried):
                state.admission.mark_known(event.job, event.kind)
            elif isinstance(event, Woke):
                state.wake = None
        for action in entry.actions:
            if isinstance(action, WakeAt):
                state.wake = action.time
        if any(isinstance(event, Belated) for event in entry.events):
            state.wake = entry.now  # nothing was decided then
        yield entry


def _carry_over(
    deps: Dependencies, before: ServiceState, header: Header, batch: Batch, lock: _Lock = _NO_LOCK
) -> tuple[ServiceState, Outcome]:
    """Begin a chapter in which every job stands where it stood. A run on GPUs that are gone has to leave.

    A job that cannot run on the cluster at all is kept from the core: it waits for another cluster, or for its owner. After
    a repair, the latest run of a job is the one of which there is any trace, whatever its record says.
    """
    is_repaired = deps.store.is_repaired
    state = ServiceState(header, deps.new_scheduler(header), deps.new_admission(header))
    state.continue_from(before)
    batch.chapter = header_line(header), header_line(deps.header)
    stops = []
    carried: list[Carried] = []
    for record in state.records.values():
        if record.finished is not None:
            continue
        job, run = record.job.id, record.current
        stranded, latest = state.admission.why_stranded(record.job), deps.latest_epoch(job) if is_repaired else 0
        is_outlived = run is not None and latest > run.epoch
        if run is not None and (stranded or is_outlived or not state.holding(run)):
            text = LOST_END if is_outlived else GONE_GPUS
            notice = RunNotice(PreemptionCause.UNPLANNED.value, text, record.deadline)
            run.grip, run.cause = DesiredState.LEAVE, text
            stops.append((job, run.epoch, notice))
            state.release(record, batch.now, batch.charged)
            batch.touched.add(job)
        if stranded:
            state.stranded[job] = stranded
            continue
        estimates, fact = _carried(state, record, before)
        batch.events += estimates
        carried.append(replace(fact, epoch=max(fact.epoch, latest)))
    batch.events += carried
    batch.events += node_facts(state.nodes, header.cluster)
    if header.policy != before.header.policy:
        note = {"by": Actor.SERVICE, "policy": header.policy, "before": before.header.policy}
        batch.notes.setdefault(WHOLE, note)
    outcome = state.apply(batch, lock)
    outcome.stops += stops
    return state, outcome


def _carried(state: ServiceState, record: JobRecord, before: ServiceState) -> tuple[list[Estimated | Colocated], Carried]:
    """A job as it stands, for a new core, with what the core before knew of it."""
    job, run, core = record.job, record.current, before.scheduler.state
    kind, estimate, steps = state.admission.resolve(job)
    epoch = record.runs[-1].epoch if record.runs else 0
    done, failures, until = 0.0, record.failures, None
    if (row := core.rows.get(job.id)) is not None:
        done, failures = core.columns.done_before(row), core.columns.failures[row]
        until = before.scheduler.backs_off_until(job.id)
        epoch = max(epoch, core.columns.epoch[row])
    gpus = () if run is None else state.holding(run)
    since, attached = (record.since, None) if run is None else (run.started, run.attached)
    is_held = record.held or state.conditions.is_barred(job.id)
    fact = Carried(job, kind, steps, epoch, done, record.ran, failures, since, gpus, is_held, attached, until)
    return state.admission.estimates(job, kind, estimate), fact
