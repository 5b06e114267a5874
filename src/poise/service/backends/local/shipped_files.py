"""Working directories that were shipped with jobs: archives by their SHA-256, and their unpacking once per job.

    STATE/files/<tenant>/<sha256>.tar     an archive, complete
    STATE/files/<tenant>/<sha256>.part    one that is being received
    STATE/files/<tenant>/<sha256>.json    the environment of a submitter; only on the machine of a service
    STATE/jobs/<job>/files/               the working directory of a job's runs on this machine

The same on the machine of a service, where clients upload them, and on a node, whose agent fetches them from the service.

Imported by the runner of jobs that have files: standard library only.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from poise.durable import replace_durably
from poise.service.wire.archives import BLOCK, ArchiveError, unpack

FILES, SHIPPED = "files", "files"  # in the state directory, and in the directory of a job
MISSING = "shipped-files-missing"
FULL = "storage-full"


class ShippedFilesError(Exception):
    """The files of a job are not here, or cannot be unpacked. `cause` is what its run fails of."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


def archive_path(state: Path, tenant: str, sha256: str) -> Path:
    """Return where an archive is in a state directory."""
    return state / FILES / tenant / f"{sha256}.tar"


def environment_path(state: Path, tenant: str, sha256: str) -> Path:
    """Return where an environment is in a state directory."""
    return state / FILES / tenant / f"{sha256}.json"


def unpack_files(archive: str, sha256: str, folder: str, beat: Callable[[], None] = lambda: None) -> None:
    """Unpack an archive, so that the directory is complete once it has its name. `beat` is called again and again."""
    part = Path(f"{folder}.part")
    try:
        with suppress(FileNotFoundError):
            shutil.rmtree(part)  # left by a runner that was killed
        part.mkdir(0o700)

        def blocks() -> Iterator[bytes]:
            for block in blocks_in(archive):
                beat()
                yield block

        _, found = unpack(blocks(), part)
        if found != sha256:
            raise ShippedFilesError(MISSING, "the files that were shipped with the job are damaged")
        replace_durably(part, folder)
    except FileNotFoundError:
        raise ShippedFilesError(MISSING, "the files that were shipped with the job are not on this machine") from None
    except ArchiveError as error:
        raise ShippedFilesError(MISSING, f"the files that were shipped with the job are damaged: {error}") from None
    except OSError as error:
        raise ShippedFilesError(FULL, f"the files that were shipped with the job cannot be unpacked: {error}") from None


def blocks_in(path: str | Path) -> Iterator[bytes]:
    """Yield a file in blocks."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(handle, "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            yield block
