"""The state directory: what is where, opened relative to one directory that is held open.

STATE/jobs/<job>/checkpoint/  log/  work/  runs/<epoch>/
"""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from poise.durable import make_folders, sync_folder
from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.lease_files import (
    FOLDER,
    LOCK,
    PASSING,
    Fields,
    get,
    is_there,
    now,
    open_below,
    put,
    take_lock,
)
from poise.service.backends.local.processes import SCARCE
from poise.worker.checkpoints import Checkpoints

JOBS = "jobs"
KEPT_RUNS = 3
"""Directories of runs that are kept of a job, the latest ones."""
TOKEN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")


def token(job: str) -> str:
    """A job's id, as part of a path; whatever could be anything but a name is refused."""
    if not TOKEN.fullmatch(job):
        raise RequestError(f"job id {job[:100]!r} cannot name a directory; expected letters, digits and ._-")
    return job


def highest_number(state: Path) -> int:
    """The highest number under which something of a job is kept in a state directory; 0: nothing is."""
    folder = state / JOBS
    return max(map(int, filter(_NUMBER.fullmatch, os.listdir(folder))), default=0) if folder.exists() else 0


def latest_epoch(state: Path, job: str) -> int:
    """The highest number of a run of which something is kept in a state directory; 0: nothing is."""
    try:
        return max(map(int, filter(_NUMBER.fullmatch, os.listdir(state / JOBS / token(job) / "runs"))), default=0)
    except OSError:
        return 0


class StateDir:
    """Directories of jobs and runs. Everything is made for its owner alone."""

    def __init__(self, state: Path) -> None:
        self.path = state.resolve() / JOBS
        make_folders(self.path)
        self.handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.handle)

    def job_path(self, job: str) -> Path:
        """Where everything of a job is."""
        return self.path / token(job)

    def run_path(self, job: str, epoch: int) -> Path:
        """Where the files of a run are."""
        return self.job_path(job) / "runs" / str(epoch)

    def make_run(self, job: str, epoch: int) -> None:
        """Make the directory of a run, and those of its job if need be; old runs go. OSError: a link is in the way."""
        _make(self.handle, token(job))
        with self._opened(job) as folder:
            _make(folder, "checkpoint", "log", "work", "runs")
        with self._opened(job, "runs") as runs:
            _make(runs, str(epoch))
            for old in _numbers(runs)[:-KEPT_RUNS]:
                with suppress(OSError):
                    remove_tree(runs, str(old))

    def has_run(self, job: str, epoch: int) -> bool:
        """The run has a directory; also if that cannot be found out just now."""
        return self._is_there(str(epoch), job, "runs")

    def has(self, job: str, epoch: int, name: str) -> bool:
        """The run has a file of that name; also if that cannot be found out just now."""
        return self._is_there(name, job, "runs", str(epoch))

    def get(self, job: str, epoch: int, name: str) -> Fields | None:
        """What a file of a run says; None: nothing that can be understood."""
        try:
            with self._run(job, epoch) as folder:
                return get(folder, name)
        except OSError:
            return None

    def put(self, job: str, epoch: int, name: str, fields: Fields) -> None:
        """Replace a file of a run."""
        with self._run(job, epoch) as folder:
            put(folder, name, fields)

    def stamp(self, job: str, epoch: int, name: str) -> tuple[int, int, int] | None:
        """Something that changes whenever a file is replaced; None: it is not there."""
        try:
            with self._run(job, epoch) as folder:
                stat = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size

    def lock(self, job: str, epoch: int) -> int | None:
        """The run's lock, as an open file; None: its runner has it."""
        with self._run(job, epoch) as folder:
            return take_lock(folder)

    def last_sign(self, job: str, epoch: int) -> float:
        """When the run's runner was last known to live: it touches its lock every few seconds.

        Now, if the lock is gone.
        """
        try:
            with self._run(job, epoch) as folder:
                stat = os.stat(LOCK, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return now()
        return min(stat.st_mtime, now())

    def epochs(self, job: str) -> list[int]:
        """Runs of a job that have a directory, in order."""
        try:
            with self._opened(job, "runs") as runs:
                return _numbers(runs)
        except OSError:
            return []

    def checkpoints(self, job: str) -> list[int]:
        """Steps of the complete checkpoints of a job, the latest first."""
        try:
            with self._opened(job) as folder:
                # A link is followed here: whoever keeps checkpoints elsewhere may, and nothing but names is read.
                return Checkpoints(f"/proc/self/fd/{folder}/checkpoint").complete()
        except OSError:
            return []

    def run_at(self, path: str) -> tuple[str, int] | None:
        """The run whose directory that is; None: it is none of these."""
        job, runs, epoch = (*Path(path).parts[-3:], "", "", "")[:3]
        if not (TOKEN.fullmatch(job) and runs == "runs" and _NUMBER.fullmatch(epoch)):
            return None
        return (job, int(epoch)) if str(self.run_path(job, int(epoch))) == path else None

    @contextmanager
    def _opened(self, job: str, *names: str) -> Iterator[int]:
        """A directory of a job. Everything that is opened below the directory of all jobs is opened here, links excluded."""
        folder = open_below(self.handle, token(job), *names)
        try:
            yield folder
        finally:
            os.close(folder)

    def _run(self, job: str, epoch: int) -> AbstractContextManager[int]:
        return self._opened(job, "runs", str(epoch))

    def _is_there(self, name: str, job: str, *names: str) -> bool:
        try:
            with self._opened(job, *names) as folder:
                return is_there(folder, name)
        except OSError as error:
            return error.errno in SCARCE | PASSING  # who takes it to be there looks again


def _make(folder: int, *names: str) -> None:
    """Directories that are there from now on, also after a power failure."""
    is_changed = False
    for name in names:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folder)
            is_changed = True
    if is_changed:
        sync_folder(folder)


def _numbers(runs: int) -> list[int]:
    """Epochs that have a directory, in order."""
    return sorted(int(name) for name in os.listdir(runs) if _NUMBER.fullmatch(name))


def remove_tree(parent: int, name: str) -> None:
    """Remove a directory and all that is in it, however deep that goes. Links are removed, not followed.

    One directory is open at a time, and the way back up is `..`: neither calls nor open files nor paths grow with the depth.
    """
    here = os.open(name, FOLDER, dir_fd=parent)
    way: list[tuple[str, list[str]]] = []  # the directories down to here, and what is still to be removed beside each
    try:
        todo = _emptied(here)
        while todo or way:
            if todo:
                below = todo.pop()
                here = _gone_to(here, below)
                way.append((below, todo))
                todo = _emptied(here)
            else:
                below, todo = way.pop()
                here = _gone_to(here, "..")
                os.rmdir(below, dir_fd=here)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=parent)


def _gone_to(here: int, name: str) -> int:
    there = os.open(name, FOLDER, dir_fd=here)
    os.close(here)
    return there


def _emptied(folder: int) -> list[str]:
    """Remove all but directories; and say which those are."""
    folders = []
    for each in os.listdir(folder):
        try:
            os.unlink(each, dir_fd=folder)
        except IsADirectoryError:
            folders.append(each)
    return folders
