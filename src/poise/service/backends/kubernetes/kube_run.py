"""One run on Kubernetes, and what all runs there share: which of them a new one has to wait for.

Runs of both kinds, pods that Poise starts (`pod_runs.py`) and pods of others that it places (`gang_runs.py`), compete for
the same GPUs, so they are in one table. The life of a run is one asyncio task: it waits for the runs before it, lives as its
kind does, and ends with one `RunEnded`. Everything here belongs to the one thread of the back end.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import time  # noqa: TID251 - events carry the time at which things happened

from poise.service.backends.api import DesiredState, RunEnded, RunEnding, RunNotice, RunOrder
from poise.service.backends.run_table import Gpu, Key, RunTable

SLOW_SECONDS = 600.0  # for pods to start; then people are told
START_SECONDS = 3 * SLOW_SECONDS  # then their GPUs are given back: large images take long, some volumes never come
LOOK_SECONDS = 2.0  # longest time between two looks at a run: a change that was missed is noticed then


@dataclass(eq=False, slots=True)
class KubeRun:
    """One run.

    changed     set whenever something may have changed: what is wanted of it, its pods, what its agents have said
    is_adopted  it was ordered before a restart, and may have begun
    notice      with which it was asked to leave
    force_at    when its pods are deleted if it has not ended by then, on the loop's clock
    reported_end  how it ended, as its agents have it; None: they have not said so
    failure     why it cannot go on: cause, and a sentence for people
    on_trouble  called when that is known
    obstacle    why pods of others that belong to it cannot be bound now
    is_leaving  eviction of its pods has begun
    """

    order: RunOrder
    desired: DesiredState
    is_adopted: bool = False
    sequence: int = 0
    waiters: list["KubeRun"] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    notice: RunNotice | None = None
    force_at: float = inf
    reported_end: RunEnded | None = None
    failure: tuple[str, str] | None = None
    has_begun: bool = False
    obstacle: str | None = None
    is_leaving: bool = False
    task: asyncio.Task[None] | None = None
    on_trouble: Callable[["KubeRun"], None] = lambda _run: None

    @property
    def key(self) -> Key:
        """Job and epoch."""
        return self.order.job, self.order.epoch

    @property
    def gpus(self) -> frozenset[Gpu]:
        """All its GPUs."""
        return frozenset((part.node, slot) for part in self.order.gpus for slot in part.slots)

    @property
    def must_end(self) -> bool:
        """Whether it was asked or told to end."""
        return self.desired is not DesiredState.RUN

    def ended(self, how: RunEnding, cause: str | None = None, codes: tuple[int | None, ...] = ()) -> RunEnded:
        """Say that it has ended just now."""
        return RunEnded(*self.key, time(), how, None, cause, codes)

    def trouble(self, cause: str, text: str) -> None:
        """Note why it cannot go on, and tell of it once for each cause: the texts of several pods may take turns."""
        is_new = self.failure is None or self.failure[0] != cause
        self.failure = cause, text
        if is_new:
            self.on_trouble(self)

    async def wait(self) -> None:
        """Wait until something has changed, or until it is time for another look."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self.changed.wait()
        self.changed.clear()


Life = Callable[[KubeRun], Awaitable[RunEnded]]


class KubeRuns:
    """All runs that are not over.

    on_end       called with a run that is over, and how it ended
    life_of      how a run lives, from when its GPUs are free to its end
    on_fault     called with an exception that no run should raise
    on_trouble   called with a run that cannot go on
    """

    def __init__(
        self,
        on_end: Callable[[KubeRun, RunEnded], None],
        life_of: Callable[[KubeRun], Life],
        on_fault: Callable[[Exception], None],
        on_trouble: Callable[[KubeRun], None],
    ) -> None:
        self.table: RunTable[KubeRun] = RunTable()
        self._on_end, self._life_of, self._on_fault, self._on_trouble = on_end, life_of, on_fault, on_trouble

    def adopt(self, runs: list[KubeRun]) -> None:
        """Take up runs of before a restart: first those that have to go, as others may wait for their GPUs."""
        runs.sort(key=lambda run: not run.must_end)
        for run in runs:
            run.on_trouble = self._on_trouble
            self.table.enter(run)
        for run in runs:
            run.task = asyncio.get_running_loop().create_task(self._live(run))

    def launch(self, order: RunOrder) -> None:
        """Take up a new run."""
        if self.table.get((order.job, order.epoch)) is None:
            self.adopt([KubeRun(order, DesiredState.RUN)])

    def stop(self, key: Key, notice: RunNotice) -> KubeRun | None:
        """Note that a run is to leave; return it, unless that was known."""
        run = self.table.get(key)
        if run is None or run.must_end:
            return None
        run.desired, run.notice = DesiredState.LEAVE, notice
        run.changed.set()
        return run

    def kill(self, key: Key, reason: str, seconds: float) -> KubeRun | None:
        """Note that a run is not wanted any more; return it, unless that was known."""
        run = self.table.get(key)
        if run is None or run.desired is DesiredState.GONE:
            return None
        run.desired, run.notice = DesiredState.GONE, RunNotice("stopped", reason, seconds)
        run.changed.set()
        return run

    async def close(self) -> None:
        """Stop watching; what runs goes on."""
        tasks = [run.task for run in self.table if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _blockers(self, run: KubeRun) -> list[KubeRun]:
        """Return the runs that have to be over before a run may do anything.

        One that is to end needs no GPUs any more. If it was ordered before a restart it may have begun, though, and two runs
        of one job never look after the same pods.
        """
        if not run.must_end:
            return self.table.blockers(run)
        return [each for each in self.table.of(run.key[0]) if run.is_adopted and each.key < run.key]

    async def _live(self, run: KubeRun) -> None:
        try:
            while blockers := self._blockers(run):
                for each in blockers:
                    if run not in each.waiters:
                        each.waiters.append(run)
                await run.wait()
            end = await self._life_of(run)(run)
            self.table.remove(run)
            self._on_end(run, end)
        except Exception as error:
            self._on_fault(error)
            return
        for waiter in run.waiters:
            if end.how is RunEnding.FINISHED and waiter.key[0] == run.key[0]:
                self.kill(waiter.key, "the job has finished on its way out", 0.0)  # nothing is left to do
            waiter.changed.set()
