"""Laws of the simulated world task by task: whoever asks for what, every task is computed once, and every second counted."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.driving import FOUR, FREE, NO_WAIT, Stated, a_job, divided, told

from poise.lab.analysis.history import History, cumulated
from poise.lab.analysis.tenant_usage import HOUR, TenantUsage
from poise.lab.simulator.tasks import Switching
from poise.lab.simulator.world import Simulator, Truth
from poise.scheduler.model.action import Action, Compute, JournalEntry
from poise.scheduler.model.cluster import Cluster, Holding, Slots, merged
from poise.scheduler.model.event import Computed, Event, Failed, Finished, Submitted, Synchronised
from poise.scheduler.model.micro_batches import Tasks


class Greedy:
    """Gives every idle GPU to the first job that has tasks left and no use for patience."""

    def __init__(self, cluster: Cluster, tasks: Mapping[str, Tasks | None]) -> None:
        self.idle = {(node, 1 << slot) for node, each in enumerate(cluster.nodes) for slot in range(each.gpus)}
        self.tasks = {name: each for name, each in tasks.items() if each is not None}
        self.left: dict[str, int] = {}
        self.epochs: dict[str, int] = dict.fromkeys(tasks, 1)
        self.computing: dict[str, set[tuple[int, int]]] = {name: set() for name in tasks}

    def hear(self, event: Event) -> None:
        if isinstance(event, Submitted):
            self.left[event.job.id] = self.tasks[event.job.id].count
        elif isinstance(event, Computed):
            gpus = {(node, 1 << slot) for node, mask in event.gpus for slot in range(8) if mask >> slot & 1}
            self.idle |= gpus
            self.computing[event.job] -= gpus
        elif isinstance(event, Synchronised | Failed):
            self.idle |= self.computing[event.job]
            self.computing[event.job] = set()
            self.left[event.job] = self.tasks[event.job].count
            self.epochs[event.job] += 1
        elif isinstance(event, Finished):
            del self.left[event.job]

    def act(self) -> list[Action]:
        actions: list[Action] = []
        for job, left in self.left.items():
            gpus = [*sorted(self.idle)[:left]]
            if gpus:
                self.idle -= set(gpus)
                self.computing[job] |= set(gpus)
                self.left[job] -= len(gpus)
                actions.append(Compute(job, self.epochs[job], merged(Slots(*each) for each in gpus), NO_WAIT))
        return actions


SECONDS = (1.0, 0.5, 2.0, 0.3, 0.7)
part = st.tuples(
    st.integers(1, 5), st.integers(1, 3), st.sampled_from(SECONDS), st.sampled_from(SECONDS),
    st.sampled_from((0.0, 0.5, 0.1)), st.sampled_from((0.0, 0.0, 1.5)), st.sampled_from(((), (), (1.1,))),
)  # fmt: skip


@given(st.lists(part, min_size=1, max_size=4), st.sampled_from((FREE, Truth(switching=Switching(0.01, 1.0, 0.1, 2)))))
def test_whatever_is_asked_for_every_task_is_computed_once_and_every_second_counted(
    parts: list[tuple[int, int, float, float, float, float, tuple[float, ...]]], truth: Truth
) -> None:
    parts = sorted(parts, key=lambda each: each[5])
    tasks: Mapping[str, Tasks | None] = {
        f"j{i}": divided(count, fast, slow, sync=sync) for i, (count, _, fast, slow, sync, _, _) in enumerate(parts)
    }
    jobs = [a_job(f"j{i}", each[1], at=each[5], dies=each[6]) for i, each in enumerate(parts)]
    speeds, driver = Stated(tasks), Greedy(FOUR, tasks)
    world = Simulator(jobs, FOUR, beliefs=speeds, truths=speeds, truth=truth)
    entries: list[JournalEntry] = []
    for now, events in world.batches():
        for event in events:
            driver.hear(event)
        actions = driver.act()
        world.apply(now, actions)
        entries.append(JournalEntry(now, events, tuple(actions)))
        assert len(entries) < 500
    assert world.ended == len(jobs)
    history, usage = History.of(entries, FOUR), TenantUsage.of(entries, FOUR)
    held = _held(entries)
    assert {name: life.gpu_seconds for name, life in history.jobs.items()} == pytest.approx(held)
    assert sum(usage.tenants["default"].held) * HOUR == pytest.approx(sum(held.values()))
    assert cumulated(history.held)[1][-1] == cumulated(history.waiting)[1][-1] == 0
    assert all(0 <= level <= 4 for level in cumulated(history.held)[1])
    assert all(0 <= level <= len(jobs) for level in cumulated(history.waiting)[1])
    for name, (count, rounds, *_) in zip(tasks, parts, strict=True):
        whole = [fact.epoch for _, fact in told(entries, Synchronised, Finished) if fact.job == name]  # type: ignore[union-attr]
        assert len(whole) == rounds
        done = [fact for _, fact in told(entries, Computed) if isinstance(fact, Computed) and fact.job == name]
        assert all(sum(_count(fact.gpus) for fact in done if fact.epoch == epoch) == count for epoch in whole)
        assert (history.jobs[name].preemptions, history.jobs[name].migrations) == (0, 0)


def _count(gpus: Holding) -> int:
    return sum(mask.bit_count() for _, mask in gpus)


def _held(entries: list[JournalEntry]) -> dict[str, float]:
    """GPU-seconds by job, from events and actions alone: the end of each task less its start."""
    total: dict[str, float] = {}
    since: dict[tuple[str, int, int], float] = {}
    for now, events, actions in entries:
        for fact in events:
            ended = []
            if isinstance(fact, Computed):
                ended = [
                    key for key in since for node, mask in fact.gpus if key[:2] == (fact.job, node) and mask >> key[2] & 1
                ]
            elif isinstance(fact, Failed):
                ended = [key for key in since if key[0] == fact.job]
            for key in ended:
                total[key[0]] = total.get(key[0], 0.0) + now - since.pop(key)
        for action in actions:
            if isinstance(action, Compute):
                since |= {
                    (action.job, node, slot): now for node, mask in action.gpus for slot in range(8) if mask >> slot & 1
                }
    assert not since
    return total
