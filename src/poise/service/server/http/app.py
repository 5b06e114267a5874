"""The HTTP API: what an endpoint is, the application, then its endpoints by subject (jobs, the service as a whole, tokens).

All bodies and answers are JSON models of `poise.service.wire`; every answer that is not 2xx is a ProblemView. A request
comes through the guard (`guard.py`) and the check of role and query (`checked`) to one handler below, which checks whose job
it is and calls the service. Reading methods answer from the current state; commands are answered once they are in the
journal (`when_committed`).
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from inspect import signature
from threading import Lock
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from starlette.concurrency import run_in_threadpool

from poise import __version__
from poise.service.server.accounts import TokenStore, is_at_least
from poise.service.server.http.guard import ApiOptions, RequestGuard
from poise.service.server.http.problems import HANDLERS, JSON, WrongTypeError, body_problem, encoded, sentence
from poise.service.server.logs import Logbook
from poise.service.server.metrics import CONTENT_TYPE
from poise.service.server.service_api import JobFilter, RefusalCode, RequestRefusedError, ServiceApi, Verb
from poise.service.wire import views
from poise.service.wire.request import NAME, Name, Submission, Wire
from poise.service.wire.views import (
    Account,
    JobState,
    MadeToken,
    NewToken,
    ProblemView,
    Role,
    SubmittedView,
    Weight,
)

MOST_ROWS = 1_000
MOST_LOG = 1 << 20  # bytes of a log in one answer
MOST_WEIGHT = 1.0  # largest weight of a job that a user submits
LARGEST_INTEGER = 1 << 53  # the largest integer that every JSON parser represents exactly
LARGE = 64 << 10  # bytes from which on a body is parsed in a thread, so that the event loop can answer others meanwhile
ANY_ENDPOINT = (400, 401, 403, 408, 413, 414, 429, 431, 500, 503)
"""Statuses that any endpoint may answer, mostly by the guard."""
_ABOUT = """Submit training jobs to Poise and see what becomes of them.

Every request needs a token: `Authorization: Bearer TOKEN`. Every answer that is not 2xx is a Problem. Times are seconds:
moments since 1970 (UTC), spans as they are."""

W = TypeVar("W", bound=Wire)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method and path with its handler.

    role       the least that may call it
    takes      the model of the body, if there is one
    problems   statuses beside those that any endpoint may answer
    """

    method: str
    path: str
    role: Role
    handler: Callable[..., Any]
    answers: type[Wire]
    takes: type[Wire] | None = None
    status: HTTPStatus = HTTPStatus.OK
    problems: tuple[int, ...] = ()

    def add_to(self, app: FastAPI) -> None:
        """Make the application answer here. The role is checked before anything else of the request."""
        handler = self.handler
        check = checked(self.role, get_type_hints(handler).get("query"))
        # A handler that takes the request and nothing else is called directly, which saves FastAPI's injection.
        is_direct = list(signature(handler).parameters) == ["request"]

        class CheckedRoute(APIRoute):
            def get_route_handler(self) -> Handler:
                inner: Handler = handler if is_direct else super().get_route_handler()

                async def handle(request: Request) -> Response:
                    await check(request)
                    return await inner(request)

                return handle

        more = (415,) * (self.takes is not None) + (507,) * (self.method != "GET")
        extra: dict[str, Any] = {}
        if self.takes is not None:
            schema = {"$ref": f"#/components/schemas/{self.takes.__name__}"}
            extra = {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}
        app.router.add_api_route(
            self.path, handler, methods=[self.method], operation_id=handler.__name__, status_code=self.status,
            description=f"{handler.__doc__}\n\nNeeds the role {self.role.value} at least.",
            summary=(handler.__doc__ or "").partition(".")[0], response_model=self.answers, response_description="Done",
            responses=problem_responses(*more, *self.problems), route_class_override=CheckedRoute, openapi_extra=extra,
        )  # fmt: skip


def problem_responses(*more: int) -> dict[int | str, dict[str, Any]]:
    """Answers that are not 2xx, for the OpenAPI description: those of any endpoint, and these."""
    statuses = sorted((*ANY_ENDPOINT, *more))
    return {status: {"model": ProblemView, "description": HTTPStatus(status).phrase} for status in statuses}


def checked(role: Role, query: type[BaseModel] | None = None) -> Callable[[Request], Awaitable[None]]:
    """A check that the caller has at least this role and that the query has only keys of this model, each once.

    FastAPI would ignore unknown keys, and take the last of several values.
    """
    known: Mapping[str, FieldInfo] = {} if query is None else query.model_fields

    async def check(request: Request) -> None:
        account = caller_of(request)
        if not is_at_least(account, role):
            text = f"needs the role {role.value}; token {account.name!r} has the role {account.role.value}"
            raise RequestRefusedError(RefusalCode.FORBIDDEN, text)
        if not request.scope["query_string"]:
            return
        for name, times in Counter(name for name, _ in request.query_params.multi_items()).items():
            if name not in known:
                text = sentence({"type": "extra_forbidden", "msg": ""}, (name,), known)
                raise RequestRefusedError(RefusalCode.WRONG, f"query: {text}")
            if times > 1 and get_origin(known[name].annotation) is not tuple:
                raise RequestRefusedError(RefusalCode.WRONG, f"query: {name}: expected once, got it {times} times")

    return check


def caller_of(request: Request) -> Account:
    """The account whose token the request brought; the guard has checked it."""
    account: Account = request.state.account
    return account


async def _caller(request: Request) -> Account:  # a coroutine: FastAPI would call a function in a thread
    return caller_of(request)


Caller = Annotated[Account, Depends(_caller)]
NamePart = Annotated[str, Path(pattern=f"^{NAME}$", max_length=64)]
"""A name in a path. It is looked up, and never made part of a file's path."""


ShaPart = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]
"""A SHA-256 in a path. It names a file, and can name no other."""


def answer(model: BaseModel, status: int = HTTPStatus.OK) -> Response:
    """A model as JSON, not validated again."""
    return Response(encoded(model), status, media_type=JSON)


async def body_of(request: Request, model: type[W]) -> W:
    """The body of a request, which must be JSON and exactly what the model says: no text for a number."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise WrongTypeError(f"expected a body of type {JSON}, got {kind[:60] or 'none'}")
    raw = await request.body()

    def parse() -> W:
        try:
            return model.model_validate_json(raw, strict=True)
        except ValidationError as error:
            raise body_problem(error, model) from None

    return await run_in_threadpool(parse) if len(raw) > LARGE else parse()


def create_app(service: ServiceApi, accounts: TokenStore, options: ApiOptions | None = None) -> FastAPI:
    """The application over a service. Every path and method needs a token of these accounts.

    FastAPI's interactive pages are left out: they load scripts from other hosts.
    """
    options = options or ApiOptions()
    options.metrics.watch(service)
    app = FastAPI(
        title="Poise", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    routes = JobRoutes(service), ServiceRoutes(service), TokenRoutes(accounts, options.log)
    endpoints = tuple(endpoint for each in routes for endpoint in each.endpoints())
    for endpoint in endpoints:
        endpoint.add_to(app)

    def metrics() -> Response:
        """Read the metrics, as Prometheus does."""
        return Response(options.metrics.text(), media_type=CONTENT_TYPE)

    @cache
    def description_text() -> str:
        return json.dumps(openapi_document(app, endpoints))

    making = Lock()

    def description() -> Response:
        with making:  # on the first request, and once: it takes a while, and many may ask for it at the same time
            return Response(description_text(), media_type=JSON)

    readers = [Depends(checked(Role.READER))]
    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    app.add_api_route(
        "/metrics", metrics, operation_id="metrics", response_class=Response, dependencies=readers,
        responses={200: text, **problem_responses()},
    )  # fmt: skip
    app.add_api_route("/openapi.json", description, dependencies=readers, include_in_schema=False)
    for kind, handler in HANDLERS:
        app.add_exception_handler(kind, handler)
    app.add_middleware(RequestGuard, accounts=accounts, options=options)
    return app


def openapi_document(app: FastAPI, endpoints: tuple[Endpoint, ...]) -> dict[str, Any]:
    """The OpenAPI description: all endpoints, the bodies that they take, and that all of them need a bearer token."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=_ABOUT)
    components = document["components"]
    for endpoint in endpoints:
        if endpoint.takes is not None:
            schema = endpoint.takes.model_json_schema(ref_template="#/components/schemas/{model}")
            components["schemas"] |= schema.pop("$defs", {}) | {endpoint.takes.__name__: schema}
    components["schemas"].pop("HTTPValidationError", None)
    components["schemas"].pop("ValidationError", None)
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # a problem with status 400 instead
    return document


_COMMANDS = ThreadPoolExecutor(16, "commands")


async def when_committed(command: "Callable[[], Future[W]]", status: int = HTTPStatus.OK) -> Response:
    """Issue a command to the service, and answer with its result once it is in the journal.

    Issuing it can block (it waits for a lock, or looks for a file), so a thread does that; the event loop is woken once, for
    the result. A caller that gives up does not take the command back.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[W] = loop.create_future()

    def settle(done: "Future[W]") -> None:
        if result.done():  # the caller has given up
            return
        error = done.exception()
        if error is None:
            result.set_result(done.result())
        elif isinstance(error, RequestRefusedError):
            # One error may answer many commands. Raised itself, it would collect the tracebacks of them all.
            result.set_exception(RequestRefusedError(error.fault, str(error), retry=error.retry))
        else:
            result.set_exception(error)

    def wake(done: "Future[W]") -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, done)

    def issue() -> None:
        try:
            command().add_done_callback(wake)
        except Exception as error:
            failed: Future[W] = Future()
            failed.set_exception(error)
            wake(failed)

    _COMMANDS.submit(issue)
    return answer(await result, status)


class QueueQuery(Wire):
    """Which jobs; no state: all that have not ended."""

    state: Annotated[tuple[JobState, ...], Field(max_length=len(JobState))] = ()
    tenant: Name | None = None
    app: Name | None = None
    name: Name | None = None
    limit: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 50
    offset: Annotated[int, Field(ge=0, le=LARGEST_INTEGER)] = 0


class LogQuery(Wire):
    """Which part of which replica's log; a negative offset counts from the end."""

    replica: Annotated[int, Field(ge=0, le=100_000)] = 0
    offset: Annotated[int, Field(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)] = 0
    limit: Annotated[int, Field(ge=1, le=MOST_LOG)] = 64 << 10


class HoldQuery(Wire):
    """Whether a run is ended even if that loses work."""

    stop: bool = False


class FileQuery(Wire):
    """Whose files; the token's tenant's if none is named."""

    tenant: Name | None = None


class EventsQuery(Wire):
    """Events after a number of the journal; negative: the last ones, that many."""

    after: Annotated[int, Field(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)] = 0
    job: Name | None = None
    tenant: Name | None = None
    limit: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 100


class JobRoutes:
    """The endpoints of jobs. Their docstrings are part of the OpenAPI description."""

    def __init__(self, service: ServiceApi) -> None:
        self._service = service

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them."""
        one = "/v1/jobs/{job}"
        return (
            Endpoint("POST", "/v1/jobs", Role.USER, self.submit, SubmittedView, Submission, HTTPStatus.CREATED, (404, 409)),
            Endpoint("GET", "/v1/jobs", Role.READER, self.queue, views.QueuePage),
            Endpoint("GET", one, Role.READER, self.show, views.JobDetail, problems=(404,)),
            Endpoint("GET", f"{one}/why", Role.READER, self.why, views.WhyView, problems=(404,)),
            Endpoint("GET", f"{one}/logs", Role.READER, self.logs, views.Log, problems=(404,)),
            Endpoint("POST", f"{one}/cancel", Role.USER, self.cancel, views.CommandResult, problems=(404, 409)),
            Endpoint("POST", "/v1/tenants/{tenant}/cancel", Role.USER, self.cancel_all, views.CancelledJobs),
            Endpoint("POST", "/v1/cancellations", Role.USER, self.cancel_some, views.CancelledJobs, views.Cancellation),
            Endpoint("GET", "/v1/names/{name}", Role.READER, self.called, views.JobsCalled),
            Endpoint("POST", f"{one}/hold", Role.USER, self.hold, views.CommandResult, problems=(404, 409)),
            Endpoint("POST", f"{one}/release", Role.USER, self.release, views.CommandResult, problems=(404, 409)),
            Endpoint("POST", "/v1/files/{sha256}", Role.USER, self.receive_file, views.FileReceived, views.FilePiece),
        )

    async def submit(self, request: Request) -> Response:
        """Submit jobs, all or none."""
        by = caller_of(request)
        submission = await body_of(request, Submission)
        if not is_at_least(by, Role.OPERATOR):
            _check_user_submission(by, submission)
        return await when_committed(lambda: self._service.submit(by, submission), HTTPStatus.CREATED)

    def queue(self, query: Annotated[QueueQuery, Query()]) -> Response:
        """List jobs in scheduling order."""
        wanted = JobFilter(frozenset(query.state), query.tenant, query.app, query.name)
        return answer(self._service.queue(wanted, limit=query.limit, offset=query.offset))

    def show(self, by: Caller, job: NamePart) -> Response:
        """Show a job; its command and environment only to its owner and to operators."""
        detail = self._service.show(job)
        return answer(detail if self._may_change(by, job) else detail.model_copy(update={"request": None}))

    def why(self, job: NamePart) -> Response:
        """Say why a job runs, waits or has ended."""
        return answer(self._service.why(job))

    def logs(self, by: Caller, job: NamePart, query: Annotated[LogQuery, Query()]) -> Response:
        """Read a part of a replica's log; only its owner and operators may."""
        self._require_owner(by, job)
        return answer(self._service.log(job, replica=query.replica, offset=query.offset, limit=query.limit))

    async def cancel(self, by: Caller, job: NamePart) -> Response:
        """Withdraw a job."""
        return await self._change(by, job, Verb.CANCEL)

    async def cancel_all(self, by: Caller, tenant: NamePart) -> Response:
        """Withdraw all jobs of a tenant that have not ended; of other tenants only operators may."""
        _check_tenant(by, tenant)
        return await when_committed(lambda: self._service.cancel_all(by, JobFilter(tenant=tenant)))

    async def cancel_some(self, request: Request) -> Response:
        """Withdraw all jobs that are described and have not ended; of other tenants only operators may."""
        by = caller_of(request)
        wanted = await body_of(request, views.Cancellation)
        _check_tenant(by, wanted.tenant)
        if over := [state for state in wanted.states if state.is_final]:
            text = f"states: a job that is {over[0]} has ended, and cannot be cancelled"
            raise RequestRefusedError(RefusalCode.WRONG, text)
        found = JobFilter(frozenset(wanted.states), wanted.tenant, wanted.app)
        return await when_committed(lambda: self._service.cancel_all(by, found))

    def called(self, by: Caller, name: NamePart) -> Response:
        """Say which jobs have a name, or else which have names that begin so."""
        return answer(self._service.called(name, by.tenant))

    async def receive_file(
        self, by: Caller, sha256: ShaPart, query: Annotated[FileQuery, Query()], request: Request
    ) -> Response:
        """Take a piece of an archive of a working directory. Jobs name it by its SHA-256."""
        tenant = query.tenant or by.tenant
        _check_tenant(by, tenant)
        piece = await body_of(request, views.FilePiece)
        return answer(await run_in_threadpool(self._service.receive_file, tenant, sha256, piece))

    async def hold(self, by: Caller, job: NamePart, query: Annotated[HoldQuery, Query()]) -> Response:
        """Keep a job from running until it is released. One that runs goes on as long as to end it would lose work."""
        return await self._change(by, job, Verb.STOP if query.stop else Verb.HOLD)

    async def release(self, by: Caller, job: NamePart) -> Response:
        """End a hold."""
        return await self._change(by, job, Verb.RELEASE)

    async def _change(self, by: Account, job: str, verb: Verb) -> Response:
        """Issue a command that only the job's owner and operators may."""

        def issue() -> "Future[views.CommandResult]":
            self._require_owner(by, job)
            return self._service.change(by, job, verb)

        return await when_committed(issue)

    def _may_change(self, by: Account, job: str) -> bool:
        """Whether the job is the caller's tenant's, or the caller an operator; raises for a job that does not exist."""
        return self._service.owner(job) == by.tenant or is_at_least(by, Role.OPERATOR)

    def _require_owner(self, by: Account, job: str) -> None:
        if not self._may_change(by, job):
            text = f"job {job} is of tenant {self._service.owner(job)}; only its owner and operators may do that"
            raise RequestRefusedError(RefusalCode.FORBIDDEN, text)


def _check_tenant(by: Account, tenant: str | None) -> None:
    """Refuse what a user asks for another tenant, or for all of them."""
    if tenant != by.tenant and not is_at_least(by, Role.OPERATOR):
        other = "not of all" if tenant is None else f"not of {tenant}"
        text = f"token {by.name!r} is of tenant {by.tenant}, {other}; only operators may do that"
        raise RequestRefusedError(RefusalCode.FORBIDDEN, text)


def _check_user_submission(by: Account, submission: Submission) -> None:
    """Refuse what only operators may: to submit for another tenant, and to give a job more than the usual weight.

    A larger weight would take from other tenants, not from the tenant's own jobs.
    """
    for number, job in enumerate(submission.jobs):
        place = f"jobs[{number}]." if len(submission.jobs) > 1 else ""
        if job.tenant is not None and job.tenant != by.tenant:
            text = f"{place}tenant: token {by.name!r} is of tenant {by.tenant}, not of {job.tenant}"
            raise RequestRefusedError(RefusalCode.FORBIDDEN, text)
        if job.weight > MOST_WEIGHT:
            text = f"expected at most {MOST_WEIGHT:g} with a token of role {by.role.value}, got {job.weight:g}"
            advice = "give your other jobs less, or ask an operator"
            raise RequestRefusedError(RefusalCode.FORBIDDEN, f"{place}weight: {text}; {advice}")


class ServiceRoutes:
    """The endpoints of the service as a whole: nodes, shares, policy, events."""

    def __init__(self, service: ServiceApi) -> None:
        self._service = service

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them."""
        node = "/v1/nodes/{node}"
        return (
            Endpoint("GET", "/v1/nodes", Role.READER, self.nodes, views.NodeList),
            Endpoint("POST", f"{node}/drain", Role.OPERATOR, self.drain, views.NodeRow, views.NewDrain, problems=(404,)),
            Endpoint("POST", f"{node}/return", Role.OPERATOR, self.return_node, views.NodeRow, problems=(404,)),
            Endpoint("GET", "/v1/shares", Role.READER, self.shares, views.Shares),
            Endpoint("PUT", "/v1/shares/{tenant}", Role.ADMIN, self.set_weight, views.Shares, Weight, problems=(404, 409)),
            Endpoint("GET", "/v1/service", Role.READER, self.service, views.ServiceView),
            Endpoint("GET", "/v1/policy", Role.READER, self.policy, views.PolicyName),
            Endpoint("PUT", "/v1/policy", Role.ADMIN, self.set_policy, views.ServiceView, views.PolicyName, problems=(409,)),
            Endpoint("GET", "/v1/events", Role.READER, self.events, views.EventPage, problems=(404,)),
        )

    def nodes(self) -> Response:
        """List nodes, how they are, and who holds their GPUs."""
        return answer(self._service.nodes())

    async def drain(self, by: Caller, node: NamePart, request: Request) -> Response:
        """Take a node out of service: nothing starts there any more, and its runs are saved and go on elsewhere."""
        wanted = await body_of(request, views.NewDrain)
        return await when_committed(lambda: self._service.drain(by, node, wanted.reason))

    async def return_node(self, by: Caller, node: NamePart) -> Response:
        """Give a node back that was drained."""
        return await when_committed(lambda: self._service.return_node(by, node))

    def shares(self) -> Response:
        """List tenants, what they are entitled to and what they hold."""
        return answer(self._service.shares())

    async def set_weight(self, by: Caller, tenant: NamePart, request: Request) -> Response:
        """Change a tenant's weight."""
        wanted = await body_of(request, Weight)
        return await when_committed(lambda: self._service.set_weight(by, tenant, wanted.weight))

    def service(self) -> Response:
        """Say what runs here."""
        return answer(self._service.service())

    def policy(self) -> Response:
        """Say which policy decides."""
        return answer(views.PolicyName(policy=self._service.service().policy))

    async def set_policy(self, request: Request) -> Response:
        """Go on under another policy."""
        by = caller_of(request)
        wanted = await body_of(request, views.PolicyName)
        return await when_committed(lambda: self._service.set_policy(by, wanted.policy))

    def events(self, query: Annotated[EventsQuery, Query()]) -> Response:
        """Read what happened, in order."""
        found = self._service.events(after=query.after, job=query.job, tenant=query.tenant, limit=query.limit)
        return answer(found)


class TokenRoutes:
    """The endpoints of tokens. Only admins make tokens, so none can be made that may do more than its maker."""

    def __init__(self, accounts: TokenStore, log: Logbook) -> None:
        self._accounts = accounts
        self._log = log

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them."""
        return (
            Endpoint("GET", "/v1/me", Role.READER, self.me, Account),
            Endpoint("GET", "/v1/tokens", Role.ADMIN, self.tokens, views.TokenList),
            Endpoint("POST", "/v1/tokens", Role.ADMIN, self.make_token, MadeToken, NewToken, HTTPStatus.CREATED, (409,)),
            Endpoint("DELETE", "/v1/tokens/{name}", Role.ADMIN, self.revoke_token, Account, problems=(404, 409)),
        )

    async def me(self, request: Request) -> Response:
        """Say whom the token stands for."""
        return answer(caller_of(request))

    def tokens(self) -> Response:
        """List all tokens, without the tokens."""
        return answer(views.TokenList(accounts=self._accounts.all()))

    async def make_token(self, request: Request) -> Response:
        """Make a token. This answer is the only place where it is shown."""
        by = caller_of(request)
        wanted = await body_of(request, NewToken)
        made = await run_in_threadpool(self._accounts.make, wanted)  # it waits for the disk
        account = made.account
        self._log.info("token-made", name=account.name, tenant=account.tenant, role=account.role.value, by=by.name)
        return answer(made, HTTPStatus.CREATED)

    def revoke_token(self, by: Caller, name: NamePart) -> Response:
        """Make a token worthless from now on."""
        gone = self._accounts.revoke(name)
        self._log.info("token-revoked", name=gone.name, by=by.name)
        return answer(gone)
