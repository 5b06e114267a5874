"""The live state: the core, the records of jobs that have not ended, and the totals of tenants, kept consistent.

`ServiceState.apply` is the middle of the pipeline: it takes a `Batch` of facts, asks the core, applies facts and actions to
the records, and returns an `Outcome`: what to commit (`changes`), and what the back end is told after that. It does no input
or output. Only the engine's thread changes it, under the engine's lock; see `engine.py`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from poise.engine.journal import Header, entry_line, job_line
from poise.engine.outside import blaming
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
from poise.scheduler.model.event import Cancelled, Carried, Event, Failed, Finished, Held, NodeLost, Released, Submitted
from poise.scheduler.model.job import Job
from poise.service.backends.api import DesiredState, RunNotice, RunPart
from poise.service.server.admission import NO_NODE, Admission
from poise.service.server.node_records import NodeRecord
from poise.service.server.quotas import Usage
from poise.service.server.records import JobRecord, RunRecord, StateCounts, slots_by_node, type_counts
from poise.service.server.start_conditions import StartConditions
from poise.service.server.storage.store import Changes, StoredJob, mentioned_by
from poise.service.wire.views import Flag, JobState

WHOLE, STOPS, DEFERRED, ACCEPTED, NODES, INTERRUPTED = -1, -2, -3, -4, -5, -6
"""Keys of notes on a batch as a whole; notes on its events have their positions as keys. Stored: they must not change.

WHOLE      who changed a policy or a weight, or which jobs were set aside
STOPS      by job: the notice that its stopping run gets
DEFERRED   by job: who asked for a hold that waits until it loses no work, or lifted one; and which of the two
ACCEPTED   by job: who submitted it while the cluster had no nodes; the core learns of it in the next chapter
NODES      what happened to nodes, each a NodeNote as a list
INTERRUPTED   by job: why its run ended that was lost with a node
"""
CONDITION = "condition"
"""Key in the note on a fact that the conditions of a job's start have caused, and not its owner: why, in words. Stored."""
JOB_ENDED = "its job has ended"  # why a run is to end if its job states no cause

_FLAGS = {
    "gpu-out-of-memory": Flag.OUT_OF_MEMORY,
    "cpu-out-of-memory": Flag.OUT_OF_MEMORY,
    "node-lost": Flag.NODE_FAIL,
    "max-duration": Flag.TIMEOUT,
}
_RULES = {
    PreemptionCause.OUTRANKED: "stands before it under the policy in force",
    PreemptionCause.UNPLANNED: "is to have its turn",
    PreemptionCause.MOVED: "it goes on elsewhere",
    PreemptionCause.RESIZED: "it goes on with another number of GPUs",
    PreemptionCause.VALIDATED: "its trial is over",
    PreemptionCause.HELD: "it was put on hold",
    PreemptionCause.DRAINED: "its node is drained; it comes back by itself",
}


class NodeNote(NamedTuple):
    """What happened to a node, for the log of events: which kind of event, to which node, by whom, in words."""

    kind: str
    node: str
    by: str
    text: str


@dataclass
class Batch:
    """The facts of one instant, before the core is asked. `batch.py` and `recovery.py` fill it; nothing changes it later.

    notes       by position of the event: who asked, and what else is known; stored beside the journal entry
    arrivals    records of new jobs, each with its request as JSON
    touched     jobs whose records changed without the core being told;  charged: tenants whose totals did
    nodes       nodes whose records changed, whether the core is told or not
    keys        keys of submissions: (key, whose it is, ids of the jobs as JSON)
    aside       rows of damaged jobs, as they are stored from now on
    chapter     if a chapter begins with it: its header, and the header that the service was started with, as JSON
    reweighed   jobs whose weight differs from what was submitted, as JSON, by id
    replies     answers that are given once all of this is committed
    """

    now: float
    events: list[Event] = field(default_factory=list)
    notes: dict[int, Any] = field(default_factory=dict)
    arrivals: list[tuple[JobRecord, str]] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    charged: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    keys: list[tuple[str, str, str]] = field(default_factory=list)
    aside: list[StoredJob] = field(default_factory=list)
    chapter: tuple[str, str] | None = None
    reweighed: dict[str, str] = field(default_factory=dict)
    replies: list[Callable[[], None]] = field(default_factory=list)

    def add(self, event: Event, **note: object) -> None:
        """Add a fact, with what else there is to say of it."""
        if note:
            self.notes[len(self.events)] = note
        self.events.append(event)

    def note_node(self, kind: str, node: str, by: str, text: str) -> None:
        """Add what happened to a node, whose record has changed; the core may have to be told of it, or not."""
        self.notes.setdefault(NODES, []).append(NodeNote(kind, node, by, text))
        self.nodes.add(node)


@dataclass
class Outcome:
    """What came of a batch.

    actions   of the core; None: it was not asked, and the journal gets no entry
    jobs      that facts or actions name, except those only carried into a new chapter;  tenants: whose totals changed
    launches, stops, kills   what the back end is told after the commit
    interrupted              by job: why its run ended that was lost with a node
    """

    batch: Batch
    actions: tuple[Action, ...] | None = None
    jobs: set[str] = field(default_factory=set)
    tenants: set[str] = field(default_factory=set)
    launches: list[tuple[JobRecord, RunRecord]] = field(default_factory=list)
    stops: list[tuple[str, int, RunNotice]] = field(default_factory=list)
    kills: list[tuple[str, int, str]] = field(default_factory=list)
    interrupted: dict[str, str] = field(default_factory=dict)


@dataclass
class TenantTotals:
    """Weight of one tenant, and what it has received so far."""

    weight: float = 1.0
    gpu_seconds: float = 0.0
    preemptions: int = 0


class ServiceState:
    """Everything the service knows. The records belong to it; the core is replaced with each chapter of the journal.

    records    jobs that have not ended, or whose processes are not all gone
    running    jobs that hold GPUs, in the order in which they got them
    stopping   jobs with processes on GPUs that the core has taken back
    conditions  of the start of jobs, and which of them are met
    stranded   jobs that cannot run on the cluster as it is, and why: the core does not know them
    nodes      what is known of nodes, by name; one without a record is up
    damaged    jobs that have not ended and cannot be read, and why: recovery sets them aside
    ended      number of jobs that have ended, by final state
    wake       when the core asked to be woken
    """

    def __init__(self, header: Header, scheduler: Scheduler, admission: Admission) -> None:
        self.header = header
        self.scheduler = scheduler
        self.admission = admission
        self.records: dict[str, JobRecord] = {}
        self.totals: dict[str, TenantTotals] = {}
        self.running: dict[str, None] = {}
        self.stopping: dict[str, None] = {}
        self.stranded: dict[str, str] = {}
        self.nodes: dict[str, NodeRecord] = {}
        self.damaged: list[tuple[StoredJob, str]] = []
        self.ended: Counter[str] = Counter()
        self.counts = StateCounts()
        self.usage = Usage()
        self.conditions = StartConditions()
        self.wake: float | None = None
        self.places = {node.name: (index, node) for index, node in enumerate(header.cluster.nodes)}  # of nodes, by name

    def continue_from(self, before: "ServiceState") -> None:
        """Take over all but the core. Shared, not copied: `before` is only read from now on, until it is replaced."""
        self.records, self.totals, self.damaged, self.ended = before.records, before.totals, before.damaged, before.ended
        self.running, self.stopping, self.counts, self.usage = before.running, before.stopping, before.counts, before.usage
        self.nodes, self.conditions = before.nodes, before.conditions

    def apply(self, batch: Batch, lock: AbstractContextManager[object] = nullcontext()) -> Outcome:  # noqa: B008
        """Put the facts to the core, and apply facts and actions to the records.

        lock   held while the records change: for a new chapter, whose core is asked while readers still see the old one
        """
        with blaming(self.header.policy):
            actions = self.scheduler.handle(batch.now, batch.events)
        with lock:
            happened = (each for each in batch.events if not isinstance(each, Carried))
            jobs = {name for each in (*happened, *actions) if (name := _job_of(each)) is not None}
            outcome = Outcome(batch, actions, jobs)
            for record, _ in batch.arrivals:
                self.records[record.job.id] = record
            self.stranded |= dict.fromkeys(batch.notes.get(ACCEPTED, ()), NO_NODE)
            for position, event in enumerate(batch.events):
                self._apply_event(event, batch.notes.get(position, {}), outcome)
            for action in actions:
                self._apply_action(action, outcome)
            self.count(record.job.id for record, _ in batch.arrivals)
            self.count(jobs | batch.touched)
        return outcome

    def changes(self, outcome: Outcome) -> Changes:
        """What to commit of an outcome. Changes nothing, and is called without the lock: it takes long for many jobs."""
        batch, arrived = outcome.batch, {record.job.id for record, _ in outcome.batch.arrivals}
        changes = Changes(batch.now, chapter=batch.chapter, keys=batch.keys, aside=batch.aside, reweighed=batch.reweighed)
        if outcome.actions is not None:
            changes.entry = entry_line(JournalEntry(batch.now, tuple(batch.events), outcome.actions))
            stops = {job: notice.text for job, _, notice in outcome.stops}
            lost = {INTERRUPTED: outcome.interrupted} if outcome.interrupted else {}
            notes = batch.notes | ({STOPS: stops} if stops else {}) | lost
            changes.notes = json.dumps(notes, separators=(",", ":")) if notes else None
            by_note = {*batch.notes.get(DEFERRED, ()), *batch.notes.get(ACCEPTED, ())}
            changes.mentions = outcome.jobs | mentioned_by(batch.notes.get(WHOLE, {})) | by_note
        for record, request in batch.arrivals:  # some may have been launched, or rejected, in the same instant
            job, state = record.job, record.state.value
            row = StoredJob(job.id, job.tenant, job.app, record.ended, state, job_line(job), request, record.text())
            changes.jobs.append(row)
        for name in sorted((outcome.jobs | batch.touched) - arrived):
            if (found := self.records.get(name)) is not None:
                changes.records[name] = (found.ended, found.state.value, found.text())
        for tenant in sorted(outcome.tenants | batch.charged):
            totals = self.totals_of(tenant)
            changes.tenants[tenant] = totals.weight, totals.gpu_seconds, totals.preemptions
        changes.nodes = {name: self.nodes[name].text() for name in sorted(batch.nodes)}
        return changes

    def committed(self, changes: Changes) -> None:
        """Drop the jobs that have ended with these changes: from now on they are found in the store."""
        rows = ((row.id, row.ended) for row in changes.jobs)
        for name, ended in (*rows, *((name, state[0]) for name, state in changes.records.items())):
            if ended is not None and name in self.records:
                record = self.records.pop(name)
                self.ended[record.state.value] += 1
                self.counts.forget(name)
                self.usage.leave(record)

    def count(self, jobs: Iterable[str]) -> None:
        """Count these jobs anew: their records may have changed."""
        for name in jobs:
            if (record := self.records.get(name)) is not None:
                self.counts.count(record)

    def totals_of(self, tenant: str) -> TenantTotals:
        """The totals of a tenant, which are made if there are none."""
        return self.totals.setdefault(tenant, TenantTotals())

    def weight_of(self, tenant: str) -> float:
        """Weight of a tenant among tenants; the weights of its jobs are multiplied by it too."""
        return self.totals.get(tenant, TenantTotals()).weight

    def holding(self, run: RunRecord) -> Holding:
        """A run's GPUs as the core names them; empty if the cluster lacks any of them, or has others in their place."""
        nodes = self.places
        for name, slots in run.gpus.items():
            if name not in nodes or slots[-1] >= nodes[name][1].gpus or nodes[name][1].gpu_type not in run.by_type:
                return ()
        return merged((nodes[name][0], sum(1 << slot for slot in slots)) for name, slots in run.gpus.items())

    def run_parts(self, run: RunRecord) -> tuple[RunPart, ...]:
        """A run's GPUs as the back end names them."""
        nodes = self.places
        return tuple(
            RunPart(name, nodes[name][1].gpu_type if name in nodes else run.gpu_type, slots)
            for name, slots in run.gpus.items()
        )

    # Facts and actions, applied to the records.

    def _apply_event(self, event: Event, note: Mapping[str, Any], outcome: Outcome) -> None:
        if isinstance(event, NodeLost):
            self._lose_runs(self.header.cluster.nodes[event.node].name, outcome)
            return
        name = _job_of(event)
        record = self.records.get(name) if name is not None else None
        if record is None:
            return
        match event:
            case Finished():
                self._end(record, JobState.SUCCEEDED, None, outcome)
            case Cancelled():
                self._end(record, JobState.CANCELLED, note.get(CONDITION, "cancelled by its owner"), outcome)
            case Failed():
                record.failures += 1
                self.release(record, outcome.batch.now, outcome.tenants)
            case Held() | Released() if CONDITION not in note:
                record.held = isinstance(event, Held)
            case Submitted():
                outcome.tenants.add(record.job.tenant)

    def _lose_runs(self, node: str, outcome: Outcome) -> None:
        """Give up all runs with a part on a lost node. The core has taken back the GPUs of those that held any.

        The back end is told to kill them: it may not have reported their ends yet, parts of them may live on other nodes,
        and a node that comes back must not go on with them.
        """
        known = self.nodes.get(node)
        text = f"node {node} was lost" + (f": {known.evidence}" if known is not None and known.evidence else "")
        for job in [*self.running, *(job for job in self.stopping if job not in self.running)]:
            record = self.records[job]
            current = record.current
            if current is not None and node in current.gpus:
                outcome.interrupted[job] = f"run {current.epoch} is over: {text}"
                self.release(record, outcome.batch.now, outcome.tenants)
                outcome.jobs.add(job)
            for run in record.open_runs():
                if node in run.gpus and run.grip is not DesiredState.GONE:
                    run.grip, run.cause = DesiredState.GONE, text
                    outcome.kills.append((job, run.epoch, text))
                    outcome.jobs.add(job)
            record.update_state()

    def _apply_action(self, action: Action, outcome: Outcome) -> None:
        match action:
            case Launch():
                cluster, record, now = self.header.cluster, self.records[action.job], outcome.batch.now
                slots, by_type = slots_by_node(cluster, action.gpus), type_counts(cluster, action.gpus)
                run = RunRecord(action.epoch, now, slots, gpu_count(action.gpus), by_type, record.checkpoint or 0.0)
                record.launch(run, now)
                self.running[action.job] = None
                outcome.launches.append((record, run))
            case Preempt():
                self._preempt(action, outcome)
            case Reject() | Abandon():
                self._end(self.records[action.job], JobState.FAILED, action.reason, outcome)
            case Cancel():
                self._end(self.records[action.job], JobState.CANCELLED, action.reason, outcome)
            case WakeAt():
                self.wake = action.time
            case Compute():
                raise InvariantError("the policy gives out single tasks, which real processes cannot be started for")

    def _preempt(self, action: Preempt, outcome: Outcome) -> None:
        record = self.records[action.job]
        run = record.run(action.epoch)
        if run is None:
            raise InvariantError(f"job {action.job!r} is to leave run {action.epoch}, which is not known")
        # One text for the worker, the owner, the log and the API.
        rule = _RULES[action.why]
        if action.beneficiary is not None:
            other = self.records[action.beneficiary]
            rule = f"job {action.beneficiary} ({other.name}, tenant {other.job.tenant}) {rule}; it comes back by itself"
        elif action.why is PreemptionCause.OUTRANKED:  # of two that share GPUs, one may have to leave for another partner
            rule = f"another job {rule}; it comes back by itself"
        elif action.why is PreemptionCause.UNPLANNED:
            rule = "it is not its turn"
        elif action.why is PreemptionCause.DRAINED:
            rule = f"{self._drains(run)}; it comes back by itself"
        notice = RunNotice(action.why.value, f"preempted ({action.why}): {rule}", record.deadline)
        run.grip, run.cause = DesiredState.LEAVE, notice.text
        if action.why is not PreemptionCause.HELD:
            record.preemptions += 1
            self.totals_of(record.job.tenant).preemptions += 1
        self.release(record, outcome.batch.now, outcome.tenants)
        outcome.stops.append((action.job, action.epoch, notice))

    def _drains(self, run: RunRecord) -> str:
        """Which nodes of a run are drained, by whom and why."""
        named = ((name, self.nodes.get(name)) for name in run.gpus)
        return ", ".join(f"node {name} is {each.drain_text()}" for name, each in named if each and each.drained is not None)

    def _end(self, record: JobRecord, state: JobState, cause: str | None, outcome: Outcome) -> None:
        if record.finished is not None:
            return
        self.release(record, outcome.batch.now, outcome.tenants)
        self.stranded.pop(record.job.id, None)
        record.end(state, outcome.batch.now, cause)
        self.conditions.note_end(record.job.id, state)
        if not record.open_runs():
            self.conditions.note_gone(record.job.id)
        last = record.runs[-1] if record.runs else None
        flag = _FLAGS.get(last.cause or "") if last is not None and state is JobState.FAILED else None
        record.flags = () if flag is None else (flag,)
        for run in record.open_runs():
            run.grip = DesiredState.GONE
            outcome.kills.append((record.job.id, run.epoch, cause or JOB_ENDED))

    def release(self, record: JobRecord, now: float, tenants: set[str]) -> None:
        """Take a job's GPUs back and charge its tenant for them; the tenant is added to `tenants`."""
        before = record.gpu_seconds
        record.release(now)
        self.running.pop(record.job.id, None)
        self.note_stopping(record)
        self.totals_of(record.job.tenant).gpu_seconds += record.gpu_seconds - before
        tenants.add(record.job.tenant)

    def note_stopping(self, record: JobRecord) -> None:
        """Keep `stopping` up to date: does the job still have processes on GPUs that are no longer its own?"""
        if record.stopping_runs():
            self.stopping[record.job.id] = None
        else:
            self.stopping.pop(record.job.id, None)


def _job_of(thing: Event | Action) -> str | None:
    """The job that a fact or an action is about, if it is about one."""
    job = getattr(thing, "job", None)
    return job.id if isinstance(job, Job) else job
