"""One request and its answer: sent again after a lost connection, with a bound on how long; errors as one line.

Neither the environment nor the server can send a token elsewhere: proxies of the environment are not used, and no
redirection is followed.
"""

import json
import ssl
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Protocol, TypeVar

import httpx
from pydantic import ValidationError

from poise import __version__
from poise.scheduler.model.errors import PoiseError, RequestError
from poise.service.client.errors import ServerRefusedError, UnavailableError
from poise.service.wire.request import Wire, plain
from poise.service.wire.views import ProblemView

Answer = TypeVar("Answer", bound=Wire)

# Answers of a server that may be newer than this client: keys that are not known are dropped, unknown words refused.


def understood(kind: type[Answer], content: bytes) -> Answer:
    """The answer that these bytes are."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        unknown = [each["loc"] for each in error.errors(include_url=False) if each["type"] == "extra_forbidden"]
        if not unknown:
            raise _unclear(error) from None
    document = json.loads(content)
    for path in unknown:
        _drop(document, path)
    try:
        return kind.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise _unclear(error) from None


def _drop(document: Any, path: tuple[int | str, ...]) -> None:  # noqa: ANN401 - JSON
    for part in path[:-1]:
        document = document[part]
    del document[path[-1]]


def _unclear(error: ValidationError) -> UnavailableError:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "the whole"
    got = repr(first["input"])
    shown = got if len(got) <= 40 else got[:39] + "…"
    return UnavailableError(
        f"the server's answer is not understood by poise {__version__}: {place} is {shown}; is the server a newer Poise?"
    )


FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds before a request is sent again: doubled each time."""
BUSY = frozenset({"busy", "too-many-requests"})
"""Codes of a server that has not even looked at a request, and may do so in a moment."""
NO_TOKEN = "no-token"
"""Code of a server that does not know the token."""
FIRST_CONTACT = 1.0
"""Seconds for which a server that never answered is asked again: it does not seem to run, nor to restart."""

Parameters = dict[str, str | int | list[str]]


class Again(Enum):
    """When a request may be sent again: always, as one that is done once however often it comes; or if nothing was sent."""

    ALWAYS = "always"
    UNSENT = "unsent"


class Whereabouts(Protocol):
    """Where a server is that may move."""

    @property
    def is_gone(self) -> bool:
        """It has ended: whoever listens there now must not see the token."""

    @property
    def is_restarting(self) -> bool:
        """It has ended, and there is reason to think that it comes back."""

    def look(self) -> str:
        """Its address by now."""


class Connection:
    """A server, and the token to talk to it with. `patience`: seconds for which a request is sent again."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        verify: Path | ssl.SSLContext | bool,
        timeout: float,
        patience: float,
        transport: httpx.BaseTransport | None,
    ) -> None:
        self._url = url.rstrip("/")
        self._patience = patience
        self._reached = False
        self.whereabouts: Whereabouts | None = None
        self.token_in: str | None = None
        """The variable or the file that the token is from, to be named where it is worth nothing."""
        self.waiting: Callable[[str], None] | None = None
        """Told why, once, where a request takes long: somebody may be watching."""
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}", "User-Agent": f"poise/{__version__}", "Accept": "application/json"},
            verify=_checking(verify) if url.startswith("https:") else False,
            timeout=timeout,
            trust_env=False,
            follow_redirects=False,
            transport=transport,
        )

    def close(self) -> None:
        """Give up the connection."""
        self._http.close()

    def get(self, kind: type[Answer], path: str, **parameters: str | int | list[str] | None) -> Answer:
        """What is at a path; parameters that are None are left out."""
        given: Parameters = {name: value for name, value in parameters.items() if value is not None}
        return understood(kind, self._ask("GET", path, given, None, Again.ALWAYS).content)

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
        """The answer to something sent."""
        content = None if body is None else body.model_dump_json(exclude_defaults=True).encode()
        return understood(kind, self._ask(method, path, parameters or {}, content, again).content)

    def _ask(self, method: str, path: str, parameters: Parameters, content: bytes | None, again: Again) -> httpx.Response:
        begun, pause = monotonic(), FIRST_PAUSE
        while True:
            try:
                return self._once(method, path, parameters, content)
            except _PassingError as error:
                is_allowed = again is Again.ALWAYS or not error.may_be_done
                if not is_allowed or monotonic() - begun + pause > self._patience_now():
                    raise UnavailableError(str(error)) from None
                self._look_around()
                if self.waiting is not None and pause < LONGEST_PAUSE <= 2 * pause:
                    self.waiting(str(error))
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _patience_now(self) -> float:
        """Seconds: few for a server that never answered, unless it seems to be on its way back."""
        is_known = self._reached or (self.whereabouts is not None and self.whereabouts.is_restarting)
        return self._patience if is_known else min(self._patience, FIRST_CONTACT)

    def _look_around(self) -> None:
        if self.whereabouts is not None:
            with suppress(RequestError):  # none is known at this moment
                self._url = self.whereabouts.look().rstrip("/")

    def _once(self, method: str, path: str, parameters: Parameters, content: bytes | None) -> httpx.Response:
        if self.whereabouts is not None and self.whereabouts.is_gone:
            raise _PassingError(f"the server at {self._url} has ended; start one with `poise serve`", may_be_done=False)
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            answer = self._http.request(method, self._url + path, params=parameters, content=content, headers=headers)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            raise RequestError(f"{self._url}: {error}") from None
        except httpx.RequestError as error:
            raise self._no_answer(error) from None
        self._reached = True
        if not answer.is_success:
            raise self._refusal(answer)
        return answer

    def _no_answer(self, error: httpx.RequestError) -> PoiseError:
        if "certificate" in str(error).lower():
            return UnavailableError(
                f"{self._url}: {_line(error)}; set POISE_CA to the certificate of the server or its issuer"
            )
        unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        hint = "; is `poise serve` running?" if unsent and not self._reached else ""
        return _PassingError(f"no answer from {self._url}: {_line(error)}{hint}", may_be_done=not unsent)

    def _refusal(self, answer: httpx.Response) -> PoiseError:
        try:
            problem = understood(ProblemView, answer.content)
        except UnavailableError:
            problem = ProblemView(
                code="", detail=f"{self._url} answered {answer.status_code} {answer.reason_phrase}".strip()
            )
        detail = plain(" ".join(problem.detail.split()))
        if problem.code == NO_TOKEN:
            whose = f"the token in {self.token_in}" if self.token_in else "the token"
            detail = f"{whose} is not known to {self._url}, or has expired"
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE or problem.code in BUSY:
            return _PassingError(detail, may_be_done=problem.code not in BUSY)
        if answer.is_client_error:
            return ServerRefusedError(answer.status_code, problem.code, detail)
        return UnavailableError(detail)


class _PassingError(PoiseError):
    """Something that may be otherwise in a moment. `may_be_done`: the server may have done what it was asked."""

    def __init__(self, text: str, *, may_be_done: bool) -> None:
        super().__init__(text)
        self.may_be_done = may_be_done


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _checking(verify: Path | ssl.SSLContext | bool) -> ssl.SSLContext | bool:
    """How certificates are checked: against those of a file, or those that the machine trusts."""
    if isinstance(verify, ssl.SSLContext):
        return verify
    if verify is False:
        return False
    try:
        return ssl.create_default_context(cafile=None if verify is True else str(verify))
    except (OSError, ssl.SSLError) as error:
        raise RequestError(f"{verify}: no certificates can be read from it: {_line(error)}") from None
