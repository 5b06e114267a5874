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

from poise.server.accounts import is_at_least
from poise.server.endpoint import Caller, Endpoint, NamePart, answer, body_of, caller_of, check_owner, is_owner
from poise.server.seam import Engine, Fault, RefusedError
from poise.wire.request import Name, Submission, Wire
from poise.wire.views import Account, Done, JobDetail, Log, Queue, Role, State, Submitted, Why, Withdrawn

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

    state: Annotated[tuple[State, ...], Field(max_length=len(State))] = ()
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
    elif isinstance(error, RefusedError):  # one error may be the answer to many: raised itself, it would hold on to them all
        reply.set_exception(RefusedError(error.fault, str(error), retry=error.retry))
    else:
        reply.set_exception(error)


class Jobs:
    """The endpoints of jobs over an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them."""
        one = "/v1/jobs/{job}"
        return (
            Endpoint("POST", "/v1/jobs", Role.USER, self.submit, Submitted, Submission, HTTPStatus.CREATED, (404, 409)),
            Endpoint("GET", "/v1/jobs", Role.READER, self.queue, Queue),
            Endpoint("GET", one, Role.READER, self.show, JobDetail, faults=(404,)),
            Endpoint("GET", f"{one}/why", Role.READER, self.why, Why, faults=(404,)),
            Endpoint("GET", f"{one}/logs", Role.READER, self.logs, Log, faults=(404,)),
            Endpoint("POST", f"{one}/cancel", Role.USER, self.cancel, Done, faults=(404, 409)),
            Endpoint("POST", "/v1/tenants/{tenant}/cancel", Role.USER, self.cancel_all, Withdrawn),
            Endpoint("POST", f"{one}/hold", Role.USER, self.hold, Done, faults=(404, 409)),
            Endpoint("POST", f"{one}/release", Role.USER, self.release, Done, faults=(404, 409)),
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
            raise RefusedError(Fault.FORBIDDEN, text)
        return await granted(lambda: self._engine.cancel_all(by, tenant))

    async def hold(self, by: Caller, job: NamePart, query: Annotated[HoldQuery, Query()]) -> Response:
        """Keep a job from running until it is released. One that runs goes on as long as to end it would lose work."""
        return await self._change(self._engine.stop if query.stop else self._engine.hold, by, job)

    async def release(self, by: Caller, job: NamePart) -> Response:
        """End a hold."""
        return await self._change(self._engine.release, by, job)

    async def _change(self, verb: "Callable[[Account, str], Future[Done]]", by: Account, job: str) -> Response:
        """Only its owner and operators may."""

        def wish() -> "Future[Done]":
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
            raise RefusedError(Fault.FORBIDDEN, text)


def _check_weights(by: Account, submission: Submission) -> None:
    """Only operators give a job more than the usual weight: it would take from other tenants, not from its own jobs."""
    if is_at_least(by, Role.OPERATOR):
        return
    for number, job in enumerate(submission.jobs):
        if job.weight > MOST_WEIGHT:
            text = f"expected at most {MOST_WEIGHT:g} with a token of role {by.role.value}, got {job.weight:g}"
            advice = "give your other jobs less, or ask an operator"
            raise RefusedError(Fault.FORBIDDEN, f"{_place(submission, number)}weight: {text}; {advice}")


def _place(submission: Submission, number: int) -> str:
    """Where a field of a job is, in a submission of several."""
    return f"jobs[{number}]." if len(submission.jobs) > 1 else ""
