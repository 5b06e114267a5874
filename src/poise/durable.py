"""Names that survive a power failure: a file that was forced to the disk is lost if the directory that names it was not.

Imported by runners and training scripts too: standard library only.
"""

import os

TYPE_CHECKING = False  # as in service/backends/local/lease_files.py
if TYPE_CHECKING:
    from pathlib import Path

    Place = int | str | Path


def sync_folder(folder: "Place") -> None:
    """See to it that names made or removed in a directory are on the disk. An open directory, or its path."""
    if isinstance(folder, int):
        os.fsync(folder)
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_durably(part: "str | Path", path: "str | Path", *, folder: int | None = None) -> None:
    """Give a file or directory, whose contents are on the disk, its final name: after a power failure it has that.

    folder   an open directory that both names are of; None: both are paths
    """
    os.replace(part, path, src_dir_fd=folder, dst_dir_fd=folder)
    sync_folder((os.path.dirname(path) or ".") if folder is None else folder)


def make_folders(path: "str | Path", mode: int = 0o700) -> None:
    """Make a directory, and those above it, unless they are there; after a power failure they still are."""
    above = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(above):
        make_folders(above, mode)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    sync_folder(above)
