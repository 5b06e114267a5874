"""Checkpoints that go through the server: blobs of jobs in its state directory, streamed to and from the disk in blocks.

    STATE/jobs/<job>/kept/<name>

A blob has its name once all of it is on the disk. What the blobs mean, and which are removed, is the agents' business
(`service/agent/kept_checkpoints.py`). They stay when their job has ended, as checkpoints do on one machine.

    STATE/kept-at.json              where the service keeps the checkpoints of jobs that do not say so themselves
    STATE/jobs/<job>/kept-at.json   the same for a job that had begun before that was changed: another setting of the
                                    service must not part a job from its checkpoints
"""

import asyncio
import hashlib
import os
import re
import secrets
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from poise.durable import sync_folder
from poise.scheduler.model.errors import RequestError
from poise.service.backends.api import RunOrder
from poise.service.backends.local.lease_files import get, put
from poise.service.backends.local.state_dir import TOKEN, StateDir
from poise.service.backends.remote.runs import RefusedAgentError
from poise.service.wire.agent_messages import BlobAnswer, BlobNames
from poise.service.wire.archives import BLOCK
from poise.service.wire.request import RELAY, JobPlace

KEPT, KEPT_AT = "kept", "kept-at.json"
_NUMBER = "(?:0|[1-9][0-9]{0,17})"
_BLOB = re.compile(rf"step-{_NUMBER}-{_NUMBER}\.(?:tar|json)|epoch-{_NUMBER}\.json")
_PLACE: TypeAdapter[str] = TypeAdapter(JobPlace)


@dataclass(frozen=True, slots=True)
class CheckpointPlaces:
    """Where checkpoints of jobs are kept that do not say so themselves, and how many bytes one may have on the server."""

    at: str = RELAY
    relay_bytes: int = 256 << 20


class RelayedCheckpoints:
    """The blobs of all jobs. `write` is called in the loop, and the others in threads, since they wait for the disk.

    service   identity of the service: several may use one shared path
    """

    def __init__(self, state: StateDir, places: CheckpointPlaces, service: str) -> None:
        self._state, self._places, self._service = state, places, service
        self._swept: set[str] = set()  # jobs that were looked at since this server was started
        self._sweeping = threading.Lock()  # what is just being written must not be swept away
        self._is_changed = False  # whether they were ever kept elsewhere
        self._note_change()

    def place_of(self, order: RunOrder) -> str:
        """Return where the checkpoints of a job are kept, for the orders of its runs.

        Called in the loop that renews leases, for each run, so nothing is forced to the disk here. A job that has begun is
        known by its directory.
        """
        if order.request.checkpoint.url is not None:
            return self._place(order.request.checkpoint.url, order.job)
        if order.epoch > 1 and not self._is_changed:
            return self._place(self._places.at, order.job)
        with suppress(OSError):
            folder = self._state.open_job(order.job, lasting=False)
            try:
                with suppress(ValidationError):
                    return _PLACE.validate_python((get(folder, KEPT_AT) or {}).get("at"))
            finally:
                os.close(folder)
        return self._place(self._places.at, order.job)

    def _place(self, at: str, job: str) -> str:
        return at if at == RELAY else f"{at.rstrip('/')}/{self._service[:12]}/{job}"

    def _note_change(self) -> None:
        """If checkpoints were kept elsewhere before, note that for all jobs that have begun."""
        above = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._state.handle)
        try:
            noted = get(above, KEPT_AT) or {}
            before, self._is_changed = noted.get("at"), noted.get("changed") is True
            if before == self._places.at:
                return
            with suppress(ValidationError):
                before = _PLACE.validate_python(before)
                self._is_changed = True
                for job in filter(TOKEN.fullmatch, os.listdir(self._state.handle)):
                    folder = self._state.open_job(job)
                    try:
                        if get(folder, KEPT_AT) is None:
                            put(folder, KEPT_AT, {"at": self._place(before, job)})
                            sync_folder(folder)
                    finally:
                        os.close(folder)
            put(above, KEPT_AT, {"at": self._places.at, "changed": self._is_changed})
            sync_folder(above)
        finally:
            os.close(above)

    def names(self, job: str) -> BlobNames:
        """List the blobs of a job."""
        with self._opened(job) as folder:
            found = tuple(sorted(filter(_BLOB.fullmatch, os.listdir(folder))))
        return BlobNames(names=found, most=self._places.relay_bytes)

    async def write(self, job: str, name: str, body: AsyncIterator[bytes]) -> BlobAnswer:
        """Write a blob as it comes; RefusedAgentError if it is too large, or cannot be stored."""
        _check_name(name)
        most, size, digest = self._places.relay_bytes, 0, hashlib.sha256()
        part = f"part-{secrets.token_hex(8)}"
        with self._opened(job) as folder:
            try:
                handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
                try:
                    async for block in _gathered(body):
                        size += len(block)
                        if size > most:
                            raise RefusedAgentError("too-large", f"a checkpoint has at most {most:,} bytes here")
                        digest.update(block)
                        await asyncio.to_thread(_write_all, handle, block)
                    await asyncio.to_thread(os.fsync, handle)
                finally:
                    os.close(handle)
                os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
                await asyncio.to_thread(sync_folder, folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise
        return BlobAnswer(bytes=size, sha256=digest.hexdigest())

    def open(self, job: str, name: str) -> int:
        """Open a blob for reading; RefusedAgentError if there is none."""
        _check_name(name)
        with self._opened(job) as folder:
            try:
                return os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
            except FileNotFoundError:
                raise RefusedAgentError("not-found", f"nothing called {name} is kept of job {job}") from None

    def remove(self, job: str, name: str) -> None:
        """Remove a blob, if it is there."""
        _check_name(name)
        with self._opened(job) as folder, suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    @contextmanager
    def _opened(self, job: str) -> Iterator[int]:
        try:
            folder = self._state.open_job(job, KEPT)
            try:
                with self._sweeping:
                    if job not in self._swept:
                        _sweep(folder)
                        self._swept.add(job)
                yield folder
            finally:
                os.close(folder)
        except OSError as error:
            raise RefusedAgentError("storage", f"checkpoints of job {job} cannot be kept: {error}") from None
        except RequestError as error:  # of an id that no job has
            raise RefusedAgentError("wrong-request", str(error)) from None


def _sweep(folder: int) -> None:
    """Remove what a server that was killed has left half-written."""
    for name in os.listdir(folder):
        if name.startswith("part-"):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


async def blocks_of(handle: int) -> AsyncIterator[bytes]:
    """Yield an open file, and close it."""
    try:
        while block := await asyncio.to_thread(os.read, handle, BLOCK):
            yield block
    finally:
        os.close(handle)


async def _gathered(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what comes in blocks that are worth a thread."""
    pending = bytearray()
    async for part in body:
        pending += part
        if len(pending) >= BLOCK:
            yield bytes(pending)
            pending.clear()
    if pending:
        yield bytes(pending)


def _write_all(handle: int, block: bytes) -> None:
    while block:
        block = block[os.write(handle, block) :]


def _check_name(name: str) -> None:
    if not _BLOB.fullmatch(name):
        raise RefusedAgentError("wrong-request", f"{name[:100]!r} is no name of a checkpoint")
