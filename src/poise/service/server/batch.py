"""One instant in the making: wishes and news become facts for the core, and answers that are due once they are kept."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import repeat
from math import inf

from poise.scheduler.model.event import (
    Attached,
    Cancelled,
    Failed,
    Finished,
    Held,
    Progressed,
    Released,
    Stopped,
    Submitted,
)
from poise.scheduler.model.failures import Verdict, verdict
from poise.scheduler.model.job import Yields
from poise.scheduler.model.units import format_seconds
from poise.service.backends.api import RunBegan, RunEnded, RunEnding, RunEvent, RunProgressed
from poise.service.server.admission import job_of
from poise.service.server.commands import (
    AWAITED,
    CancelTenant,
    ChangeJobs,
    SetPolicy,
    SetWeight,
    SubmitJobs,
    Verb,
    Wish,
    grant,
    refuse,
)
from poise.service.server.dependencies import Dependencies
from poise.service.server.engine_api import RefusalCode, RequestRefusedError
from poise.service.server.quotas import size_of
from poise.service.server.records import LOST, JobRecord, RunRecord
from poise.service.server.service_state import BatchFacts, ServiceState
from poise.service.server.storage.store import Store, check_same, holder
from poise.service.wire import views
from poise.service.wire.request import JobRequest, notes_on

# What a hold does to a job that runs: it is stopped if that loses nothing that its owner has not agreed to lose.
#
# Otherwise it goes on, and keeps its GPUs, until it has reported that it can save its work, or has ended. Until then
# only its
# record says that it is held (`is_awaited`). The core does not know: nothing is decided about GPUs that are not free.


def is_awaited(record: JobRecord) -> bool:
    """The job is to be held, and goes on until that costs nothing."""
    return record.held and _running(record) is not None


def defers(record: JobRecord) -> bool:
    """To hold the job now would lose work that its owner has not agreed to lose."""
    run = _running(record)
    return run is not None and record.job.yields is not Yields.ANY_TIME and not _can_save(record, run)


def awaited(record: JobRecord) -> str:
    """What a job goes on for that is to be held."""
    if record.job.yields is Yields.NEVER:
        return "it is held when it ends, as its owner wants it never to be preempted"
    return "it is held as soon as it has reported that it can save its work, or when it ends"


def remedy(record: JobRecord) -> str:
    """How it is made to leave all the same, and what that costs."""
    what = "sends it TERM now" if record.job.yields is Yields.NEVER else "asks it to save and to leave"
    return f"poise hold --stop {record.job.id} {what}{_cost(record)}"


def outcome(record: JobRecord, verb: Verb) -> str | None:
    """What comes of a wish that is about to be met; None: the state says it all."""
    run = _running(record)
    if verb is Verb.RELEASE:
        return "it goes on, and is no longer to be held" if is_awaited(record) else None
    if run is None or verb is Verb.CANCEL:
        return None
    if verb is Verb.HOLD and defers(record):
        return f"it goes on and keeps its GPUs: {awaited(record)}; {remedy(record)}"
    if _can_save(record, run):
        return "it is asked to save its work and to leave"
    if record.job.yields is Yields.ANY_TIME:
        return f"it gets TERM now, as --preemption restart has it{_cost(record)}"
    what = "gets TERM now" if record.job.yields is Yields.NEVER else "is asked to save and to leave"
    return f"it {what}{_cost(record)}"


def _cost(record: JobRecord) -> str:
    """How long a job has that may not be able to save, and what is lost then. Only `checkpoint` gives it any time."""
    if record.job.yields is not Yields.ATTACHED:
        return ": what it has not saved itself is lost"
    return f", with TERM at its deadline of {format_seconds(record.deadline)}: what it has not saved by then is lost"


def _running(record: JobRecord) -> RunRecord | None:
    """The run that has GPUs, and has not ended as far as is known."""
    run = record.current
    return run if run is not None and run.ended is None else None


def _can_save(record: JobRecord, run: RunRecord) -> bool:
    return record.job.yields is Yields.ATTACHED and run.attached is not None


MOST_QUEUED = 200_000
"""Jobs that have not ended."""
CANCELLED_AT_ONCE = 512
"""Jobs of a tenant that one instant withdraws, if all are to be."""
MOST_FAILURES = 100
"""Failed runs of a job that are forgiven if it was never its own fault."""
LOSS_EVERY = 30.0
"""Seconds between two reports of a job's loss to the core, at least."""
LOSS_PART = 1 / 16
"""Part of the time since a job first started that has to pass between two: what is reported in a month is some 160 points,
each by a sixteenth further than the one before it, and not 86,400."""

KILLED = "killed"
"""Cause of death of a run that somebody killed from outside: not its own fault, and no reason to wait. So is what went
with its runner, unless no runner could be started at all (a run without replicas)."""
OVERDUE = "max-duration"
"""Of a job that has run for as long as it may."""

_FACTS: dict[Verb, Callable[[str], Cancelled | Held | Released]] = {
    Verb.CANCEL: Cancelled,
    Verb.HOLD: Held,
    Verb.STOP: Held,
    Verb.RELEASE: Released,
}


class Batch:
    """The facts of one instant in the making, and the answers that are due once they are kept."""

    def __init__(
        self, situation: ServiceState, store: Store, parts: Dependencies, losses: dict[str, float], now: float
    ) -> None:
        self.now = now
        self.facts = BatchFacts()
        self.chapters: list[SetWeight | SetPolicy] = []
        self.unfinished: list[CancelTenant] = []
        """Wishes that go on in the next instant."""
        self._situation = situation
        self._store = store
        self._parts = parts
        self._losses = losses
        self._answers: list[Callable[[], None]] = []
        self._keys: dict[tuple[str | None, str], tuple[tuple[str, ...], tuple[JobRequest, ...]]] = {}
        """Ids and requests of submissions of this instant, by key and whose it is."""
        self._next = 0
        self._finished: set[str] = set()
        self._told: set[str] = set()
        """Jobs whose hold, or release, the core is told of in this instant."""

    def take(self, item: Wish | RunEvent) -> None:
        """One wish, or one piece of news."""
        match item:
            case SubmitJobs():
                self._submit(item)
            case ChangeJobs():
                self._change(item)
            case CancelTenant():
                self._withdraw(item)
            case SetWeight() | SetPolicy():
                self.chapters.append(item)
            case RunBegan():
                self._began(item)
            case RunProgressed():
                self._progressed(item)
            case RunEnded():
                self._ended(item)

    def answer(self) -> None:
        """All of it is kept: say so."""
        for answer in self._answers:
            answer()

    def _submit(self, wish: SubmitJobs) -> None:
        texts: Sequence[str] = ()
        try:
            ids = self._taken(wish)
            if ids is None:
                texts = [request.model_dump_json(exclude_defaults=True) for request in wish.submission.jobs]
                self._check_room(wish.by, texts)
        except RequestRefusedError as error:
            if error.bound is not None:
                self._parts.metrics.refused(error.bound)
            refuse(wish, error)
            return
        if ids is None:
            ids = tuple(map(self._enter, wish.submission.jobs, texts, repeat(wish.by)))
            self._note_key(wish, ids)
        answer = views.SubmittedView(jobs=ids, notes=notes_on(wish.submission.jobs))
        self._answers.append(lambda: grant(wish.reply, answer))

    def _taken(self, wish: SubmitJobs) -> tuple[str, ...] | None:
        """Ids of its jobs if it was taken before; RefusedError if its key was that of another submission."""
        before = self._keys.get((wish.submission.key, holder(wish.by)))
        if before is None:
            return self._store.submissions.taken(wish.by, wish.submission)
        check_same(wish.submission, before[1])
        return before[0]

    def _note_key(self, wish: SubmitJobs, ids: tuple[str, ...]) -> None:
        key, whose = wish.submission.key, holder(wish.by)
        if key is not None:
            self._keys[key, whose] = ids, wish.submission.jobs
            self.facts.keys.append((key, whose, json.dumps(ids)))

    def _check_room(self, by: views.Account, texts: Sequence[str]) -> None:
        queued = len(self._situation.records) + len(self.facts.arrivals)
        if queued + len(texts) > MOST_QUEUED:
            text = f"{queued:,} jobs are queued, of at most {MOST_QUEUED:,}; try again later"
            raise RequestRefusedError(RefusalCode.FULL, text, bound="all-jobs")
        size = sum(map(size_of, texts))
        self._situation.usage.check(by, len(texts), size, self.now, self._parts.allowance)

    def _enter(self, request: JobRequest, text: str, by: views.Account) -> str:
        """A new job; `text`: its request as JSON. It counts at once: the next one of this instant comes on top."""
        if not self._next:
            self._next = max(self._store.highest, self._parts.taken)
        self._next += 1
        tenant = request.tenant or by.tenant
        situation = self._situation
        job = job_of(request, str(self._next), self.now, tenant, situation.weight_of(tenant))
        kind, estimate, steps = situation.intake.resolve(job)
        for estimated in situation.intake.news(job, kind, estimate):
            self.facts.add(estimated)
        self.facts.add(Submitted(job, kind, steps), by=by.name)
        if request.hold:
            self.facts.add(Held(job.id), by=by.name)
        record = JobRecord.of(job, request, by.name, size_of(text))
        situation.usage.submitted(record)
        self.facts.arrivals.append((record, text))
        return job.id

    def _change(self, wish: ChangeJobs) -> None:
        record = self._situation.records.get(wish.job)
        if record is None or record.finished is not None or wish.job in self._finished:
            self._change_ended(wish, self._store.final_state(wish.job) if record is None else record.state)
            return
        if wish.verb is not Verb.CANCEL:  # which makes room, and happens once to a job
            try:
                self._situation.usage.changed(wish.by, self.now, self._parts.allowance)
            except RequestRefusedError as error:
                refuse(wish, error)
                return
        text = outcome(record, wish.verb)
        if not self._is_kept_for_later(wish, record):
            self._told.add(wish.job)
            self.facts.add(_FACTS[wish.verb](wish.job), by=wish.by.name)
        self._answers.append(lambda: grant(wish.reply, views.CommandResult(job=wish.job, state=record.state, text=text)))

    def _is_kept_for_later(self, wish: ChangeJobs, record: JobRecord) -> bool:
        """A hold that would lose work now, or the end of one that was never met: the core need not know of either."""
        holds = wish.verb is Verb.HOLD and defers(record)
        lifts = wish.verb is Verb.RELEASE and is_awaited(record)
        if wish.job in self._told or not (holds or lifts):
            return False
        record.held = holds
        self.facts.touched.add(wish.job)
        self.facts.notes.setdefault(AWAITED, {})[wish.job] = [wish.by.name, holds]
        return True

    def _hold_at_last(self, record: JobRecord) -> None:
        """A job that was to be held once that costs nothing: it costs nothing now."""
        if record.held and record.job.id not in self._told:
            self._told.add(record.job.id)
            self.facts.add(Held(record.job.id))

    def _withdraw(self, wish: CancelTenant) -> None:
        """The next jobs of a tenant; those that came after the wish are not meant."""
        left = self._all_of(wish.tenant) if wish.left is None else wish.left
        done = wish.done
        for job in left[:CANCELLED_AT_ONCE]:
            record = self._situation.records.get(job)
            if record is not None and record.finished is None and job not in self._finished:
                self.facts.add(Cancelled(job), by=wish.by.name)
                done += 1
        if len(left) > CANCELLED_AT_ONCE:
            self.unfinished.append(replace(wish, left=left[CANCELLED_AT_ONCE:], done=done))
        else:
            self._answers.append(lambda: grant(wish.reply, views.CancelledJobs(tenant=wish.tenant, jobs=done)))

    def _all_of(self, tenant: str) -> tuple[str, ...]:
        """Jobs of a tenant, those that wait first: others of them would be started in the place of one that runs."""
        records = self._situation.records
        return tuple(sorted(self._situation.tally.jobs.get(tenant, ()), key=lambda job: records[job].current is not None))

    def _change_ended(self, wish: ChangeJobs, state: str) -> None:
        """Of a job that has ended nothing can be wanted but what is so: one that was cancelled may be cancelled again."""
        if wish.verb is Verb.CANCEL and state == views.JobState.CANCELLED:
            self._answers.append(
                lambda: grant(wish.reply, views.CommandResult(job=wish.job, state=views.JobState.CANCELLED))
            )
            return
        stands = f"is {state}" if views.JobState(state).is_final else "has ended"
        refuse(wish, RequestRefusedError(RefusalCode.CONFLICT, f"job {wish.job} {stands} already"))

    def _began(self, news: RunBegan) -> None:
        record = self._situation.records.get(news.job)
        run = None if record is None else record.run(news.epoch)
        if record is not None and run is not None and run.ended is run.began is None:
            run.began = max(run.started, min(news.at, self.now))
            record.restate()
            self.facts.touched.add(news.job)

    def _progressed(self, news: RunProgressed) -> None:
        record = self._situation.records.get(news.job)
        run = None if record is None else record.run(news.epoch)
        if record is None or run is None or run.ended is not None:
            return
        record.steps, record.throughput, record.loss = news.steps, news.throughput, news.loss
        if news.total is not None or news.steps > (record.total or inf):  # further than was believed to be the end
            record.total = news.total
        record.checkpoint = news.checkpoint if news.checkpoint is not None else record.checkpoint
        if run.attached is None and record.can_leave(run, news):
            run.attached = self.now
            self.facts.touched.add(news.job)
            self.facts.add(Attached(news.job, news.epoch))
            if record.current is run and not defers(record):
                self._hold_at_last(record)
        if news.loss is not None and self._is_due(record):
            self._losses[news.job] = self.now
            self.facts.add(Progressed(news.job, news.epoch, self._work(record, news.steps), news.loss))

    def _is_due(self, record: JobRecord) -> bool:
        """The core is to hear of a job's loss: the older the job, the more seldom."""
        last = self._losses.get(record.job.id)
        age = self.now - (self.now if record.started is None else record.started)
        return last is None or self.now - last >= max(LOSS_EVERY, LOSS_PART * age)

    def _ended(self, news: RunEnded) -> None:
        record = self._situation.records.get(news.job)
        run = None if record is None else record.run(news.epoch)
        if record is None or run is None or run.ended is not None:
            return
        self._losses.pop(news.job, None)
        self._parts.metrics.ended(news.how.value)
        log = self._parts.log
        log.info("run-ended", job=news.job, epoch=news.epoch, how=news.how.value, cause=news.cause, codes=news.codes)
        steps = self._work(record, news.steps)
        is_current = record.current is run
        record.gone(news, self.now)
        self._situation.watch(record)
        self.facts.touched.add(news.job)
        if record.finished is not None or news.job in self._finished:
            return
        note: dict[str, object] = {"codes": news.codes, "exit": run.exit, "cause": news.cause, "steps": news.steps}
        if news.how is RunEnding.FINISHED:
            self._finished.add(news.job)
            self.facts.add(Finished(news.job, news.epoch), **note)
        elif is_current:
            self._fail(news, record, steps, note)
            self._hold_at_last(record)
        else:
            self.facts.add(Stopped(news.job, news.epoch, steps), **note)

    def _fail(self, news: RunEnded, record: JobRecord, steps: float, note: dict[str, object]) -> None:
        """A run died by itself; how often that is forgiven depends on whose fault it was."""
        yielded = news.how is RunEnding.YIELDED
        cause = "job-preempted" if yielded else news.cause or "no-signature"
        if cause == LOST and news.codes:  # this service runs on the machine that was lost, so it is back: no reason to wait
            cause = KILLED
        forgiven = next((code for code in map(_shell_code, news.codes) if code in record.forgiven), None)
        if forgiven is not None and cause != OVERDUE:
            cause = f"exit code {forgiven}, which is retried"
        elif cause != KILLED and verdict(cause) is not Verdict.TRANSIENT:
            record.faults += 1
        most = self._parts.retries if record.on_errors is None else record.on_errors
        final = record.faults > most or record.failures >= MOST_FAILURES or cause == OVERDUE
        self.facts.add(Failed(news.job, news.epoch, cause, steps, final=final), **note)

    def _work(self, record: JobRecord, steps: float | None) -> float:
        """Steps as the worker counts them, in the core's units: those may be seconds on the reference type."""
        columns, rows = self._situation.scheduler.state.columns, self._situation.scheduler.state.rows
        row = rows.get(record.job.id)
        believed = 0.0 if row is None else columns.done_before(row)
        if steps is None:
            return believed
        job = record.job
        if job.duration is None or job.steps is not None:
            return steps
        return job.duration * min(1.0, steps / record.total) if record.total else believed


def _shell_code(code: int | None) -> int | None:
    """An exit code as shells say it: 128 and the signal's number for what a signal ended."""
    return code if code is None or code >= 0 else 128 - code
