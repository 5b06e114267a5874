"""`LiveService`, the implementation of `ServiceApi`: commands go to the engine, questions are answered from its state.

Methods are called from the threads of the HTTP server. Those that read the live state hold the engine's lock, and answer
within milliseconds; jobs that have ended are read from the store, over one connection per thread.
"""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

from poise import __version__
from poise.engine import outside
from poise.scheduler.model.errors import PoiseError
from poise.scheduler.model.units import counted
from poise.service.server import service_api as api
from poise.service.server.engine import ServiceEngine
from poise.service.server.event_log import EventReader
from poise.service.server.explain import ended_reason, reason_counts, reason_of, why
from poise.service.server.naming import LATEST, Candidate, candidates, meant
from poise.service.server.queue_view import nodes, page_of, positions, shares
from poise.service.server.records import JobRecord
from poise.service.server.service_api import JobFilter, RefusalCode, RequestRefusedError, Verb, fulfil
from poise.service.server.storage.damaged_jobs import DamagedRowError, read_record, request_of, set_aside
from poise.service.server.storage.store import EntryFilter, Reader, StoredJob
from poise.service.server.submission_notes import notes_under
from poise.service.wire import views
from poise.service.wire.after import ids_of, term_of
from poise.service.wire.environments import joined, sha256_of, text_of
from poise.service.wire.moments import format_moment
from poise.service.wire.request import Replicas, Submission
from poise.service.wire.views import Account

Answer = TypeVar("Answer")
MOST_AWAITED_BY_ALL = 100_000  # jobs that the jobs of one submission wait for, counted once for each term that names them
NO_CLUSTER = "no nodes yet"  # in the place of a cluster's specification


class LiveService:
    """The live service as the API sees it; `ServiceApi` documents its methods."""

    def __init__(self, engine: ServiceEngine) -> None:
        self._engine = engine
        self._readers = threading.local()

    def start(self) -> None:
        """Start the engine; raise what goes wrong with that."""
        self._engine.start()

    def close(self) -> None:
        """Stop the engine; jobs go on running."""
        self._engine.close()

    @property
    def failed(self) -> BaseException | None:
        """What the engine died of, if it did."""
        return self._engine.failed

    # Commands.

    def submit(self, by: Account, submission: Submission) -> "Future[views.SubmittedView]":
        """Accept all jobs or none. A repeated submission gets its answer again, even if its jobs could not run by now."""
        command = api.SubmitJobs(by, submission)
        ids = self._reader().submissions.taken(by, submission)
        if ids is not None:
            fulfil(
                command,
                views.SubmittedView(
                    jobs=ids, notes=notes_under(self._engine.state.header.policy, self._engine.deps.notes, submission.jobs)
                ),
            )
            return command.reply
        admission = self._engine.state.admission
        environments = {sha256_of(text): (text, each) for each in submission.environments for text in [text_of(each)]}
        for request in submission.jobs:
            if request.pods is not None:
                raise RequestRefusedError(RefusalCode.WRONG, "pods: only the service itself submits pods of others")
            if request.exported is None:
                admission.admit(request)
            elif request.exported in environments:
                admission.admit(joined(request, environments[request.exported][1]))
            else:
                raise RequestRefusedError(RefusalCode.WRONG, "exported: no environment of the submission has this SHA-256")
        self._check_start(submission)
        for tenant, sha256 in {(each.tenant or by.tenant, each.exported) for each in submission.jobs if each.exported}:
            self._engine.deps.files.keep_environment(tenant, environments[sha256][0], self._reader().shipped_files)
        for tenant, sha256 in {(each.tenant or by.tenant, each.files) for each in submission.jobs if each.files}:
            self._engine.deps.files.require(tenant, sha256)
        self._engine.put(command)
        return command.reply

    def _check_start(self, submission: Submission) -> None:
        """Raise RequestRefusedError for jobs that wait for unknown ones, or whose deadline has passed."""
        now, left = self._engine.clock.now(), MOST_AWAITED_BY_ALL
        for text in dict.fromkeys(text for request in submission.jobs for text in request.after):
            try:
                jobs = ids_of(term_of(text))
            except ValueError as error:
                raise RequestRefusedError(RefusalCode.WRONG, f"after: {error}") from None
            left -= len(jobs)
            if left < 0:
                problem = f"the jobs of one submission wait for at most {MOST_AWAITED_BY_ALL:,} others"
                raise RequestRefusedError(RefusalCode.WRONG, f"after: {problem}")
            if (unknown := self._reader().first_unknown(jobs)) is not None:
                raise RequestRefusedError(RefusalCode.WRONG, f"after: there is no job {unknown!r}")
        for request in submission.jobs:
            if request.deadline is not None and request.deadline <= now:
                text = f"deadline: {format_moment(request.deadline)} has passed; here it is {format_moment(now)}"
                raise RequestRefusedError(RefusalCode.WRONG, text)

    def receive_file(self, tenant: str, sha256: str, piece: views.FilePiece) -> views.FileReceived:
        """Take a piece of an archive."""
        return self._engine.deps.files.receive(tenant, sha256, piece, self._reader().shipped_files)

    def cancel_all(self, by: Account, wanted: JobFilter) -> "Future[views.CancelledJobs]":
        """Cancel all these jobs."""
        command = api.CancelJobs(by, wanted)
        self._engine.put(command)
        return command.reply

    def change(self, by: Account, job: str, verb: Verb) -> "Future[views.CommandResult]":
        """Cancel, hold, stop or release a job."""
        self.owner(job)  # raises for a job that was never submitted
        command = api.ChangeJob(by, job, verb)
        self._engine.put(command)
        return command.reply

    def set_weight(self, by: Account, tenant: str, weight: float) -> "Future[views.Shares]":
        """Change a tenant's share."""
        command = api.SetWeight(by, tenant, weight)
        self._engine.put(command)
        return _then(command.reply, self.shares)

    def set_policy(self, by: Account, policy: str) -> "Future[views.ServiceView]":
        """Switch to another policy: of the catalogue, of a distribution that is installed here, or allowed at the start.

        A client's word imports nothing else: the right to choose a policy is not the right to run any code on this machine.
        """
        try:
            if not outside.find_installed(policy) and outside.is_reference(policy):
                remedy = f"start the service with --allow-policy {outside.base_of(policy)}, or install it as a plug-in"
                raise RequestRefusedError(RefusalCode.WRONG, f"policy {policy!r} is not allowed here; {remedy}")
        except PoiseError as error:  # what is installed is broken
            raise RequestRefusedError(RefusalCode.WRONG, str(error)) from None
        command = api.SetPolicy(by, policy)
        self._engine.put(command)
        return _then(command.reply, self.service)

    def drain(self, by: Account, node: str, reason: str | None) -> "Future[views.NodeRow]":
        """Keep runs away from a node."""
        command = api.ChangeNode(by, node, is_drain=True, reason=reason)
        self._engine.put(command)
        return command.reply

    def return_node(self, by: Account, node: str) -> "Future[views.NodeRow]":
        """End a drain."""
        command = api.ChangeNode(by, node, is_drain=False)
        self._engine.put(command)
        return command.reply

    # Questions.

    def owner(self, job: str) -> str:
        """The tenant of a job."""
        return self._record(job)[0].job.tenant

    def queue(self, wanted: JobFilter, *, limit: int, offset: int) -> views.QueuePage:
        """One page of jobs."""
        with self._engine.lock:
            state = self._engine.state
            page = page_of(state, wanted, limit=limit, offset=offset)
            rows = [self._live_row(state.records[job], page.positions.get(job)) for job in page.jobs]
        counts, before = page.counts, page.counts.total()
        if any(state.is_final for state in wanted.states):
            reader = self._reader()
            found = reader.ended(wanted, limit=limit - len(rows), offset=max(0, offset - before))
            listed = {row.id for row in rows}  # some of these may have ended since
            ended = [_read(each) for each in found]
            rows += [_row(each, ended_reason(each)) for each in ended if each.job.id not in listed]
            counts += reader.ended_counts(wanted)
            counts -= Counter(each.state.value for each in ended if each.job.id in listed)
        return views.QueuePage(jobs=tuple(rows), total=counts.total(), counts=dict(counts))

    def called(self, word: str, tenant: str) -> views.JobsCalled:
        """The jobs that are meant by this word in the place of a name."""
        with self._engine.lock:
            records = tuple(self._engine.state.records.values())
        there = candidates(records, word)
        listed = {each.id for each in there}  # some of these may have ended since
        rows = self._reader().ended_called(word, LATEST)
        ended = (Candidate(*row[:-1], views.JobState(row[-1])) for row in rows if row[0] not in listed)
        return meant([*there, *ended], word, tenant)

    def _live_row(self, record: JobRecord, position: int | None) -> views.JobRow:
        state, now = self._engine.state, self._engine.clock.now()
        reason = reason_of(state, record, now) if record.finished is None else ended_reason(record)
        return _row(record, reason, now, position, state.counts.share(record.job.tenant))

    def show(self, job: str) -> views.JobDetail:
        """Everything about a job."""
        with self._engine.lock:  # to the end: the engine may change the record at any time
            record, request = self._record(job)
            if job not in self._engine.state.records:
                row = _row(record, ended_reason(record))
            else:
                position = positions(self._engine.state).get(job) if record.current is None else None
                row = self._live_row(record, position)
            return views.JobDetail(
                job=row, preemptions=record.preemptions, failures=record.failures,
                gpu_seconds=record.gpu_seconds + row.gpus * (row.ran - record.ran), lost_gpu_seconds=record.lost,
                steps=record.steps, total_steps=record.total, checkpoint_steps=record.checkpoint,
                throughput=record.throughput, loss=record.loss, cause=record.cause,
                runs=tuple(run.view() for run in record.runs), request=request_of(request),
            )  # fmt: skip

    def why(self, job: str) -> views.WhyView:
        """Why a job stands where it stands."""
        with self._engine.lock:
            record = self._engine.state.records.get(job) or self._record(job)[0]
            return why(self._engine.state, record, self._engine.clock.now())

    def reason(self, job: str) -> tuple[str, str] | None:
        """Why a job waits, as code and sentence; None: it does not wait, or is not known."""
        with self._engine.lock:
            record = self._engine.state.records.get(job)
            if record is None or record.current is not None or record.finished is not None:
                return None
            found = reason_of(self._engine.state, record, self._engine.clock.now())
            return found.code, found.text

    def log(self, job: str, *, replica: int, offset: int, limit: int) -> views.Log:
        """A part of a replica's log."""
        record, request = self._record(job)
        ended = record.ended is not None
        try:
            found = self._engine.backend.log(job, replica, offset, limit)
        except PermissionError as error:  # which does not pass by itself
            text = f"job {job} has no log that the service may read: {error}"
            raise RequestRefusedError(RefusalCode.UNKNOWN, text) from error
        except OSError as error:
            text = f"the log of job {job} cannot be read at the moment: {error}"
            raise RequestRefusedError(RefusalCode.NOT_READY, text) from error
        text = found.text.decode("utf-8", "replace")
        if found.next == 0:  # nothing was ever written: is it a replica that no run has had?
            per_gpu = request_of(request).replicas is Replicas.GPU
            most = max((run.count if per_gpu else len(run.gpus) for run in tuple(record.runs)), default=None)
            if most is not None and replica >= most:
                text = f"job {job} has {counted(most, 'replica')}; the first is replica 0"
                raise RequestRefusedError(RefusalCode.WRONG, text)
        return views.Log(text=text, offset=found.offset, next=found.next, ended=ended and not text)

    def nodes(self) -> views.NodeList:
        """All nodes."""
        with self._engine.lock:
            return nodes(self._engine.state, self._engine.clock.now())

    def shares(self) -> views.Shares:
        """Every tenant's share."""
        with self._engine.lock:
            return shares(self._engine.state, self._engine.clock.now())

    def events(self, *, after: int, job: str | None, tenant: str | None, limit: int) -> views.EventPage:
        """Events of the journal."""
        if job is not None:
            self.owner(job)
        reader = EventReader(self._reader(), EntryFilter(job, tenant))
        return reader.latest(min(-after, limit)) if after < 0 else reader.after(after, limit)

    def states(self) -> dict[str, int]:
        """Number of jobs in each state."""
        with self._engine.lock:
            return dict(self._engine.state.counts.states + self._engine.state.ended)

    def reasons(self) -> dict[str, int]:
        """Number of jobs by reason code."""
        with self._engine.lock:
            return reason_counts(self._engine.state)

    def service(self) -> views.ServiceView:
        """Version, policy, cluster and health."""
        engine = self._engine
        header, trouble = engine.state.header, engine.trouble
        return views.ServiceView(
            version=__version__, policy=header.policy, cluster=str(header.cluster) or NO_CLUSTER,
            round=header.settings.round, now=engine.clock.now(), started=engine.began, ready=trouble is None,
            problem=None if trouble is None else str(trouble),
            jobs=len(engine.state.records), warnings=engine.deps.warnings,
        )  # fmt: skip

    def _record(self, job: str) -> tuple[JobRecord, str]:
        """A job's record and request; raises RequestRefusedError for a job that was never submitted."""
        row = self._reader().job(job)
        if row is None:
            raise RequestRefusedError(RefusalCode.UNKNOWN, f"there is no job {job!r}")
        return self._engine.state.records.get(job) or _read(row), row.request

    def _reader(self) -> Reader:
        reader: Reader | None = getattr(self._readers, "reader", None)
        if reader is None:
            reader = self._readers.reader = self._engine.store.reader()
        return reader


def _read(row: StoredJob) -> JobRecord:
    """The record of a job that has ended; if it is damaged, one that says so."""
    try:
        return read_record(row)
    except DamagedRowError as error:
        return set_aside(row, str(error), row.ended or 0.0).record


def _row(
    record: JobRecord, reason: views.ReasonView, now: float = 0.0, position: int | None = None, share: float | None = None
) -> views.JobRow:
    """A job as the queue lists it; `now` counts only if it has not ended."""
    job, run = record.job, record.current
    spent = 0.0 if record.finished is not None else now - record.since
    return views.JobRow(
        id=job.id, name=record.name, tenant=job.tenant, app=job.app, state=record.state, flags=record.all_flags(),
        reason=reason, position=position, gpus=0 if run is None else run.count, wanted=job.gpus,
        gpu_type=None if run is None else run.gpu_type, gpu_types=job.gpu_types, submitted=job.submitted,
        started=record.started, finished=record.finished, waited=record.waited + (spent if run is None else 0.0),
        ran=record.ran + (0.0 if run is None else spent), restarts=max(0, record.launches - 1), eta=None, share=share,
        steps=record.steps or None, total_steps=record.total, throughput=record.throughput, loss=record.loss,
    )  # fmt: skip


def _then(granted: "Future[None]", answer: Callable[[], Answer]) -> "Future[Answer]":
    """A future for an answer that is read once a command has been granted."""
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
