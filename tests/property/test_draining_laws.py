"""Laws of closed GPUs and drained nodes, over random worlds and under every policy."""

from collections import Counter
from math import inf

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.builders import Story
from tests.strategies import World, outages, policies, worlds

from poise.engine.assembly import with_rounds
from poise.engine.journal import entry_line, read_entry
from poise.lab.analysis.history import History
from poise.lab.simulator.outages import Drain
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.model.action import Action, Compute, JournalEntry, Launch, Preempt, PreemptionCause
from poise.scheduler.model.cluster import Holding, gpu_count
from poise.scheduler.model.event import (
    Cancelled,
    Event,
    Failed,
    Finished,
    NodeLost,
    NodeRestricted,
    NodeReturned,
    Stopped,
)
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import POLICIES


@st.composite
def draining(draw: st.DrawFn, policy: st.SearchStrategy[str] = policies, *, forever: bool = False) -> World:
    """A world in which some node is drained or closed for sure."""
    world = draw(worlds(policy=policy, forever=forever))
    more = draw(outages(world.cluster, forever=forever).filter(lambda found: any(isinstance(each, Drain) for each in found)))
    world.outages.extend(more)
    return world


class Watcher:
    """What is closed and lost, and who holds what, read off the journal alone; compared with what the core does."""

    def __init__(self, world: World) -> None:
        self.closed = dict.fromkeys(range(len(world.cluster.nodes)), 0)
        self.draining: set[int] = set()
        self.lost: set[int] = set()
        self.held: dict[str, tuple[int, Holding]] = {}
        self.drained = 0

    def is_closed(self, gpus: Holding) -> bool:
        return any(self.closed[node] & mask for node, mask in gpus)

    def read(self, fact: Event) -> None:
        match fact:
            case NodeRestricted(node, closed, drained):
                self.closed[node] = sum(1 << slot for slot in closed)
                self.draining.discard(node)
                if drained:
                    self.draining.add(node)
            case NodeLost(node):
                self.lost.add(node)
            case NodeReturned(node):
                self.lost.discard(node)
            case Finished() | Failed() | Stopped():
                if self.held.get(fact.job, (-1, ()))[0] == fact.epoch:
                    del self.held[fact.job]
            case Cancelled():
                self.held.pop(fact.job, None)

    def carry_out(self, action: Action) -> None:
        match action:
            case Launch() | Compute():
                assert not self.is_closed(action.gpus), "a closed GPU was given out"
                assert all(node not in self.lost for node, _ in action.gpus), "a GPU of a lost node was given out"
                if isinstance(action, Launch):
                    self.held[action.job] = action.epoch, action.gpus
            case Preempt(why=PreemptionCause.VALIDATED):
                self.held.pop(action.job)
            case Preempt():
                is_drained = action.why is PreemptionCause.DRAINED
                assert self.is_closed(self.held.pop(action.job)[1]) is is_drained, "drained for nothing, or stopped there"
                self.drained += is_drained

    def watch(self, scheduler: Scheduler, entry: JournalEntry) -> None:
        for fact in entry.events:
            self.read(fact)
        for action in entry.actions:
            self.carry_out(action)
        state = scheduler.state
        for node in self.draining - self.lost:
            left = state.ledger.holders(node, self.closed[node])
            assert all(row in state.ledger.trials or state.protected.get(row) == inf for row in left), "a run stayed"
        free = {node: mask & self.closed[node] for node, mask in enumerate(state.free.masks)}
        assert not any(free.values()), "a closed GPU is free"
        held = {holding for holding in state.ledger.holdings.values() if holding}  # shared ones once
        assert sum(state.live_gpus()) == sum(state.free.idle) + sum(map(gpu_count, held))


def ended_once(story: Story) -> None:
    ends = Counter(fact.job for entry in story.entries for fact in entry.events if isinstance(fact, Finished | Cancelled))
    assert set(ends.values()) <= {1}
    assert all(story.status(each.job.id).is_final for each in story.jobs)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12)
@given(data=st.data())
def test_closed_gpus_are_not_given_out_drained_runs_leave_at_once_and_all_jobs_end(policy: str, data: st.DataObject) -> None:
    world = data.draw(draining(st.just(policy)))
    watcher = Watcher(world)
    story = world.played(watcher.watch)
    ended_once(story)
    event(f"drained runs: {min(watcher.drained, 3)}")


@given(draining(forever=True))
def test_nothing_is_given_out_that_stays_closed_for_ever(world: World) -> None:
    watcher = Watcher(world)
    story = world.played(watcher.watch)
    history = History.of(story.entries, world.cluster)
    assert sum(gpus for _, gpus in history.live) + world.cluster.gpus >= 0


def scheduler_of(world: World) -> Scheduler:
    how = with_rounds(world.how, world.settings)
    return Scheduler(world.cluster, how, placement_named(world.placement), world.settings)


@given(worlds(forever=True), st.data())
def test_what_was_closed_and_is_open_again_before_the_first_job_leaves_no_trace(world: World, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, len(world.cluster.nodes) - 1))
    slots = tuple(range(0, world.cluster.nodes[node].gpus, data.draw(st.sampled_from((1, 2)))))
    there, back = NodeRestricted(node, slots, drained=data.draw(st.booleans())), NodeRestricted(node, (), drained=False)
    lost = data.draw(st.booleans())
    there_and_back: list[Event] = [there, NodeLost(node), back, NodeReturned(node)] if lost else [there, back]
    again = scheduler_of(world)
    for place, (now, events, actions) in enumerate(world.played().entries):
        assert again.handle(now, events if place else (*there_and_back, *events)) == actions


@given(draining(forever=True))
def test_a_journal_with_restrictions_replays_from_its_text(world: World) -> None:
    again = scheduler_of(world)
    for entry in world.played().entries:
        read = read_entry(entry_line(entry))
        assert read == entry
        assert again.handle(read.now, read.events) == read.actions


@given(draining())
def test_no_more_is_in_use_than_there_is(world: World) -> None:
    history = History.of(world.played().entries, world.cluster)
    changes = sorted([(time, gpus) for time, gpus in history.live] + [(time, -gpus) for time, gpus in history.held])
    level, moments = world.cluster.gpus, sorted({time for time, _ in changes})
    for moment in moments:
        level += sum(gpus for time, gpus in changes if time == moment)
        assert level >= 0, f"at {moment}"
