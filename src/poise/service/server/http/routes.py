"""Jobs: submit, list, show, why, logs, cancel, hold, release."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated, TypeVar

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from poise.service.server.accounts import TokenStore, is_at_least
from poise.service.server.engine_api import EngineApi, RefusalCode, RequestRefusedError
from poise.service.server.http.endpoint import (
    Caller,
    Endpoint,
    NamePart,
    answer,
    body_of,
    caller_of,
    check_owner,
    is_owner,
)
from poise.service.server.logs import Logbook
from poise.service.server.metrics import CONTENT_TYPE, Metrics
from poise.service.wire.request import Name, Submission, Wire
from poise.service.wire.views import (
    Account,
    CancelledJobs,
    CommandResult,
    EventPage,
    JobDetail,
    JobState,
    Log,
    MadeToken,
    NewToken,
    NodeList,
    PolicyName,
    QueuePage,
    Role,
    ServiceView,
    Shares,
    SubmittedView,
    Weight,
    WhyView,
)
from poise.service.wire.views import TokenList as Listing

MOST_ROWS = 1_000
MOST_LOG = 1 << 20
"""Bytes of a log in one answer."""
MOST_WEIGHT = 1.0
"""Of a job that a user submits."""
FARTHEST = 1 << 53
"""The largest number that every reader of JSON can hold."""

W = TypeVar("W", bound=Wire)

_UTTERING = ThreadPoolExecutor(16, "wishes")


class QueueQuery(Wire):
    """Which jobs; no state: all that have not ended."""

    state: Annotated[tuple[JobState, ...], Field(max_length=len(JobState))] = ()
    tenant: Name | None = None
    app: Name | None = None
    name: Name | None = None
    limit: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 50
    offset: Annotated[int, Field(ge=0, le=FARTHEST)] = 0


class LogQuery(Wire):
    """Which part of which replica's log; a negative offset counts from the end."""

    replica: Annotated[int, Field(ge=0, le=100_000)] = 0
    offset: Annotated[int, Field(ge=-FARTHEST, le=FARTHEST)] = 0
    limit: Annotated[int, Field(ge=1, le=MOST_LOG)] = 64 << 10


class HoldQuery(Wire):
    """Whether a run is ended even if that loses work."""

    stop: bool = False


async def granted(wish: "Callable[[], Future[W]]", status: int = HTTPStatus.OK) -> Response:
    """What a wish came to, once it is in the journal. A caller that gives up does not take the wish back.

    To utter it may take a moment (a file is looked for, a lock is waited for), which the loop must not: a thread does it,
    and the loop hears of it once, when the wish is granted or refused.
    """
    loop = asyncio.get_running_loop()
    reply: asyncio.Future[W] = loop.create_future()

    def tell(settle: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle)

    def utter() -> None:
        try:
            wish().add_done_callback(lambda done: tell(lambda: _settle(reply, done)))
        except Exception as error:
            refusal = error
            tell(lambda: None if reply.done() else reply.set_exception(refusal))

    _UTTERING.submit(utter)
    return answer(await reply, status)


def _settle(reply: "asyncio.Future[W]", done: "Future[W]") -> None:
    """Hand the answer on, unless whoever asked has given up."""
    if reply.done():
        return
    error = done.exception()
    if error is None:
        reply.set_result(done.result())
    elif isinstance(
        error, RequestRefusedError
    ):  # one error may be the answer to many: raised itself, it would hold on to them all
        reply.set_exception(RequestRefusedError(error.fault, str(error), retry=error.retry))
    else:
        reply.set_exception(error)


class JobRoutes:
    """The endpoints of jobs over an engine."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them."""
        one = "/v1/jobs/{job}"
        return (
            Endpoint("POST", "/v1/jobs", Role.USER, self.submit, SubmittedView, Submission, HTTPStatus.CREATED, (404, 409)),
            Endpoint("GET", "/v1/jobs", Role.READER, self.queue, QueuePage),
            Endpoint("GET", one, Role.READER, self.show, JobDetail, faults=(404,)),
            Endpoint("GET", f"{one}/why", Role.READER, self.why, WhyView, faults=(404,)),
            Endpoint("GET", f"{one}/logs", Role.READER, self.logs, Log, faults=(404,)),
            Endpoint("POST", f"{one}/cancel", Role.USER, self.cancel, CommandResult, faults=(404, 409)),
            Endpoint("POST", "/v1/tenants/{tenant}/cancel", Role.USER, self.cancel_all, CancelledJobs),
            Endpoint("POST", f"{one}/hold", Role.USER, self.hold, CommandResult, faults=(404, 409)),
            Endpoint("POST", f"{one}/release", Role.USER, self.release, CommandResult, faults=(404, 409)),
        )

    async def submit(self, request: Request) -> Response:
        """Submit jobs, all or none."""
        by = caller_of(request)
        submission = await body_of(request, Submission)
        _check_tenants(by, submission)
        _check_weights(by, submission)
        return await granted(lambda: self._engine.submit(by, submission), HTTPStatus.CREATED)

    def queue(self, query: Annotated[QueueQuery, Query()]) -> Response:
        """List jobs in scheduling order."""
        found = self._engine.queue(
            states=frozenset(query.state),
            tenant=query.tenant,
            app=query.app,
            limit=query.limit,
            offset=query.offset,
            name=query.name,
        )
        return answer(found)

    def show(self, by: Caller, job: NamePart) -> Response:
        """Show a job; its command and environment only to its owner and to operators."""
        detail = self._engine.show(job)
        return answer(detail if is_owner(self._engine, by, job) else detail.model_copy(update={"request": None}))

    def why(self, job: NamePart) -> Response:
        """Say why a job runs, waits or has ended."""
        return answer(self._engine.why(job))

    def logs(self, by: Caller, job: NamePart, query: Annotated[LogQuery, Query()]) -> Response:
        """Read a part of a replica's log; only its owner and operators may."""
        check_owner(self._engine, by, job)
        return answer(self._engine.log(job, replica=query.replica, offset=query.offset, limit=query.limit))

    async def cancel(self, by: Caller, job: NamePart) -> Response:
        """Withdraw a job."""
        return await self._change(self._engine.cancel, by, job)

    async def cancel_all(self, by: Caller, tenant: NamePart) -> Response:
        """Withdraw all jobs of a tenant that have not ended; of other tenants only operators may."""
        if tenant != by.tenant and not is_at_least(by, Role.OPERATOR):
            text = f"token {by.name!r} is of tenant {by.tenant}, not of {tenant}; only operators may do that"
            raise RequestRefusedError(RefusalCode.FORBIDDEN, text)
        return await granted(lambda: self._engine.cancel_all(by, tenant))

    async def hold(self, by: Caller, job: NamePart, query: Annotated[HoldQuery, Query()]) -> Response:
        """Keep a job from running until it is released. One that runs goes on as long as to end it would lose work."""
        return await self._change(self._engine.stop if query.stop else self._engine.hold, by, job)

    async def release(self, by: Caller, job: NamePart) -> Response:
        """End a hold."""
        return await self._change(self._engine.release, by, job)

    async def _change(self, verb: "Callable[[Account, str], Future[CommandResult]]", by: Account, job: str) -> Response:
        """Only its owner and operators may."""

        def wish() -> "Future[CommandResult]":
            check_owner(self._engine, by, job)
            return verb(by, job)

        return await granted(wish)


def _check_tenants(by: Account, submission: Submission) -> None:
    """Only operators submit in another tenant's name."""
    if is_at_least(by, Role.OPERATOR):
        return
    for number, job in enumerate(submission.jobs):
        if job.tenant is not None and job.tenant != by.tenant:
            text = f"{_place(submission, number)}tenant: token {by.name!r} is of tenant {by.tenant}, not of {job.tenant}"
            raise RequestRefusedError(RefusalCode.FORBIDDEN, text)


def _check_weights(by: Account, submission: Submission) -> None:
    """Only operators give a job more than the usual weight: it would take from other tenants, not from its own jobs."""
    if is_at_least(by, Role.OPERATOR):
        return
    for number, job in enumerate(submission.jobs):
        if job.weight > MOST_WEIGHT:
            text = f"expected at most {MOST_WEIGHT:g} with a token of role {by.role.value}, got {job.weight:g}"
            advice = "give your other jobs less, or ask an operator"
            raise RequestRefusedError(RefusalCode.FORBIDDEN, f"{_place(submission, number)}weight: {text}; {advice}")


def _place(submission: Submission, number: int) -> str:
    """Where a field of a job is, in a submission of several."""
    return f"jobs[{number}]." if len(submission.jobs) > 1 else ""


# The service as a whole: nodes, shares, policy, events, metrics.


class EventsQuery(Wire):
    """What happened after that number of the journal; negative: the last so many."""

    after: Annotated[int, Field(ge=-FARTHEST, le=FARTHEST)] = 0
    job: Name | None = None
    tenant: Name | None = None
    limit: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 100


class ServiceRoutes:
    """The endpoints of the service as a whole, over an engine and its metrics."""

    def __init__(self, engine: EngineApi, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them that answer in JSON."""
        return (
            Endpoint("GET", "/v1/nodes", Role.READER, self.nodes, NodeList),
            Endpoint("GET", "/v1/shares", Role.READER, self.shares, Shares),
            Endpoint("PUT", "/v1/shares/{tenant}", Role.ADMIN, self.set_weight, Shares, Weight, faults=(404, 409)),
            Endpoint("GET", "/v1/service", Role.READER, self.service, ServiceView),
            Endpoint("GET", "/v1/policy", Role.READER, self.policy, PolicyName),
            Endpoint("PUT", "/v1/policy", Role.ADMIN, self.set_policy, ServiceView, PolicyName, faults=(409,)),
            Endpoint("GET", "/v1/events", Role.READER, self.events, EventPage, faults=(404,)),
        )

    def nodes(self) -> Response:
        """List nodes and who holds their GPUs."""
        return answer(self._engine.nodes())

    def shares(self) -> Response:
        """List tenants, what they are entitled to and what they hold."""
        return answer(self._engine.shares())

    async def set_weight(self, by: Caller, tenant: NamePart, request: Request) -> Response:
        """Change a tenant's weight."""
        wanted = await body_of(request, Weight)
        return await granted(lambda: self._engine.set_weight(by, tenant, wanted.weight))

    def service(self) -> Response:
        """Say what runs here."""
        return answer(self._engine.service())

    def policy(self) -> Response:
        """Say which policy decides."""
        return answer(PolicyName(policy=self._engine.service().policy))

    async def set_policy(self, request: Request) -> Response:
        """Go on under another policy."""
        by = caller_of(request)
        wanted = await body_of(request, PolicyName)
        return await granted(lambda: self._engine.set_policy(by, wanted.policy))

    def events(self, query: Annotated[EventsQuery, Query()]) -> Response:
        """Read what happened, in order."""
        found = self._engine.events(after=query.after, job=query.job, tenant=query.tenant, limit=query.limit)
        return answer(found)

    def metrics(self) -> Response:
        """Read the metrics, as Prometheus does."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)


# Who one is, and the tokens of others.


class TokenRoutes:
    """The endpoints of accounts. Only admins make tokens, so none can be made that may do more than its maker."""

    def __init__(self, accounts: TokenStore, log: Logbook) -> None:
        self._accounts = accounts
        self._log = log

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them."""
        return (
            Endpoint("GET", "/v1/me", Role.READER, self.me, Account),
            Endpoint("GET", "/v1/tokens", Role.ADMIN, self.tokens, Listing),
            Endpoint("POST", "/v1/tokens", Role.ADMIN, self.make_token, MadeToken, NewToken, HTTPStatus.CREATED, (409,)),
            Endpoint("DELETE", "/v1/tokens/{name}", Role.ADMIN, self.revoke_token, Account, faults=(404, 409)),
        )

    async def me(self, request: Request) -> Response:
        """Say whom the token stands for."""
        return answer(caller_of(request))

    def tokens(self) -> Response:
        """List all tokens, without the tokens."""
        return answer(Listing(accounts=self._accounts.all()))

    async def make_token(self, request: Request) -> Response:
        """Make a token. This answer is the only place where it is shown."""
        by = caller_of(request)
        wanted = await body_of(request, NewToken)
        made = await run_in_threadpool(self._accounts.make, wanted)
        account = made.account
        self._log.info("token-made", name=account.name, tenant=account.tenant, role=account.role.value, by=by.name)
        return answer(made, HTTPStatus.CREATED)

    def revoke_token(self, by: Caller, name: NamePart) -> Response:
        """Make a token worthless from now on."""
        gone = self._accounts.revoke(name)
        self._log.info("token-revoked", name=gone.name, by=by.name)
        return answer(gone)
