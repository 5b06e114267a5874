"""One HTTP request and its answer: sent again after a lost connection, for a bounded time; errors as one line.

Neither the environment nor the server can send a token elsewhere: proxies of the environment are not used, and no
redirection is followed. Errors:

    RequestError
    └── ServerRefusedError   the server understood and refused: nothing was changed
    PoiseError
    ├── UnavailableError     no answer, or none that can be understood
    └── WaitTimeoutError     a job had not ended in time
"""

import json
import os
import ssl
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from poise import __version__
from poise.scheduler.model.errors import PoiseError, RequestError, plain
from poise.service.client.config import ServerAddress, find_server
from poise.service.wire.request import Wire
from poise.service.wire.views import ProblemView

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds before a request is sent again: doubled each time
FIRST_CONTACT = 1.0  # seconds for which a server that never answered is asked again: it neither runs nor seems to restart

# Codes of the server's answers.
NOT_FOUND = "not-found"
NO_TOKEN = "no-token"
BUSY = frozenset({"busy", "too-many-requests"})  # the server has not even looked at the request, and may do so soon

Answer = TypeVar("Answer", bound=Wire)
Parameters = dict[str, str | int | list[str]]


class ServerRefusedError(RequestError):
    """The server refused (4xx). `code` is the server's, for programs."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code


class UnavailableError(PoiseError):
    """No answer, or one that says that the server cannot do its work (5xx), or one that cannot be understood."""


class WaitTimeoutError(PoiseError, TimeoutError):
    """A job had not ended when the time was up; it continues."""


class _TransientError(PoiseError):
    """A failure that may pass. `may_be_done`: the server may have done what it was asked."""

    def __init__(self, text: str, *, may_be_done: bool) -> None:
        super().__init__(text)
        self.may_be_done = may_be_done


class Again(Enum):
    """When a request may be sent again: always, if it is idempotent, or only if the first one was not sent."""

    ALWAYS = "always"
    UNSENT = "unsent"


class Connection:
    """A server, and the token to talk to it with. `patience`: seconds for which a request is sent again."""

    def __init__(
        self,
        server: ServerAddress,
        *,
        verify: Path | ssl.SSLContext | bool,
        timeout: float,
        patience: float,
        transport: httpx.BaseTransport | None,
    ) -> None:
        self.server = server
        self.on_wait: Callable[[str], None] | None = None
        """Called once with the reason if a request takes long: a person may be watching."""
        self._patience = patience
        self._reached = False
        identity = {"Authorization": f"Bearer {server.token}", "User-Agent": f"poise/{__version__}"}
        self._http = httpx.Client(
            headers={**identity, "Accept": "application/json"},
            verify=tls_context(verify) if server.url.startswith("https:") else False,
            timeout=timeout,
            trust_env=False,
            follow_redirects=False,
            transport=transport,
        )

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def get(self, kind: type[Answer], path: str, **parameters: str | int | list[str] | None) -> Answer:
        """The resource at a path; parameters that are None are left out."""
        given: Parameters = {name: value for name, value in parameters.items() if value is not None}
        return parsed(kind, self._ask("GET", path, given, None, Again.ALWAYS).content)

    def send(
        self,
        kind: type[Answer],
        method: str,
        path: str,
        body: Wire | None = None,
        *,
        again: Again = Again.ALWAYS,
        parameters: Parameters | None = None,
    ) -> Answer:
        """The answer to a request that changes something."""
        content = None if body is None else body.model_dump_json(exclude_defaults=True).encode()
        return parsed(kind, self._ask(method, path, parameters or {}, content, again).content)

    def locate(self) -> str:
        """The server's address by now: one of this machine may restart under another.

        The token goes to no other server, even if that is the only one known at the moment.
        """
        if self.server.home is not None:
            with suppress(RequestError):  # none is known at the moment
                found = find_server(os.environ)
                self.server = found if found.is_same(self.server) else self.server
        return self.server.url.rstrip("/")

    def _ask(self, method: str, path: str, parameters: Parameters, content: bytes | None, again: Again) -> httpx.Response:
        """Send a request until it is answered, or patience is at its end."""
        begun, pause = monotonic(), FIRST_PAUSE
        url = self.server.url.rstrip("/")
        while True:
            try:
                return self._once(method, url, path, parameters, content)
            except _TransientError as error:
                # A server that never answered gets little time, unless it seems to be restarting.
                is_known = self._reached or self.server.is_restarting
                patience = self._patience if is_known else min(self._patience, FIRST_CONTACT)
                is_allowed = again is Again.ALWAYS or not error.may_be_done
                if not is_allowed or monotonic() - begun + pause > patience:
                    raise UnavailableError(str(error)) from None
                url = self.locate()
                if self.on_wait is not None and pause < LONGEST_PAUSE <= 2 * pause:
                    self.on_wait(str(error))
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _once(self, method: str, url: str, path: str, parameters: Parameters, content: bytes | None) -> httpx.Response:
        if self.server.is_gone:
            # Whoever listens there now must not see the token.
            raise _TransientError(f"the server at {url} has ended; start one with `poise serve`", may_be_done=False)
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            answer = self._http.request(method, url + path, params=parameters, content=content, headers=headers)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            raise RequestError(f"{url}: {error}") from None
        except httpx.RequestError as error:
            if "certificate" in str(error).lower():
                hint = "set POISE_CA to the certificate of the server or its issuer"
                raise UnavailableError(f"{url}: {_one_line(error)}; {hint}") from None
            unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            hint = "; is `poise serve` running?" if unsent and not self._reached else ""
            raise _TransientError(f"no answer from {url}: {_one_line(error)}{hint}", may_be_done=not unsent) from None
        self._reached = True
        if not answer.is_success:
            raise self._refusal(url, answer)
        return answer

    def _refusal(self, url: str, answer: httpx.Response) -> PoiseError:
        try:
            problem = parsed(ProblemView, answer.content)
        except UnavailableError:
            problem = ProblemView(code="", detail=f"{url} answered {answer.status_code} {answer.reason_phrase}".strip())
        detail = plain(" ".join(problem.detail.split()))
        if problem.code == NO_TOKEN:
            whose = f"the token in {self.server.token_in}" if self.server.token_in else "the token"
            detail = f"{whose} is not known to {url}, or has expired"
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE or problem.code in BUSY:
            return _TransientError(detail, may_be_done=problem.code not in BUSY)
        if answer.is_client_error:
            return ServerRefusedError(answer.status_code, problem.code, detail)
        return UnavailableError(detail)


def parsed(kind: type[Answer], content: bytes) -> Answer:
    """The answer in these bytes. The server may be newer: unknown keys are dropped, unknown values refused."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        unknown = [each["loc"] for each in error.errors(include_url=False) if each["type"] == "extra_forbidden"]
        if not unknown:
            raise _not_understood(error) from None
    document: Any = json.loads(content)
    for *path, last in unknown:
        parent = document
        for part in path:
            parent = parent[part]
        del parent[last]
    try:
        return kind.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise _not_understood(error) from None


def _not_understood(error: ValidationError) -> UnavailableError:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "the whole"
    got = repr(first["input"])
    shown = got if len(got) <= 40 else got[:39] + "…"
    return UnavailableError(
        f"the server's answer is not understood by poise {__version__}: {place} is {shown}; is the server a newer Poise?"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def tls_context(verify: Path | ssl.SSLContext | bool) -> ssl.SSLContext | bool:
    """Say how certificates are checked: against those of a file, or those that the machine trusts.

    A certificate in the file is trusted as it is, also if it is a server's own and another authority has issued it.
    """
    if isinstance(verify, ssl.SSLContext) or verify is False:
        return verify
    try:
        context = ssl.create_default_context(cafile=None if verify is True else str(verify))
    except (OSError, ssl.SSLError) as error:
        raise RequestError(f"{verify}: no certificates can be read from it: {_one_line(error)}") from None
    if verify is not True:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
