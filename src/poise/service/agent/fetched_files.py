"""Working directories that were shipped with jobs, fetched from the server once for all jobs of this node that have them.

They are where they would be on the machine of the service (`backends/local/shipped_files.py`), and the runner of a job
unpacks them from there.
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import time  # noqa: TID251 - the age of files

from poise.durable import make_folders, replace_durably
from poise.service.agent.checkpoint_stores import FULL, ServerAccess, StoreAwayError, StoreProblemError
from poise.service.backends.local.shipped_files import FILES, MISSING, archive_path
from poise.service.wire.archives import BLOCK

UNUSED_SECONDS = 86_400.0  # after which files are removed that no run here has asked for


def fetch_files(
    access: ServerAccess, state: Path, tenant: str, sha256: str, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Fetch an archive, unless it is here; StoreProblemError if the server has not got it."""
    path = archive_path(state, tenant, sha256)
    with suppress(FileNotFoundError):
        os.utime(path)
        return
    _remove_unused(state)
    make_folders(path.parent)
    part = path.with_suffix(f".{secrets.token_hex(8)}.part")  # two jobs may fetch the same files at the same time
    try:
        found = hashlib.sha256()
        with open(part, "wb") as file:
            for block in _blocks(access, tenant, sha256):
                if is_over():
                    raise StoreAwayError("not wanted any more")
                found.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        if found.hexdigest() != sha256:
            raise StoreAwayError("the files of the job were damaged on their way")  # tried again
        replace_durably(part, path)
    except OSError as error:
        raise StoreProblemError(FULL, f"the files of the job cannot be kept on this node: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def _blocks(access: ServerAccess, tenant: str, sha256: str) -> Iterator[bytes]:
    try:
        with access.request("GET", f"/agent/files/{sha256}", params={"tenant": tenant}) as response:
            yield from response.iter_bytes(BLOCK)
    except FileNotFoundError as error:
        raise StoreProblemError(MISSING, str(error)) from None


def _remove_unused(state: Path) -> None:
    for path in (state / FILES).glob("*/*"):
        with suppress(OSError):
            if time() - path.stat().st_mtime > UNUSED_SECONDS:
                path.unlink()
