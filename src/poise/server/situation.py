"""The live state: the core, the records of jobs that have not ended, and the books of tenants; always one of the other.

`Situation` takes the facts of an instant, asks the core, carries facts and wishes into the records, and says what is to be
committed and what the world is then to be told. It does no input or output.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from poise.core.scheduler import Scheduler
from poise.engine.journal import Header, entry_line, header_line, job_line
from poise.engine.live import Grip, Notice, Part
from poise.model.action import Abandon, Action, Cancel, Compute, Launch, Preempt, Reject, WakeAt, Why
from poise.model.cluster import Holding, gpu_count, merged
from poise.model.errors import InvariantError
from poise.model.event import Cancelled, Carried, Estimated, Event, Failed, Finished, Held, Released, Submitted
from poise.model.job import Job
from poise.model.journal import Entry
from poise.server.intake import Intake
from poise.server.records import Record, RunRecord, places
from poise.server.store import Changes, JobRowText
from poise.wire.views import Flag, State

_FLAGS = {
    "gpu-out-of-memory": Flag.OUT_OF_MEMORY,
    "cpu-out-of-memory": Flag.OUT_OF_MEMORY,
    "node-lost": Flag.NODE_FAIL,
    "max-duration": Flag.TIMEOUT,
}
"""What a cause of failure says about a job at a glance."""

_RULES = {
    Why.OUTRANKED: "stands before it under the policy in force",
    Why.UNPLANNED: "is to have its turn",
    Why.MOVED: "it goes on elsewhere",
    Why.RESIZED: "it goes on with another number of GPUs",
    Why.VALIDATED: "its trial is over",
    Why.HELD: "it was put on hold",
}


@dataclass
class Books:
    """Of one tenant."""

    weight: float = 1.0
    gpu_seconds: float = 0.0
    preemptions: int = 0


@dataclass
class Orders:
    """What the world is to be told once the commit is done."""

    launches: list[tuple[str, RunRecord]] = field(default_factory=list)
    leaves: list[tuple[str, int, Notice]] = field(default_factory=list)
    kills: list[tuple[str, int, str]] = field(default_factory=list)


@dataclass
class Facts:
    """What is known of an instant before the core is asked. `notes`: who, and what else is known, by place of the event."""

    events: list[Event] = field(default_factory=list)
    arrivals: list[tuple[Record, str]] = field(default_factory=list)
    """New records, each with its request as JSON."""
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    """Jobs whose records changed without the core's knowing."""
    keys: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, event: Event, **note: object) -> None:
        """One more fact, with what else there is to say of it."""
        if note:
            self.notes[len(self.events)] = note
        self.events.append(event)


class Situation:
    """Everything that is known. `records`: jobs that have not ended, or whose processes are not all gone."""

    def __init__(self, header: Header, scheduler: Scheduler, intake: Intake) -> None:
        self.header = header
        self.scheduler = scheduler
        self.intake = intake
        self.records: dict[str, Record] = {}
        self.books: dict[str, Books] = {}
        self.running: dict[str, None] = {}
        """Jobs that hold GPUs, in the order in which they got them."""
        self.ended: Counter[str] = Counter()
        """Jobs that have ended, by their final state."""
        self.closing: dict[str, None] = {}
        """Jobs with processes on GPUs that the core has taken back."""
        self.wake: float | None = None

    def weight_of(self, tenant: str) -> float:
        """What the weights of a tenant's jobs are multiplied by."""
        books = self.books.get(tenant)
        return 1.0 if books is None else books.weight

    def ask(self, now: float, facts: Facts) -> tuple[Changes, Orders]:
        """Put the facts of an instant to the core, and carry all of it into the records."""
        for record, _ in facts.arrivals:
            self.records[record.job.id] = record
        actions = self.scheduler.handle(now, facts.events)
        changes = Changes(now, entry_line(Entry(now, tuple(facts.events), actions)), keys=facts.keys)
        changes.notes = json.dumps(facts.notes, separators=(",", ":")) if facts.notes else None
        orders = Orders()
        concerned = {name for each in (*facts.events, *actions) if (name := _job_of(each)) is not None}
        changes.mentions = concerned
        tenants: set[str] = set()
        for event in facts.events:
            self._happened(event, now, orders, tenants)
        for action in actions:
            self._wished(action, now, orders, tenants)
        new = {record.job.id for record, _ in facts.arrivals}
        changes.jobs = [self._row(record, request) for record, request in facts.arrivals]
        self._keep(changes, (concerned | facts.touched) - new)
        changes.tenants = {name: (each.weight, each.gpu_seconds, each.preemptions) for name, each in self._books(tenants)}
        return changes, orders

    def note(self, now: float, facts: Facts) -> Changes:
        """Keep what changed in the records where nothing concerns the core."""
        changes = Changes(now, keys=facts.keys)
        self._keep(changes, facts.touched)
        return changes

    def begin(
        self, now: float, *, carried: Iterable[Carried], estimates: Iterable[Estimated], asked: Header
    ) -> tuple[Changes, Orders]:
        """The first instant of a chapter: everybody is as they were, and the core decides from there.

        asked   what the service was started with
        """
        facts = Facts(events=[*estimates, *carried])
        changes, orders = self.ask(now, facts)
        changes.chapter = header_line(self.header), header_line(asked)
        changes.mentions -= {each.job.id for each in facts.events if isinstance(each, Carried)}
        return changes, orders

    def carried(self, record: Record, job: Job, before: Scheduler | None) -> tuple[list[Estimated], Carried]:
        """A job as it stands, for a new core; `before` is the one that knew it until now."""
        kind, estimate, steps = self.intake.resolve(job)
        done, failures = 0.0, record.failures
        if before is not None and (row := before.state.rows.get(job.id)) is not None:
            done, failures = before.state.columns.steps_done[row], before.state.columns.failures[row]
        run = record.current
        epoch = record.runs[-1].epoch if record.runs else 0
        gpus = self.holding(run) if run is not None else ()
        since = run.started if run is not None else record.since
        fact = Carried(job, kind, steps, epoch, done, record.ran, failures, since, gpus, record.held)
        return self.intake.news(kind, estimate), fact

    def holding(self, run: RunRecord) -> Holding:
        """A run's GPUs as the core names them; empty if some of them are not there (any more)."""
        nodes = {node.name: index for index, node in enumerate(self.header.cluster.nodes)}
        sizes = {node.name: node.gpus for node in self.header.cluster.nodes}
        if any(name not in nodes or slots[-1] >= sizes[name] for name, slots in run.gpus.items()):
            return ()
        return merged((nodes[name], sum(1 << slot for slot in slots)) for name, slots in run.gpus.items())

    def partner(self, job: str) -> str | None:
        """The job that shares GPUs with this one, if one does."""
        state = self.scheduler.state
        row = state.ledger.partner.get(state.rows.get(job, -1))
        return None if row is None else state.columns.ids[row]

    def parts(self, run: RunRecord) -> tuple[Part, ...]:
        """A run's GPUs as the world names them."""
        types = {node.name: node.gpu_type for node in self.header.cluster.nodes}
        return tuple(Part(name, types.get(name, run.gpu_type), slots) for name, slots in run.gpus.items())

    def _happened(self, event: Event, now: float, orders: Orders, tenants: set[str]) -> None:
        name = _job_of(event)
        record = self.records.get(name) if name is not None else None
        if record is None:
            return
        match event:
            case Finished():
                self._end(record, State.SUCCEEDED, None, now, orders, tenants)
            case Cancelled():
                self._end(record, State.CANCELLED, "cancelled by its owner", now, orders, tenants)
            case Failed():
                record.failures += 1
                self._release(record, now, tenants)
            case Held() | Released():
                record.held = isinstance(event, Held)
            case Submitted() | Carried():
                tenants.add(record.job.tenant)
            case _:
                pass

    def _wished(self, action: Action, now: float, orders: Orders, tenants: set[str]) -> None:
        match action:
            case Launch():
                self._launch(action, now, orders)
            case Preempt():
                self._preempt(action, now, orders, tenants)
            case Reject() | Abandon():
                self._end(self.records[action.job], State.FAILED, action.reason, now, orders, tenants)
            case Cancel():
                self._end(self.records[action.job], State.CANCELLED, action.reason, now, orders, tenants)
            case WakeAt():
                self.wake = action.time
            case Compute():
                raise InvariantError("the policy gives out single tasks, which real processes cannot be started for")
            case _:
                pass

    def _launch(self, action: Launch, now: float, orders: Orders) -> None:
        record = self.records[action.job]
        gpu_type = self.header.cluster.nodes[action.gpus[0].node].gpu_type
        where = places(self.header.cluster, action.gpus)
        run = RunRecord(action.epoch, now, where, gpu_count(action.gpus), gpu_type, record.checkpoint or 0.0)
        record.launch(run, now)
        self.running[action.job] = None
        orders.launches.append((action.job, run))

    def _preempt(self, action: Preempt, now: float, orders: Orders, tenants: set[str]) -> None:
        record = self.records[action.job]
        run = record.run(action.epoch)
        if run is None:
            raise InvariantError(f"job {action.job!r} is to leave run {action.epoch}, which is not known")
        notice = Notice(action.why.value, self._says_why(action), record.deadline)
        run.grip, run.cause = Grip.LEAVE, notice.text
        if action.why is not Why.HELD:
            record.preemptions += 1
            self._account(record.job.tenant).preemptions += 1
        self._release(record, now, tenants)
        orders.leaves.append((action.job, action.epoch, notice))

    def _says_why(self, action: Preempt) -> str:
        """The same text for the worker, the owner, the log and the API."""
        rule = _RULES[action.why]
        if action.beneficiary is None:
            return f"preempted ({action.why}): {rule if action.why is not Why.UNPLANNED else 'it is not its turn'}"
        other = self.records[action.beneficiary]
        whose = f"job {action.beneficiary} ({other.name}, tenant {other.job.tenant})"
        return f"preempted ({action.why}): {whose} {rule}; it comes back by itself"

    def _end(self, record: Record, state: State, cause: str | None, now: float, orders: Orders, tenants: set[str]) -> None:
        if record.finished is not None:
            return
        self._release(record, now, tenants)
        record.end(state, now, cause)
        last = record.runs[-1] if record.runs else None
        flag = _FLAGS.get(last.cause or "") if last is not None and state is State.FAILED else None
        record.flags = () if flag is None else (flag,)
        for run in record.open_runs():
            run.grip = Grip.GONE
            orders.kills.append((record.job.id, run.epoch, cause or "its job has ended"))

    def _release(self, record: Record, now: float, tenants: set[str]) -> None:
        """The core has its GPUs back, and they are charged."""
        before = record.gpu_seconds
        record.release(now)
        self.running.pop(record.job.id, None)
        self.watch(record)
        self._account(record.job.tenant).gpu_seconds += record.gpu_seconds - before
        tenants.add(record.job.tenant)

    def watch(self, record: Record) -> None:
        """Note whether a job still has processes on GPUs that are no longer its own."""
        if any(run.released is not None for run in record.open_runs()):
            self.closing[record.job.id] = None
        else:
            self.closing.pop(record.job.id, None)

    def withdraw(self, record: Record, now: float) -> None:
        """A run loses its GPUs before the core is told of it."""
        self._release(record, now, set())

    def _account(self, tenant: str) -> Books:
        return self.books.setdefault(tenant, Books())

    def _books(self, tenants: set[str]) -> list[tuple[str, Books]]:
        return [(name, self._account(name)) for name in sorted(tenants)]

    def _keep(self, changes: Changes, jobs: Iterable[str]) -> None:
        """Records as they are now; a job has ended for good once all its processes are gone."""
        for name in sorted(jobs):
            record = self.records.get(name)
            if record is None:
                continue
            changes.records[name] = (self._ended(record), job_line(record.job), record.text())

    def _ended(self, record: Record) -> float | None:
        """When a job ended, once all its processes are gone too."""
        return record.finished if not record.open_runs() else None

    def kept(self, changes: Changes) -> None:
        """These changes are in the store: jobs that have ended are found there from now on, and no more here."""
        rows = ((row.id, row.ended) for row in changes.jobs)
        for name, ended in (*rows, *((name, ended) for name, (ended, _, _) in changes.records.items())):
            if ended is not None and name in self.records:
                self.ended[self.records.pop(name).state.value] += 1

    def _row(self, record: Record, request: str) -> JobRowText:
        """A new job. It may have been launched, or refused, in the very instant of its arrival."""
        job = record.job
        return JobRowText(job.id, job.tenant, job.app, self._ended(record), job_line(job), request, record.text())

    def reweigh(self, tenant: str, weight: float) -> None:
        """From now on a tenant's jobs weigh so much more or less; the core learns of it in the next chapter."""
        self._account(tenant).weight = weight
        for record in self.records.values():
            if record.job.tenant == tenant:
                record.job = replace(record.job, weight=record.weight * weight)


def _job_of(thing: Event | Action) -> str | None:
    """The job that a fact or a wish is about, if it is about one."""
    job = getattr(thing, "job", None)
    return job.id if isinstance(job, Job) else job
