"""Checkpoints in a directory: `step-<n>`, a file or a directory, is complete once it has this name.

Other names there:

    ranks-<n>.json   random generators of each of several ranks at step n (rank_state.py); there before `step-<n>` is
    saving-<n>       being written, or left by a process that died while writing
    removing-<n>     an old one that is being removed
    bad-step-<n>     could not be loaded when the one before it could; kept for its owner, until the next such one
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress

from poise.durable import make_folders, replace_durably

KEPT = 2  # complete checkpoints that are kept: the newest, and the one before it in case the newest cannot be loaded

_COMPLETE = re.compile(r"step-([0-9]{1,18})")
_RANKS = re.compile(r"ranks-([0-9]{1,18})\.json")


class Checkpoints:
    """The checkpoints of one job. One process at a time writes; any number read."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def path(self, step: int) -> str:
        """Return where the complete checkpoint of that many steps is, or would be."""
        return os.path.join(self._folder, f"step-{step}")

    def part(self, step: int) -> str:
        """Return where it is while it is being written. Not a hidden file: torch.save refuses those."""
        return os.path.join(self._folder, f"saving-{step}")

    def ranks(self, step: int) -> bytes | None:
        """Read `ranks-<step>.json`; None: there is none, or it cannot be read."""
        try:
            with open(self._ranks_path(step), "rb") as file:
                return file.read()
        except OSError:
            return None

    def complete(self) -> list[int]:
        """List the steps of the complete checkpoints, newest first."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        matches = (_COMPLETE.fullmatch(name) for name in names)
        # Other spellings of a number ("step-007") are not ours: path() would not find them again.
        found = (int(match[1]) for match in matches if match and match[1] == str(int(match[1])))
        return sorted(found, reverse=True)

    def write(self, step: int, save: Callable[[str], object], ranks: Callable[[], bytes | None] = lambda: None) -> None:
        """Have `save(path)` write a checkpoint. It becomes complete by one rename, and survives a power failure.

        `ranks` is called after `save` for the contents of `ranks-<step>.json`; None: no such file. Older checkpoints than
        the last KEPT are removed. An exception is passed on; then nothing is left of this one, and older ones are
        untouched.
        """
        make_folders(self._folder, 0o777)
        part = self.part(step)
        try:
            save(part)
            _require_written(part)
            _flush_tree(part)
            self._write_ranks(step, ranks())
            replace_durably(part, self.path(step))
        except BaseException:
            with suppress(OSError):
                _remove(part)
                _remove(self._ranks_path(step))
            raise
        for old in self.complete()[KEPT:]:
            # Renamed first: a directory does not go at once, and half of it must not be taken for a checkpoint.
            going = os.path.join(self._folder, f"removing-{old}")
            with suppress(OSError):
                _remove(going)
                os.rename(self.path(old), going)
                _remove(going)
                _remove(self._ranks_path(old))

    def set_aside(self, step: int) -> None:
        """Take a checkpoint out of the count without losing it, if possible; remove those that were set aside before.

        Any number of processes may do so at once; it is done once.
        """
        aside = os.path.join(self._folder, f"bad-step-{step}")
        claimed = f"{aside}.{os.getpid()}"
        with suppress(OSError):
            # A second process fails here, and does not remove what the first has just put there.
            os.rename(self.path(step), claimed)
            self._remove_all("bad-step-", but=claimed)
            replace_durably(claimed, aside)

    def sweep(self) -> None:
        """Remove what processes that died have left half-written, as far as possible."""
        with suppress(OSError):
            self._remove_all("saving-", "removing-")
            kept = set(self.complete())
            for match in filter(None, map(_RANKS.fullmatch, os.listdir(self._folder))):
                if int(match[1]) not in kept:
                    _remove(os.path.join(self._folder, match[0]))

    def _ranks_path(self, step: int) -> str:
        return os.path.join(self._folder, f"ranks-{step}.json")

    def _write_ranks(self, step: int, text: bytes | None) -> None:
        path = self._ranks_path(step)
        if text is None:
            _remove(path)  # left by a run with more ranks that died before its checkpoint of this step was complete
            return
        part = os.path.join(self._folder, f"saving-ranks-{step}")
        with open(part, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, path)

    def _remove_all(self, *beginnings: str, but: str | None = None) -> None:
        for name in os.listdir(self._folder):
            path = os.path.join(self._folder, name)
            if name.startswith(beginnings) and path != but:
                _remove(path)


def _require_written(path: str) -> None:
    if not os.path.lexists(path):
        raise FileNotFoundError(f"save(path) made neither a file nor a directory at the path that it was given, {path}")


def _flush_tree(path: str) -> None:
    """Force a file, or a directory and all that is in it, to the disk."""
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.is_symlink():
                    _flush_tree(entry.path)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        from shutil import rmtree  # here: most checkpoints are files, and this import is slow

        rmtree(path)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)
