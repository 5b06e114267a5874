"""The verbs of a live Poise, for Python programs: `Client`, and `JobHandle` for one job of it."""

import base64
import os
import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload
from uuid import uuid4

import httpx

from poise.scheduler.model.errors import RequestError, UnknownNameError
from poise.service.client import streams
from poise.service.client.config import ServerAddress, await_server
from poise.service.client.connection import NOT_FOUND, Again, Connection, Parameters, ServerRefusedError, UnavailableError
from poise.service.client.exporting import exported
from poise.service.client.shipping import SHIP_MIB, packed_folder, pieces_of
from poise.service.client.submission import check_request, completed_request, request_of, validated, variants_of, with_ids
from poise.service.wire import views
from poise.service.wire.after import AfterEnd, Term, ids_of, is_ids, ranges_of, term_of
from poise.service.wire.draft import JobDraft
from poise.service.wire.request import MOST_JOBS, NAME, JobRequest, Submission
from poise.service.wire.views import CommandResult, EventPage, EventRow, JobState, Role

Found = TypeVar("Found")

PATIENCE = 15.0  # seconds for which a request is sent again while the server is away: a restart takes less


class JobHandle:
    """A job, by its id or its name. Nothing is cached: every method asks the server."""

    def __init__(self, client: "Client", job: str, notes: tuple[str, ...] = ()) -> None:
        self._client = client
        self.id = job
        self.notes = notes
        """What its submission asked for and has no effect, or another one than expected; and what did not come along."""

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r})"

    @property
    def state(self) -> JobState:
        """Its state now."""
        return self.show().job.state

    def show(self) -> views.JobDetail:
        """Everything about it."""
        return self._client.show(self.id)

    def why(self) -> views.WhyView:
        """Why it runs, waits or has ended."""
        return self._client.why(self.id)

    def cancel(self) -> CommandResult:
        """Cancel it."""
        return self._client.cancel(self.id)

    def hold(self) -> CommandResult:
        """Keep it from running until it is released. If it runs, it is preempted as soon as that loses no work."""
        return self._client.hold(self.id)

    def stop(self) -> CommandResult:
        """Hold it, and stop its run: it is asked to save, and gets TERM at its deadline. Unsaved work is lost."""
        return self._client.stop(self.id)

    def release(self) -> CommandResult:
        """End a hold."""
        return self._client.release(self.id)

    @overload
    def logs(self, *, follow: Literal[False] = False, replica: int = 0) -> str: ...
    @overload
    def logs(self, *, follow: Literal[True], replica: int = 0) -> Iterator[str]: ...
    def logs(self, *, follow: bool = False, replica: int = 0) -> str | Iterator[str]:
        """What a replica has printed; with `follow`, part by part as it prints more, until the job has ended."""
        read = self._client.follow_log if follow else self._client.log
        return read(self.id, replica=replica)

    def wait(self, timeout: float | None = None) -> JobState:
        """The final state, once it is reached, FAILED included; WaitTimeoutError after `timeout` seconds."""
        return streams.wait_for(self._client, [self.id], timeout=timeout)[self.id]


class Client:
    """A live Poise.

    url, token   of the server; `Client.from_config()` finds them
    verify       certificates of an https server: True for those that the machine trusts, or a file of them
    timeout      seconds to wait for one answer
    patience     seconds for which a request is sent again after a lost connection; a submission is accepted only once

    Every method raises ServerRefusedError if the server refuses, and UnavailableError if there is no answer.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        verify: Path | ssl.SSLContext | bool = True,
        timeout: float = 30.0,
        patience: float = PATIENCE,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        server = ServerAddress(url, token)
        self._link = Connection(server, verify=verify, timeout=timeout, patience=patience, transport=transport)

    @classmethod
    def from_config(
        cls, *, timeout: float = 30.0, patience: float = PATIENCE, waiting: Callable[[str], None] | None = None
    ) -> Self:
        """The server of the environment, of this machine, or of client.toml; RequestError if none is known.

        waiting   is called with the reason if an answer takes long
        """
        found = await_server(os.environ, patience, waiting)
        client = cls(found.url, found.token, verify=found.ca or True, timeout=timeout, patience=patience)
        client._link.server = found  # with its state directory, so that it is found again after a restart
        client._link.on_wait = waiting
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def submit(self, request: JobRequest | None = None, /, **fields: Any) -> JobHandle:  # noqa: ANN401 - fields of a request
        """Submit a job: a JobRequest, or its fields.

        Without `cwd` it runs in the current folder, without `venv` in the active virtual environment; None: in none. It gets
        the environment of this process; with `export="none"` none of it, with `export="A,B"` just these variables.
        `after` may also name jobs by handles, `begin` and `deadline` may be a datetime or a text such as `now+2h`.
        """
        return self.submit_all([request_of(request, fields)])[0]

    def submit_all(self, requests: Sequence[JobRequest], *, key: str | None = None) -> tuple[JobHandle, ...]:
        """Submit jobs that are accepted all together or not at all, and only once however often they are sent.

        key   of the submission; whatever is sent again under the same key is accepted once. None: a new one
        """
        requests = _several(requests, "requests")
        for each in requests:
            check_request(each)
        if not 1 <= len(requests) <= MOST_JOBS:
            raise RequestError(f"expected 1 to {MOST_JOBS:,} jobs in a submission, got {len(requests):,}")
        ids = self._ids_of_terms(requests)
        jobs = [with_ids(completed_request(each), ids) for each in requests]
        sent = exported(jobs, os.environ, is_here=self._link.server.is_here)
        submission = validated(
            Submission, jobs=sent.requests, key=new_key() if key is None else key, environments=sent.environments
        )
        try:
            taken = self._link.send(views.SubmittedView, "POST", "/v1/jobs", submission)
        except ServerRefusedError as error:
            if error.status != httpx.codes.REQUEST_ENTITY_TOO_LARGE:
                raise
            text = f"{len(requests):,} jobs are too much for one submission ({error}); divide them, or make them smaller"
            raise ServerRefusedError(error.status, error.code, text) from None
        return tuple(JobHandle(self, job, (*sent.notes, *taken.notes)) for job in taken.jobs)

    def _ids_of_terms(self, requests: Iterable[JobRequest]) -> dict[str, str]:
        """Each term of `after`, with ids in the place of names of jobs and apps."""
        found: dict[str, str] = {}
        for request in requests:
            for text in request.after:
                if text not in found:
                    term = term_of(text)
                    named = [self._ids_of(word, request.tenant) for word in term.words]
                    found[text] = str(term._replace(words=ranges_of(chain.from_iterable(named))))
        return found

    def _ids_of(self, word: str, tenant: str | None) -> Sequence[str]:
        """Ids of what a term names: ids, a job by its name, or an app of the tenant, which is all its jobs so far.

        An app comes before jobs of others, and before jobs whose names only begin so, as those of an array do.
        """
        if is_ids(word):
            try:
                return ids_of(Term((word,), AfterEnd.ENDED))
            except ValueError as error:
                raise RequestError(f"after: {error}") from None
        found, owner = self.called(word), self.me().tenant if tenant is None else tenant
        is_own = found.exact and any(job.tenant == owner for job in found.jobs)
        jobs = () if is_own else self._ids_of_app(word, owner)
        if jobs:
            return jobs
        if found.total > 1:
            raise RequestError(f"after: {_ambiguous(word, found)}")
        if not found.jobs:
            raise RequestError(f"after: there is no job {word!r}, and no app of this tenant is called so")
        return [found.jobs[0].id]

    def _ids_of_app(self, app: str, tenant: str) -> Sequence[str]:
        rows: list[views.JobRow] = []
        while True:
            page = self.queue(states=list(JobState), tenant=tenant, app=app, limit=MOST_JOBS, offset=len(rows))
            rows += page.jobs
            if not page.jobs or len(rows) >= page.total:
                return [row.id for row in rows]

    def ship(self, folder: Path, *, most_mib: int = SHIP_MIB, tenant: str | None = None) -> str:
        """Upload a working directory, without what its `.gitignore` files ignore, and return its SHA-256 for `files=`.

        What the service has already is not sent again.

        tenant   whose jobs will name it; None: the token's
        """
        tree, sha256 = packed_folder(folder, most_mib << 20)
        parameters: Parameters = {} if tenant is None else {"tenant": tenant}

        def send(offset: int, data: bytes) -> views.FileReceived:
            piece = views.FilePiece(total=tree.size, offset=offset, data=base64.b64encode(data).decode())
            return self._link.send(views.FileReceived, "POST", f"/v1/files/{sha256}", piece, parameters=parameters)

        there = send(0, b"")
        while not there.complete:
            begun = there.received
            for offset, data in pieces_of(folder, tree, begun):
                there = send(offset, data)
                if there.complete or there.received != offset + len(data):  # another client sends the same
                    break
            if not there.complete and there.received <= begun:
                raise UnavailableError("the service does not take the files; try again")
        return sha256

    def map(
        self, request: JobRequest, params: Iterable[Mapping[str, object]] | Mapping[str, Iterable[object] | object]
    ) -> tuple[JobHandle, ...]:
        """Submit an app: the request once per environment, or once per combination of values.

        `${NAME}` in the command stands for the variable's value, and the jobs share an `app`. A text or a number in place
        of a list of values is one value.
        """
        check_request(request)
        variants = variants_of(params)
        key = new_key()
        return self.submit_all(replace(JobDraft.of(request), variants=variants).requests(key), key=key)

    def job(self, job: str) -> JobHandle:
        """A handle of a job, by its id, its name, or how its name begins. The server is not asked yet."""
        return JobHandle(self, job)

    def find(self, job: str) -> str:
        """The id of a job, given by its id, its name, or how its name begins; RequestError unless that is one job."""
        return self.show(job).job.id

    def called(self, word: str) -> views.JobsCalled:
        """The jobs that have this name, or else whose names begin so; `show` and the others take it if that is one."""
        return self._link.get(views.JobsCalled, f"/v1/names/{_checked(word)}")

    def wait(self, jobs: Sequence[str], *, timeout: float | None = None) -> dict[str, JobState]:
        """The final state of each job, once all have one; WaitTimeoutError after `timeout` seconds."""
        return streams.wait_for(self, list(dict.fromkeys(map(str, _several(jobs, "jobs")))), timeout=timeout)

    def queue(
        self,
        *,
        states: Sequence[JobState | str] = (),
        tenant: str | None = None,
        app: str | None = None,
        name: str | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> views.QueuePage:
        """Jobs in scheduling order; without states, those that have not ended."""
        words = _states(states) or None
        asked = {"tenant": tenant, "app": app, "name": name}
        return self._link.get(views.QueuePage, "/v1/jobs", state=words, **asked, limit=limit, offset=offset)

    def show(self, job: str) -> views.JobDetail:
        """Everything about a job."""
        return self._named(job, lambda each: self._link.get(views.JobDetail, _job(each)))

    def why(self, job: str) -> views.WhyView:
        """Why a job runs, waits or has ended: one reason, the evidence, what would help."""
        return self._named(job, lambda each: self._link.get(views.WhyView, _job(each) + "/why"))

    def log(self, job: str, *, replica: int = 0) -> str:
        """What a replica of a job has printed."""
        return self._named(job, lambda each: "".join(part.text for part in streams.log_parts(self._link, each, replica, 0)))

    def tail(self, job: str, lines: int, *, replica: int = 0) -> tuple[str, int]:
        """The last lines of a replica's log, and the offset to follow it from."""
        return self._named(job, lambda each: streams.last_lines(self._link, each, replica, lines))

    def follow_log(self, job: str, *, replica: int = 0, offset: int = 0) -> Iterator[str]:
        """A replica's log, part by part as it is written, until nothing is added any more."""
        parts = self._stream(_checked(job), lambda each: streams.follow_log(self._link, each, replica, offset))
        return (part.text for part in parts)

    def follow_job(self, job: str, *, on_change: Callable[[views.JobRow], None], offset: int = 0) -> Iterator[views.Log]:
        """What rank 0 of a job prints, part by part, until the job has ended; `on_change` hears of states and reasons."""
        return streams.follow_job(self, self._link, self.find(job), offset, on_change)

    @overload
    def logs(self, job: str, *, follow: Literal[False] = False, replica: int = 0) -> str: ...
    @overload
    def logs(self, job: str, *, follow: Literal[True], replica: int = 0) -> Iterator[str]: ...
    def logs(self, job: str, *, follow: bool = False, replica: int = 0) -> str | Iterator[str]:
        """What a replica of a job has printed; with `follow`, part by part as it prints more, until the job has ended."""
        return self.follow_log(job, replica=replica) if follow else self.log(job, replica=replica)

    def cancel(self, job: str) -> CommandResult:
        """Cancel a job."""
        return self._command(job, "cancel")

    def cancel_all(
        self, tenant: str | None, *, app: str | None = None, states: Sequence[JobState | str] = ()
    ) -> views.CancelledJobs:
        """Cancel all jobs of a tenant that have not ended, or those of an app, or in some states.

        Only operators may cancel those of other tenants, and of all tenants (None).
        """
        if tenant is not None and app is None and not states:
            return self._link.send(views.CancelledJobs, "POST", f"/v1/tenants/{_name('tenant', tenant)}/cancel")
        body = validated(views.Cancellation, tenant=tenant, app=app, states=tuple(map(JobState, _states(states))))
        return self._link.send(views.CancelledJobs, "POST", "/v1/cancellations", body)

    def hold(self, job: str) -> CommandResult:
        """Keep a job from running until it is released. If it runs, it is preempted as soon as that loses no work."""
        return self._command(job, "hold")

    def stop(self, job: str) -> CommandResult:
        """Hold a job, and stop its run: it is asked to save, and gets TERM at its deadline. Unsaved work is lost."""
        return self._command(job, "hold", {"stop": "true"})

    def release(self, job: str) -> CommandResult:
        """End a hold."""
        return self._command(job, "release")

    def nodes(self) -> views.NodeList:
        """All nodes, how they are, and the jobs that hold their GPUs."""
        return self._link.get(views.NodeList, "/v1/nodes")

    def drain(self, node: str, *, reason: str | None = None) -> views.NodeRow:
        """Take a node out of service: nothing starts there any more, and its runs are saved and go on elsewhere.

        Returns at once; `emptied` of the node says when nothing runs there any more. Only operators may.
        """
        body = validated(views.NewDrain, reason=reason)
        return self._link.send(views.NodeRow, "POST", f"{_node(node)}/drain", body)

    def return_node(self, node: str) -> views.NodeRow:
        """Give a node back that was drained. Only operators may."""
        return self._link.send(views.NodeRow, "POST", f"{_node(node)}/return")

    def shares(self) -> views.Shares:
        """All tenants: what each is entitled to, holds and has received."""
        return self._link.get(views.Shares, "/v1/shares")

    def set_weight(self, tenant: str, weight: float) -> views.Shares:
        """Change a tenant's weight."""
        return self.set_weights([(tenant, weight)])

    def set_weights(self, weights: Sequence[tuple[str, float]]) -> views.Shares:
        """Change weights of tenants, one after the other. All are checked before the first is sent."""
        bodies = [
            (_name("tenant", tenant), validated(views.Weight, weight=weight))
            for tenant, weight in _several(weights, "weights")
        ]
        answers = [self._link.send(views.Shares, "PUT", f"/v1/shares/{name}", body) for name, body in bodies]
        return answers[-1] if answers else self.shares()

    def events(self, *, after: int = -50, job: str | None = None, tenant: str | None = None, limit: int = 50) -> EventPage:
        """The events after a number of the journal; negative: the last that many."""

        def ask(each: str | None) -> EventPage:
            return self._link.get(EventPage, "/v1/events", after=after, job=each, tenant=tenant, limit=limit)

        return ask(None) if job is None else self._named(job, ask)

    def follow_events(self, *, after: int = -50, job: str | None = None, tenant: str | None = None) -> Iterator[EventRow]:
        """The same events, and all later ones as they happen, without end."""
        if job is None:
            return streams.follow_events(self._link, after, None, tenant)
        return self._stream(job, lambda each: streams.follow_events(self._link, after, each, tenant))

    def service(self) -> views.ServiceView:
        """The service: its policy, cluster and state."""
        return self._link.get(views.ServiceView, "/v1/service")

    def use(self, policy: str) -> views.ServiceView:
        """Switch to another policy of the catalogue."""
        return self._link.send(views.ServiceView, "PUT", "/v1/policy", validated(views.PolicyName, policy=policy))

    set_policy = use  # as `set_weight`

    def me(self) -> views.Account:
        """The account of the token."""
        return self._link.get(views.Account, "/v1/me")

    def tokens(self) -> views.TokenList:
        """All accounts, without their tokens."""
        return self._link.get(views.TokenList, "/v1/tokens")

    def make_token(
        self, name: str, *, tenant: str | None = None, role: Role = Role.USER, days: float | None = None
    ) -> views.MadeToken:
        """Make a token, which is shown only now. `tenant`: owner of the jobs that it submits; None: named as the token."""
        body = validated(views.NewToken, name=name, tenant=tenant, role=role, days=days)
        return self._link.send(views.MadeToken, "POST", "/v1/tokens", body, again=Again.UNSENT)

    def drop_token(self, name: str) -> views.Account:
        """Revoke a token; the account that it belonged to."""
        return self._link.send(views.Account, "DELETE", f"/v1/tokens/{_name('token', name)}", again=Again.UNSENT)

    def _command(self, job: str, verb: str, parameters: dict[str, str | int | list[str]] | None = None) -> CommandResult:
        def send(each: str) -> CommandResult:
            return self._link.send(CommandResult, "POST", f"{_job(each)}/{verb}", parameters=parameters)

        return self._named(job, send)

    def _named(self, job: str, ask: Callable[[str], Found]) -> Found:
        """The answer about a job that is given by its id or its name. An id is never taken for a name."""
        given = _checked(job)
        try:
            return ask(given)
        except ServerRefusedError as error:
            if error.code != NOT_FOUND:
                raise
            # The one job that is called so, unless there is none, or the server is too old to look for it.
            try:
                found = self.called(given)
            except ServerRefusedError:
                raise error from None
            if not found.jobs or found.jobs[0].id == given:
                raise
            if found.total > 1:
                raise RequestError(_ambiguous(given, found)) from None
        return ask(found.jobs[0].id)

    def _stream(self, job: str, ask: Callable[[str], Iterator[Found]]) -> Iterator[Found]:
        """A stream about a job that is given by its id or its name."""

        def begin(each: str) -> Iterator[Found]:
            parts = ask(each)
            return chain(list(islice(parts, 1)), parts)  # an unknown job is refused with the first item

        yield from self._named(job, begin)


def _several(given: Iterable[Found], name: str) -> list[Found]:
    """Several things; one text is not several letters."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise RequestError(f"{name}: expected a list, got {given!r:.60}")
    return list(given)


def _states(given: Sequence[JobState | str] | str) -> list[str]:
    """States as the server names them; `running` will do."""
    words = [given] if isinstance(given, str) else list(map(str, _several(given, "states")))
    for word in words:
        if word.upper() not in JobState.__members__:
            raise UnknownNameError("state", word, list(JobState))
    return [word.upper() for word in words]


def _ambiguous(word: str, found: views.JobsCalled) -> str:
    """Say which jobs a word could mean."""
    more = ", …" if found.total > len(found.jobs) else ""
    if found.exact:
        ids = ", ".join(f"{job.id} ({job.state})" for job in found.jobs)
        return f"several jobs are called {word!r}: {ids}{more}; give the id of one"
    ids = ", ".join(f"{job.id} {job.name} ({job.state})" for job in found.jobs)
    return f"names of {found.total:,} jobs begin with {word!r}: {ids}{more}; give more of the name, or the id of one"


def new_key() -> str:
    """A unique key for a submission."""
    return uuid4().hex


def _job(job: str) -> str:
    return f"/v1/jobs/{_checked(job)}"


def _node(node: str) -> str:
    return f"/v1/nodes/{_name('node', node)}"


def _checked(job: str) -> str:
    return _name("job", str(job))  # programs that are not type-checked pass ids as numbers


def _name(what: str, name: str) -> str:
    """A name that may be part of a URL."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise RequestError(f"{what}: {name!r:.66} is no name of a {what}; expected letters, digits, `.`, `_` and `-`")
    return name
