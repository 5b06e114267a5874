"""What jobs wait for, second by second: every wait is attributed to the cause that there was, and none of it is lost."""

from collections import defaultdict
from itertools import accumulate, chain

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tests.builders import EVENTS, a_job, nodes, simulate
from tests.strategies import World, choices, worlds

from poise.lab.simulator.outages import Outage
from poise.lab.traces.schema import TraceJob
from poise.scheduler.core.claim_shapes import ClaimShape, WaitCause
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.action import Compute, JournalEntry, Launch
from poise.scheduler.model.cluster import bits
from poise.scheduler.model.event import NodeLost, NodeRestricted, NodeReturned
from poise.scheduler.model.job import Status
from poise.scheduler.model.speed import Locality
from poise.scheduler.placement.free_gpus import FreeGpus


class Oracle:
    """Looks at every waiting job after every instant, and at GPUs one by one."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.closed: dict[int, tuple[int, ...]] = {}
        self.waited: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.causes: dict[str, WaitCause] = {}
        self.last = 0.0
        self.compared = 0

    def watch(self, scheduler: Scheduler, entry: JournalEntry) -> None:
        """Add up what was waited until now, compare what launches say of it, and note what is waited for from now on."""
        for job, cause in self.causes.items():
            self.waited[job][cause] += entry.now - self.last
        for action in entry.actions:
            if isinstance(action, Launch | Compute):
                self.compared += 1
                assert action.waited == pytest.approx(self.waited.pop(action.job, (0.0, 0.0, 0.0)), abs=1e-6), action
        for fact in entry.events:
            if isinstance(fact, NodeLost):
                self.lost.add(fact.node)
            elif isinstance(fact, NodeReturned):
                self.lost.discard(fact.node)
            elif isinstance(fact, NodeRestricted):
                self.closed[fact.node] = fact.closed
        state = scheduler.state
        free = self._free(state)
        waiting = (row for row in state.rows.values() if state.columns.status[row] == Status.WAITING)
        self.causes = {state.columns.ids[row]: self._cause(state, row, free) for row in waiting}
        self.last = entry.now

    def _free(self, state: SchedulerState) -> FreeGpus:
        """The cluster without lost nodes and closed GPUs, and without what jobs hold and the pool has set aside."""
        free = FreeGpus(state.topology)
        for node in self.lost:
            free.lose(node)
        taken = {
            (node, bit)
            for node, mask in chain(state.pool.slots, *state.ledger.holdings.values())
            for bit in bits(mask)
            if node not in self.lost
        }
        taken |= {(node, 1 << slot) for node, slots in self.closed.items() for slot in slots if node not in self.lost}
        for node, bit in sorted(taken):
            free.take(((node, bit),))  # type: ignore[arg-type]
        return free

    def _cause(self, state: SchedulerState, row: int, free: FreeGpus) -> WaitCause:
        shape = state.shape_of[row]
        if row in state.suspended or shape.is_over_share:
            return WaitCause.ORDER
        gang = 1 if shape.tasks else shape.gang
        enough = [kind for kind in shape.types if _count(free, kind) >= gang]
        if not enough:
            return WaitCause.CAPACITY
        return WaitCause.ORDER if any(_fits(state, shape, kind, free) for kind in enough) else WaitCause.FRAGMENTATION


def _count(free: FreeGpus, kind: int) -> int:
    return sum(mask.bit_count() for node, mask in enumerate(free.masks) if free.topology.type_of[node] == kind)


def _fits(state: SchedulerState, shape: ClaimShape, kind: int, free: FreeGpus) -> bool:
    return shape.locality is Locality.CLUSTER or state.placement(free, kind, shape.gang, shape.locality) is not None


ROUNDS = Settings(cadence=Cadence.ROUNDS, round=5.0, backfill=False)
small_jobs = st.lists(choices((1, 2, 3, 4), (2.0, 3.0, 6.0, 9.0), (2.0, 5.0, 8.0)), min_size=2, max_size=7)
outages = st.lists(choices((1, 2, 0), (1.5, 3.0, 0.5), (0.75, 2.0, 4.5)), min_size=3, max_size=10)
"""Node, seconds since the one before, and for how long."""


def in_line(small: list[tuple[int, float, float]]) -> list[TraceJob]:
    """Some wait though GPUs are free: for a job ahead of them that needs all, or for the end of a round."""
    first = [a_job("runs", gpus=2, seconds=20.0), a_job("head", at=1.0, gpus=6)]
    return first + [a_job(f"{n}", gpus=gpus, at=at, seconds=seconds) for n, (gpus, at, seconds) in enumerate(small)]


@given(worlds(forever=True))
def test_every_wait_is_attributed_to_the_cause_that_there_was(world: World) -> None:
    oracle = Oracle()
    story = world.played(oracle.watch)
    assert oracle.compared == len([*story.actions(Launch), *story.actions(Compute)])
    for cause in WaitCause:
        if any(action.waited[cause] > 0 for _, action in story.actions(Launch)):
            event(f"waits for {cause.name.lower()}")


@given(small_jobs, outages, st.sampled_from(("fifo", "fifo+stable", "srtf", "max-min")), st.sampled_from((EVENTS, ROUNDS)))
def test_every_wait_is_attributed_to_the_cause_that_there_was_while_nodes_come_and_go(
    small: list[tuple[int, float, float]], lost: list[tuple[int, float, float]], policy: str, how: Settings
) -> None:
    moments = accumulate(after for _, after, _ in lost)
    gone = [Outage(moment, node, length) for moment, (node, _, length) in zip(moments, lost, strict=True)]
    where, oracle = nodes(2, 2, 2), Oracle()
    simulate(in_line(small), policy, where, placement="consolidate", settings=how, outages=gone, watch=oracle.watch)
    assert oracle.compared > 0
