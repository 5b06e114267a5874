"""The live state: the core, the records of jobs that have not ended, and the books of tenants; always one of the other.

`ServiceState` takes the facts of an instant, asks the core, carries facts and wishes into the records, and says what is
to be
committed and what the back end is then to be told. It does no input or output.
"""

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from poise.engine.journal import Header, entry_line, header_line, job_line
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.model.action import (
    Abandon,
    Action,
    Cancel,
    Compute,
    JournalEntry,
    Launch,
    Preempt,
    PreemptionCause,
    Reject,
    WakeAt,
)
from poise.scheduler.model.cluster import Holding, gpu_count, merged
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import (
    Cancelled,
    Carried,
    Colocated,
    Estimated,
    Event,
    Failed,
    Finished,
    Held,
    Released,
    Submitted,
)
from poise.scheduler.model.job import Job
from poise.service.backends.api import DesiredState, RunNotice, RunPart
from poise.service.server.admission import Admission
from poise.service.server.commands import AWAITED, LEAVES, WHOLE, SetWeight, weight_note
from poise.service.server.quotas import Usage
from poise.service.server.records import JobRecord, RunRecord, places, type_counts
from poise.service.server.state_counts import StateCounts
from poise.service.server.storage.store import Changes, JobRowText, told_of
from poise.service.wire.views import Flag, JobState

_FLAGS = {
    "gpu-out-of-memory": Flag.OUT_OF_MEMORY,
    "cpu-out-of-memory": Flag.OUT_OF_MEMORY,
    "node-lost": Flag.NODE_FAIL,
    "max-duration": Flag.TIMEOUT,
}
"""What a cause of failure says about a job at a glance."""

_RULES = {
    PreemptionCause.OUTRANKED: "stands before it under the policy in force",
    PreemptionCause.UNPLANNED: "is to have its turn",
    PreemptionCause.MOVED: "it goes on elsewhere",
    PreemptionCause.RESIZED: "it goes on with another number of GPUs",
    PreemptionCause.VALIDATED: "its trial is over",
    PreemptionCause.HELD: "it was put on hold",
}
JOB_ENDED = "its job has ended"
"""Why a run is to end whose job has not said why it did."""


@dataclass
class TenantTotals:
    """Of one tenant."""

    weight: float = 1.0
    gpu_seconds: float = 0.0
    preemptions: int = 0


@dataclass
class RunOrders:
    """What the back end is to be told once the commit is done."""

    launches: list[tuple[str, RunRecord]] = field(default_factory=list)
    leaves: list[tuple[str, int, RunNotice]] = field(default_factory=list)
    kills: list[tuple[str, int, str]] = field(default_factory=list)


@dataclass
class BatchFacts:
    """What is known of an instant before the core is asked. `notes`: who, and what else is known, by place of the event."""

    events: list[Event] = field(default_factory=list)
    arrivals: list[tuple[JobRecord, str]] = field(default_factory=list)
    """New records, each with its request as JSON."""
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    """Jobs whose records changed without the core's knowing."""
    charged: set[str] = field(default_factory=set)
    """Tenants whose books did."""
    keys: list[tuple[str, str, str]] = field(default_factory=list)
    reweighed: dict[str, str] = field(default_factory=dict)
    """Jobs that are not as they were submitted any more, as they are to be kept."""

    def add(self, event: Event, **note: object) -> None:
        """One more fact, with what else there is to say of it."""
        if note:
            self.notes[len(self.events)] = note
        self.events.append(event)


@dataclass(frozen=True, slots=True)
class CommittedReply:
    """What came of an instant: all that has to be kept, and what the back end is then to be told.

    actions   wishes of the core; None: it was not asked
    """

    now: float
    facts: BatchFacts
    actions: tuple[Action, ...] | None
    orders: RunOrders
    concerned: set[str]
    """Jobs that facts or wishes are about; not those that were only carried into a new chapter."""
    tenants: set[str]
    """Whose books have changed."""


class ServiceState:
    """Everything that is known. `records`: jobs that have not ended, or whose processes are not all gone."""

    def __init__(self, header: Header, scheduler: Scheduler, intake: Admission) -> None:
        self.header = header
        self.scheduler = scheduler
        self.intake = intake
        self.records: dict[str, JobRecord] = {}
        self.books: dict[str, TenantTotals] = {}
        self.running: dict[str, None] = {}
        """Jobs that hold GPUs, in the order in which they got them."""
        self.ended: Counter[str] = Counter()
        """Jobs that have ended, by their final state."""
        self.closing: dict[str, None] = {}
        """Jobs with processes on GPUs that the core has taken back."""
        self.stranded: dict[str, str] = {}
        """Jobs that cannot run on the cluster as it is, and why: the core does not know of them until it can."""
        self.damaged: list[tuple[JobRowText, str]] = []
        """Jobs that have not ended and that cannot be read, and why: they are to be set aside."""
        self.tally = StateCounts()
        self.usage = Usage()
        self.wake: float | None = None
        self._nodes = {node.name: (index, node) for index, node in enumerate(header.cluster.nodes)}

    def weight_of(self, tenant: str) -> float:
        """Of a tenant among tenants; the weights of its jobs are multiplied by it too."""
        books = self.books.get(tenant)
        return 1.0 if books is None else books.weight

    def ask(self, now: float, facts: BatchFacts) -> CommittedReply:
        """Put the facts of an instant to the core, and carry all of it into the records."""
        actions = self.scheduler.handle(now, facts.events)
        for record, _ in facts.arrivals:
            self.records[record.job.id] = record
        return self._carry(now, facts, actions)

    def _carry(self, now: float, facts: BatchFacts, actions: tuple[Action, ...]) -> CommittedReply:
        happened = (each for each in facts.events if not isinstance(each, Carried))
        concerned = {name for each in (*happened, *actions) if (name := _job_of(each)) is not None}
        answer = CommittedReply(now, facts, actions, RunOrders(), concerned, set())
        for event in facts.events:
            self._happened(event, now, answer.orders, answer.tenants)
        for action in actions:
            self._wished(action, now, answer.orders, answer.tenants)
        self.count(record.job.id for record, _ in facts.arrivals)
        self.count(concerned | facts.touched)
        return answer

    def count(self, jobs: Iterable[str]) -> None:
        """The records of these jobs may have changed."""
        for name in jobs:
            if (record := self.records.get(name)) is not None:
                self.tally.count(record)

    def changes(self, answer: CommittedReply) -> Changes:
        """What is to be committed of an instant. Changes nothing, so that others may look meanwhile."""
        facts = answer.facts
        changes = Changes(answer.now, keys=facts.keys)
        new = {record.job.id for record, _ in facts.arrivals}
        changes.jobs = [self._row(record, request) for record, request in facts.arrivals]
        if answer.actions is not None:
            changes.entry = entry_line(JournalEntry(answer.now, tuple(facts.events), answer.actions))
            told = {job: notice.text for job, _, notice in answer.orders.leaves}
            notes = facts.notes | ({LEAVES: told} if told else {})
            changes.notes = json.dumps(notes, separators=(",", ":")) if notes else None
            changes.mentions = answer.concerned | told_of(facts.notes.get(WHOLE, {})) | set(facts.notes.get(AWAITED, {}))
        self._keep(changes, (answer.concerned | facts.touched) - new)
        changes.reweighed = facts.reweighed
        changes.tenants = self._books(answer.tenants | facts.charged)
        return changes

    def note(self, now: float, facts: BatchFacts) -> CommittedReply:
        """Nothing of an instant concerns the core; but records have changed."""
        self.count(facts.touched)
        return CommittedReply(now, facts, None, RunOrders(), set(), set())

    def begin(self, now: float, facts: BatchFacts, lock: AbstractContextManager[object]) -> CommittedReply:
        """The first instant of a chapter: everybody is as they were, and the core decides from there.

        lock   held while the records change, which others may be looking at; nobody has seen this core yet
        """
        actions = self.scheduler.handle(now, facts.events)
        with lock:
            return self._carry(now, facts, actions)

    def chapter(self, answer: CommittedReply, asked: Header) -> Changes:
        """What is to be committed of the first instant of a chapter; `asked`: what the service was started with."""
        changes = self.changes(answer)
        changes.chapter = header_line(self.header), header_line(asked)
        return changes

    def carried(self, record: JobRecord, job: Job, before: Scheduler | None) -> tuple[list[Estimated | Colocated], Carried]:
        """A job as it stands, for a new core; `before` is the one that knew it until now."""
        kind, estimate, steps = self.intake.resolve(job)
        epoch = record.runs[-1].epoch if record.runs else 0
        done, failures, until = 0.0, record.failures, None
        if before is not None and (row := before.state.rows.get(job.id)) is not None:
            done, failures = before.state.columns.done_before(row), before.state.columns.failures[row]
            until = before.backs_off_until(job.id)
            epoch = max(epoch, before.state.columns.epoch[row])
        run = record.current
        gpus = self.holding(run) if run is not None else ()
        since = run.started if run is not None else record.since
        fact = Carried(job, kind, steps, epoch, done, record.ran, failures, since, gpus, record.held, _attached(run), until)
        return self.intake.news(job, kind, estimate), fact

    def holding(self, run: RunRecord) -> Holding:
        """A run's GPUs as the core names them; empty if some of them are not there (any more)."""
        nodes = self._nodes
        if any(name not in nodes or slots[-1] >= nodes[name][1].gpus for name, slots in run.gpus.items()):
            return ()
        return merged((nodes[name][0], sum(1 << slot for slot in slots)) for name, slots in run.gpus.items())

    def partner(self, job: str) -> str | None:
        """The job that shares GPUs with this one, if one does."""
        state = self.scheduler.state
        row = state.ledger.partner.get(state.rows.get(job, -1))
        return None if row is None else state.columns.ids[row]

    def parts(self, run: RunRecord) -> tuple[RunPart, ...]:
        """A run's GPUs as the back end names them."""
        there = self._nodes
        return tuple(
            RunPart(name, there[name][1].gpu_type if name in there else run.gpu_type, slots)
            for name, slots in run.gpus.items()
        )

    def _happened(self, event: Event, now: float, orders: RunOrders, tenants: set[str]) -> None:
        name = _job_of(event)
        record = self.records.get(name) if name is not None else None
        if record is None:
            return
        match event:
            case Finished():
                self._end(record, JobState.SUCCEEDED, None, now, orders, tenants)
            case Cancelled():
                self._end(record, JobState.CANCELLED, "cancelled by its owner", now, orders, tenants)
            case Failed():
                record.failures += 1
                self._release(record, now, tenants)
            case Held() | Released():
                record.held = isinstance(event, Held)
            case Submitted():
                tenants.add(record.job.tenant)
            case _:
                pass

    def _wished(self, action: Action, now: float, orders: RunOrders, tenants: set[str]) -> None:
        match action:
            case Launch():
                self._launch(action, now, orders)
            case Preempt():
                self._preempt(action, now, orders, tenants)
            case Reject() | Abandon():
                self._end(self.records[action.job], JobState.FAILED, action.reason, now, orders, tenants)
            case Cancel():
                self._end(self.records[action.job], JobState.CANCELLED, action.reason, now, orders, tenants)
            case WakeAt():
                self.wake = action.time
            case Compute():
                raise InvariantError("the policy gives out single tasks, which real processes cannot be started for")
            case _:
                pass

    def _launch(self, action: Launch, now: float, orders: RunOrders) -> None:
        record = self.records[action.job]
        where = places(self.header.cluster, action.gpus)
        by_type = type_counts(self.header.cluster, action.gpus)
        run = RunRecord(action.epoch, now, where, gpu_count(action.gpus), by_type, record.checkpoint or 0.0)
        record.launch(run, now)
        self.running[action.job] = None
        orders.launches.append((action.job, run))

    def _preempt(self, action: Preempt, now: float, orders: RunOrders, tenants: set[str]) -> None:
        record = self.records[action.job]
        run = record.run(action.epoch)
        if run is None:
            raise InvariantError(f"job {action.job!r} is to leave run {action.epoch}, which is not known")
        notice = RunNotice(action.why.value, self._says_why(action), record.deadline)
        run.grip, run.cause = DesiredState.LEAVE, notice.text
        if action.why is not PreemptionCause.HELD:
            record.preemptions += 1
            self._account(record.job.tenant).preemptions += 1
        self._release(record, now, tenants)
        orders.leaves.append((action.job, action.epoch, notice))

    def _says_why(self, action: Preempt) -> str:
        """The same text for the worker, the owner, the log and the API."""
        rule = _RULES[action.why]
        if action.beneficiary is not None:
            other = self.records[action.beneficiary]
            rule = f"job {action.beneficiary} ({other.name}, tenant {other.job.tenant}) {rule}; it comes back by itself"
        elif action.why is PreemptionCause.OUTRANKED:  # of two that share GPUs, one may have to leave for another partner
            rule = f"another job {rule}; it comes back by itself"
        elif action.why is PreemptionCause.UNPLANNED:
            rule = "it is not its turn"
        return f"preempted ({action.why}): {rule}"

    def _end(
        self, record: JobRecord, state: JobState, cause: str | None, now: float, orders: RunOrders, tenants: set[str]
    ) -> None:
        if record.finished is not None:
            return
        self._release(record, now, tenants)
        self.stranded.pop(record.job.id, None)
        record.end(state, now, cause)
        last = record.runs[-1] if record.runs else None
        flag = _FLAGS.get(last.cause or "") if last is not None and state is JobState.FAILED else None
        record.flags = () if flag is None else (flag,)
        for run in record.open_runs():
            run.grip = DesiredState.GONE
            orders.kills.append((record.job.id, run.epoch, cause or JOB_ENDED))

    def _release(self, record: JobRecord, now: float, tenants: set[str]) -> None:
        """The core has its GPUs back, and they are charged."""
        before = record.gpu_seconds
        record.release(now)
        self.running.pop(record.job.id, None)
        self.watch(record)
        self._account(record.job.tenant).gpu_seconds += record.gpu_seconds - before
        tenants.add(record.job.tenant)

    def watch(self, record: JobRecord) -> None:
        """Note whether a job still has processes on GPUs that are no longer its own."""
        if any(run.released is not None for run in record.open_runs()):
            self.closing[record.job.id] = None
        else:
            self.closing.pop(record.job.id, None)

    def withdraw(self, record: JobRecord, now: float, facts: BatchFacts) -> None:
        """A run loses its GPUs before the core is told of it."""
        self._release(record, now, facts.charged)
        facts.touched.add(record.job.id)

    def _account(self, tenant: str) -> TenantTotals:
        return self.books.setdefault(tenant, TenantTotals())

    def _books(self, tenants: set[str]) -> dict[str, tuple[float, float, int]]:
        books = ((name, self._account(name)) for name in sorted(tenants))
        return {name: (each.weight, each.gpu_seconds, each.preemptions) for name, each in books}

    def _keep(self, changes: Changes, jobs: Iterable[str]) -> None:
        """Records as they are now; a job has ended for good once all its processes are gone."""
        for name in sorted(jobs):
            record = self.records.get(name)
            if record is None:
                continue
            changes.records[name] = (self._ended(record), record.state.value, record.text())

    def _ended(self, record: JobRecord) -> float | None:
        """When a job ended, once all its processes are gone too."""
        return record.finished if not record.open_runs() else None

    def kept(self, changes: Changes) -> None:
        """These changes are in the store: jobs that have ended are found there from now on, and no more here."""
        rows = ((row.id, row.ended) for row in changes.jobs)
        for name, ended in (*rows, *((name, state[0]) for name, state in changes.records.items())):
            if ended is not None and name in self.records:
                record = self.records.pop(name)
                self.ended[record.state.value] += 1
                self.tally.forget(name)
                self.usage.leave(record)

    def _row(self, record: JobRecord, request: str) -> JobRowText:
        """A new job. It may have been launched, or refused, in the very instant of its arrival."""
        job = record.job
        stands = self._ended(record), record.state.value
        return JobRowText(job.id, job.tenant, job.app, *stands, job_line(job), request, record.text())

    def weigh(self, now: float, wish: SetWeight) -> CommittedReply:
        """A tenant that has no jobs gets another weight: the core need not know, but the journal has it."""
        note = weight_note(wish, self.weight_of(wish.tenant))
        self._account(wish.tenant).weight = wish.weight
        return self.ask(now, BatchFacts(notes={WHOLE: note}, charged={wish.tenant}))

    def reweigh(self, tenant: str, weight: float) -> dict[str, str]:
        """From now on a tenant, and all its jobs, weigh so much more or less; the core learns of it in the next chapter.

        Returns the jobs as they are to be kept, by id.
        """
        self._account(tenant).weight = weight
        mine = [record for record in self.records.values() if record.job.tenant == tenant]
        for record in mine:
            record.job = replace(record.job, weight=record.weight * weight, tenant_weight=weight)
        return {record.job.id: job_line(record.job) for record in mine}


def _attached(run: RunRecord | None) -> float | None:
    return None if run is None else run.attached


def _job_of(thing: Event | Action) -> str | None:
    """The job that a fact or a wish is about, if it is about one."""
    job = getattr(thing, "job", None)
    return job.id if isinstance(job, Job) else job
