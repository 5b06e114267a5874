"""One run of a policy in a world, with what laws look at: the journal, and the core as it stood at the end.

`play` runs a policy from beginning to end. It can hide how long jobs are, and it can hand over to a new core in the middle,
as the live service does when it begins a new chapter.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from types import FrameType

from poise.engine.assembly import with_rounds
from poise.lab.conformance.worlds import World
from poise.lab.simulator.world import ReportedSpeeds, Simulator
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.model.action import Action, JournalEntry
from poise.scheduler.model.errors import PolicyError
from poise.scheduler.model.event import (
    Carried,
    Colocated,
    Estimated,
    Event,
    NodeEvent,
    NodeLost,
    NodeRestricted,
    NodeReturned,
    Submitted,
)
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.plan import Policy
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import shipped

MOST_INSTANTS = 1_000
"""Instants of a small world, and for each job 100 more: a run that takes longer goes round in circles."""
LONGEST = 10.0
"""Seconds of a run in a small world: a policy that takes longer does not answer."""

Watch = Callable[[Scheduler, JournalEntry], None]


@dataclass(frozen=True)
class Play:
    """What happened in a world under a policy."""

    policy: Policy
    world: World
    entries: tuple[JournalEntry, ...]
    scheduler: Scheduler
    speeds: Speeds

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs of the world in order of submission."""
        return tuple(each.job for each in self.world.jobs)

    @property
    def unended(self) -> tuple[str, ...]:
        """The jobs that have not ended. A core that took over in the middle does not know those that ended before."""
        state = self.scheduler.state
        rows = ((job.id, state.rows.get(job.id)) for job in self.jobs)
        return tuple(job for job, row in rows if row is not None and not Status(state.columns.status[row]).is_final)


@dataclass(frozen=True)
class Handover:
    """Where a new core takes over: after this entry, under a policy that has no memory of what was before."""

    after: int
    policy: Policy


def new_core(policy: Policy, world: World) -> Scheduler:
    """A core for a world."""
    return Scheduler(world.cluster, with_rounds(policy, world.settings), placement_named(world.placement), world.settings)


def play(
    policy: Policy,
    world: World,
    *,
    pairs: bool = False,
    tell: Callable[[tuple[Event, ...]], tuple[Event, ...]] = lambda events: events,
    handover: Handover | None = None,
    watch: Watch | None = None,
) -> Play:
    """Run a policy in a world to the end; raises PolicyError if it comes to none, and whatever the policy raises.

    pairs   the core is told how fast jobs are on shared GPUs
    tell    what the core is told of the events
    watch   shown the core after every instant
    """
    table = shipped().flat() if world.placement == "count" else shipped()
    speeds = Speeds(table, world.cluster)
    costs = replace(world.costs, reported_speeds=ReportedSpeeds.PAIRS if pairs else ReportedSpeeds.ALONE)
    simulator = Simulator(world.jobs, world.cluster, beliefs=speeds, truths=speeds, truth=costs, outages=world.outages)
    core = new_core(policy, world)
    entries: list[JournalEntry] = []
    most = MOST_INSTANTS + 100 * len(world.jobs)
    with _limited(LONGEST):
        for now, events in simulator.batches():
            told = tell(events)
            _act(core, simulator, now, told, entries)
            if watch is not None:
                watch(core, entries[-1])
            if handover is not None and len(entries) == handover.after + 1:
                facts = carried(core, entries, now)
                core = new_core(handover.policy, world)
                _act(core, simulator, now, facts, entries)
            if len(entries) > most:
                raise PolicyError(f"goes round in circles: {len(entries):,} decisions, the last at {now:g} s")
    return Play(policy, world, tuple(entries), core, speeds)


def _act(core: Scheduler, world: Simulator, now: float, events: tuple[Event, ...], entries: list[JournalEntry]) -> None:
    actions: tuple[Action, ...] = core.handle(now, events)
    world.apply(now, actions)
    entries.append(JournalEntry(now, events, actions))


def carried(core: Scheduler, entries: list[JournalEntry], now: float) -> tuple[Event, ...]:
    """What a new core is told in the place of a journal: estimates, every job as it stands, how nodes are."""
    state, columns = core.state, core.state.columns
    estimates: list[Event] = []
    kinds: dict[str, str] = {}
    nodes: dict[tuple[type, int], NodeEvent] = {}
    for event in (event for entry in entries for event in entry.events):
        match event:
            case Estimated() | Colocated():
                estimates.append(event)
            case Submitted() | Carried():
                kinds[event.job.id] = event.kind
            case NodeLost(node):
                nodes[NodeLost, node] = event
            case NodeReturned(node):
                nodes.pop((NodeLost, node), None)
            case NodeRestricted(node):
                nodes[NodeRestricted, node] = event
            case _:
                pass
    jobs = []
    for row in sorted(columns.jobs):
        job, runs = columns.jobs[row], state.running(row)
        since = columns.started[row] if runs else columns.waiting_since[row]
        until = core.backs_off_until(job.id)
        fact = Carried(
            job, kinds[job.id], columns.steps[row], columns.epoch[row], columns.done_before(row), columns.received[row],
            columns.failures[row], since, state.of(row) if runs else (), row in state.on_hold, until=until,
        )  # fmt: skip
        jobs.append(fact)
    return (*estimates, *jobs, *nodes.values())


def without_lengths(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The same events of jobs whose length nobody knows."""
    return tuple(replace(event, steps=inf) if isinstance(event, Submitted) else event for event in events)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End a policy that never answers. Only the main thread of a process can be interrupted so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise PolicyError(f"does not answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
