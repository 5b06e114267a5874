"""The engine as the API sees it: wishes go into the loop, answers are read off the situation and the store."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

from poise import __version__
from poise.scheduler.model.units import counted
from poise.service.server.commands import (
    CancelTenant,
    ChangeJobs,
    SetPolicy,
    SetWeight,
    SubmitJobs,
    Verb,
    grant,
)
from poise.service.server.engine import ServiceEngine
from poise.service.server.engine_api import RefusalCode, RequestRefusedError
from poise.service.server.event_log import EventReader
from poise.service.server.explain import ended_reason, reason_counts, reason_of, why
from poise.service.server.queue_view import PageRequest, nodes, page_of, places_of, shares
from poise.service.server.records import JobRecord
from poise.service.server.storage.damaged_jobs import DamagedRowError, request_of, set_aside
from poise.service.server.storage.damaged_jobs import read as read_row
from poise.service.server.storage.store import Ended, JobRowText, Named, Reader
from poise.service.wire.request import Replicas, Submission, notes_on
from poise.service.wire.views import (
    Account,
    CancelledJobs,
    CommandResult,
    EventPage,
    JobDetail,
    JobRow,
    JobState,
    Log,
    NodeList,
    QueuePage,
    ReasonView,
    ServiceView,
    Shares,
    SubmittedView,
    WhyView,
)

Answer = TypeVar("Answer")


class LiveService:
    """Implements `server.seam.Engine`."""

    def __init__(self, loop: ServiceEngine) -> None:
        self._loop = loop
        self._readers = threading.local()

    def start(self) -> None:
        """Begin; raises what goes wrong with that."""
        self._loop.start()

    def close(self) -> None:
        """End; what runs goes on."""
        self._loop.close()

    @property
    def failed(self) -> BaseException | None:
        """What the engine died of, if it did."""
        return self._loop.failed

    def submit(self, by: Account, submission: Submission) -> "Future[SubmittedView]":
        """Take jobs, all or none. What was taken before is so whatever has become of its folder or its program since."""
        wish = SubmitJobs(by, submission)
        ids = self._reader().submissions.taken(by, submission)
        if ids is not None:
            grant(wish.reply, SubmittedView(jobs=ids, notes=notes_on(submission.jobs)))
            return wish.reply
        intake = self._loop.situation.intake
        for request in submission.jobs:
            intake.admit(request)
        self._loop.put(wish)
        return wish.reply

    def cancel(self, by: Account, job: str) -> "Future[CommandResult]":
        """Withdraw a job."""
        return self._change(by, job, Verb.CANCEL)

    def cancel_all(self, by: Account, tenant: str) -> "Future[CancelledJobs]":
        """Withdraw all jobs of a tenant that have not ended."""
        wish = CancelTenant(by, tenant)
        self._loop.put(wish)
        return wish.reply

    def hold(self, by: Account, job: str) -> "Future[CommandResult]":
        """Keep a job from running."""
        return self._change(by, job, Verb.HOLD)

    def stop(self, by: Account, job: str) -> "Future[CommandResult]":
        """Hold a job, and end its run even if that loses work."""
        return self._change(by, job, Verb.STOP)

    def release(self, by: Account, job: str) -> "Future[CommandResult]":
        """End a hold."""
        return self._change(by, job, Verb.RELEASE)

    def _change(self, by: Account, job: str, verb: Verb) -> "Future[CommandResult]":
        self.owner(job)
        wish = ChangeJobs(by, job, verb)
        self._loop.put(wish)
        return wish.reply

    def set_weight(self, by: Account, tenant: str, weight: float) -> "Future[Shares]":
        """Change a tenant's share."""
        wish = SetWeight(by, tenant, weight)
        self._loop.put(wish)
        return _then(wish.reply, self.shares)

    def set_policy(self, by: Account, policy: str) -> "Future[ServiceView]":
        """Go on under another policy."""
        wish = SetPolicy(by, policy)
        self._loop.put(wish)
        return _then(wish.reply, self.service)

    def owner(self, job: str) -> str:
        """The tenant that a job belongs to."""
        return self._record(job)[0].job.tenant

    def queue(
        self,
        *,
        states: frozenset[JobState],
        tenant: str | None,
        app: str | None,
        limit: int,
        offset: int,
        name: str | None = None,
    ) -> QueuePage:
        """Jobs in scheduling order; no states: all that have not ended. Ended ones come last, the latest first."""
        wants_ended = any(state.is_final for state in states)
        with self._loop.lock:
            situation = self._loop.situation
            page = page_of(situation, PageRequest(states, tenant, app, name), limit=limit, offset=offset)
            rows = [self._row(situation.records[name], page.places.get(name)) for name in page.names]
        counts, before = page.counts, page.counts.total()
        if wants_ended:
            reader, wanted = self._reader(), Ended(tuple(sorted(state.value for state in states)), tenant, app, name)
            found = reader.ended(wanted, limit=limit - len(rows), offset=max(0, offset - before))
            listed = {row.id for row in rows}  # of these some may have ended since
            ended = [_read(each) for each in found]
            rows += [self._ended_row(each) for each in ended if each.job.id not in listed]
            counts += reader.ended_counts(wanted)
            counts -= Counter(each.state.value for each in ended if each.job.id in listed)
        return QueuePage(jobs=tuple(rows), total=counts.total(), counts=dict(counts))

    def _row(self, record: JobRecord, position: int | None) -> JobRow:
        situation = self._loop.situation
        now, run = self._loop.clock.now(), record.current
        reason = ended_reason(record) if record.finished is not None else reason_of(situation, record, now)
        spent = 0.0 if record.finished is not None else now - record.since
        ran, waited = (0.0, spent) if run is None else (spent, 0.0)
        share = situation.tally.held.share(record.job.tenant)
        return _row(record, reason, position, share, ran=ran, waited=waited)

    @staticmethod
    def _ended_row(record: JobRecord) -> JobRow:
        return _row(record, ended_reason(record), None, None, ran=0.0, waited=0.0)

    def show(self, job: str) -> JobDetail:
        """Everything about a job, its request included."""
        with self._loop.lock:
            record, request = self._record(job)
            situation = self._loop.situation
            if job not in situation.records:
                return _detail(record, self._ended_row(record), request)
            place = places_of(situation).get(job) if record.current is None else None
            return _detail(record, self._row(record, place), request)

    def why(self, job: str) -> WhyView:
        """The one dominant reason."""
        with self._loop.lock:
            record = self._loop.situation.records.get(job) or self._record(job)[0]
            return why(self._loop.situation, record, self._loop.clock.now())

    def log(self, job: str, *, replica: int, offset: int, limit: int) -> Log:
        """At most `limit` bytes of a replica's log from `offset` on; a negative offset counts from the end."""
        record, request = self._record(job)
        ended = record.finished is not None and not record.open_runs()
        try:
            found = self._loop.backend.log(job, replica, offset, limit)
        except PermissionError as error:  # that does not pass by itself
            raise RequestRefusedError(
                RefusalCode.UNKNOWN, f"job {job} has no log that the service may read: {error}"
            ) from error
        except OSError as error:
            raise RequestRefusedError(
                RefusalCode.NOT_READY, f"the log of job {job} cannot be read at the moment: {error}"
            ) from error
        text = found.text.decode("utf-8", "replace")
        if found.next == 0:
            _require_replica(record, request, replica)
        return Log(text=text, offset=found.offset, next=found.next, ended=ended and not text)

    def nodes(self) -> NodeList:
        """All nodes and who holds them."""
        with self._loop.lock:
            return nodes(self._loop.situation)

    def shares(self) -> Shares:
        """All tenants."""
        with self._loop.lock:
            return shares(self._loop.situation, self._loop.clock.now())

    def events(self, *, after: int, job: str | None, tenant: str | None, limit: int) -> EventPage:
        """What happened after that number of the journal (negative: the last so many)."""
        if job is not None:
            self.owner(job)
        telling = EventReader(self._reader(), Named(job, tenant))
        return telling.latest(min(-after, limit)) if after < 0 else telling.after(after, limit)

    def states(self) -> dict[str, int]:
        """How many jobs are in which state, ended ones too."""
        with self._loop.lock:
            return dict(self._loop.situation.tally.states + self._loop.situation.ended)

    def reasons(self) -> dict[str, int]:
        """How many jobs that have not ended have which reason."""
        with self._loop.lock:
            return reason_counts(self._loop.situation)

    def service(self) -> ServiceView:
        """What runs here."""
        loop = self._loop
        header, trouble = loop.situation.header, loop.trouble
        return ServiceView(
            version=__version__, policy=header.policy, cluster=str(header.cluster), round=header.settings.round,
            now=loop.clock.now(), started=loop.began, ready=trouble is None,
            problem=None if trouble is None else str(trouble),
            jobs=len(loop.situation.records), warnings=loop.parts.warnings,
        )  # fmt: skip

    def _record(self, job: str) -> tuple[JobRecord, str]:
        """A job's record and request; raises RefusedError for one that was never submitted."""
        row = self._reader().job(job)
        if row is None:
            raise RequestRefusedError(RefusalCode.UNKNOWN, f"there is no job {job!r}")
        return self._loop.situation.records.get(job) or _read(row), row.request

    def _reader(self) -> Reader:
        reader: Reader | None = getattr(self._readers, "reader", None)
        if reader is None:
            reader = self._readers.reader = self._loop.store.reader()
        return reader


def _read(row: JobRowText) -> JobRecord:
    """A job that has ended; of one that cannot be read, that it cannot."""
    try:
        return read_row(row)
    except DamagedRowError as error:
        return set_aside(row, str(error), row.ended or 0.0).record


def _require_replica(record: JobRecord, request: str, replica: int) -> None:
    """Raises RefusedError for a replica that no run has had; a job that has not run yet may come to have it."""
    per_gpu = request_of(request).replicas is Replicas.GPU
    most = max((run.count if per_gpu else len(run.gpus) for run in tuple(record.runs)), default=None)
    if most is not None and replica >= most:
        raise RequestRefusedError(
            RefusalCode.WRONG, f"job {record.job.id} has {counted(most, 'replica')}; the first is replica 0"
        )


def _row(
    record: JobRecord, reason: ReasonView, position: int | None, share: float | None, *, ran: float, waited: float
) -> JobRow:
    job, run = record.job, record.current
    return JobRow(
        id=job.id, name=record.name, tenant=job.tenant, app=job.app, state=record.state, flags=record.flagged(),
        reason=reason, position=position, gpus=0 if run is None else run.count, wanted=job.gpus,
        gpu_type=None if run is None else run.gpu_type, gpu_types=job.gpu_types, submitted=job.submitted,
        started=record.started, finished=record.finished, waited=record.waited + waited, ran=record.ran + ran,
        restarts=max(0, record.launches - 1), eta=None, share=share,
    )  # fmt: skip


def _detail(record: JobRecord, row: JobRow, request: str) -> JobDetail:
    return JobDetail(
        job=row, preemptions=record.preemptions, failures=record.failures,
        gpu_seconds=record.gpu_seconds + row.gpus * (row.ran - record.ran),
        lost_gpu_seconds=record.lost, steps=record.steps, total_steps=record.total, checkpoint_steps=record.checkpoint,
        throughput=record.throughput, loss=record.loss, cause=record.cause,
        runs=tuple(run.view() for run in record.runs), request=request_of(request),
    )  # fmt: skip


def _then(granted: "Future[None]", answer: Callable[[], Answer]) -> "Future[Answer]":
    """What is to be read once the wish is granted."""
    reply: Future[Answer] = Future()

    def done(_: object) -> None:
        with suppress(InvalidStateError):
            try:
                granted.result()
                reply.set_result(answer())
            except Exception as error:
                reply.set_exception(error)

    granted.add_done_callback(done)
    return reply
