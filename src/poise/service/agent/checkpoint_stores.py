"""Places where the checkpoints of one job are kept as blobs: a URL of fsspec, or the server (relay).

A blob is a file with a name, written as a whole. Neither place promises that a blob which was being written when its writer
died is absent, or that two are written together: `kept_checkpoints.py` decides what counts. Everything here blocks, and is
called in threads.
"""

import errno
import hashlib
import os
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any, Protocol

import httpx

from poise.service.wire.agent_messages import AgentRefusal, BlobAnswer, BlobNames
from poise.service.wire.archives import BLOCK, ArchiveError

TOO_LARGE = "checkpoint-too-large"
UNUSABLE = "checkpoint-place-unusable"
NOT_KEPT = "checkpoint-not-kept"
FULL = "storage-full"
PAUSES = (0.02, 0.1, 0.3)  # seconds before a request is sent again whose connection broke
ANSWER_SECONDS = 60.0  # for one block to be passed on, or for an answer once all are


class StoreProblemError(Exception):
    """Checkpoints cannot be kept or fetched. `cause` is what a run fails of (docs/reference/reasons.md)."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause

    @property
    def may_pass(self) -> bool:
        """Whether it is worth trying again."""
        return self.cause in (NOT_KEPT, FULL)


class StoreAwayError(Exception):
    """The server is away, or has begun another session: it says then what is wanted of the run."""


class BlobStore(Protocol):
    """Blobs of one job, by name."""

    def names(self) -> set[str]:
        """Return the names of all blobs."""

    def write(self, name: str, blocks: Iterable[bytes], size: int) -> None:
        """Write or replace a blob of that many bytes. A tuple of blocks may be gone through more than once."""

    def read(self, name: str) -> Iterator[bytes]:
        """Yield a blob in blocks; FileNotFoundError if there is none of that name."""

    def remove(self, name: str) -> None:
        """Remove a blob, if it is there."""


class InterruptibleStore:
    """A store whose transfers end with StoreAwayError at the next block once `is_over`: threads cannot be cancelled."""

    def __init__(self, store: BlobStore, is_over: Callable[[], bool]) -> None:
        self._store, self._is_over = store, is_over

    def names(self) -> set[str]:
        """Return the names of all blobs."""
        self._check()
        return self._store.names()

    def write(self, name: str, blocks: Iterable[bytes], size: int) -> None:
        """Write or replace a blob."""
        self._check()
        self._store.write(name, blocks if isinstance(blocks, tuple) else self._passing(blocks), size)

    def read(self, name: str) -> Iterator[bytes]:
        """Yield a blob."""
        return self._passing(self._store.read(name))

    def remove(self, name: str) -> None:
        """Remove a blob."""
        self._check()
        self._store.remove(name)

    def _passing(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self._check()
            yield block

    def _check(self) -> None:
        if self._is_over():
            raise StoreAwayError("not wanted any more")


class UrlStore:
    """Blobs under a URL that fsspec understands (s3://, gs://, file://, …). It reads credentials as fsspec does.

    hidden   directory that jobs do not see: a URL must not lead there
    """

    def __init__(self, url: str, hidden: Path) -> None:
        self._url = url
        if "::" in url:
            raise StoreProblemError(UNUSABLE, f"{url}: a chain of URLs (::) cannot keep checkpoints")
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped] # an extra, and slow to import
        except ImportError:
            text = f"{url}: fsspec is not installed on this node; pip install 'poise[stores]'"
            raise StoreProblemError(UNUSABLE, text) from None
        with self._problems():
            self._fs, self._path = url_to_fs(url, use_listings_cache=False)
        if "file" in self._protocols():
            real = os.path.realpath(self._path)
            if os.path.commonpath((real, os.path.realpath(hidden))) == os.path.realpath(hidden):
                raise StoreProblemError(UNUSABLE, f"{url} lies in the state directory of the agent")

    def _protocols(self) -> tuple[str, ...]:
        given = self._fs.protocol
        return (given,) if isinstance(given, str) else tuple(given)

    def names(self) -> set[str]:
        """Return the names of all blobs."""
        with self._problems():
            self._fs.invalidate_cache()
            try:
                return {str(each).rstrip("/").rsplit("/", 1)[-1] for each in self._fs.ls(self._path, detail=False)}
            except FileNotFoundError:
                return set()

    def write(self, name: str, blocks: Iterable[bytes], size: int) -> None:
        """Write or replace a blob."""
        path = f"{self._path}/{name}"
        with self._problems():
            try:
                self._fs.makedirs(self._path, exist_ok=True)
                with self._fs.open(path, "wb") as file:
                    for block in blocks:
                        file.write(block)
                self._fs.invalidate_cache()
                found = self._fs.info(path)["size"]
            except FileNotFoundError as error:  # a bucket that is not there
                raise StoreProblemError(UNUSABLE, f"{self._url} cannot be written: {_described(error)}") from error
        if found != size:
            raise StoreProblemError(NOT_KEPT, f"{self._url}/{name} has {found:,} bytes where {size:,} were written")

    def read(self, name: str) -> Iterator[bytes]:
        """Yield a blob."""
        with self._problems(), self._fs.open(f"{self._path}/{name}", "rb") as file:
            while block := file.read(BLOCK):
                yield block

    def remove(self, name: str) -> None:
        """Remove a blob."""
        with self._problems():
            try:
                self._fs.rm_file(f"{self._path}/{name}")
            except FileNotFoundError:
                return

    @contextmanager
    def _problems(self) -> Iterator[None]:
        """Turn whatever a file system raises into a readable problem; each has exceptions of its own."""
        try:
            yield
        except (StoreProblemError, StoreAwayError, FileNotFoundError, ArchiveError):
            raise
        except (PermissionError, NotImplementedError, ImportError, ValueError, NotADirectoryError) as error:
            raise StoreProblemError(UNUSABLE, f"{self._url} cannot be used: {_described(error)}") from error
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            cause = FULL if full else NOT_KEPT
            raise StoreProblemError(cause, f"{self._url} does not work: {_described(error)}") from error


def _described(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@dataclass(slots=True)
class ServerAccess:
    """How threads of the agent reach the server. They share a client: to make one takes as long as several requests.

    token     returns the current one, which may change
    session   returns the current one; None: there is none
    """

    server: str
    token: Callable[[], str]
    verify: ssl.SSLContext | bool
    session: Callable[[], str | None]
    _client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        """Make the client."""
        self._client = httpx.Client(base_url=self.server, verify=self.verify, timeout=ANSWER_SECONDS)

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    @contextmanager
    def request(self, method: str, path: str, **more: Any) -> Iterator[httpx.Response]:  # noqa: ANN401 - those of httpx
        """Ask the server, and hand out the answer before its body is read; StoreAwayError if there is none."""
        session = self.session()
        if session is None:
            raise StoreAwayError("there is no session")
        headers = {"Authorization": f"Bearer {self.token()}", **more.pop("headers", {})}
        params = {"session": session, **more.pop("params", {})}
        try:
            with closing(self._send(method, path, headers=headers, params=params, **more)) as response:
                if not response.is_success:
                    response.read()
                    raise _refused(response)
                yield response
        except httpx.HTTPError as error:
            raise StoreAwayError(f"the server is away: {error!r}") from error

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:  # noqa: ANN401 - those of httpx
        """Send a request, and again if the connection breaks, unless its body can be gone through only once.

        To keep a checkpoint takes several requests. If each loss of an answer failed all of them, a bad line would let none
        be kept. Each request can be repeated: blobs are written and removed as a whole.
        """
        pauses = () if isinstance(more.get("content"), Iterator) else PAUSES
        for pause in pauses:
            try:
                return self._client.send(self._client.build_request(method, path, **more), stream=True)
            except httpx.TimeoutException:  # has taken long enough
                raise
            except httpx.TransportError:
                sleep(pause)
        return self._client.send(self._client.build_request(method, path, **more), stream=True)


def _refused(response: httpx.Response) -> Exception:
    try:
        refusal = AgentRefusal.model_validate_json(response.content)
    except ValueError:
        return StoreAwayError(f"the server answers {response.status_code}")
    causes = {"storage": FULL, "too-large": TOO_LARGE, "wrong-request": UNUSABLE, "forbidden": UNUSABLE}
    if refusal.code == "not-found":
        return FileNotFoundError(refusal.detail)
    if refusal.code in causes:
        return StoreProblemError(causes[refusal.code], refusal.detail)
    return StoreAwayError(refusal.detail)


class RelayStore:
    """Blobs of a job that the server keeps in its state directory."""

    def __init__(self, access: ServerAccess, job: str) -> None:
        self._access, self._path = access, f"/agent/checkpoints/{job}"

    def names(self) -> set[str]:
        """Return the names of all blobs."""
        return set(self._listed().names)

    def _listed(self) -> BlobNames:
        with self._access.request("GET", self._path) as response:
            return BlobNames.model_validate_json(response.read())

    def write(self, name: str, blocks: Iterable[bytes], size: int) -> None:
        """Write or replace a blob. What the server has received is compared with what was sent."""
        most = self._listed().most
        if size > most:  # asked first: an answer that comes before the body is read would be lost
            raise StoreProblemError(TOO_LARGE, too_large(size, most))
        sent = hashlib.sha256()

        def passing() -> Iterator[bytes]:
            for block in blocks:
                sent.update(block)
                yield block

        content: bytes | Iterator[bytes] = b"".join(passing()) if isinstance(blocks, tuple) else passing()
        length = {"Content-Length": str(size)}
        with self._access.request("PUT", f"{self._path}/{name}", content=content, headers=length) as response:
            got = BlobAnswer.model_validate_json(response.read())
        if (got.bytes, got.sha256) != (size, sent.hexdigest()):
            raise StoreProblemError(NOT_KEPT, f"{name} was damaged on its way to the server")

    def read(self, name: str) -> Iterator[bytes]:
        """Yield a blob."""
        with self._access.request("GET", f"{self._path}/{name}") as response:
            yield from response.iter_bytes(BLOCK)

    def remove(self, name: str) -> None:
        """Remove a blob."""
        with self._access.request("DELETE", f"{self._path}/{name}") as response:
            response.read()


def too_large(size: int, most: int) -> str:
    """Say what is wrong with a checkpoint that the server does not take."""
    mib = 1 << 20
    return (
        f"a checkpoint of {size / mib:,.1f} MiB is more than the {most / mib:,.0f} MiB that go through the server; keep"
        " checkpoints on a shared path or at a URL (checkpoint.url), or raise `poise serve --relay-mib`"
    )
