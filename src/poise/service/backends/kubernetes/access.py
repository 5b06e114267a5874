"""Where the API server is, and whose requests these are: kubeconfig files, service accounts, tokens, credential plug-ins."""

import asyncio
import base64
import binascii
import json
import os
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from time import monotonic, time  # noqa: TID251 - a credential is good until a time of the wall clock
from typing import NamedTuple

import httpx
import yaml

from poise.scheduler.model.errors import RequestError
from poise.service.backends.kubernetes.errors import ApiUnavailableError, words_of
from poise.service.backends.kubernetes.objects import Json

Clock = Callable[[], float]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 60.0  # after which the file of a token is read again: Kubernetes replaces it well before it expires
EARLY_SECONDS = 10.0  # before its end at which a credential is no longer used: requests take time
PLUGIN_SECONDS = 60.0  # for a credential plug-in to answer


# Credentials


class Authorization(NamedTuple):
    """What a request carries to say whose it is. `serial` counts certificates: another one needs new connections."""

    headers: Mapping[str, str]
    serial: int = 0


class Credential:
    """Identifies the sender of requests. This one adds nothing: a client certificate, if any, is in the TLS context."""

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
    """A token in a file that is replaced from outside: read again after a minute, and when it was refused."""

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
                raise ApiUnavailableError(f"{self._path}: the token cannot be read: {words_of(error)}") from error
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
                raise self._trouble(f"printed a client certificate that cannot be used: {words_of(error)}") from error
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
            raise self._trouble(f"cannot be started: {words_of(error)}") from error
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
            raise RequestError(f"{self.what}: {name} {path} cannot be read: {words_of(error)}") from error


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
        raise RequestError(f"{file}: cannot be read: {words_of(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"{file}: is not YAML: {words_of(error)}") from error
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
    proxy = cluster.text("proxy-url")
    if proxy and not proxy.startswith(("https://", "http://")):
        raise RequestError(f"{cluster.what}: proxy-url is {proxy!r}; Poise knows proxies of http:// and https:// alone")
    for name, url in (("server", server), ("proxy-url", proxy)):
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise RequestError(f"{cluster.what}: {name} is {url!r}, which is no URL: {words_of(error)}") from error
    verify = _context_of(cluster, user)
    return KubeConfig(
        server=server.rstrip("/"),
        namespace=chosen.text("namespace") or "default",
        verify=verify,
        credential=Credential() if user is None else _credential(user, cluster, verify, environ),
        server_name=cluster.text("tls-server-name") or None,
        proxy=proxy or None,
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
            raise RequestError(
                f"{user.what}: the client certificate and its key cannot be used: {words_of(error)}"
            ) from error
    return context


def _tls(authorities: bytes | None, what: str) -> ssl.SSLContext:
    """Make a TLS context that trusts these certificates; without any, those that the machine trusts."""
    try:
        context = ssl.create_default_context(cadata=None if authorities is None else authorities.decode())
    except (ssl.SSLError, ValueError) as error:
        raise RequestError(f"{what} holds no certificates in PEM: {words_of(error)}") from error
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
