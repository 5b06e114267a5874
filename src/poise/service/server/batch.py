"""From commands and news to facts: what arrived becomes one `Batch` for the core, and replies that wait for the commit.

`BatchBuilder.take` is the way in, with one method per command and per piece of news. It may change records of jobs, where
the core need not know; a command that cannot be met is refused here and leaves nothing behind. The first part of the file
says what a hold means for a job that runs.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from poise.scheduler.model.errors import UnknownNameError
from poise.scheduler.model.event import (
    Attached,
    Cancelled,
    Failed,
    Finished,
    Held,
    NodeLost,
    NodeReturned,
    Progressed,
    Released,
    Stopped,
    Submitted,
)
from poise.scheduler.model.failures import Verdict, verdict
from poise.scheduler.model.job import Yields
from poise.scheduler.model.units import format_seconds
from poise.service.backends.api import (
    NodeReport,
    NodeState,
    RunBegan,
    RunEnded,
    RunEnding,
    RunEvent,
    RunProgressed,
)
from poise.service.server import service_api as api
from poise.service.server.admission import job_of
from poise.service.server.dependencies import Dependencies
from poise.service.server.node_records import NodeRecord, withheld_slots
from poise.service.server.queue_view import jobs_of, node_row
from poise.service.server.quotas import size_of
from poise.service.server.records import LOST, JobRecord, RunRecord
from poise.service.server.service_api import Command, RefusalCode, RequestRefusedError, Verb, fulfil, refuse
from poise.service.server.service_state import ACCEPTED, CONDITION, DEFERRED, Batch, ServiceState
from poise.service.server.storage.store import Store, check_same, holder
from poise.service.server.submission_notes import notes_under
from poise.service.wire import views
from poise.service.wire.request import JobRequest

MOST_QUEUED = 200_000  # jobs that have not ended
CANCELLED_AT_ONCE = 512  # jobs that one batch cancels of a tenant whose jobs are all to be cancelled
MOST_FAILURES = 100  # failed runs after which a job fails, even if none of them was its own fault
LOSS_EVERY = 30.0  # least seconds between two reports of a job's loss to the core
LOSS_PART = 1 / 16
"""Least part of a job's age between two such reports: a month of training takes some 160 of them, not 86,400."""
KILLED = "killed"
"""Failure cause of a run that was killed from outside: not its own fault, and no reason to wait before the next."""
OVERDUE = "max-duration"  # failure cause of a job that has run for as long as it may

_CHANGES: dict[Verb, type[Cancelled | Held | Released]] = {
    Verb.CANCEL: Cancelled, Verb.HOLD: Held, Verb.STOP: Held, Verb.RELEASE: Released
}  # fmt: skip


# Holding a job that runs. It is preempted if that loses nothing that its owner has not agreed to lose. Otherwise the hold is
# deferred: the job keeps its GPUs until it has reported that it can save its work, or has ended. Until then only its record
# says that it is held. The core is not told, as no GPUs come free that it could give to others.


def is_hold_deferred(record: JobRecord) -> bool:
    """The owner wants the job held, and it goes on until that loses no work."""
    return record.held and _running(record) is not None


def defers_hold(record: JobRecord) -> bool:
    """A hold now would lose work that the job's owner has not agreed to lose."""
    run = _running(record)
    return run is not None and record.job.yields is not Yields.ANY_TIME and not _can_save(record, run)


def deferral(record: JobRecord) -> str:
    """When a deferred hold takes effect."""
    if record.job.yields is Yields.NEVER:
        return "it is held when it ends, as its owner wants it never to be preempted"
    return "it is held as soon as it has reported that it can save its work, or when it ends"


def stop_advice(record: JobRecord) -> str:
    """How to end the run of a deferred hold at once, and what that costs."""
    what = "sends it TERM now" if record.job.yields is Yields.NEVER else "asks it to save and to leave"
    return f"poise hold --stop {record.job.id} {what}{_cost(record)}"


def _effect(record: JobRecord, verb: Verb) -> str | None:
    """What a change will do to a job that runs; None: the state says it all."""
    run = _running(record)
    if verb is Verb.RELEASE:
        return "it goes on, and is no longer to be held" if is_hold_deferred(record) else None
    if run is None or verb is Verb.CANCEL:
        return None
    if verb is Verb.HOLD and defers_hold(record):
        return f"it goes on and keeps its GPUs: {deferral(record)}; {stop_advice(record)}"
    if _can_save(record, run):
        return "it is asked to save its work and to leave"
    if record.job.yields is Yields.ANY_TIME:
        return f"it gets TERM now, as --preemption restart has it{_cost(record)}"
    what = "gets TERM now" if record.job.yields is Yields.NEVER else "is asked to save and to leave"
    return f"it {what}{_cost(record)}"


def _cost(record: JobRecord) -> str:
    """How long a run has to save its work, and what is lost. Only `--preemption checkpoint` gives it any time."""
    if record.job.yields is not Yields.ATTACHED:
        return ": what it has not saved itself is lost"
    return f", with TERM at its deadline of {format_seconds(record.deadline)}: what it has not saved by then is lost"


def _running(record: JobRecord) -> RunRecord | None:
    """The run that holds GPUs and has not ended as far as is known."""
    run = record.current
    return run if run is not None and run.ended is None else None


def _can_save(record: JobRecord, run: RunRecord) -> bool:
    return record.job.yields is Yields.ATTACHED and run.attached is not None


class BatchBuilder:
    """Builds the batch of one instant. Used by the engine's thread, under the engine's lock, and then thrown away.

    loss_reported   by job, when its loss was last reported to the core: the engine's, as it outlives the batch
    followups       commands to run after the commit: the rest of a large cancellation, and those that start a new chapter
    reports         of nodes: a new chapter takes in those that the cluster lacks as they are
    """

    def __init__(self, state: ServiceState, deps: Dependencies, loss_reported: dict[str, float], now: float) -> None:
        self.batch = Batch(now)
        self.followups: list[Command] = []
        self.reports: list[NodeReport] = []
        self._now = now
        self._state = state
        self._deps = deps
        self._loss_reported = loss_reported
        self._keys: dict[tuple[str | None, str], tuple[tuple[str, ...], tuple[JobRequest, ...]]] = {}
        """Ids and requests of submissions of this batch, by key and whose it is: the store does not have them yet."""
        self._last_id = 0
        self._finished: set[str] = set()  # jobs that end with this batch; their records say so only once it is applied
        self._lost: set[str] = set()  # nodes that are lost with this batch: the core has given up the runs there
        self._ending: dict[str, views.JobState] = {}  # the same, and those that are cancelled, as far as is known here
        self._held: dict[str, bool] = {}  # jobs whose owners hold or release them with this batch, and what they will be
        self._hold_told: set[str] = set()  # jobs whose hold or release the core is told of in this batch

    def take(self, item: Command | RunEvent | NodeReport) -> None:
        """Take one command, or one piece of news."""
        match item:
            case api.SubmitJobs():
                self._submit(item)
            case api.ChangeJob():
                self._change(item)
            case api.CancelJobs():
                self._cancel_all(item)
            case api.SetWeight() | api.SetPolicy():
                self.followups.append(item)
            case api.ChangeNode():
                self._change_node(item)
            case NodeReport():
                self._hear_of_node(item)
            case RunBegan() | RunProgressed() | RunEnded():
                self._hear(item)

    def _reply(self, command: Command, answer: object) -> None:
        """Answer once the batch is committed."""
        self.batch.replies.append(lambda: fulfil(command, answer))

    # Commands.

    def _submit(self, command: api.SubmitJobs) -> None:
        submission, by, whose = command.submission, command.by, holder(command.by)
        try:
            # A submission sent twice under one key is accepted once; the client may not have seen the first answer.
            before = self._keys.get((submission.key, whose))
            if before is None:
                ids = self._deps.store.submissions.taken(by, submission)
            else:
                check_same(submission, before[1])
                ids = before[0]
            if ids is None:
                texts = [request.model_dump_json(exclude_defaults=True) for request in submission.jobs]
                queued = len(self._state.records) + len(self.batch.arrivals)
                if queued + len(texts) > MOST_QUEUED:
                    text = f"{queued:,} jobs are queued, of at most {MOST_QUEUED:,}; try again later"
                    raise RequestRefusedError(RefusalCode.FULL, text, bound="all-jobs")  # noqa: TRY301
                size = sum(map(size_of, texts))
                self._state.usage.check_submit(by, len(texts), size, self._now, self._deps.allowance)
        except RequestRefusedError as error:
            if error.bound is not None:
                self._deps.metrics.refused.labels(error.bound).inc()
            refuse(command, error)
            return
        if ids is None:
            ids = tuple(self._new_job(request, text, by) for request, text in zip(submission.jobs, texts, strict=True))
            if submission.key is not None:
                self._keys[submission.key, whose] = ids, submission.jobs
                self.batch.keys.append((submission.key, whose, json.dumps(ids)))
        self._reply(
            command,
            views.SubmittedView(jobs=ids, notes=notes_under(self._state.header.policy, self._deps.notes, submission.jobs)),
        )

    def _new_job(self, request: JobRequest, text: str, by: views.Account) -> str:
        """Add a new job and return its id. It counts at once: the next submission of this batch comes on top of it."""
        state, deps = self._state, self._deps
        self._last_id = 1 + (self._last_id or max(deps.store.highest, deps.highest_job))
        tenant = request.tenant or by.tenant
        job = job_of(request, str(self._last_id), self._now, tenant, state.weight_of(tenant))
        if state.header.cluster.nodes:
            kind, estimate, steps = state.admission.resolve(job)
            for estimated in state.admission.estimates(job, kind, estimate):
                self.batch.add(estimated)
            self.batch.add(Submitted(job, kind, steps), by=by.name)
            if request.hold:
                self.batch.add(Held(job.id), by=by.name)
        else:  # there is nothing to decide on: it is carried over into the chapter that begins with the first node
            self.batch.notes.setdefault(ACCEPTED, {})[job.id] = by.name
        record = JobRecord.of(job, request, by.name, size_of(text))
        state.usage.submitted(record)
        state.conditions.add(record, request, self._ends_of)
        self._held[job.id] = request.hold
        self.batch.arrivals.append((record, text))
        return job.id

    def _change(self, command: api.ChangeJob) -> None:
        job, verb, by = command.job, command.verb, command.by
        record = self._state.records.get(job)
        if record is None or record.finished is not None or job in self._finished:
            ended = views.JobState(self._deps.store.final_state(job) if record is None else record.state)
            if verb is Verb.CANCEL and ended is views.JobState.CANCELLED:  # as asked: cancelling twice is no error
                self._reply(command, views.CommandResult(job=job, state=ended))
                return
            how = f"is {ended}" if ended.is_final else "has ended"
            refuse(command, RequestRefusedError(RefusalCode.CONFLICT, f"job {job} {how} already"))
            return
        if verb is not Verb.CANCEL:  # which frees room, and happens once to a job
            try:
                self._state.usage.check_change(by, self._now, self._deps.allowance)
            except RequestRefusedError as error:
                refuse(command, error)
                return
        # A run that is lost with this batch has nothing left to lose: its job is held at once.
        is_lost = record.current is not None and not self._lost.isdisjoint(record.current.gpus)
        text = None if is_lost else _effect(record, verb)
        is_deferred = verb is Verb.HOLD and not is_lost and defers_hold(record)
        is_lifted = verb is Verb.RELEASE and is_hold_deferred(record)
        if job not in self._hold_told and (is_deferred or is_lifted):
            record.held = is_deferred
            self.batch.touched.add(job)
            self.batch.notes.setdefault(DEFERRED, {})[job] = [by.name, is_deferred]
        else:
            self._hold_told.add(job)
            self.batch.add(_CHANGES[verb](job), by=by.name)
            if verb is Verb.RELEASE:
                self._state.conditions.renew(job)
        if verb is Verb.CANCEL:
            self._ending.setdefault(job, views.JobState.CANCELLED)
        else:
            self._held[job] = verb is not Verb.RELEASE
            self._state.conditions.touch(job)
        # The state is that after the commit, hence read late.
        state, now = self._state, self._now
        self.batch.replies.append(lambda: fulfil(command, _changed(state, record, verb, text, now)))

    def _cancel_all(self, command: api.CancelJobs) -> None:
        records, left, done = self._state.records, command.left, command.done
        if left is None:
            # Those that wait first: otherwise some of them would be started in the place of one that runs. Jobs that are
            # submitted after the command are not meant.
            jobs = jobs_of(self._state, command.wanted)
            left = tuple(sorted(jobs, key=lambda job: records[job].current is not None))
        for job in left[:CANCELLED_AT_ONCE]:
            record = records.get(job)
            if record is not None and record.finished is None and job not in self._finished:
                self.batch.add(Cancelled(job), by=command.by.name)
                self._ending.setdefault(job, views.JobState.CANCELLED)
                done += 1
        if len(left) > CANCELLED_AT_ONCE:
            self.followups.append(replace(command, left=left[CANCELLED_AT_ONCE:], done=done))
        else:
            self._reply(command, views.CancelledJobs(tenant=command.wanted.tenant, jobs=done))

    # Conditions of a job's start.

    def look_at_conditions(self) -> None:
        """Hold, release and cancel jobs as the conditions of their start have it. Called once all that arrived was taken."""
        conditions, by = self._state.conditions, views.Actor.SERVICE.value
        for job, state in self._ending.items():
            conditions.note_end(job, state)
            if not self._state.records[job].open_runs():
                conditions.note_gone(job)
        if conditions.next_time() > self._now:
            return
        found = conditions.look(self._now, self._is_held, self._keeps_turn)
        for job in found.barred:
            text = next(iter(conditions.texts(job, self._state.records, self._now)), "")
            self.batch.add(Held(job), by=by, **{CONDITION: text})
        for job, text in found.opened.items():
            self.batch.add(Released(job), by=by, **{CONDITION: text})
        for job, text in found.lost.items():
            self.batch.add(Cancelled(job), by=by, **{CONDITION: text})

    def _is_held(self, job: str) -> bool:
        """Whether the owner of a job wants it held, as of this batch."""
        record = self._state.records.get(job)
        return self._held.get(job, record is not None and record.held)

    def _keeps_turn(self, job: str) -> bool:
        """Whether a job that has its turn in its array may go on, or has processes that are still to leave."""
        record = self._state.records.get(job)
        if record is None or record.open_runs():
            return record is not None
        return record.finished is None and job not in self._ending and not self._is_held(job)

    def _ends_of(self, jobs: tuple[str, ...]) -> dict[str, tuple[views.JobState, bool]]:
        return ends_of(self._state, self._deps.store, jobs)

    # News. Its epoch says which run it is about; news of a run that is unknown, or known to have ended, is dropped.

    def _hear(self, news: RunEvent) -> None:
        record = self._state.records.get(news.job)
        run = None if record is None else record.run(news.epoch)
        if record is None or run is None or run.ended is not None:
            return
        if isinstance(news, RunProgressed):
            self._progressed(record, run, news)
        elif isinstance(news, RunEnded):
            self._ended(record, run, news)
        elif run.began is None:
            record.begin_run(run, max(run.started, min(news.at, self._now)), news.begun)
            self.batch.touched.add(news.job)

    def _progressed(self, record: JobRecord, run: RunRecord, news: RunProgressed) -> None:
        record.steps, record.throughput, record.loss = news.steps, news.throughput, news.loss
        if news.total is not None or news.steps > (record.total or inf):  # further than what was taken for the end
            record.total = news.total
        record.checkpoint = news.checkpoint if news.checkpoint is not None else record.checkpoint
        if run.attached is None and record.can_yield(run, news):
            run.attached = self._now
            self.batch.touched.add(news.job)
            self.batch.add(Attached(news.job, news.epoch))
            if record.current is run and not defers_hold(record):
                self._hold_now(record)
        if news.loss is None:
            return
        last = self._loss_reported.get(news.job)
        age = self._now - (self._now if record.started is None else record.started)
        if last is None or self._now - last >= max(LOSS_EVERY, LOSS_PART * age):
            self._loss_reported[news.job] = self._now
            self.batch.add(Progressed(news.job, news.epoch, self._work(record, news.steps), news.loss))

    def _ended(self, record: JobRecord, run: RunRecord, news: RunEnded) -> None:
        self._loss_reported.pop(news.job, None)
        self._deps.metrics.ended.labels(news.how.value).inc()
        values = {"how": news.how.value, "cause": news.cause, "codes": news.codes}
        self._deps.log.info("run-ended", job=news.job, epoch=news.epoch, **values)
        steps = self._work(record, news.steps)
        is_current = record.current is run and self._lost.isdisjoint(run.gpus)
        record.end_run(run, news, self._now)
        self._state.note_stopping(record)
        self._state.conditions.touch(news.job)
        if record.ended is not None:
            self._state.conditions.note_gone(news.job)
        self.batch.touched.add(news.job)
        if record.finished is not None or news.job in self._finished:
            return
        note: dict[str, object] = {"codes": news.codes, "exit": run.exit, "cause": news.cause, "steps": news.steps}
        if news.how is RunEnding.FINISHED:
            self._finished.add(news.job)
            self._ending.setdefault(news.job, views.JobState.SUCCEEDED)
            self.batch.add(Finished(news.job, news.epoch), **note)
        elif is_current:
            self.batch.add(self._failure(news, record, steps), **note)
            self._hold_now(record)
        else:
            self.batch.add(Stopped(news.job, news.epoch, steps), **note)

    def _failure(self, news: RunEnded, record: JobRecord, steps: float) -> Failed:
        """The failure of a run that ended by itself; whether it counts against the job's retries depends on the cause."""
        cause = "job-preempted" if news.how is RunEnding.YIELDED else news.cause or "no-signature"
        # A run that was lost with its runner had replicas: it was killed, and there is no node to wait for. If its node is
        # lost too, the core hears that first, and the run is not the job's current one any more. Without replicas no runner
        # could be started at all, or the node was lost before that: the core waits a while.
        if cause == LOST and news.codes:
            cause = KILLED
        shell_codes = (code if code is None or code >= 0 else 128 - code for code in news.codes)
        forgiven = next((code for code in shell_codes if code in record.forgiven), None)
        if forgiven is not None and cause != OVERDUE:
            cause = f"exit code {forgiven}, which is retried"
        elif cause != KILLED and verdict(cause) is not Verdict.TRANSIENT:
            record.faults += 1
        most = self._deps.retries if record.on_errors is None else record.on_errors
        final = record.faults > most or record.failures >= MOST_FAILURES or cause == OVERDUE
        return Failed(news.job, news.epoch, cause, steps, final=final)

    # Nodes. The core is told what concerns it; what does not is noted for the log of events.

    def _hear_of_node(self, news: NodeReport) -> None:
        """Take a report. One that says what is known already changes nothing but the evidence."""
        place, state = self._state.places.get(news.node.name), self._state
        is_lost = news.state is NodeState.LOST
        self.reports.append(news)
        if place is None or (place[1] != news.node and not is_lost):
            return
        (index, node), name = place, news.node.name
        record = state.nodes.get(name) or NodeRecord(name)
        before, was_known, withheld = record.state, record.since is not None, record.withheld
        restriction = record.restriction(index, node.gpus)
        if before is NodeState.LOST and news.state is NodeState.UNREACHABLE:
            return  # it is lost until it takes orders
        if before is news.state and was_known and record.evidence == news.evidence and withheld == withheld_slots(news):
            return
        state.nodes[name] = record
        record.report(news, self._now)
        self.batch.nodes.add(name)
        self._note_withheld(record, withheld)
        if record.restriction(index, node.gpus) != restriction:
            self.batch.add(record.restriction(index, node.gpus))
        if before is news.state and was_known:
            return
        if is_lost:
            self._lost.add(name)
            self.batch.add(NodeLost(index))
            self._hold_lost(name)
            self._note_node("node-lost", name, f"is lost: {news.evidence}")
        elif before is NodeState.LOST:
            self.batch.add(NodeReturned(index))
            self._note_node("node-returned", name, f"is back: {news.evidence}")
        elif news.state is NodeState.UNREACHABLE:
            self._note_node("node-unreachable", name, f"cannot be reached; its runs may go on: {news.evidence}")
        else:
            self._note_node("node-reachable" if was_known else "node-joined", name, news.evidence)

    def _note_withheld(self, record: NodeRecord, before: tuple[int, ...]) -> None:
        """GPUs of a node are used by others, or not any more."""
        if record.withheld == before:
            return
        slots = ", ".join(map(str, record.withheld))
        text = f"GPUs {slots} are used by others, and not given out" if slots else "all its GPUs can be given out again"
        self._note_node("node-withheld", record.name, f"{text}: {record.evidence}")

    def _change_node(self, command: api.ChangeNode) -> None:
        name, by = command.node, command.by.name
        place = self._state.places.get(name)
        if place is None:
            known = "" if self._state.places else " (no node has joined the cluster yet)"
            text = f"{UnknownNameError('node', name, self._state.places)}{known}"
            refuse(command, RequestRefusedError(RefusalCode.UNKNOWN, text))
            return
        index, node = place
        record = self._state.nodes.setdefault(name, NodeRecord(name))
        if command.is_drain and record.drained is None:
            record.drain(self._now, by, command.reason)
            because = f": {command.reason}" if command.reason else ""
            self.batch.note_node("node-drained", name, by, f"drained: nothing starts there, and its runs leave{because}")
            self.batch.add(record.restriction(index, node.gpus))
        elif command.is_drain and command.reason not in (None, record.reason):
            record.reason = command.reason
            self.batch.note_node("node-drained", name, by, f"stays drained: {command.reason}")
        elif not command.is_drain and record.drained is not None:
            record.open()
            self.batch.note_node("node-opened", name, by, "given back: it takes new runs again")
            self.batch.add(record.restriction(index, node.gpus))
        # As it is after the commit, hence read late.
        state, now = self._state, self._now
        self.batch.replies.append(lambda: fulfil(command, node_row(state, name, now)))

    def note_empty_nodes(self) -> None:
        """Note which drained nodes nothing runs on any more. Called once all that arrived was taken."""
        draining = [each for each in self._state.nodes.values() if each.drained is not None and each.emptied is None]
        if not draining:
            return
        records, jobs = self._state.records, {**self._state.running, **self._state.stopping}
        used = {node for job in jobs for run in records[job].open_runs() for node in run.gpus}
        for each in draining:
            if each.name not in used:
                each.emptied = self._now
                self._note_node("node-empty", each.name, "nothing runs there any more")

    def _note_node(self, kind: str, node: str, text: str) -> None:
        self.batch.note_node(kind, node, views.Actor.SERVICE.value, text)

    def _hold_now(self, record: JobRecord) -> None:
        """Carry out a hold that was deferred, if there is one: it loses no work any more."""
        if record.held and record.job.id not in self._hold_told:
            self._hold_told.add(record.job.id)
            self._state.conditions.touch(record.job.id)
            self.batch.add(Held(record.job.id))

    def _hold_lost(self, node: str) -> None:
        """Carry out the deferred holds of jobs that run on a node which is lost: they have nothing left to lose."""
        for record in (self._state.records[job] for job in self._state.running):
            if record.current is not None and node in record.current.gpus:
                self._hold_now(record)

    def _work(self, record: JobRecord, steps: float | None) -> float:
        """Steps as the worker counts them in the core's units, which may be seconds on the reference type."""
        job, core = record.job, self._state.scheduler.state
        row = core.rows.get(job.id)
        believed = 0.0 if row is None else core.columns.done_before(row)
        if steps is None:
            return believed
        if job.duration is None or job.steps is not None:
            return steps
        return job.duration * min(1.0, steps / record.total) if record.total else believed


def ends_of(state: ServiceState, store: Store, jobs: tuple[str, ...]) -> dict[str, tuple[views.JobState, bool]]:
    """Of some jobs, those that have ended, with their final states, and whether all their processes are gone.

    One of which nothing is known any more has failed.
    """
    known = {job: state.records.get(job) for job in jobs}
    gone = [job for job, record in known.items() if record is None]
    states = dict.fromkeys(gone, views.JobState.FAILED) | store.final_states(gone)
    found = {job: (each, True) for job, each in states.items()}
    live = (record for record in known.values() if record is not None and record.finished is not None)
    return found | {record.job.id: (record.state, record.ended is not None) for record in live}


def _changed(state: ServiceState, record: JobRecord, verb: Verb, text: str | None, now: float) -> views.CommandResult:
    """What became of a command for a job. A release ends its owner's hold alone."""
    waits = state.conditions.texts(record.job.id, state.records, now) if verb is Verb.RELEASE else []
    if waits:
        text = f"no longer held by its owner; it {waits[0]}"
    return views.CommandResult(job=record.job.id, state=record.state, text=text)


def late_news(
    news: Sequence[RunEvent | NodeReport], since: float
) -> tuple[list[list[RunEvent | NodeReport]], list[RunEvent | NodeReport]]:
    """Split off what ended before `since`, in the order of the ends; and the rest.

    What ended is a run, with all its news; or a node that is lost by now, with all reports of it.
    """
    last = {each.node.name: each for each in news if isinstance(each, NodeReport)}
    late: list[RunEnded | NodeReport] = [each for each in last.values() if each.state is NodeState.LOST and each.at < since]
    late += [each for each in news if isinstance(each, RunEnded) and each.at < since]
    lost = max((each.at for each in late if isinstance(each, NodeReport)), default=-inf)
    late.sort(key=lambda each: max(each.at, lost) if is_lost_run(each) else each.at)
    groups: dict[object, list[RunEvent | NodeReport]] = {_about(each): [] for each in late}
    rest: list[RunEvent | NodeReport] = []
    for each in news:
        groups.get(_about(each), rest).append(each)
    return [sorted(group, key=lambda each: isinstance(each, RunEnded)) for group in groups.values()], rest


def is_lost_run(news: RunEvent | NodeReport) -> bool:
    """Whether a run has ended because its node, or its runner, was lost. The loss of the node may be reported after it."""
    return isinstance(news, RunEnded) and news.how is RunEnding.FAILED and news.cause == LOST


def _about(news: RunEvent | NodeReport) -> str | tuple[str, int]:
    """Which node or run a piece of news is about."""
    return news.node.name if isinstance(news, NodeReport) else (news.job, news.epoch)
