"""What comes with jobs and is kept beside the journal: working directories and environments, so many bytes for each tenant.

Working directories are archives, which clients upload in pieces. Environments of submitters come with their submissions
(`wire/environments.py`). Both are in the state directory, by tenant and SHA-256 (`backends/local/shipped_files.py`). A
tenant's jobs can name only what the tenant has sent. What no unfinished job names is removed when there is something new,
except for what came or was named within the last hour: its jobs may be about to be submitted.
"""

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from time import time  # noqa: TID251 - the age of files

from poise.durable import make_folders, replace_durably
from poise.service.backends.local.shipped_files import FILES, archive_path, blocks_in, environment_path
from poise.service.server.service_api import RefusalCode, RequestRefusedError
from poise.service.wire.environments import sha256_of
from poise.service.wire.views import FilePiece, FileReceived

SHIP_BYTES = 64 << 20  # of one archive, unless the operator says otherwise
GRACE = 3600.0  # seconds for which an archive is kept that no job names
Named = Callable[[], set[tuple[str, str]]]  # tenant and SHA-256 of what unfinished jobs name


ENVIRONMENT_MISSING = "environment-missing"
"""Cause of a run of a job whose environment is not there any more."""


class EnvironmentGoneError(Exception):
    """The environment of a job is not there any more, or not what it was."""


class ShippedArchives:
    """The archives and environments of all tenants. Thread-safe.

    state         state directory of the service; None: nothing can be shipped
    most          bytes of one archive
    tenant_most   bytes of all that is kept of a tenant; 0: any
    """

    def __init__(self, state: Path | None, most: int = SHIP_BYTES, tenant_most: int = 0) -> None:
        self._state, self._most, self._tenant_most = state, most, tenant_most
        self._lock = Lock()

    def receive(self, tenant: str, sha256: str, piece: FilePiece, named: Named) -> FileReceived:
        """Take the next piece of an archive, and say how much there is. A piece that does not come next changes nothing."""
        state = self._require_state()
        try:
            data = base64.b64decode(piece.data, validate=True)
        except (binascii.Error, ValueError):
            raise RequestRefusedError(RefusalCode.WRONG, "data: expected base64") from None
        if piece.total > self._most:
            text = f"the files have {piece.total / (1 << 20):,.1f} MiB, of at most {self._most >> 20:,} (serve --ship-mib)"
            raise RequestRefusedError(RefusalCode.WRONG, f"total: {text}")
        path = archive_path(state, tenant, sha256)
        with self._lock, _disk_problems():
            if path.exists():
                os.utime(path)
                return FileReceived(received=path.stat().st_size, complete=True)
            part = path.with_suffix(".part")
            received = part.stat().st_size if part.exists() else 0
            if not data or piece.offset != received:
                return FileReceived(received=received, complete=False)
            if received + len(data) > piece.total:
                raise RequestRefusedError(RefusalCode.WRONG, "data: there is more of it than `total` says")
            if received == 0:
                self.collect(named())
                make_folders(path.parent)
            self._check_room(tenant, piece.total - received)  # at each piece: others may be on their way at the same time
            with open(part, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
                file.write(data)
            if received + len(data) < piece.total:
                return FileReceived(received=received + len(data), complete=False)
            self._complete(part, path, sha256)
            return FileReceived(received=piece.total, complete=True)

    def require(self, tenant: str, sha256: str) -> None:
        """Refuse a job whose files were not uploaded; those that are there stay for a while."""
        try:
            os.utime(archive_path(self._require_state(), tenant, sha256))
        except OSError:
            text = f"files: tenant {tenant} has uploaded none with the SHA-256 {sha256[:12]}…; `poise submit --ship` does"
            raise RequestRefusedError(RefusalCode.WRONG, text) from None

    def keep_environment(self, tenant: str, text: str, named: Named) -> None:
        """Keep an environment, unless it is there."""
        path = environment_path(self._require_state(), tenant, sha256_of(text))
        with self._lock, _disk_problems():
            if path.exists():
                os.utime(path)
                return
            self.collect(named())
            make_folders(path.parent)
            self._check_room(tenant, len(text))
            part = path.with_suffix(".new")
            with open(part, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            replace_durably(part, path)

    def environment(self, tenant: str, sha256: str) -> dict[str, str]:
        """Return the variables of an environment; EnvironmentGoneError: they are not there."""
        try:
            text = environment_path(self._require_state(), tenant, sha256).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise EnvironmentGoneError(str(error)) from error
        if sha256_of(text) != sha256:
            raise EnvironmentGoneError("it is not as it was written")
        found: dict[str, str] = json.loads(text)
        return found

    def _complete(self, part: Path, path: Path, sha256: str) -> None:
        found = hashlib.sha256()
        for block in blocks_in(part):
            found.update(block)
        if found.hexdigest() != sha256:
            part.unlink()
            raise RequestRefusedError(RefusalCode.WRONG, "the files are not what their name says; upload them again")
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        replace_durably(part, path)

    def _check_room(self, tenant: str, size: int) -> None:
        """Refuse what would be too much for the tenant."""
        folder = self._require_state() / FILES / tenant
        used = sum(each.stat().st_size for each in folder.iterdir()) if folder.is_dir() else 0
        if self._tenant_most and used + size > self._tenant_most:
            mib = 1 << 20
            kept, most = f"{used / mib:,.1f} MiB of files and environments", f"{self._tenant_most / mib:,.0f}"
            text = f"tenant {tenant} keeps {kept}, of at most {most}"
            raise RequestRefusedError(RefusalCode.QUOTA, f"{text}; they go when their jobs have ended", bound="tenant-files")

    def collect(self, named: set[tuple[str, str]]) -> None:
        """Remove archives that no unfinished job names, and that are not new."""
        root = self._require_state() / FILES
        for path in root.glob("*/*") if root.is_dir() else ():
            with suppress(OSError):
                if (path.parent.name, path.stem) not in named and time() - path.stat().st_mtime > GRACE:
                    path.unlink()

    def _require_state(self) -> Path:
        if self._state is None:
            raise RequestRefusedError(RefusalCode.WRONG, "files: this service keeps none")
        return self._state


@contextmanager
def _disk_problems() -> Iterator[None]:
    """Turn errors of the disk into a refusal."""
    try:
        yield
    except OSError as error:
        text = f"the files cannot be kept at the moment: {error.strerror or error}"
        raise RequestRefusedError(RefusalCode.STORAGE, text) from None
