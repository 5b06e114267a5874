"""The checkpoints of jobs on this node: copies of what is kept elsewhere, and what a run here has just written.

    STATE/jobs/<job>/checkpoint/   where the worker writes and loads (worker/checkpoints.py)
    STATE/kept/<job>.json          which of those are known to be kept, and as what
    STATE/keeping/<job>/           hard links to one that is being uploaded: the worker may remove it meanwhile
    STATE/fetching/<job>/          one that is being fetched

A job can write in its own directory only, so what is known of it is noted beside that. All functions but `changed` block,
and are called by one thread at a time for each job.
"""

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from poise.durable import make_folders, replace_file, sync_folder
from poise.service.agent.kept_checkpoints import DamagedCheckpointError, KeptCheckpoint
from poise.service.backends.local.lease_files import FOLDER, open_below
from poise.service.backends.local.state_dir import StateDir, remove, token
from poise.service.wire.archives import ArchiveError, PackedTree, packed

MOST_DEPTH = 64  # directories inside each other in a checkpoint

Stamp = tuple[int, int]  # inode and time of a file or directory: another one of the same name has another


class LocalCopy(NamedTuple):
    """A checkpoint on this node that is kept elsewhere."""

    kept: KeptCheckpoint
    stamp: Stamp


class CheckpointSnapshot(NamedTuple):
    """A checkpoint that is about to be packed."""

    tree: PackedTree
    stamp: Stamp


class NodeCheckpoints:
    """The checkpoints of all jobs on this node.

    folder   state directory of the node
    """

    def __init__(self, state: StateDir, folder: Path) -> None:
        self._state, self._folder = state, folder

    def equalise(
        self, job: str, at: str, wanted: Iterable[KeptCheckpoint], fetch: Callable[[KeptCheckpoint, Path], None]
    ) -> None:
        """Make the directory of a job equal to what is kept: fetch what is missing, and remove everything else.

        at   where it is kept; copies of what is kept elsewhere do not count
        """
        known = self._copies(job, at)
        here: dict[int, LocalCopy] = {}
        folder = self._state.open_checkpoints(job)
        try:
            for each in wanted:
                copy = known.get(each.step)
                if copy is not None and copy.kept == each and _stamp(folder, f"step-{each.step}") == copy.stamp:
                    here[each.step] = copy
            staying = {name for step in here for name in (f"step-{step}", f"ranks-{step}.json")}
            for name in os.listdir(folder):
                if name not in staying:
                    remove(folder, name)
            self._note(job, at, here)
            for each in wanted:
                if each.step not in here:
                    here[each.step] = self._fetched(job, folder, each, fetch)
                    self._note(job, at, here)
        finally:
            os.close(folder)

    def _fetched(
        self, job: str, folder: int, kept: KeptCheckpoint, fetch: Callable[[KeptCheckpoint, Path], None]
    ) -> LocalCopy:
        scratch = self._empty("fetching", job)
        fetch(kept, scratch)
        names = (f"ranks-{kept.step}.json", f"step-{kept.step}")  # as the worker does: complete once it has its name
        if not os.path.lexists(scratch / names[1]):
            raise DamagedCheckpointError(f"the checkpoint of {kept.step} steps is empty")
        for name in names:
            with suppress(FileNotFoundError):
                os.rename(scratch / name, name, dst_dir_fd=folder)
        sync_folder(folder)
        stamp = _stamp(folder, names[1])
        assert stamp is not None
        return LocalCopy(kept, stamp)

    def changed(self, job: str) -> Stamp | None:
        """Return what is another value once a checkpoint was written or removed; cheap, so that it can be asked often."""
        return _stamp(self._state.handle, f"{token(job)}/checkpoint")

    def newest_unkept(self, job: str, at: str) -> int | None:
        """Return the steps of the newest complete checkpoint, if it is not known to be kept."""
        newest = next(iter(self._state.checkpoints(job)), None)
        if newest is None:
            return None
        copy = self._copies(job, at).get(newest)
        return None if copy is not None and copy.stamp == self._stamp_of(job, f"step-{newest}") else newest

    def newest_kept(self, job: str, at: str) -> int | None:
        """Return the steps of the newest checkpoint that is known to be kept; None: none is."""
        return max(self._copies(job, at), default=None)

    def snapshot(self, job: str, step: int) -> CheckpointSnapshot:
        """Make hard links to a complete checkpoint; FileNotFoundError if the worker removes it at the same time."""
        scratch = self._empty("keeping", job)
        target = os.open(scratch, FOLDER)
        source = open_below(self._state.handle, token(job), "checkpoint")
        try:
            name = f"step-{step}"
            before = _stamp(source, name)
            _link_tree(source, name, target)
            with suppress(FileNotFoundError):
                _link_tree(source, f"ranks-{step}.json", target)
            # It is renamed before it is removed: if it still has its name now, all of it was there.
            if before is None or _stamp(source, name) != before:
                raise FileNotFoundError(name)
        finally:
            os.close(source)
            os.close(target)
        return CheckpointSnapshot(packed(scratch, os.listdir(scratch)), before)

    def note_kept(self, job: str, at: str, kept: KeptCheckpoint, stamp: Stamp) -> None:
        """Note that a checkpoint is kept. Those that are not on this node any more are forgotten."""
        copies = {**self._copies(job, at), kept.step: LocalCopy(kept, stamp)}
        there = {*self._state.checkpoints(job), kept.step}
        self._note(job, at, {step: copy for step, copy in copies.items() if step in there})
        self._empty("keeping", job)

    def unusable(self, job: str, at: str) -> list[KeptCheckpoint]:
        """Return the kept checkpoints that a run here could not load, and has set aside."""
        copies = self._copies(job, at)
        return [copy.kept for step, copy in copies.items() if self._stamp_of(job, f"bad-step-{step}") == copy.stamp]

    def link(self, job: str, target: str) -> None:
        """Have the worker write to a directory that the nodes share. It is made, and must be writable."""
        make_folders(target)
        probe = Path(target, f".writable-{secrets.token_hex(8)}")  # other nodes may look at the same time
        replace_file(probe, "")
        probe.unlink()
        self._state.link_checkpoints(job, target)

    def _stamp_of(self, job: str, name: str) -> Stamp | None:
        try:
            folder = open_below(self._state.handle, token(job), "checkpoint")
        except OSError:
            return None
        try:
            return _stamp(folder, name)
        finally:
            os.close(folder)

    def _copies(self, job: str, at: str) -> dict[int, LocalCopy]:
        with suppress(OSError, ValueError, TypeError, KeyError):
            found: dict[str, Any] = json.loads((self._folder / "kept" / f"{token(job)}.json").read_bytes())
            if found["at"] == at:
                copies = (LocalCopy(KeptCheckpoint(*kept), (int(ino), int(time))) for kept, (ino, time) in found["copies"])
                return {copy.kept.step: copy for copy in copies}
        return {}

    def _note(self, job: str, at: str, copies: dict[int, LocalCopy]) -> None:
        make_folders(self._folder / "kept")
        document = {"at": at, "copies": [[list(copy.kept), list(copy.stamp)] for copy in copies.values()]}
        replace_file(self._folder / "kept" / f"{token(job)}.json", json.dumps(document))

    def _empty(self, kind: str, job: str) -> Path:
        """Return an empty directory; what an earlier agent has left there is removed."""
        above = self._folder / kind
        make_folders(above)
        parent = os.open(above, FOLDER)
        try:
            with suppress(FileNotFoundError):
                remove(parent, token(job))
            os.mkdir(token(job), 0o700, dir_fd=parent)
        finally:
            os.close(parent)
        return above / token(job)


def _stamp(folder: int, name: str) -> Stamp | None:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _link_tree(source: int, name: str, target: int, depth: int = 0) -> None:
    """Make hard links to a file, or to all files below a directory; links are linked, not followed."""
    if depth > MOST_DEPTH:
        raise ArchiveError(f"it has more than {MOST_DEPTH} directories inside each other")
    try:
        below = os.open(name, FOLDER, dir_fd=source)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        return
    try:
        os.mkdir(name, 0o700, dir_fd=target)
        here = os.open(name, FOLDER, dir_fd=target)
        try:
            for each in os.listdir(below):
                _link_tree(below, each, here, depth + 1)
        finally:
            os.close(here)
    finally:
        os.close(below)
