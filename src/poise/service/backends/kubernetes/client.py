"""The Kubernetes API over HTTP: where the server is, requests and their errors, lists, watches, and mirrors of collections.

Objects are raw JSON: with 20,000 pods, a model of each would take a gigabyte and twelve seconds. Errors are of two kinds.
`ApiError` is an answer: the server refused, and asking again changes nothing. `ApiUnavailableError` is no answer, or one
that may pass: a write may then have been done or not. The client itself repeats a request only if the server has certainly
not carried it out (401, after which the credential is read again), or if it is a GET whose connection had gone stale.
"""

import asyncio
import base64
import binascii
import json
import os
import ssl
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from random import uniform
from time import monotonic, time  # noqa: TID251 - a credential is good until a time of the wall clock
from typing import Any, NamedTuple
from urllib.parse import urlencode

import httpx
import yaml

from poise.scheduler.model.errors import PoiseError, RequestError
from poise.service.backends.kubernetes.connections import IDLE_SECONDS, KEEP_ALIVE, KeepAliveTransport

Json = dict[str, Any]
Clock = Callable[[], float]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 60.0  # after which the file of a token is read again: Kubernetes replaces it well before it expires
EARLY_SECONDS = 10.0  # before its end at which a credential is no longer used: requests take time
PLUGIN_SECONDS = 60.0  # for a credential plug-in to answer
REQUEST_SECONDS = 30.0  # for a request and its answer
CONNECT_SECONDS = 10.0
PAGE = 500  # objects in one answer to a list
WATCH_SECONDS = 300.0  # after which the server ends a watch; each watch asks for a tenth more or less
WATCH_SLACK = 30.0  # seconds by which the end of a watch may be late; after them the connection is taken to be dead
NOT_LISTED = "not listed yet"  # what is wrong with a mirror that is new
LEAST_PAUSE, MOST_PAUSE = 0.5, 10.0  # seconds between tries of a mirror whose server is away


# Errors


class ApiError(PoiseError):
    """The API server refused a request. `reason` is its word: `NotFound`, `AlreadyExists`, `Conflict`, `Forbidden`."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after


class ExpiredError(ApiError):
    """A resource version or a page is too old for the server (410): list again."""


class ApiUnavailableError(PoiseError):
    """The API server gave no answer, or one that may pass. A write may have been done or not.

    status        of the answer; None: there was none
    retry_after   seconds for which the server asks to be left alone; None: it does not say
    """

    def __init__(self, text: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.text, self.status, self.retry_after = text, status, retry_after


# Credentials


class Authorization(NamedTuple):
    """What a request carries to say whose it is. `serial` counts certificates: another one needs new connections."""

    headers: Mapping[str, str]
    serial: int = 0


class Credential:
    """Whose requests these are: here nobody's, or those of a client certificate that is part of the TLS context."""

    async def authorization(self) -> Authorization:
        """Return what a request has to carry now."""
        return Authorization({})

    def forget(self, used: Authorization) -> bool:
        """Note that the server refused this one; say whether another may be had."""
        return False


class TokenCredential(Credential):
    """A token that does not change."""

    def __init__(self, token: str) -> None:
        self._authorization = _bearer(token)

    async def authorization(self) -> Authorization:
        """Return the token."""
        return self._authorization


class TokenFileCredential(Credential):
    """A token in a file that somebody replaces: read again when it was read a minute ago, and when it was refused."""

    def __init__(self, path: Path, clock: Clock = monotonic) -> None:
        self._path, self._clock = path, clock
        self._authorization: Authorization | None = None
        self._read_at = 0.0
        self._is_refused = False

    async def authorization(self) -> Authorization:
        """Return the token in the file; the last one if the file cannot be read now."""
        known = self._authorization
        if known is not None and not self._is_refused and self._clock() - self._read_at < TOKEN_SECONDS:
            return known
        try:
            token = self._path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            if known is None:
                raise ApiUnavailableError(f"{self._path}: the token cannot be read: {_of(error)}") from error
            token = ""
        if token or known is None:
            known = _bearer(token)
        self._authorization, self._read_at, self._is_refused = known, self._clock(), False
        return known

    def forget(self, used: Authorization) -> bool:
        """Read the file again before the next request."""
        self._is_refused = self._is_refused or used is self._authorization
        return True


@dataclass(frozen=True, slots=True)
class PluginCommand:
    """How a credential plug-in of a kubeconfig is run. `info`: the cluster, for those that want to know it."""

    command: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    version: str
    info: Json | None = None
    hint: str = ""


class PluginCredential(Credential):
    """What a command prints as an `ExecCredential`, until it expires or is refused.

    A client certificate goes into the TLS context, which new connections use. The command runs in a thread, and once for all
    that wait for it.
    """

    def __init__(self, command: PluginCommand, context: ssl.SSLContext | None, wall: Clock = time) -> None:
        self._command, self._context, self._wall = command, context, wall
        self._lock = threading.Lock()
        self._authorization: Authorization | None = None
        self._until: float | None = None
        self._serial = 0

    async def authorization(self) -> Authorization:
        """Return the last answer of the command; run it if there is none that is still good."""
        good = self._good()
        return await asyncio.to_thread(self._renew) if good is None else good

    def forget(self, used: Authorization) -> bool:
        """Run the command again before the next request."""
        if used is self._authorization:
            self._authorization = None
        return True

    def _good(self) -> Authorization | None:
        is_over = self._until is not None and self._wall() > self._until - EARLY_SECONDS
        return None if is_over else self._authorization

    def _renew(self) -> Authorization:
        with self._lock:
            good = self._good()
            return self._run() if good is None else good

    def _run(self) -> Authorization:
        status = self._status(self._output())
        token, chain, key = (status.get(name) for name in ("token", "clientCertificateData", "clientKeyData"))
        if chain and key and self._context is not None:
            try:
                _load_chain(self._context, str(chain).encode(), str(key).encode())
            except (ssl.SSLError, OSError) as error:
                raise self._trouble(f"printed a client certificate that cannot be used: {_of(error)}") from error
            self._serial += 1
        elif not token:
            raise self._trouble("printed neither a token nor a certificate with its key")
        until = status.get("expirationTimestamp")
        try:
            self._until = None if until is None else datetime.fromisoformat(str(until)).timestamp()
        except ValueError as error:
            raise self._trouble(f"printed the expirationTimestamp {until!r}, which is no time") from error
        headers = _bearer(str(token)).headers if token else {}
        self._authorization = Authorization(headers, self._serial)
        return self._authorization

    def _output(self) -> bytes:
        given = self._command
        spec = {"interactive": False, **({} if given.info is None else {"cluster": given.info})}
        info = json.dumps({"apiVersion": given.version, "kind": "ExecCredential", "spec": spec})
        environment = {**given.environment, "KUBERNETES_EXEC_INFO": info}
        line = (given.command, *given.arguments)
        try:
            done = subprocess.run(
                line, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=PLUGIN_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise self._trouble(f"did not answer within {PLUGIN_SECONDS:g} s") from error
        except OSError as error:
            raise self._trouble(f"cannot be started: {_of(error)}") from error
        if done.returncode != 0:
            said = " ".join(done.stderr.decode(errors="replace").split())[-300:]
            raise self._trouble(f"ended with exit code {done.returncode}: {said or 'it said nothing'}")
        return done.stdout

    def _status(self, output: bytes) -> Json:
        try:
            answer = json.loads(output)
        except ValueError as error:
            raise self._trouble("printed something that is no JSON") from error
        status = answer.get("status") if isinstance(answer, dict) else None
        if not isinstance(status, dict):
            raise self._trouble("printed no ExecCredential with a status")
        return status

    def _trouble(self, text: str) -> ApiUnavailableError:
        hint = " ".join(self._command.hint.split())
        return ApiUnavailableError(f"credential plug-in {self._command.command} {text}{hint and f' ({hint})'}")


def _bearer(token: str) -> Authorization:
    return Authorization({"Authorization": f"Bearer {token}"})


def _load_chain(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    """Make a client certificate part of a context. It can only be loaded from files, which are gone before this returns."""
    with tempfile.TemporaryDirectory() as folder:  # of mode 0700
        files = Path(folder, "chain.pem"), Path(folder, "key.pem")
        for file, content in zip(files, (chain, key), strict=True):
            file.write_bytes(content)
        context.load_cert_chain(*files)


def _of(error: BaseException) -> str:
    """Say what an error is, also if it has no words."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(words.split()) or type(error).__name__


# Configuration


@dataclass(frozen=True, slots=True)
class KubeConfig:
    """Where the API server is and how to speak to it.

    namespace     in which the configuration's owner works
    verify        the TLS context: authorities, client certificate. A Boolean: as httpx understands it
    server_name   by which the server's certificate is checked; None: the host in `server`
    proxy         URL of a proxy; those in the environment are not used
    source        where this was found, for people
    """

    server: str
    namespace: str = "default"
    verify: ssl.SSLContext | bool = True
    credential: Credential = field(default_factory=Credential)
    server_name: str | None = None
    proxy: str | None = None
    source: str = ""


def load_config(kubeconfig: Path | None, context: str | None, environ: Mapping[str, str]) -> KubeConfig:
    """Find out where the API server is and how to speak to it.

    The file that is given; else those in `KUBECONFIG`; else, in a pod, its service account, unless a context is asked for;
    else `~/.kube/config`. Raise a `RequestError` that says what is missing.
    """
    if kubeconfig is not None:
        return _from_files([_existing(kubeconfig)], context, environ)
    listed = [Path(part) for part in environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    if listed:
        existing = [path for path in listed if path.is_file()]
        return _from_files(existing or [_existing(listed[0])], context, environ)
    if context is None and environ.get("KUBERNETES_SERVICE_HOST") and (SERVICE_ACCOUNT / "token").is_file():
        return _in_cluster(environ)
    usual = Path(environ.get("HOME") or Path.home()) / ".kube" / "config"
    if usual.is_file():
        return _from_files([usual], context, environ)
    ways = f"give --kubeconfig FILE, set KUBECONFIG, write {usual}, or run in a pod with a service account"
    raise RequestError(f"no configuration for Kubernetes: {ways}")


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise RequestError(f"{path}: no such kubeconfig file")
    return path


def _in_cluster(environ: Mapping[str, str]) -> KubeConfig:
    """Speak as the service account of the pod in which this process runs."""
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    authorities, namespace = SERVICE_ACCOUNT / "ca.crt", SERVICE_ACCOUNT / "namespace"
    return KubeConfig(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=namespace.read_text().strip() if namespace.is_file() else "default",
        verify=_tls(authorities.read_bytes() if authorities.is_file() else None, str(authorities)),
        credential=TokenFileCredential(SERVICE_ACCOUNT / "token"),
        source="the service account of this pod",
    )


@dataclass(frozen=True, slots=True)
class _NamedEntry:
    """A named entry of a kubeconfig, and the file in which it stands: paths in it are relative to that."""

    file: Path
    kind: str
    name: str
    fields: Json

    @property
    def what(self) -> str:
        return f"{self.file}: {self.kind} {self.name!r}"

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{self.what}: {name} is {value!r}, not a text")
        return value or ""

    def path(self, name: str) -> Path | None:
        return self.file.parent / self.text(name) if self.text(name) else None

    def content(self, name: str) -> bytes | None:
        """Return what `NAME-data` has in base64, or else the content of the file `NAME`."""
        if data := self.text(f"{name}-data"):
            try:
                return base64.b64decode(data, validate=True)
            except binascii.Error as error:
                raise RequestError(f"{self.what}: {name}-data is not base64: {error}") from error
        path = self.path(name)
        try:
            return None if path is None else path.read_bytes()
        except OSError as error:
            raise RequestError(f"{self.what}: {name} {path} cannot be read: {_of(error)}") from error


class _Merged:
    """The kubeconfig files of a list as one, as kubectl merges them: of two entries of a name the first is taken."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.names = ":".join(map(str, files))
        self.current = ""
        self.entries: dict[tuple[str, str], _NamedEntry] = {}
        for file in files:
            self._add(file, _read_yaml(file))

    def _add(self, file: Path, document: Json) -> None:
        self.current = self.current or str(document.get("current-context") or "")
        for kind in ("cluster", "user", "context"):
            listed = document.get(f"{kind}s") or []
            for item in listed if isinstance(listed, list) else [listed]:
                fields = item.get(kind, {}) if isinstance(item, dict) else None
                if (
                    not isinstance(fields, dict | None)
                    or not isinstance(item, dict)
                    or not isinstance(item.get("name"), str)
                ):
                    raise RequestError(f"{file}: an entry of {kind}s is not of the form {{name: …, {kind}: {{…}}}}")
                self.entries.setdefault((kind, item["name"]), _NamedEntry(file, kind, item["name"], fields or {}))

    def entry(self, kind: str, name: str, wanted_by: str) -> _NamedEntry:
        found = self.entries.get((kind, name))
        if found is None:
            known = sorted(name for listed, name in self.entries if listed == kind)
            raise RequestError(f"{wanted_by}: there is no {kind} {name!r}; there {_are(known)}")
        return found


def _are(names: Sequence[str]) -> str:
    return f"are: {', '.join(names)}" if names else "are none at all"


def _read_yaml(file: Path) -> Json:
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {_of(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"{file}: is not YAML: {_of(error)}") from error
    if not isinstance(document, dict | None):
        raise RequestError(f"{file}: is not a kubeconfig: it holds no mapping of clusters, users and contexts")
    return document or {}


def _from_files(files: Sequence[Path], context: str | None, environ: Mapping[str, str]) -> KubeConfig:
    merged = _Merged(files)
    wanted = context or merged.current
    if not wanted:
        known = sorted(name for kind, name in merged.entries if kind == "context")
        raise RequestError(f"{merged.names}: no current context; name one with --context; there {_are(known)}")
    chosen = merged.entry("context", wanted, merged.names)
    cluster = merged.entry("cluster", chosen.text("cluster"), chosen.what)
    user = merged.entry("user", chosen.text("user"), chosen.what) if chosen.text("user") else None
    server = cluster.text("server")
    if not server.startswith(("https://", "http://")):
        raise RequestError(f"{cluster.what}: server is {server!r}; it begins with https:// or http://")
    verify = _context_of(cluster, user)
    return KubeConfig(
        server=server.rstrip("/"),
        namespace=chosen.text("namespace") or "default",
        verify=verify,
        credential=Credential() if user is None else _credential(user, cluster, verify, environ),
        server_name=cluster.text("tls-server-name") or None,
        proxy=cluster.text("proxy-url") or None,
        source=f"{chosen.file}, context {wanted!r}",
    )


def _context_of(cluster: _NamedEntry, user: _NamedEntry | None) -> ssl.SSLContext:
    """Make the TLS context of a cluster, with the user's certificate if the file has one."""
    context = _tls(cluster.content("certificate-authority"), f"{cluster.what}: certificate-authority")
    if cluster.fields.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if user is None:
        return context
    chain, key = user.content("client-certificate"), user.content("client-key")
    if (chain is None) != (key is None):
        raise RequestError(f"{user.what}: client-certificate and client-key go together; one of them is missing")
    if chain is not None and key is not None:
        try:
            _load_chain(context, chain, key)
        except (ssl.SSLError, OSError) as error:
            raise RequestError(f"{user.what}: the client certificate and its key cannot be used: {_of(error)}") from error
    return context


def _tls(authorities: bytes | None, what: str) -> ssl.SSLContext:
    """Make a TLS context that trusts these certificates; without any, those that the machine trusts."""
    try:
        context = ssl.create_default_context(cadata=None if authorities is None else authorities.decode())
    except (ssl.SSLError, ValueError) as error:
        raise RequestError(f"{what} holds no certificates in PEM: {_of(error)}") from error
    if authorities is not None:
        # As kubectl does: authorities often lack what strict checks ask for, or are the server's own certificate.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


UNSUPPORTED = {
    "username": "the API server no longer takes passwords",
    "password": "the API server no longer takes passwords",
    "auth-provider": "it has been replaced by exec plug-ins",
    "as": "impersonation is not supported",
}


def _credential(user: _NamedEntry, cluster: _NamedEntry, context: ssl.SSLContext, environ: Mapping[str, str]) -> Credential:
    for name, why in UNSUPPORTED.items():
        if user.fields.get(name):
            raise RequestError(
                f"{user.what}: {name} cannot be used: {why}; use token, tokenFile, a client certificate or exec"
            )
    if path := user.path("tokenFile"):
        if not path.is_file():
            raise RequestError(f"{user.what}: tokenFile {path} does not exist")
        return TokenFileCredential(path)
    if token := user.text("token"):
        return TokenCredential(token)
    if user.fields.get("exec") is None:
        return Credential()
    return PluginCredential(_plugin(user, cluster, environ), context)


def _plugin(user: _NamedEntry, cluster: _NamedEntry, environ: Mapping[str, str]) -> PluginCommand:
    given = user.fields["exec"]
    if not isinstance(given, dict) or not isinstance(given.get("command"), str):
        raise RequestError(f"{user.what}: exec has no command")
    if given.get("interactiveMode") == "Always":
        raise RequestError(
            f"{user.what}: exec {given['command']!r} needs a terminal (interactiveMode Always); use another user"
        )
    version = str(given.get("apiVersion") or "client.authentication.k8s.io/v1")
    if version.removeprefix("client.authentication.k8s.io/") not in ("v1", "v1beta1"):
        raise RequestError(
            f"{user.what}: exec has apiVersion {version!r}; client.authentication.k8s.io/v1 and v1beta1 are known"
        )
    try:
        more = {str(item["name"]): str(item["value"]) for item in given.get("env") or []}
    except (TypeError, KeyError) as error:
        raise RequestError(f"{user.what}: an entry of env of exec is not of the form {{name: …, value: …}}") from error
    command = given["command"]
    return PluginCommand(
        command=str(user.file.parent / command) if "/" in command else command,
        arguments=tuple(str(word) for word in given.get("args") or []),
        environment={**environ, **more},
        version=version,
        info=_plugin_info(cluster) if given.get("provideClusterInfo") else None,
        hint=str(given.get("installHint") or ""),
    )


def _plugin_info(cluster: _NamedEntry) -> Json:
    authorities = cluster.content("certificate-authority")
    told = {
        "server": cluster.text("server"),
        "tls-server-name": cluster.text("tls-server-name"),
        "insecure-skip-tls-verify": bool(cluster.fields.get("insecure-skip-tls-verify")),
        "certificate-authority-data": None if authorities is None else base64.b64encode(authorities).decode(),
        "proxy-url": cluster.text("proxy-url"),
    }
    return {name: value for name, value in told.items() if value}


# Requests


class PatchKind(StrEnum):
    """How a patch changes an object; the value is the type of its body."""

    MERGE = "application/merge-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"
    JSON = "application/json-patch+json"
    APPLY = "application/apply-patch+yaml"


class Page(NamedTuple):
    """A part of a list. `is_first`: forget earlier pages, the list was begun anew. `is_last`: the list is complete."""

    items: Sequence[Json]
    resource_version: str
    is_first: bool
    is_last: bool


class ListedObjects(NamedTuple):
    """A whole collection, and the resource version from which a watch goes on."""

    items: Sequence[Json]
    resource_version: str


class KubeClient:
    """Sends requests to one API server, from one event loop. Paths are the caller's, such as `/api/v1/pods`.

    At most `connections` requests are under way at a time; the others wait their turn, and watches do not count. So whatever
    must not wait behind others, such as the renewal of a lease, has a client of its own.

    calls   requests so far by Kubernetes' verbs: get, list, watch, create, update, patch, delete
    """

    def __init__(
        self,
        config: KubeConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        connections: int = 16,
        seconds: float = REQUEST_SECONDS,
    ) -> None:
        self.config = config
        self.calls: Counter[str] = Counter()
        self._transport, self._connections, self._seconds = transport, connections, seconds
        self._turns = asyncio.Semaphore(connections)
        self._http = self._new_http()
        self._serial = 0
        self._retired: httpx.AsyncClient | None = None

    async def get(self, path: str) -> Json:
        """Read an object."""
        return _parsed(await self._ask("get", "GET", path), path)

    async def get_text(self, path: str) -> str:
        """Read something that is not JSON, such as the log of a pod."""
        return (await self._ask("get", "GET", path)).text

    async def post(self, path: str, body: Json) -> Json:
        """Create an object, or one of those that are only answered, such as a binding or a review."""
        return _parsed(await self._ask("create", "POST", path, body), path)

    async def put(self, path: str, body: Json) -> Json:
        """Replace an object: the one with the resource version in the body, if it has one."""
        return _parsed(await self._ask("update", "PUT", path, body), path)

    async def patch(self, path: str, body: Json | Sequence[Json], kind: PatchKind = PatchKind.MERGE) -> Json:
        """Change an object. With `APPLY` this client's fields become Poise's, also where others claim them."""
        if kind is PatchKind.APPLY:
            path = _with_query(path, {"fieldManager": "poise", "force": "true"})
        return _parsed(await self._ask("patch", "PATCH", path, body, kind), path)

    async def delete(
        self, path: str, *, uid: str | None = None, grace: int | None = None, propagation: str | None = None
    ) -> Json:
        """Delete an object, or only the one with this uid; `grace` in seconds. Return it as it is now, or a Status."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            **({} if uid is None else {"preconditions": {"uid": uid}}),
            **({} if grace is None else {"gracePeriodSeconds": grace}),
            **({} if propagation is None else {"propagationPolicy": propagation}),
        }
        return _parsed(await self._ask("delete", "DELETE", path, options), path)

    async def pages(self, path: str, *, labels: str = "", fields: str = "", limit: int = PAGE) -> AsyncGenerator[Page, None]:
        """List a collection page by page; a list that expires under way is begun anew, which `Page.is_first` says.

        Others of the event loop have a turn after each page. Items are without `kind` and `apiVersion`.
        """
        token = ""
        while True:
            query = {"limit": str(limit), **_selection(labels, fields), **({"continue": token} if token else {})}
            try:
                answer = _parsed(await self._ask("list", "GET", _with_query(path, query)), path)
            except ExpiredError:
                if not token:
                    raise
                token, limit = "", 8 * limit  # larger pages take less time in all: else it might expire for ever
                continue
            head = answer.get("metadata") or {}
            is_first, token = not token, head.get("continue") or ""
            yield Page(answer.get("items") or (), str(head.get("resourceVersion", "")), is_first, not token)
            if not token:
                return
            await asyncio.sleep(0)

    async def watch(
        self,
        path: str,
        resource_version: str,
        *,
        labels: str = "",
        fields: str = "",
        seconds: float = WATCH_SECONDS,
        on_open: Callable[[], None] | None = None,
    ) -> AsyncGenerator[tuple[str, Json], None]:
        """Yield what happens after a resource version: `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`, and the object.

        It ends when the server ends it, after some `seconds`: go on from the resource version of the last object. Raise
        `ExpiredError` if that is too old, and `ApiUnavailableError` if the connection breaks or is silent for longer than
        a watch can last. `on_open` is called when the server has accepted the watch.
        """
        length = int(max(1.0, uniform(0.9, 1.1) * seconds))  # else all watches that a restart began would end together
        query = {
            "watch": "1",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(length),
            **_selection(labels, fields),
        }
        patience = httpx.Timeout(length + WATCH_SLACK, connect=CONNECT_SECONDS)
        async with self._streaming(_with_query(path, query), patience) as response:
            if on_open is not None:
                on_open()
            async with aclosing(_lines(response)) as lines:
                async for line in lines:
                    yield _event(line, path)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        if self._retired is not None:
            await self._retired.aclose()

    def _new_http(self) -> httpx.AsyncClient:
        if self._transport is not None:
            transport = self._transport
        elif self.config.proxy is None:
            transport = KeepAliveTransport(self.config.verify, self._connections)
        else:
            transport = httpx.AsyncHTTPTransport(
                verify=self.config.verify,
                proxy=self.config.proxy,
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=self._connections, keepalive_expiry=IDLE_SECONDS
                ),
                socket_options=KEEP_ALIVE,
            )
        return httpx.AsyncClient(transport=transport, headers={"User-Agent": "poise", "Accept": "application/json"})

    async def _ask(
        self,
        verb: str,
        method: str,
        path: str,
        body: Json | Sequence[Json] | None = None,
        kind: str = "application/json",
    ) -> httpx.Response:
        """Send a request, again after a refused credential, and return an answer that is no error."""
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        async with self._turns:
            response, used = await self._send(verb, method, path, content, kind)
            if response.status_code == 401 and self.config.credential.forget(used):
                response, _ = await self._send(verb, method, path, content, kind)
        if not response.is_success:
            raise _error(method, path, response)
        return response

    async def _send(
        self, verb: str, method: str, path: str, content: bytes | None, kind: str
    ) -> tuple[httpx.Response, Authorization]:
        used = await self._authorize()
        headers = {**used.headers, **({} if content is None else {"Content-Type": kind})}
        what = f"{method} {path.partition('?')[0]}"
        for is_again in (False, True):
            self.calls[verb] += 1
            request = self._request(method, path, headers, httpx.Timeout(self._seconds, connect=CONNECT_SECONDS), content)
            try:
                async with asyncio.timeout(self._seconds):
                    return await self._http.send(request), used
            except (httpx.TimeoutException, TimeoutError) as error:
                raise ApiUnavailableError(f"{what}: no answer within {self._seconds:g} s") from error
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                if is_again or method != "GET":  # a server may close a connection just when it is used again
                    raise ApiUnavailableError(f"{what}: the connection broke: {_of(error)}") from error
            except httpx.RequestError as error:
                raise ApiUnavailableError(f"{what}: no connection: {_of(error)}") from error
        raise AssertionError("the second try returns or raises")

    @asynccontextmanager
    async def _streaming(self, path: str, patience: httpx.Timeout) -> AsyncIterator[httpx.Response]:
        """Have an answer that is read as it comes."""
        what = f"watch {path.partition('?')[0]}"
        try:
            response, used = await self._begin(path, patience)
            if response.status_code == 401 and self.config.credential.forget(used):
                await response.aclose()
                response, _ = await self._begin(path, patience)
            try:
                if not response.is_success:
                    await response.aread()
                    raise _error("watch", path, response)
                yield response
            finally:
                await response.aclose()
        except (httpx.TimeoutException, TimeoutError) as error:
            raise ApiUnavailableError(f"{what}: silent for too long") from error
        except (httpx.RequestError, httpx.StreamError) as error:
            raise ApiUnavailableError(f"{what}: the connection broke: {_of(error)}") from error

    async def _begin(self, path: str, patience: httpx.Timeout) -> tuple[httpx.Response, Authorization]:
        """Send a request for a stream; the head of the answer comes at once, however long the rest takes."""
        used = await self._authorize()
        self.calls["watch"] += 1
        request = self._request("GET", path, used.headers, patience)
        async with asyncio.timeout(self._seconds):
            return await self._http.send(request, stream=True), used

    def _request(
        self, method: str, path: str, headers: Mapping[str, str], patience: httpx.Timeout, content: bytes | None = None
    ) -> httpx.Request:
        name = self.config.server_name
        return self._http.build_request(
            method,
            self.config.server + path,
            headers=headers,
            content=content,
            timeout=patience,
            extensions={} if name is None else {"sni_hostname": name},
        )

    async def _authorize(self) -> Authorization:
        """Say who asks. A new certificate only serves in new connections, so those that are open are used up and left."""
        given = await self.config.credential.authorization()
        if given.serial != self._serial:
            old, self._retired, self._http, self._serial = self._retired, self._http, self._new_http(), given.serial
            if old is not None:
                await old.aclose()
        return given

    # Last, as the name hides Python's own in what follows it.
    async def list(self, path: str, *, labels: str = "", fields: str = "", limit: int = PAGE) -> ListedObjects:
        """List a whole collection. Use `pages` for one that may be large."""
        items: list[Json] = []
        version = ""
        async for page in self.pages(path, labels=labels, fields=fields, limit=limit):
            if page.is_first:
                items.clear()
            items.extend(page.items)
            version = page.resource_version
        return ListedObjects(tuple(items), version)


def _selection(labels: str, fields: str) -> dict[str, str]:
    return {**({"labelSelector": labels} if labels else {}), **({"fieldSelector": fields} if fields else {})}


def _with_query(path: str, query: Mapping[str, str]) -> str:
    return f"{path}{'&' if '?' in path else '?'}{urlencode(query)}"


def _parsed(response: httpx.Response, path: str) -> Json:
    try:
        answer = json.loads(response.content)
    except ValueError as error:
        raise ApiUnavailableError(f"{path}: the answer is no JSON; is there a Kubernetes API at this address?") from error
    if not isinstance(answer, dict):
        raise ApiUnavailableError(f"{path}: the answer is no object; is there a Kubernetes API at this address?")
    return answer


def _error(method: str, path: str, response: httpx.Response) -> PoiseError:
    """Turn an answer that is an error into one of ours."""
    try:
        status = json.loads(response.content)
    except ValueError:
        status = None
    if not isinstance(status, dict):
        status = {"message": " ".join(response.text.split())[:200]}
    after = response.headers.get("Retry-After", "")
    path = path.partition("?")[0]
    return _status_error(f"{method} {path}", response.status_code, status, float(after) if after.isdigit() else None)


def _status_error(what: str, code: int, status: Json, retry_after: float | None = None) -> PoiseError:
    """Turn a Status of Kubernetes into an error: one that may pass is `ApiUnavailableError`."""
    reason = str(status.get("reason") or httpx.codes.get_reason_phrase(code).replace(" ", "") or "Unknown")
    message = " ".join(str(status.get("message") or "the server says no more").split())
    details = status.get("details")
    details = details if isinstance(details, dict) else {}
    if retry_after is None and isinstance(details.get("retryAfterSeconds"), int):
        retry_after = float(details["retryAfterSeconds"])
    if code == 410:
        return ExpiredError(code, reason, f"{what}: {message}", retry_after)
    # An eviction that a disruption budget forbids has the status of an overloaded server, but it is an answer.
    by_budget = any(cause.get("reason") == "DisruptionBudget" for cause in details.get("causes") or ())
    if code >= 500 or (code == 429 and not by_budget):
        return ApiUnavailableError(f"{what}: {code} {reason}: {message}", status=code, retry_after=retry_after)
    return ApiError(code, reason, f"{what}: {message}", retry_after)


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Split a stream at newlines alone: httpx would also split at characters that stand in texts."""
    rest: list[bytes] = []
    async for piece in response.aiter_bytes():
        *ends, last = piece.split(b"\n")
        for end in ends:
            line = b"".join((*rest, end))
            rest.clear()
            if line.strip():
                yield line
        if last:
            rest.append(last)


def _event(line: bytes, path: str) -> tuple[str, Json]:
    try:
        event = json.loads(line)
        kind, thing = str(event["type"]), dict(event["object"])
        if kind != "ERROR":
            thing["metadata"]["resourceVersion"]  # from which a watch that is cut goes on
    except (ValueError, KeyError, TypeError) as error:
        raise ApiUnavailableError(f"watch {path}: a line of the answer is no event") from error
    if kind == "ERROR":
        code = thing.get("code")
        raise _status_error(f"watch {path}", code if isinstance(code, int) else 500, thing)
    return kind, thing


# Mirror


Key = tuple[str, str]
"""Namespace and name of an object; the namespace of one that is in none is empty."""


class Change(StrEnum):
    """What happened to an object of a mirrored collection."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


class _MirroredObject(NamedTuple):
    uid: str
    version: str


class Mirror:
    """Follows one collection by list and watch, and tells each change once; it keeps no objects, callers do.

    `on_change` is told of an object as ADDED when it was not known, as MODIFIED when it is another version, and as DELETED
    when it is gone or no longer selected. One that was deleted and made again under its name, which has another uid, is told
    as DELETED and then as ADDED. Of an object whose end was not seen, DELETED has only `metadata` with namespace, name, uid
    and resourceVersion. `on_synced` is called when a list is complete, after its changes. What they raise ends `run`.

    synced         whether a list has ever been complete
    problem        why the mirror is behind, for people; None: it is not
    behind_since   by the clock; None: it is not behind
    heard          when the server was last heard of, by the clock; a quiet collection has a bookmark about once a minute
    """

    def __init__(
        self,
        client: KubeClient,
        path: str,
        *,
        on_change: Callable[[Change, Json], None],
        on_synced: Callable[[], None] = lambda: None,
        labels: str = "",
        fields: str = "",
        clock: Clock = monotonic,
    ) -> None:
        self.synced = asyncio.Event()
        self.problem: str | None = NOT_LISTED
        self.behind_since: float | None = clock()
        self.heard = clock()
        self._client, self._path = client, path
        self._on_change, self._on_synced = on_change, on_synced
        self._labels, self._fields = labels, fields
        self._clock = clock
        self._known: dict[Key, _MirroredObject] = {}
        self._version: str | None = None  # from which to watch; None: list first
        self._failures = 0  # in a row

    def __len__(self) -> int:
        return len(self._known)

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        while True:
            try:
                if self._version is None:
                    await self._list()
                await self._watch()
            except ExpiredError as error:
                self._version = None
                await self._fall_behind(error, None)
            except (ApiError, ApiUnavailableError) as error:
                await self._fall_behind(error, error.retry_after)

    async def _list(self) -> None:
        seen: set[Key] = set()
        version = ""
        async with aclosing(self._client.pages(self._path, labels=self._labels, fields=self._fields)) as pages:
            async for page in pages:
                self.heard = self._clock()
                if page.is_first:
                    seen.clear()
                for thing in page.items:
                    seen.add(self._take(thing))
                version = page.resource_version
        for key in [key for key in self._known if key not in seen]:
            self._lose(key)
        self._version = version
        if self.problem == NOT_LISTED:
            self.problem = None  # the first list is as new as a watch; that it is not open yet is no trouble
        self.synced.set()
        self._on_synced()

    async def _watch(self) -> None:
        began, events = self._clock(), 0
        watch = self._client.watch(
            self._path, self._version or "", labels=self._labels, fields=self._fields, on_open=self._catch_up
        )
        async with aclosing(watch) as happenings:
            async for kind, thing in happenings:
                self.heard = self._clock()
                events += 1
                self._failures = 0
                self._happen(kind, thing)
        if not events and self._clock() - began < LEAST_PAUSE:  # a server that ends each watch at once is not to be flooded
            await self._back_off(None)

    def _happen(self, kind: str, thing: Json) -> None:
        self._version = thing["metadata"]["resourceVersion"]
        if kind == "DELETED":
            if self._known.pop(_key(thing), None) is not None:
                self._on_change(Change.DELETED, thing)
        elif kind in ("ADDED", "MODIFIED"):
            self._take(thing)

    def _take(self, thing: Json) -> Key:
        """Note an object that exists, and tell how it differs from what was known."""
        head, key = thing["metadata"], _key(thing)
        now, before = _MirroredObject(head["uid"], head["resourceVersion"]), self._known.get(key)
        if before is not None and before.uid != now.uid:
            self._lose(key)
            before = None
        if now != before:
            self._known[key] = now
            self._on_change(Change.ADDED if before is None else Change.MODIFIED, thing)
        return key

    def _lose(self, key: Key) -> None:
        """Tell that an object is gone, of which no more is known than who it was."""
        (namespace, name), known = key, self._known.pop(key)
        head = {"name": name, "uid": known.uid, "resourceVersion": known.version}
        self._on_change(Change.DELETED, {"metadata": {**({"namespace": namespace} if namespace else {}), **head}})

    def _catch_up(self) -> None:
        self.problem = self.behind_since = None
        self.heard = self._clock()

    async def _fall_behind(self, error: Exception, retry_after: float | None) -> None:
        self.problem = str(error)
        if self.behind_since is None:
            self.behind_since = self._clock()
        if isinstance(error, ExpiredError) and not self._failures:
            self._failures = 1  # list at once; after a second time in a row, pause
            return
        await self._back_off(retry_after)

    async def _back_off(self, retry_after: float | None) -> None:
        """Wait: longer each time, and less or more than others do, who lost the same server at the same moment."""
        longest = min(MOST_PAUSE, LEAST_PAUSE * 2**self._failures)
        self._failures = min(self._failures + 1, 10)
        await asyncio.sleep(max(uniform(0.5, 1.0) * longest, min(retry_after or 0.0, MOST_PAUSE)))


def _key(thing: Json) -> Key:
    head = thing["metadata"]
    return head.get("namespace", ""), head["name"]
