"""An engine in memory, for tests of what stands before it: it keeps jobs and runs none. And an API over it, with tokens."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from json import dumps, loads
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from fastapi import FastAPI

from poise.scheduler.policies.catalogue import policy_named
from poise.service.server.accounts import TokenStore
from poise.service.server.http.app import create_app
from poise.service.server.http.guard import ApiOptions
from poise.service.server.naming import Candidate, meant
from poise.service.server.service_api import JobFilter, RefusalCode, RequestRefusedError, Verb
from poise.service.wire.request import JobRequest, Submission, notes_on
from poise.service.wire.views import (
    Account,
    CancelledJobs,
    CommandResult,
    EventPage,
    EventRow,
    FilePiece,
    FileReceived,
    JobDetail,
    JobRow,
    JobsCalled,
    JobState,
    Log,
    NewToken,
    NodeCondition,
    NodeList,
    NodeRow,
    ProblemView,
    QueuePage,
    ReasonView,
    Role,
    ServiceView,
    Shares,
    SubmittedView,
    TenantShare,
    WhyView,
)

LOG = "epoch 1\nepoch 2\n"
NOW = 1_700_000_000.0
AFTER = {
    Verb.CANCEL: JobState.CANCELLED,
    Verb.HOLD: JobState.PAUSED,
    Verb.STOP: JobState.CHECKPOINTING,
    Verb.RELEASE: JobState.PENDING,
}
T = TypeVar("T")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Kept:
    """A job and where it stands."""

    tenant: str
    request: JobRequest
    state: JobState = JobState.PENDING


@dataclass
class FakeEngine:
    """Keeps jobs. Set `fails` to have the next calls raise it."""

    jobs: dict[str, Kept] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    current: str = "fifo"
    fails: Callable[[], Exception] | None = None
    happened: list[EventRow] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: BaseException | None = None
    closed: bool = False
    drained: tuple[str, str | None] | None = None

    def start(self) -> None:
        """Nothing has to be done."""

    def submit(self, by: Account, submission: Submission) -> "Future[SubmittedView]":
        self._may_fail()
        with self.lock:
            ids = [f"job-{len(self.jobs) + number}" for number, _ in enumerate(submission.jobs)]
            for job, request in zip(ids, submission.jobs, strict=True):
                self.jobs[job] = Kept(request.tenant or by.tenant, request)
                self._happens("submitted", job, by)
        return done(SubmittedView(jobs=tuple(ids), notes=notes_on(submission.jobs)))

    def change(self, by: Account, job: str, verb: Verb) -> "Future[CommandResult]":
        return self._put(by, job, AFTER[verb])

    def cancel_all(self, by: Account, wanted: JobFilter) -> "Future[CancelledJobs]":
        self._may_fail()
        live = [job for job, kept in self._matching(wanted).items() if not kept.state.is_final]
        for job in live:
            self._put(by, job, JobState.CANCELLED)
        return done(CancelledJobs(tenant=wanted.tenant, jobs=len(live)))

    def set_weight(self, by: Account, tenant: str, weight: float) -> "Future[Shares]":
        self._may_fail()
        self.weights[tenant] = weight
        return done(self.shares())

    def set_policy(self, by: Account, policy: str) -> "Future[ServiceView]":
        self._may_fail()
        policy_named(policy)
        self.current = policy
        return done(self.service())

    def owner(self, job: str) -> str:
        return self._of(job).tenant

    def _matching(self, wanted: JobFilter) -> dict[str, Kept]:
        return {
            job: each
            for job, each in self.jobs.items()
            if (each.state in wanted.states if wanted.states else not each.state.is_final)
            and wanted.tenant in {None, each.tenant}
            and wanted.app in {None, each.request.app}
            and wanted.name in {None, each.request.name or job}
        }

    def called(self, word: str, tenant: str) -> JobsCalled:
        self._may_fail()
        named = [Candidate(job, kept.request.name or job, kept.tenant, kept.state) for job, kept in self.jobs.items()]
        return meant(named, word, tenant)

    def queue(self, wanted: JobFilter, *, limit: int, offset: int) -> QueuePage:
        self._may_fail()
        kept = self._matching(wanted)
        counts = dict(Counter(each.state.value for each in kept.values()))
        names = list(kept)[offset : offset + limit]
        return QueuePage(jobs=tuple(self._row(job, kept[job]) for job in names), total=len(kept), counts=counts)

    def show(self, job: str) -> JobDetail:
        kept = self._of(job)
        return JobDetail(
            job=self._row(job, kept),
            preemptions=0,
            failures=0,
            gpu_seconds=0.0,
            lost_gpu_seconds=0.0,
            steps=0.0,
            total_steps=None,
            checkpoint_steps=None,
            throughput=None,
            loss=None,
            cause=None,
            runs=(),
            request=kept.request,
        )

    def why(self, job: str) -> WhyView:
        return WhyView(job=job, state=self._of(job).state, reason=ReasonView(code="capacity", text="no GPU is free"))

    def log(self, job: str, *, replica: int, offset: int, limit: int) -> Log:
        self._of(job)
        start = max(0, len(LOG) + offset) if offset < 0 else min(offset, len(LOG))
        text = LOG[start : start + limit] if replica == 0 else ""
        return Log(text=text, offset=start, next=start + len(text), ended=False)

    def nodes(self) -> NodeList:
        by, reason = self.drained or (None, None)
        node = NodeRow(
            name="gpu-0", gpu_type="gpu", gpus=4, free=3, rack="rack-0", alive=True, jobs=("job-0", None, None, None),
            state=NodeCondition.UP if by is None else NodeCondition.DRAINING, drained=None if by is None else NOW,
            drained_by=by, drain_reason=reason,
        )  # fmt: skip
        return NodeList(nodes=(node,))

    def drain(self, by: Account, node: str, reason: str | None) -> "Future[NodeRow]":
        return self._set_drain(node, (by.name, reason))

    def return_node(self, by: Account, node: str) -> "Future[NodeRow]":
        return self._set_drain(node, None)

    def _set_drain(self, node: str, drained: tuple[str, str | None] | None) -> "Future[NodeRow]":
        self._may_fail()
        if node != "gpu-0":
            raise RequestRefusedError(RefusalCode.UNKNOWN, f"unknown node {node!r}; known: gpu-0")
        self.drained = drained
        return done(self.nodes().nodes[0])

    def shares(self) -> Shares:
        tenants = sorted({each.tenant for each in self.jobs.values()} | set(self.weights))
        return Shares(tenants=tuple(_share(tenant, self.weights.get(tenant, 1.0)) for tenant in tenants))

    def events(self, *, after: int, job: str | None, tenant: str | None, limit: int) -> EventPage:
        if job is not None:
            self.owner(job)
        first = max(0, len(self.happened) + after) if after < 0 else after
        found = [each for each in self.happened[first:] if job in {None, each.job} and tenant in {None, each.tenant}][:limit]
        return EventPage(events=tuple(found), next=found[-1].number if found else first)

    def states(self) -> dict[str, int]:
        self._may_fail()
        return dict(Counter(each.state.value for each in self.jobs.values()))

    def reasons(self) -> dict[str, int]:
        return {"capacity": len(self.jobs)}

    def receive_file(self, tenant: str, sha256: str, piece: FilePiece) -> FileReceived:
        self._may_fail()
        return FileReceived(received=piece.offset, complete=False)

    def service(self) -> ServiceView:
        self._may_fail()
        return ServiceView(
            version="0",
            policy=self.current,
            cluster="gpu:4",
            round=360.0,
            now=NOW,
            started=NOW,
            ready=True,
            problem=None,
            jobs=len(self.jobs),
        )

    def close(self) -> None:
        self.closed = True

    def _may_fail(self) -> None:
        if self.fails is not None:
            raise self.fails()

    def _of(self, job: str) -> Kept:
        self._may_fail()
        if job not in self.jobs:
            raise RequestRefusedError(RefusalCode.UNKNOWN, f"there is no job {job!r}")
        return self.jobs[job]

    def _put(self, by: Account, job: str, state: JobState) -> "Future[CommandResult]":
        kept = self._of(job)
        if kept.state is state is JobState.CANCELLED:
            return done(CommandResult(job=job, state=state))
        if kept.state.is_final:
            raise RequestRefusedError(RefusalCode.CONFLICT, f"job {job} has ended")
        self.jobs[job] = Kept(kept.tenant, kept.request, state)
        self._happens(state.value.lower(), job, by)
        return done(CommandResult(job=job, state=state))

    def _happens(self, kind: str, job: str, by: Account) -> None:
        number = len(self.happened) + 1
        tenant = self.jobs[job].tenant
        self.happened.append(
            EventRow(number=number, time=NOW, actor=by.name, kind=kind, job=job, tenant=tenant, text=f"{kind} by {by.name}")
        )

    def _row(self, job: str, kept: Kept) -> JobRow:
        return JobRow(
            id=job,
            name=kept.request.name or job,
            tenant=kept.tenant,
            app=kept.request.app,
            state=kept.state,
            flags=(),
            reason=ReasonView(code="capacity", text="no GPU is free"),
            position=1,
            gpus=0,
            wanted=kept.request.gpus,
            gpu_type=None,
            gpu_types=kept.request.gpu_types,
            submitted=NOW,
            started=None,
            finished=None,
            waited=0.0,
            ran=0.0,
            restarts=0,
            eta=None,
            share=None,
        )


def _share(tenant: str, weight: float) -> TenantShare:
    return TenantShare(
        tenant=tenant, weight=weight, entitled=0.5, held=0.0, gpus=0, running=0, waiting=1, gpu_seconds=0.0, preemptions=0
    )


def done(result: T) -> "Future[T]":
    future: Future[T] = Future()
    future.set_result(result)
    return future


@dataclass(frozen=True)
class Call:
    """An HTTP request, as the application gets it; the body in the pieces in which it arrives; None: one that never does."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    pieces: tuple[bytes | None, ...] = (b"",)


@dataclass
class Reply:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return loads(self.body)

    @property
    def problem(self) -> tuple[int, str, str]:
        """Status, code and line of an answer that is not 2xx."""
        problem = ProblemView.model_validate_json(self.body)
        assert "\n" not in problem.detail
        return self.status, problem.code, problem.detail


def awaited(work: Coroutine[Any, Any, Result]) -> Result:
    """What comes of it, in a thread of its own: other tests may have left a loop running in this one."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, work).result()


def calls(app: FastAPI, requests: Iterable[Call]) -> list[Reply]:
    """Requests one after the other, without a network."""

    async def run() -> list[Reply]:
        return [await _call(app, each) for each in requests]

    return awaited(run())


async def _call(app: FastAPI, request: Call) -> Reply:
    reply, left = Reply(), list(request.pieces)
    path, _, query = request.path.partition("?")
    headers = {"host": "localhost"} | request.headers

    async def receive() -> dict[str, Any]:
        if not left:
            return {"type": "http.disconnect"}
        piece = left.pop(0)
        if piece is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert not reply.status
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "path": unquote(path),
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    await app(scope, receive, send)
    return reply


@dataclass
class Api:
    """An API over a fake engine, with a token of each role; `user` and `reader` are of tenant `mine`."""

    engine: FakeEngine
    accounts: TokenStore
    app: FastAPI
    tokens: dict[str, str]

    def renew(self) -> None:
        """As it was at the beginning: one job of tenant `mine` (job-0) and one of tenant `theirs` (job-1)."""
        self.engine.jobs.clear()
        self.engine.happened.clear()
        self.engine.fails = None
        for number, tenant in enumerate(("mine", "theirs")):
            request = JobRequest(command=("python", "train.py"), env={"SECRET": "s"})
            self.engine.jobs[f"job-{number}"] = Kept(tenant, request)
        for account in self.accounts.all():
            if account.name not in self.tokens:
                self.accounts.revoke(account.name)

    def call(self, who: str | None, method: str, path: str, json: object = None, **headers: str) -> Reply:
        """One request with the token of a role, or without any."""
        return calls(self.app, [self.request(who, method, path, json, **headers)])[0]

    def request(self, who: str | None, method: str, path: str, json: object = None, **headers: str) -> Call:
        """Underscores in the names of headers stand for hyphens."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        given |= {} if who is None else {"authorization": f"Bearer {self.tokens[who]}"}
        if json is None:
            return Call(method, path, given)
        return Call(method, path, {"content-type": "application/json"} | given, (dumps(json).encode(),))


TENANTS = {Role.READER: "mine", Role.USER: "mine", Role.OPERATOR: "operators", Role.ADMIN: "admins"}


def an_api(folder: Path, conditions: ApiOptions | None = None) -> Api:
    """An API over two jobs."""
    engine, accounts = FakeEngine(), TokenStore(folder)
    tokens = {
        role.value: accounts.make(NewToken(name=role.value, tenant=tenant, role=role)).token
        for role, tenant in TENANTS.items()
    }
    api = Api(engine, accounts, create_app(engine, accounts, conditions), tokens)
    api.renew()
    return api
