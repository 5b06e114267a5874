"""The state directory: where the files of jobs and runs are, opened relative to one directory that is held open.

    STATE/jobs/<job>/checkpoint/  log/  work/  runs/<epoch>/

Jobs can replace everything below their own directory, so each path is opened name by name, without following links.
"""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from poise.durable import make_folders, sync_folder
from poise.scheduler.model.errors import RequestError
from poise.service.backends.local import lease_files
from poise.service.backends.local.lease_files import ORDER, Fields, get, is_there, now, open_below, put, take_lock
from poise.service.backends.local.processes import SCARCE
from poise.worker.checkpoints import Checkpoints

JOBS = "jobs"
KEPT_RUNS = 3  # run directories that are kept per job, the latest ones
TOKEN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_OWN = ("POISE_", "MASTER_")  # variables of a run that say nothing of its owner
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")


def token(job: str) -> str:
    """Return a job's id, which is safe as part of a path; RequestError if it is not."""
    if not TOKEN.fullmatch(job):
        raise RequestError(f"job id {job[:100]!r} cannot name a directory; expected letters, digits and ._-")
    return job


def highest_number(state: Path) -> int:
    """Return the highest job number of which something is kept in a state directory; 0: none."""
    folder = state / JOBS
    return max(_numbers(folder), default=0) if folder.exists() else 0


def latest_epoch(state: Path, job: str) -> int:
    """Return the highest epoch of a job of which something is kept in a state directory; 0: none."""
    try:
        return max(_numbers(state / JOBS / token(job) / "runs"), default=0)
    except OSError:
        return 0


class StateDir:
    """Directories of jobs and runs, all private to their owner. Thread-safe: it has no state but one open directory."""

    def __init__(self, state: Path) -> None:
        self.path = state.resolve() / JOBS
        make_folders(self.path)
        self.handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)

    def reopen(self) -> None:
        """Have another directory in its place: it was renamed, and what is kept from now on is of other jobs."""
        make_folders(self.path)
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        os.dup2(handle, self.handle, inheritable=False)
        os.close(handle)

    def close(self) -> None:
        """Close the directory."""
        os.close(self.handle)

    def job_path(self, job: str) -> Path:
        """Return the directory of a job."""
        return self.path / token(job)

    def run_path(self, job: str, epoch: int) -> Path:
        """Return the directory of a run."""
        return self.job_path(job) / "runs" / str(epoch)

    def run_at(self, path: str) -> tuple[str, int] | None:
        """Return the run whose directory that is; None: it is none of this state directory."""
        job, runs, epoch = (*Path(path).parts[-3:], "", "", "")[:3]
        if not (TOKEN.fullmatch(job) and runs == "runs" and _NUMBER.fullmatch(epoch)):
            return None
        return (job, int(epoch)) if str(self.run_path(job, int(epoch))) == path else None

    def make_run(self, job: str, epoch: int) -> None:
        """Make the directory of a run, and those of its job; remove old runs. OSError: a link is in the way."""
        _make(self.handle, token(job))
        with self._opened(job) as folder:
            _make(folder, "checkpoint", "log", "work", "runs")
        with self._opened(job, "runs") as runs:
            _make(runs, str(epoch))
            for old in _numbers(runs)[:-KEPT_RUNS]:
                with suppress(OSError):
                    remove_tree(runs, str(old))

    def open_job(self, job: str, *below: str, lasting: bool = True) -> int:
        """Open the directory of a job, or one below it, which is made if it is not there."""
        with suppress(FileNotFoundError):
            return open_below(self.handle, token(job), *below)
        _make(self.handle, token(job), lasting=lasting)
        if below:
            with self._opened(job) as folder:
                _make(folder, *below, lasting=lasting)
        return open_below(self.handle, token(job), *below)

    def open_logs(self, job: str, *, lasting: bool = True) -> int:
        """Open the directory of a job's logs, which is made if it is not there."""
        return self.open_job(job, "log", lasting=lasting)

    def open_checkpoints(self, job: str) -> int:
        """Open the directory of a job's checkpoints, made if it is not there. A link or a file in its place is removed."""
        _make(self.handle, token(job))
        with self._opened(job) as folder:
            with suppress(OSError):
                os.unlink("checkpoint", dir_fd=folder)
            _make(folder, "checkpoint")
        return open_below(self.handle, token(job), "checkpoint")

    def link_checkpoints(self, job: str, target: str) -> None:
        """Have a job's checkpoints written to another directory, which the nodes share."""
        _make(self.handle, token(job))
        with self._opened(job) as folder:
            with suppress(FileNotFoundError):
                remove(folder, "checkpoint")
            os.symlink(target, "checkpoint", dir_fd=folder)
            sync_folder(folder)

    def has(self, job: str, epoch: int, *file: str) -> bool:
        """Whether the run has a directory, or that file in it; True if that cannot be found out now."""
        path = ["runs", str(epoch), *file]
        try:
            with self._opened(job, *path[:-1]) as folder:
                return is_there(folder, path[-1])
        except OSError as error:
            return error.errno in SCARCE | lease_files.PASSING  # callers that take it to be there look again

    def get(self, job: str, epoch: int, name: str) -> Fields | None:
        """Read a file of a run; None: it is missing or unreadable."""
        try:
            with self._run(job, epoch) as folder:
                return get(folder, name)
        except OSError:
            return None

    def put(self, job: str, epoch: int, name: str, fields: Fields) -> None:
        """Replace a file of a run."""
        with self._run(job, epoch) as folder:
            put(folder, name, fields)

    def forget_environment(self, job: str, epoch: int) -> None:
        """Leave of the environment in a run's order only what is Poise's own: the rest may hold secrets of its owner.

        For a run that is over. After a power failure it may be there again. OSError: it could not be looked at.
        """
        with self._run(job, epoch) as folder:
            order = get(folder, ORDER)
            if order is not None:
                own = order.get("environment")
                kept = {name: text for name, text in own.items() if name.startswith(_OWN)} if isinstance(own, dict) else {}
                rest = {name: value for name, value in order.items() if name != "inherit"}
                put(folder, ORDER, {**rest, "environment": kept}, forced=False)

    def stamp(self, job: str, epoch: int, name: str) -> tuple[int, int, int] | None:
        """Return a value that changes whenever a file is replaced; None: it is missing."""
        try:
            with self._run(job, epoch) as folder:
                stat = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size

    def lock(self, job: str, epoch: int) -> int | None:
        """Take the run's lock, as an open file; None: its runner has it."""
        with self._run(job, epoch) as folder:
            return take_lock(folder)

    def last_sign(self, job: str, epoch: int) -> float:
        """Return when the run's runner last touched its lock, as it does every few seconds; now, if the lock is gone."""
        stamp = self.stamp(job, epoch, lease_files.LOCK)
        return now() if stamp is None else min(stamp[0] / 1e9, now())

    def epochs(self, job: str) -> list[int]:
        """List the epochs of a job that have a directory, in order."""
        try:
            with self._opened(job, "runs") as runs:
                return _numbers(runs)
        except OSError:
            return []

    def checkpoints(self, job: str) -> list[int]:
        """List the steps of a job's complete checkpoints, the latest first."""
        try:
            with self._opened(job) as folder:
                # A link is followed here: an owner may keep checkpoints elsewhere, and only names are read.
                return Checkpoints(f"/proc/self/fd/{folder}/checkpoint").complete()
        except OSError:
            return []

    @contextmanager
    def _opened(self, job: str, *names: str) -> Iterator[int]:
        """Open a directory of a job. All access to what jobs can write goes through here: links are never followed."""
        folder = open_below(self.handle, token(job), *names)
        try:
            yield folder
        finally:
            os.close(folder)

    def _run(self, job: str, epoch: int) -> AbstractContextManager[int]:
        return self._opened(job, "runs", str(epoch))


def _make(folder: int, *names: str, lasting: bool = True) -> None:
    """Make directories, unless they are there. Those that are to last survive a power failure."""
    is_changed = False
    for name in names:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folder)
            is_changed = True
    if is_changed and lasting:
        sync_folder(folder)


def _numbers(folder: int | Path) -> list[int]:
    """List the names in a directory that are whole numbers, in order."""
    return sorted(int(name) for name in os.listdir(folder) if _NUMBER.fullmatch(name))


def remove(parent: int, name: str) -> None:
    """Remove a file, a link, or a directory with all that is in it."""
    try:
        os.unlink(name, dir_fd=parent)
    except IsADirectoryError:
        remove_tree(parent, name)


def remove_tree(parent: int, name: str) -> None:
    """Remove a directory and all that is in it, however deep. Links are removed, not followed.

    One directory is open at a time, and `..` leads back up, so that neither the stack nor open files nor paths grow with the
    depth: a job can nest directories without end.
    """
    here = os.open(name, lease_files.FOLDER, dir_fd=parent)
    above: list[tuple[str, list[str]]] = []  # the directories down to here, and what is still to be removed beside each
    try:
        todo = _empty(here)
        while todo or above:
            if todo:
                below = todo.pop()
                here = _go_to(here, below)
                above.append((below, todo))
                todo = _empty(here)
            else:
                below, todo = above.pop()
                here = _go_to(here, "..")
                os.rmdir(below, dir_fd=here)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=parent)


def _go_to(here: int, name: str) -> int:
    there = os.open(name, lease_files.FOLDER, dir_fd=here)
    os.close(here)
    return there


def _empty(folder: int) -> list[str]:
    """Remove everything except directories; return the names of those."""
    folders = []
    for each in os.listdir(folder):
        try:
            os.unlink(each, dir_fd=folder)
        except IsADirectoryError:
            folders.append(each)
    return folders
