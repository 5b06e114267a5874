"""Which checkpoints of a job are kept, over all machines and runs: the part that has to survive every crash.

Blobs of a job (`checkpoint_stores.py`):

    step-<n>-<e>.tar    a checkpoint of n steps that run e has written: `step-<n>`, and `ranks-<n>.json` if there is one
    step-<n>-<e>.json   says that it is complete: {"step", "epoch", "bytes", "sha256"}; written after it, removed before it
    epoch-<e>.json      what run e began with: {"epoch", "kept": [as above]}

A checkpoint counts once its .json is there. Run e begins with what `epoch-<e>.json` lists, on all its nodes: the node of
rank 0 writes it before the run begins there, and the other nodes begin later. From then on nothing else counts that an
earlier run has written: an agent that was cut off from the server, but not from the store, may still be uploading the last
checkpoint of its lost run. That comes too late, and must not appear in the middle of a later run.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from poise.service.agent.checkpoint_stores import NOT_KEPT, BlobStore, StoreProblemError
from poise.service.wire.archives import ArchiveError, PackedTree, unpack
from poise.worker.checkpoints import KEPT

_MARK = re.compile(r"step-(0|[1-9][0-9]{0,17})-([1-9][0-9]{0,17})\.json")
_ARCHIVE = re.compile(r"step-(?:0|[1-9][0-9]{0,17})-[1-9][0-9]{0,17}\.tar")
_EPOCH = re.compile(r"epoch-([1-9][0-9]{0,17})\.json")
MOST_MARK = 64 << 10  # bytes of a .json


class KeptCheckpoint(NamedTuple):
    """A checkpoint that counts: run `epoch` has written it, and its archive has this size and SHA-256."""

    step: int
    epoch: int
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """What its blobs are called, before the dot."""
        return f"step-{self.step}-{self.epoch}"


class DamagedCheckpointError(Exception):
    """What is kept of a checkpoint is not what was written."""


class KeptCheckpoints:
    """The kept checkpoints of one job."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    def counted(self) -> list[KeptCheckpoint]:
        """Return the checkpoints that count, the newest first, at most as many as the worker keeps."""
        return self._counted(self._store.names())

    def _counted(self, names: set[str]) -> list[KeptCheckpoint]:
        since, found = self._latest_epoch(names)
        for match in filter(None, map(_MARK.fullmatch, names)):
            if int(match[2]) >= since and (mark := self._mark(match[0])) is not None:
                found.append(mark)
        there = [each for each in found if f"{each.name}.tar" in names]
        # Of one step, what a later run has written: it found the other one unusable.
        latest = {each.step: each for each in sorted(there, key=lambda each: each.epoch)}
        return [latest[step] for step in sorted(latest, reverse=True)][:KEPT]

    def _latest_epoch(self, names: set[str]) -> tuple[int, list[KeptCheckpoint]]:
        """Return the latest run that has begun, and what it began with; 0 if none has."""
        for epoch in sorted((int(match[1]) for match in filter(None, map(_EPOCH.fullmatch, names))), reverse=True):
            began_with = self._began_with(epoch)
            if began_with is not None:
                return epoch, began_with
        return 0, []

    def begin(self, epoch: int) -> list[KeptCheckpoint]:
        """Say on the node of rank 0 what a run begins with, and return it. Said before: what was said then."""
        began_with = self._began_with(epoch)
        if began_with is None:
            began_with = self.counted()
            document = {"epoch": epoch, "kept": [each._asdict() for each in began_with]}
            self._write_json(f"epoch-{epoch}.json", document)
        names = self._store.names()
        return [each for each in began_with if f"{each.name}.tar" in names]

    def join(self, epoch: int) -> list[KeptCheckpoint]:
        """Return what a run begins with, on a node that does not have rank 0."""
        began_with = self._began_with(epoch)
        if began_with is None:
            raise StoreProblemError(NOT_KEPT, f"what run {epoch} begins with is not there, though rank 0 has begun")
        # An agent that was cut off may have removed the older one. All ranks load the newest: without that none may begin.
        names = self._store.names()
        return [each for each in began_with if each is began_with[0] or f"{each.name}.tar" in names]

    def keep(self, step: int, epoch: int, tree: PackedTree) -> KeptCheckpoint:
        """Keep a checkpoint of a run, and forget those that are too old. Doing so twice is harmless."""
        names = self._store.names()
        name = f"step-{step}-{epoch}"
        kept = self._mark(f"{name}.json") if {f"{name}.json", f"{name}.tar"} <= names else None
        if kept is None or (kept.bytes, kept.sha256) != (tree.size, tree.digest()):
            written = hashlib.sha256()
            self._store.remove(f"{name}.json")
            self._store.write(f"{name}.tar", _hashed(tree.blocks(), written.update), tree.size)
            kept = KeptCheckpoint(step, epoch, tree.size, written.hexdigest())
            self._write_json(f"{name}.json", kept._asdict())
        self._sweep(epoch)
        return kept

    def fetch(self, kept: KeptCheckpoint, folder: Path) -> None:
        """Unpack a checkpoint into an empty directory; DamagedCheckpointError if it is not what was written."""
        top = {f"step-{kept.step}", f"ranks-{kept.step}.json"}
        try:
            size, digest = unpack(self._store.read(f"{kept.name}.tar"), folder, top.__contains__)
        except ArchiveError as error:
            raise DamagedCheckpointError(f"the checkpoint of {kept.step} steps is damaged: {error}") from error
        except FileNotFoundError:
            raise DamagedCheckpointError(f"the checkpoint of {kept.step} steps is gone from where it was kept") from None
        if (size, digest) != (kept.bytes, kept.sha256):
            raise DamagedCheckpointError(f"the checkpoint of {kept.step} steps has other contents than were written")

    def drop(self, kept: KeptCheckpoint) -> bool:
        """Let a checkpoint count no more that cannot be used, if there is another one; returns whether it was dropped."""
        if all(each == kept for each in self.counted()):
            return False
        self._remove(kept.name)
        return True

    def _remove(self, name: str) -> None:
        self._store.remove(f"{name}.json")
        self._store.remove(f"{name}.tar")

    def _sweep(self, epoch: int) -> None:
        """Remove what does not count any more, except for what another run is just writing."""
        names = self._store.names()
        counted = {each.name for each in self._counted(names)}
        latest, _ = self._latest_epoch(names)
        if latest > epoch:
            return  # a later run has begun: what is there is its own
        for name in names:
            if _MARK.fullmatch(name) or _ARCHIVE.fullmatch(name):
                if name.rpartition(".")[0] not in counted:
                    self._store.remove(name)
            elif (match := _EPOCH.fullmatch(name)) and int(match[1]) < latest:
                self._store.remove(name)

    # Documents

    def _began_with(self, epoch: int) -> list[KeptCheckpoint] | None:
        with suppress(TypeError, ValueError, KeyError):
            found = self._read_json(f"epoch-{epoch}.json")
            if found is not None and found["epoch"] == epoch:
                return [_kept(each) for each in found["kept"]]
        return None

    def _mark(self, name: str) -> KeptCheckpoint | None:
        with suppress(TypeError, ValueError, KeyError):
            found = self._read_json(name)
            if found is not None and (kept := _kept(found)).name == name.removesuffix(".json"):
                return kept
        return None

    def _read_json(self, name: str) -> dict[str, Any] | None:
        """Read a document; None: it is missing, or was not written to its end."""
        text = b""
        try:
            for block in self._store.read(name):
                text += block
                if len(text) > MOST_MARK:
                    return None
            found = json.loads(text)
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _write_json(self, name: str, document: dict[str, Any]) -> None:
        text = json.dumps(document).encode()
        self._store.write(name, (text,), len(text))


def _kept(fields: dict[str, Any]) -> KeptCheckpoint:
    step, epoch, size, digest = (fields[name] for name in KeptCheckpoint._fields)
    if not (isinstance(step, int) and isinstance(epoch, int) and isinstance(size, int) and isinstance(digest, str)):
        raise TypeError("no checkpoint")
    return KeptCheckpoint(step, epoch, size, digest)


def _hashed(blocks: Iterable[bytes], update: Callable[[bytes], None]) -> Iterator[bytes]:
    for block in blocks:
        update(block)
        yield block
