"""Files and names that survive a power failure: a file on the disk is lost if the directory that names it was not synced.

Imported by runners and training scripts: standard library only.
"""

import os

TYPE_CHECKING = False  # importing `typing` takes as long as the rest of a runner's start
if TYPE_CHECKING:
    from pathlib import Path

    Place = int | str | Path


def sync_folder(folder: "Place") -> None:
    """Force names that were made or removed in a directory to the disk. `folder` is an open directory, or its path."""
    if isinstance(folder, int):
        os.fsync(folder)
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_durably(part: "str | Path", path: "str | Path", *, folder: int | None = None) -> None:
    """Rename a file or directory whose contents are on the disk; the new name survives a power failure.

    folder   open directory of both names; None: both are paths
    """
    os.replace(part, path, src_dir_fd=folder, dst_dir_fd=folder)
    sync_folder((os.path.dirname(path) or ".") if folder is None else folder)


def replace_file(path: "Path", text: str) -> None:
    """Replace a file, mode 0600, in one step: a crash leaves the old one or the new one."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    create_file(new, text)
    replace_durably(new, path)


def create_file(path: "Path", text: str) -> None:
    """Write a file, mode 0600, that must not exist yet, and sync its contents."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)  # an error of a descriptor, such as a full disk, has none
        raise


def make_folders(path: "str | Path", mode: int = 0o700) -> None:
    """Make a directory and those above it, unless they exist; they survive a power failure."""
    above = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(above):
        make_folders(above, mode)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    sync_folder(above)
