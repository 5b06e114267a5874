"""Sees to it that checkpoints of runs on this node are kept where the job's other runs find them (docs/design/0012).

    before a run    the directory on the node is made equal to what is kept
    while it runs   the node of rank 0 keeps each new complete checkpoint; progress names only what is kept
    after it        the last one is kept before the end of the run is reported

On a path that all nodes share there is nothing to keep: the worker writes there. Otherwise transfers are made in threads,
one at a time for each job, and everything else here in the loop of the agent.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from poise.service.agent.checkpoint_stores import (
    FULL,
    NOT_KEPT,
    UNUSABLE,
    BlobStore,
    InterruptibleStore,
    RelayStore,
    ServerAccess,
    StoreAwayError,
    StoreProblemError,
    UrlStore,
)
from poise.service.agent.fetched_files import fetch_files
from poise.service.agent.kept_checkpoints import DamagedCheckpointError, KeptCheckpoint, KeptCheckpoints
from poise.service.agent.node_checkpoints import NodeCheckpoints, Stamp
from poise.service.backends.local.run_files import CANNOT_START
from poise.service.backends.run_table import Key
from poise.service.wire.agent_messages import PartOrder
from poise.service.wire.archives import ArchiveError
from poise.service.wire.request import RELAY

LOG = logging.getLogger("poise.agent")
LOOK_SECONDS = 0.5  # between two looks for new checkpoints
LOOKS_ENOUGH = 2  # at a directory that is the same, until only its time is looked at
RETRY_SECONDS = 1.0  # after something that may pass
PATIENCE = 60.0  # for how long a full disk, or a store that does not work, is tried again before a run fails of it
MOST_TRANSFERS = 4  # at once
DAMAGED = "model-checkpoint-error"
FETCHES = 2  # of a checkpoint that arrives damaged: the connection may be to blame

T = TypeVar("T")


class CheckpointKeeper:
    """The checkpoints of all runs that have a part on this node.

    on_kept   called with the run when a checkpoint of it has been kept
    """

    def __init__(
        self, node: str, checkpoints: NodeCheckpoints, access: ServerAccess, hidden: Path, on_kept: Callable[[Key], None]
    ) -> None:
        self._node, self._local, self._access, self._hidden = node, checkpoints, access, hidden
        self._on_kept = on_kept
        self._parts: dict[Key, PartOrder] = {}
        self._newest: dict[Key, int | None] = {}  # steps that are kept
        self._transfers: dict[str, Future[Any]] = {}  # by job, one at a time
        self._seen: dict[Key, tuple[Stamp | None, int]] = {}  # directory at the last look, and how many found it so
        self._said: dict[Key, str] = {}  # what is wrong, as it was logged last
        self._threads = ThreadPoolExecutor(MOST_TRANSFERS, "checkpoints")
        self._is_closed = False

    def close(self) -> None:
        """Interrupt what is being transferred; the next agent does it again."""
        self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)

    def enter(self, part: PartOrder) -> None:
        """Keep the checkpoints of a run from now on, if this node has its rank 0."""
        key = part.job, part.epoch
        self._parts[key] = part
        if key not in self._newest and self._is_kept_elsewhere(part):
            self._newest[key] = self._local.newest_kept(part.job, self._place(part))

    def has_earlier(self, key: Key) -> bool:
        """Whether an earlier run of the job is here, and its last checkpoint may have to be kept yet."""
        return any(job == key[0] and epoch < key[1] for job, epoch in self._parts)

    def forget_all(self) -> None:
        """Forget all runs: those that are still open here are entered again."""
        self._parts.clear()
        self._transfers = {job: each for job, each in self._transfers.items() if not each.done()}
        self._newest.clear()
        self._seen.clear()
        self._said.clear()

    def newest(self, key: Key, reported: float | None) -> float | None:
        """Return the steps of a run that would survive now, given what its worker says has been written."""
        part = self._parts.get(key)
        if reported is None or part is None or not self._is_kept_elsewhere(part):
            return reported
        return min(reported, float(self._newest.get(key) or 0))

    def _is_kept_elsewhere(self, part: PartOrder) -> bool:
        return not part.kept_at.startswith("/")

    def _keeps(self, part: PartOrder) -> bool:
        """Whether this node uploads the checkpoints of a run: rank 0 alone writes them."""
        return self._is_kept_elsewhere(part) and part.gpus[0][0] == self._node

    # Before a run

    async def prepare(self, part: PartOrder) -> None:
        """Make the node's directory equal to what is kept; StoreProblemError if that cannot be, and the run must not begin.

        A server that is away is waited for: it says anew what is wanted once it is back.
        """
        over = threading.Event()
        deadline = monotonic() + PATIENCE
        try:
            while True:
                try:
                    await self._in_thread(part.job, lambda: self._equalise(part, over.is_set))
                except StoreAwayError:
                    pass
                except StoreProblemError as error:
                    if not error.may_pass or monotonic() > deadline:
                        raise
                    LOG.info("job %s: %s; trying again", part.job, error)
                else:
                    return
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            over.set()

    def _equalise(self, part: PartOrder, is_over: Callable[[], bool]) -> None:
        try:
            if part.request.files is not None:
                fetch_files(self._access, self._hidden, part.tenant, part.request.files, is_over)
            if not self._is_kept_elsewhere(part):
                self._local.link(part.job, part.kept_at)
                return
            kept = KeptCheckpoints(self._store(part, is_over))
            wanted = kept.begin(part.epoch) if self._keeps(part) else kept.join(part.epoch)
            self._local.equalise(part.job, self._place(part), wanted, lambda each, to: self._fetch(kept, each, to))
        except OSError as error:
            where = "the disk of the node" if self._is_kept_elsewhere(part) else part.kept_at
            cause = {"storage-full": FULL}.get(CANNOT_START.get(error.errno or 0, ""), UNUSABLE)
            raise StoreProblemError(cause, f"{where} cannot be used: {error}") from error
        except (ValueError, RecursionError, DamagedCheckpointError) as error:  # written by others, or damaged
            raise StoreProblemError(UNUSABLE, f"what is kept at {part.kept_at} cannot be read: {error!r}") from error
        self._newest[part.job, part.epoch] = max((each.step for each in wanted), default=None)

    def _fetch(self, kept: KeptCheckpoints, each: KeptCheckpoint, folder: Path) -> None:
        for attempt in range(1, FETCHES + 1):
            try:
                kept.fetch(each, folder)
            except DamagedCheckpointError as error:
                if attempt < FETCHES:
                    for left in folder.iterdir():
                        _remove_all(left)
                    continue
                # All nodes have to begin with the same one. So the run fails, and the next begins with the one before.
                if kept.drop(each):
                    raise StoreProblemError(DAMAGED, f"{error}; the next run begins with the one before") from error
                raise StoreProblemError(UNUSABLE, f"{error}, and there is no other") from error
            else:
                return

    # While it runs

    async def run(self) -> None:
        """Keep new checkpoints until cancelled. Runs do not wait for each other's."""
        busy: dict[Key, asyncio.Task[None]] = {}
        try:
            while True:
                for key, part in self._parts.items():
                    if self._keeps(part) and key not in busy and self._may_have_changed(key):
                        busy[key] = asyncio.get_running_loop().create_task(self._try_to_keep(key, part))
                await asyncio.sleep(LOOK_SECONDS)
                busy = {key: task for key, task in busy.items() if not task.done()}
        finally:
            for task in busy.values():
                task.cancel()

    def _may_have_changed(self, key: Key) -> bool:
        """Whether a run may have written a checkpoint since the last look. Only then is it worth a thread.

        Two looks have to find the directory the same: its time advances in ticks of some milliseconds, so that one change
        more, right after a look, may not show.
        """
        stamp, looks = self._seen.get(key, (None, 0))
        return looks < LOOKS_ENOUGH or stamp != self._local.changed(key[0])

    async def _try_to_keep(self, key: Key, part: PartOrder) -> None:
        stamp = self._local.changed(part.job)
        before, looks = self._seen.pop(key, (None, 0))  # a look that fails is repeated
        try:
            await self._keep_newest(key, part)
        except StoreAwayError:
            return
        except StoreProblemError as error:
            if str(error) != self._said.get(key):  # once, not twice a second
                LOG.warning("job %s: %s", part.job, error)
            self._said[key] = str(error)
            await asyncio.sleep(RETRY_SECONDS)
        else:
            self._said.pop(key, None)
            if key in self._parts:
                self._seen[key] = stamp, looks + 1 if stamp == before else 1

    async def _keep_newest(self, key: Key, part: PartOrder) -> None:
        """Keep the newest complete checkpoint of a run, unless it is kept."""
        place = self._place(part)

        def keep() -> int | None:
            step = self._local.newest_unkept(part.job, place)
            if step is None:  # also if a call that an earlier session has given up has kept it meanwhile
                return self._local.newest_kept(part.job, place)
            try:
                try:
                    found = self._local.snapshot(part.job, step)
                except FileNotFoundError:  # the worker has removed it: there are newer ones
                    return None
                kept = KeptCheckpoints(self._store(part, lambda: self._is_closed)).keep(step, part.epoch, found.tree)
                self._local.note_kept(part.job, place, kept, found.stamp)
            except ArchiveError as error:
                raise StoreProblemError(NOT_KEPT, f"the checkpoint of {step} steps cannot be packed: {error}") from error
            except OSError as error:
                raise StoreProblemError(NOT_KEPT, f"the checkpoint of {step} steps cannot be read: {error}") from error
            return step

        step = await self._in_thread(part.job, keep)
        if step is not None and key in self._parts and step != self._newest.get(key):
            self._newest[key] = step
            self._on_kept(key)

    # After it

    async def finish(self, key: Key, *, is_wanted: bool) -> StoreProblemError | None:
        """Keep the last checkpoint of a run that is over, and forget the run; return why that was not possible.

        StoreAwayError: the server is away, and will be told of this end in its next session.

        is_wanted   whether its job goes on: then it is tried for a while
        """
        part = self._parts.get(key)
        if part is None or not self._is_kept_elsewhere(part):
            self.forget(key)
            return None
        deadline = monotonic() + (PATIENCE if is_wanted else 0.0)
        problem: StoreProblemError | None = None
        while True:
            try:
                await self._in_thread(part.job, lambda: self._drop_unusable(part))
                if self._keeps(part):
                    await self._keep_newest(key, part)
                problem = None
            except StoreProblemError as error:
                problem = error
            except (OSError, ValueError, RecursionError) as error:  # of the node's own disk, or of what others wrote there
                problem = StoreProblemError(NOT_KEPT, repr(error))
            if problem is None or not problem.may_pass or monotonic() > deadline:
                break
            await asyncio.sleep(RETRY_SECONDS)
        self.forget(key)
        return problem

    def forget(self, key: Key) -> None:
        """Let later runs of the job begin."""
        self._parts.pop(key, None)
        self._seen.pop(key, None)
        self._said.pop(key, None)

    def kept_steps(self, key: Key, part_steps: float | None) -> float | None:
        """Return the steps with which the job would go on after a run that is over, given what its directory has."""
        if key not in self._newest:
            return part_steps
        newest = self._newest.pop(key)
        return float(newest) if newest is not None else None if part_steps is None else 0.0

    def _drop_unusable(self, part: PartOrder) -> None:
        """What a rank here could not load must not be loaded by the next run, on whichever nodes that is."""
        for each in self._local.unusable(part.job, self._place(part)):
            KeptCheckpoints(self._store(part, lambda: self._is_closed)).drop(each)

    # Places and threads

    def _place(self, part: PartOrder) -> str:
        return f"{self._access.server} {part.kept_at}" if part.kept_at == RELAY else part.kept_at

    def _store(self, part: PartOrder, is_over: Callable[[], bool]) -> BlobStore:
        store: BlobStore = (
            RelayStore(self._access, part.job) if part.kept_at == RELAY else UrlStore(part.kept_at, self._hidden)
        )
        return InterruptibleStore(store, lambda: self._is_closed or is_over())

    async def _in_thread(self, job: str, call: Callable[[], T]) -> T:
        """Call in another thread, once the job's call before is over.

        It may have been given up by who waited for it. To wait here and not there keeps threads free for other jobs.
        """
        while (before := self._transfers.get(job)) is not None and not before.done():
            over = asyncio.wrap_future(before)
            over.add_done_callback(lambda each: each.cancelled() or each.exception())  # that is for who has asked for it
            await asyncio.wait([over])
        running = self._transfers[job] = self._threads.submit(call)
        try:
            return await asyncio.wrap_future(running)
        finally:
            if running.done() and self._transfers.get(job) is running:
                del self._transfers[job]


def _remove_all(path: Path) -> None:
    from shutil import rmtree

    if path.is_dir() and not path.is_symlink():
        rmtree(path)
    else:
        path.unlink()
