"""The order that the core keeps up to date, against one that is sorted from scratch at every instant.

For one GPU type, counted GPUs and decisions at every change, what a decision means fits in a few lines: all active jobs by
(queue, section, value now, row), those that may not be stopped yet first; each gets its gang if it still fits. `Naive` does
just that, asks for ranks at the moments that `Order` promises, and looks at nothing that the core keeps.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import nodes
from tests.strategies import ORDERS, World, choices, outages, traces

from poise.lab.simulator.world import Truth
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import JournalEntry, Launch, Preempt, PreemptionCause
from poise.scheduler.model.cluster import Holding
from poise.scheduler.model.event import (
    Cancelled,
    Event,
    Failed,
    Finished,
    NodeLost,
    NodeRestricted,
    NodeReturned,
    Stopped,
    Submitted,
)
from poise.scheduler.model.plan import Order, PreemptionRule, Rank, Unfitting
from poise.scheduler.policies.catalogue import policy_named

WHOLE_MOMENTS = (*map(float, range(10)), 0.0, 0.0, 1.0, 3.0, 2.5, 4.25)
WHOLE_SECONDS = (1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 0.0, 0.125, 16.0)
CHANGING = ("las", "lrtf", "srtf", "srsf")
"""Here time changes values, and the core looks at them only when something has happened. (A run that sits out its overhead
has more left to do than when it waits, so with overhead a stop may improve a rank, which the core does not look for.)"""


FIRST = Rank(0.0)


@dataclass
class NaiveJob:
    """What an order may ask of a job, from the plainest book-keeping."""

    row: int
    submitted: float
    gang: int
    steps: float
    now: float
    waiting_since: float
    running: bool = False
    skew: float | None = None
    done: float = 0.0
    rate: float = 0.0
    progress_from: float = 0.0
    held: float = 0.0
    started: float = 0.0
    epoch: int = 0
    rank: Rank = FIRST
    asked: float = 0.0

    @property
    def attained_seconds(self) -> float:
        return self.held + (self.now - self.started if self.running else 0.0)

    @property
    def attained_service(self) -> float:
        return self.attained_seconds * self.gang

    @property
    def repaid(self) -> float:
        return self.started + 2 * (self.progress_from - self.started)

    @property
    def remaining_seconds(self) -> float:
        return self.steps - self.done - self.rate * (self.now - self.progress_from)

    @property
    def pace(self) -> float:
        return self.rate

    def key(self, now: float) -> tuple[int, int, float, int]:
        value = self.rank.value + (self.rank.slope * (now - self.asked) if self.running else 0.0)
        return self.rank.queue, self.rank.section, value, self.row

    def start(self, now: float, overhead: float) -> None:
        self.running, self.started, self.rate, self.progress_from = True, now, 1.0, now + overhead
        self.epoch += 1

    def stop(self, now: float) -> None:
        self.done += max(0.0, now - self.progress_from)
        self.held += now - self.started
        self.running, self.rate, self.waiting_since = False, 0.0, now


class Naive:
    """A scheduler that starts from scratch at every instant."""

    def __init__(self, order: Order, gpus: list[int], settings: Settings) -> None:
        self.order = order
        self.memory = order.memory
        self.settings = settings
        self.sizes = dict(enumerate(gpus))
        self.live = dict(self.sizes)
        self.closed: dict[int, tuple[int, ...]] = {}
        self.jobs: dict[str, NaiveJob] = {}
        self.failures: dict[str, int] = {}
        self.places: dict[str, Holding] = {}
        self.rows = 0

    def ask(self, job: NaiveJob, now: float, previous: Rank | None) -> None:
        job.now = now
        asked: Any = job
        job.rank, job.asked = self.order.rank(asked, previous, self.memory), now

    def catch_up(self, now: float) -> None:
        """Ranks whose time came between two instants, each as of its own time, and again if the job goes on."""
        while (late := min(self.jobs.values(), key=lambda job: job.rank.until, default=None)) is not None:
            until = late.rank.until
            if until >= now:
                return
            self.ask(late, until, late.rank)
            if late.rank.until <= until:
                self.ask(late, until, late.rank)

    def take(self, event: Event, now: float) -> bool:
        """A fact; says whether it calls for a decision."""
        match event:
            case Submitted(job=job, steps=steps):
                self.rows += 1
                if job.gpus > sum(self.sizes.values()):
                    return False
                self.jobs[job.id] = NaiveJob(self.rows, job.submitted, job.gpus, steps, now, now)
                self.ask(self.jobs[job.id], now, None)
            case Finished() | Cancelled():
                self.end(event.job, now, learn=isinstance(event, Finished))
            case Failed():
                self.failed(event, now)
            case Stopped():
                job_stopped = self.jobs[event.job]
                job_stopped.done = event.steps
                self.ask(job_stopped, now, job_stopped.rank)
                return False
            case NodeLost(node):
                self.live.pop(node)
                hit = [name for name, job in self.jobs.items() if job.running and self.is_on(name, node)]
                for name in hit:
                    self.interrupt(name, now)
                return bool(hit)
            case NodeReturned(node):
                self.live[node] = self.sizes[node] - len(self.closed.get(node, ()))
            case NodeRestricted():
                self.restrict(event, now)
            case _:
                return False
        return True

    def restrict(self, event: NodeRestricted, now: float) -> None:
        self.closed[event.node] = event.closed
        if event.node in self.live:
            self.live[event.node] = self.sizes[event.node] - len(event.closed)
        shut = sum(1 << slot for slot in event.closed)
        for name in [name for name, job in self.jobs.items() if job.running and self.is_on(name, event.node, shut)]:
            self.interrupt(name, now)

    def is_on(self, name: str, node: int, mask: int = -1) -> bool:
        return any(slots.node == node and slots.mask & mask for slots in self.places[name])

    def failed(self, event: Failed, now: float) -> None:
        self.failures[event.job] = self.failures.get(event.job, 0) + 1
        if event.final or self.failures[event.job] > self.settings.retries:
            self.end(event.job, now, learn=False)
            return
        self.interrupt(event.job, now)
        job = self.jobs[event.job]
        job.done = event.steps
        self.ask(job, now, job.rank)

    def interrupt(self, name: str, now: float) -> None:
        job = self.jobs[name]
        job.stop(now)
        self.ask(job, now, job.rank)

    def end(self, name: str, now: float, *, learn: bool) -> None:
        job = self.jobs.pop(name)
        job.stop(now)
        job.now = now
        if learn:
            finished: Any = job
            self.memory, stale = self.order.learn(self.memory, finished)
            for each in self.jobs.values() if stale else ():
                self.ask(each, now, each.rank)

    def handle(self, now: float, events: tuple[Event, ...]) -> set[str]:
        """Who runs after this instant."""
        self.catch_up(now)
        called = [self.take(event, now) for event in events]
        called += self.refresh(now)
        if any(called) or not any(job.rank.slope for job in self.jobs.values()):
            self.decide(now)
        self.refresh(now)
        return {name for name, job in self.jobs.items() if job.running}

    def refresh(self, now: float) -> list[bool]:
        """Ranks whose time has come are asked for again."""
        late = [job for job in self.jobs.values() if job.rank.until <= now]
        for job in late:
            self.ask(job, now, job.rank)
        return [True] * len(late)

    def decide(self, now: float) -> None:
        before = {name for name, job in self.jobs.items() if job.running}
        after = self.chosen(now, {name for name in before if self.is_sure(self.jobs[name], now)})
        for name in before - after:
            self.interrupt(name, now)
        for name in after - before:
            self.jobs[name].start(now, self.settings.restart_overhead)
            self.ask(self.jobs[name], now, self.jobs[name].rank)

    def chosen(self, now: float, sure: set[str]) -> set[str]:
        """The definition of a decision."""
        in_order = sorted(self.jobs, key=lambda name: (name not in sure, self.jobs[name].key(now)))
        free = sum(self.live.values())
        after: set[str] = set()
        for name in in_order:
            gang = self.jobs[name].gang
            if gang <= free:
                after.add(name)
                free -= gang
            elif self.order.unfitting is Unfitting.BLOCKS:
                break
        return after

    def is_sure(self, job: NaiveJob, now: float) -> bool:
        """It keeps its GPUs whatever its rank."""
        return self.order.preemption is PreemptionRule.NEVER or now < job.started + self.settings.minimum_run


@st.composite
def homogeneous(draw: st.DrawFn) -> World:
    """One type, GPUs counted, decisions at every change, times that are exact in binary."""
    cluster = nodes(*draw(st.sampled_from(((4, 4), (4,), (8,), (1, 2, 4), (2, 2, 2, 2)))))
    overhead, minimum, retries = draw(choices((0.0, 0.0, 0.5), (0.0, 2.0, 0.0, 5.0), (3, 0)))
    return World(
        jobs=draw(
            traces(gangs=(1, 2, 4, 1, 2, 4, 8), moments=WHOLE_MOMENTS, seconds=WHOLE_SECONDS, models=(None,), types=((),))
        ),
        cluster=cluster,
        policy="",
        placement="count",
        settings=Settings(Cadence.EVENTS, 1e9, restart_overhead=overhead, minimum_run=minimum, retries=retries),
        outages=[each for each in draw(outages(cluster, stays=False)) if (each.time * 8).is_integer()],
        truth=Truth(overhead),
    )


@pytest.mark.parametrize("policy", ORDERS)
@given(world=homogeneous())
def test_the_order_kept_is_the_order_sorted_from_scratch(policy: str, world: World) -> None:
    order = policy_named(policy).answer
    assert isinstance(order, Order)
    how = replace(world.settings, minimum_run=0.0, restart_overhead=0.0) if policy in CHANGING else world.settings
    naive = Naive(order, [node.gpus for node in world.cluster.nodes], how)
    running: dict[str, Holding] = {}

    def watch(scheduler: Scheduler, entry: JournalEntry) -> None:
        naive.places = dict(running)
        want = naive.handle(entry.now, entry.events)
        for action in entry.actions:
            if isinstance(action, Preempt):
                expected = PreemptionCause.OUTRANKED, PreemptionCause.DRAINED
                assert action.why in expected, "where GPUs are all alike nobody need be moved"
                running.pop(action.job)
            elif isinstance(action, Launch):
                running[action.job] = action.gpus
        state = scheduler.state
        got = {state.columns.ids[row] for row in state.active if state.running(row)}
        assert got == want, f"{entry}\nin order: {sorted((job.key(entry.now), name) for name, job in naive.jobs.items())}"

    replace(world, policy=policy, settings=how, truth=Truth(how.restart_overhead)).played(watch)
