"""The verbs of a live Poise, for Python programs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, overload

from poise.service.client.streams import wait_for
from poise.service.wire.views import CommandResult, JobDetail, JobState, WhyView

if TYPE_CHECKING:
    pass  # import gone
import os
import re
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import uuid4

import httpx

from poise.scheduler.model.errors import RequestError, UnknownNameError
from poise.service.client.config import ServerAddress, awaited_server, find_server
from poise.service.client.connection import Again, Connection
from poise.service.client.errors import NOT_FOUND, ServerRefusedError
from poise.service.client.streams import growing_events, growing_log, last_lines, log_parts
from poise.service.client.submission import made, no_request, placed, request_of, variants_of
from poise.service.wire.draft import JobDraft
from poise.service.wire.request import MOST_JOBS, NAME, JobRequest, Submission
from poise.service.wire.views import (
    Account,
    CancelledJobs,
    EventPage,
    EventRow,
    MadeToken,
    NewToken,
    NodeList,
    PolicyName,
    QueuePage,
    Role,
    ServiceView,
    Shares,
    SubmittedView,
    TokenList,
    Weight,
)

# One job of a live Poise.


class JobHandle:
    """A job, by its id or its name. Nothing about it is remembered: every question is asked anew."""

    def __init__(self, client: "Client", job: str, notes: tuple[str, ...] = ()) -> None:
        self._client = client
        self.id = job
        self.notes = notes
        """What the server said of its submission: what was asked for and has no effect."""

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r})"

    @property
    def state(self) -> JobState:
        """Where it stands now."""
        return self.show().job.state

    def show(self) -> JobDetail:
        """Everything about it."""
        return self._client.show(self.id)

    def why(self) -> WhyView:
        """Why it runs, waits or has ended."""
        return self._client.why(self.id)

    def cancel(self) -> CommandResult:
        """Withdraw it."""
        return self._client.cancel(self.id)

    def hold(self) -> CommandResult:
        """Keep it from running until it is released; it is preempted as soon as that loses no work."""
        return self._client.hold(self.id)

    def stop(self) -> CommandResult:
        """Hold it, and make its run leave: asked to save, it gets TERM at its deadline. What it has not saved is lost."""
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
        if follow:
            return self._client.logs(self.id, follow=True, replica=replica)
        return self._client.logs(self.id, replica=replica)

    def wait(self, timeout: float | None = None) -> JobState:
        """The final state, once it is reached; WaitTimeoutError after `timeout` seconds. Look at it: FAILED is final too."""
        return wait_for(self._client, [self.id], timeout=timeout)[self.id]


Found = TypeVar("Found")

MOST_NAMED = 11
"""Jobs of one name that are looked for: one more than are listed."""
PATIENCE = 15.0
"""Seconds for which a request is sent again while the server is away: a restart takes less."""


class Client:
    """A live Poise.

    url, token   of the server; `Client.from_config()` finds them
    verify       of an https server: True to trust what the machine trusts, or a file of certificates
    timeout      seconds for which one answer is waited for
    patience     seconds for which a request is sent again after a lost connection; a submission is taken once all the same

    Every method raises RefusedError if the server says no, and UnavailableError if there is no answer.
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
        ServerAddress(url, token)  # refuses what makes no sense
        self._link = Connection(url, token, verify=verify, timeout=timeout, patience=patience, transport=transport)

    @classmethod
    def from_config(
        cls, *, timeout: float = 30.0, patience: float = PATIENCE, waiting: Callable[[str], None] | None = None
    ) -> Self:
        """The server of the environment, of this machine, or of client.toml; RequestError if none is known.

        waiting   is told why, where an answer takes long
        """
        found = awaited_server(os.environ, patience, waiting)
        client = cls(found.url, found.token, verify=found.ca or True, timeout=timeout, patience=patience)
        client._link.whereabouts = _Whereabouts(found)
        client._link.waiting = waiting
        client._link.token_in = found.token_in
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give up the connection."""
        self._link.close()

    def submit(self, request: JobRequest | None = None, /, **fields: Any) -> JobHandle:  # noqa: ANN401 - fields of a request
        """Submit a job: a Request, or its fields.

        Without `cwd` it runs in the current folder, without `venv` in the virtual environment that is active; None: in none.
        """
        return self.submit_all([request_of(request, fields)])[0]

    def submit_all(self, requests: Sequence[JobRequest], *, key: str | None = None) -> tuple[JobHandle, ...]:
        """Submit jobs that are taken all together or not at all, and once however often they are sent.

        key   of the submission; what is sent again under the same one is taken once. None: a new one
        """
        wrong = next((each for each in requests if not isinstance(each, JobRequest)), None)
        if wrong is not None:
            raise no_request(wrong)
        if not 1 <= len(requests) <= MOST_JOBS:
            raise RequestError(f"expected 1 to {MOST_JOBS:,} jobs in a submission, got {len(requests):,}")
        submission = made(Submission, jobs=tuple(map(placed, requests)), key=new_key() if key is None else key)
        try:
            taken = self._link.send(SubmittedView, "POST", "/v1/jobs", submission)
        except ServerRefusedError as error:
            if error.status != httpx.codes.REQUEST_ENTITY_TOO_LARGE:
                raise
            text = f"{len(requests):,} jobs are too much for one submission ({error}); divide them, or make them smaller"
            raise ServerRefusedError(error.status, error.code, text) from None
        return tuple(JobHandle(self, job, taken.notes) for job in taken.jobs)

    def map(
        self, request: JobRequest, params: Iterable[Mapping[str, object]] | Mapping[str, Iterable[object] | object]
    ) -> tuple[JobHandle, ...]:
        """Submit an app: the request once with each environment, or with every combination of values.

        `${NAME}` in the command stands for the variable's value, and the jobs share an `app`. A text or a number in place
        of a list of values is one value.
        """
        if not isinstance(request, JobRequest):
            raise no_request(request)
        variants = variants_of(params)
        key = new_key()
        return self.submit_all(replace(JobDraft.of(request), variants=variants).requests(key), key=key)

    def job(self, job: str) -> JobHandle:
        """A job by its id, or by its name if no other is called so. Nothing is asked yet."""
        return JobHandle(self, job)

    def find(self, job: str) -> str:
        """The id of a job that is given by its id or its name; RequestError if there is none, or several have the name."""
        return self._named(job, lambda each: self._link.get(JobDetail, _job(each))).job.id

    def wait(self, jobs: Sequence[str], *, timeout: float | None = None) -> dict[str, JobState]:
        """The final state of each job, once all have one; WaitTimeoutError after `timeout` seconds."""
        return wait_for(self, list(dict.fromkeys(map(str, jobs))), timeout=timeout)

    def queue(
        self,
        *,
        states: Sequence[JobState | str] = (),
        tenant: str | None = None,
        app: str | None = None,
        name: str | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> QueuePage:
        """Jobs in scheduling order; no states: those that have not ended."""
        words = [_state(word).value for word in ([states] if isinstance(states, str) else states)] or None
        asked = {"tenant": tenant, "app": app, "name": name}
        return self._link.get(QueuePage, "/v1/jobs", state=words, **asked, limit=limit, offset=offset)

    def show(self, job: str) -> JobDetail:
        """Everything about a job."""
        return self._named(job, lambda each: self._link.get(JobDetail, _job(each)))

    def why(self, job: str) -> WhyView:
        """Why a job runs, waits or has ended: one reason, the evidence, what would help."""
        return self._named(job, lambda each: self._link.get(WhyView, _job(each) + "/why"))

    def log(self, job: str, *, replica: int = 0) -> str:
        """What a replica of a job has printed."""
        return self._named(job, lambda each: "".join(part.text for part in log_parts(self._link, each, replica, 0)))

    def tail(self, job: str, lines: int, *, replica: int = 0) -> tuple[str, int]:
        """The last lines of a replica's log, and the offset to follow it from."""
        return self._named(job, lambda each: last_lines(self._link, each, replica, lines))

    def follow_log(self, job: str, *, replica: int = 0, offset: int = 0) -> Iterator[str]:
        """A replica's log, part by part as it is written, until nothing is added any more."""
        parts = self._growing(_checked(job), lambda each: growing_log(self._link, each, replica, offset))
        return (part.text for part in parts)

    @overload
    def logs(self, job: str, *, follow: Literal[False] = False, replica: int = 0) -> str: ...
    @overload
    def logs(self, job: str, *, follow: Literal[True], replica: int = 0) -> Iterator[str]: ...
    def logs(self, job: str, *, follow: bool = False, replica: int = 0) -> str | Iterator[str]:
        """What a replica of a job has printed; with `follow`, part by part as it prints more, until the job has ended."""
        return self.follow_log(job, replica=replica) if follow else self.log(job, replica=replica)

    def cancel(self, job: str) -> CommandResult:
        """Withdraw a job."""
        return self._wish(job, "cancel")

    def cancel_all(self, tenant: str) -> CancelledJobs:
        """Withdraw all jobs of a tenant that have not ended; of other tenants only operators may."""
        return self._link.send(CancelledJobs, "POST", f"/v1/tenants/{_name('tenant', tenant)}/cancel")

    def hold(self, job: str) -> CommandResult:
        """Keep a job from running until it is released. One that runs is preempted as soon as that loses no work."""
        return self._wish(job, "hold")

    def stop(self, job: str) -> CommandResult:
        """Hold a job, and make its run leave: asked to save, it gets TERM at its deadline. What it has not saved is lost."""
        return self._link.send(CommandResult, "POST", f"{_job(job)}/hold", parameters={"stop": "true"})

    def release(self, job: str) -> CommandResult:
        """End a hold."""
        return self._wish(job, "release")

    def nodes(self) -> NodeList:
        """All nodes, and who holds their GPUs."""
        return self._link.get(NodeList, "/v1/nodes")

    def shares(self) -> Shares:
        """All tenants: what they are entitled to, hold and have received."""
        return self._link.get(Shares, "/v1/shares")

    def set_weight(self, tenant: str, weight: float) -> Shares:
        """Change a tenant's share."""
        return self.set_weights([(tenant, weight)])

    def set_weights(self, weights: Sequence[tuple[str, float]]) -> Shares:
        """Change shares of tenants, one after the other. What can be seen to be wrong is refused before the first."""
        wishes = [(f"/v1/shares/{_name('tenant', tenant)}", made(Weight, weight=weight)) for tenant, weight in weights]
        answers = [self._link.send(Shares, "PUT", path, wish) for path, wish in wishes]
        return answers[-1] if answers else self.shares()

    def events(self, *, after: int = -50, job: str | None = None, tenant: str | None = None, limit: int = 50) -> EventPage:
        """What happened after a number of the journal; negative: the last so many."""

        def ask(each: str | None) -> EventPage:
            return self._link.get(EventPage, "/v1/events", after=after, job=each, tenant=tenant, limit=limit)

        return ask(None) if job is None else self._named(job, ask)

    def follow_events(self, *, after: int = -50, job: str | None = None, tenant: str | None = None) -> Iterator[EventRow]:
        """The same, and whatever happens from now on, without end."""
        if job is None:
            return growing_events(self._link, after, None, tenant)
        return self._growing(job, lambda each: growing_events(self._link, after, each, tenant))

    def service(self) -> ServiceView:
        """What runs there."""
        return self._link.get(ServiceView, "/v1/service")

    def set_policy(self, policy: str) -> ServiceView:
        """The same as `use`."""
        return self.use(policy)

    def use(self, policy: str) -> ServiceView:
        """Go on under another policy of the catalogue."""
        return self._link.send(ServiceView, "PUT", "/v1/policy", made(PolicyName, policy=policy))

    def me(self) -> Account:
        """Whom the token stands for."""
        return self._link.get(Account, "/v1/me")

    def tokens(self) -> TokenList:
        """All tokens, without the tokens."""
        return self._link.get(TokenList, "/v1/tokens")

    def make_token(
        self, name: str, *, tenant: str | None = None, role: Role = Role.USER, days: float | None = None
    ) -> MadeToken:
        """A new token, which is shown this once. tenant: whose jobs those are that it submits; None: called as the token."""
        wish = made(NewToken, name=name, tenant=tenant, role=role, days=days)
        return self._link.send(MadeToken, "POST", "/v1/tokens", wish, again=Again.UNSENT)

    def drop_token(self, name: str) -> Account:
        """Make a token worthless; whom it stood for."""
        return self._link.send(Account, "DELETE", f"/v1/tokens/{_name('token', name)}", again=Again.UNSENT)

    def _wish(self, job: str, verb: str) -> CommandResult:
        return self._named(job, lambda each: self._link.send(CommandResult, "POST", f"{_job(each)}/{verb}"))

    def _named(self, job: str, ask: Callable[[str], Found]) -> Found:
        """What is answered of a job that is given by its id or its name. An id is never taken for a name."""
        given = _checked(job)
        try:
            return ask(given)
        except ServerRefusedError as error:
            if error.code != NOT_FOUND:
                raise
            found = self._called(given)
            if found is None or found == given:
                raise
        return ask(found)

    def _growing(self, job: str, ask: Callable[[str], Iterator[Found]]) -> Iterator[Found]:
        """What is told bit by bit of a job that is given by its id or its name."""
        first, others = self._named(job, lambda each: _begun(ask(each)))
        if first is not None:
            yield first
            yield from others

    def _called(self, name: str) -> str | None:
        """The id of the one job of this name; None: there is none, or the server is too old to look for it."""
        try:
            rows = self.queue(states=list(JobState), name=name, limit=MOST_NAMED).jobs
        except ServerRefusedError:
            return None
        if len(rows) > 1:
            ids = ", ".join(f"{row.id} ({row.state})" for row in rows[: MOST_NAMED - 1])
            more = ", …" if len(rows) == MOST_NAMED else ""
            raise RequestError(f"several jobs are called {name!r}: {ids}{more}; give the id of one")
        return rows[0].id if rows else None


class _Whereabouts:
    """Where the server of the configuration is: it may come back under another address."""

    def __init__(self, found: ServerAddress) -> None:
        self._at = found

    @property
    def is_gone(self) -> bool:
        return self._at.is_gone

    @property
    def is_restarting(self) -> bool:
        return self._at.is_restarting

    def look(self) -> str:
        """Where it is by now. A token goes to no other server, also if that is all that is known at this moment."""
        now = find_server(os.environ)
        if now.is_same(self._at):
            self._at = now
        return self._at.url


def new_key() -> str:
    """Of a submission, like no other."""
    return uuid4().hex


def _begun(parts: Iterator[Found]) -> tuple[Found | None, Iterator[Found]]:
    """The first of them, if there is any, and the others: whatever is wrong with all of them shows with the first."""
    return next(parts, None), parts


def _job(job: str) -> str:
    return f"/v1/jobs/{_checked(job)}"


def _checked(job: str) -> str:
    return _name("job", str(job))  # ids look like numbers, and programs have no types to go by


def _state(word: str) -> JobState:
    """A state by its word, in capitals or not."""
    if str(word).upper() not in JobState.__members__:
        raise UnknownNameError("state", str(word), list(JobState))
    return JobState[str(word).upper()]


def _name(what: str, name: str) -> str:
    """A name that can stand in a path."""
    if not re.fullmatch(NAME, name):
        raise RequestError(f"{what}: {name[:64]!r} is no name of a {what}; expected letters, digits, `.`, `_` and `-`")
    return name
