"""Nodes whose GPUs are not all given out: closed ones, and drained ones that runs have to leave."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.builders import EVENTS, a_cluster, a_job, nodes, simulate

from poise.engine.assembly import with_rounds
from poise.lab.analysis.history import History
from poise.lab.analysis.summary import utilisation
from poise.lab.simulator.outages import Drain
from poise.scheduler.core.ledger import Ledger
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import Action, Compute, Launch, Preempt, PreemptionCause
from poise.scheduler.model.cluster import Cluster, Holding, Slots
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import (
    Attached,
    Belated,
    Carried,
    Colocated,
    Estimated,
    Event,
    Finished,
    NodeLost,
    NodeRestricted,
    NodeReturned,
    Stopped,
    Submitted,
)
from poise.scheduler.model.job import Job, Yields
from poise.scheduler.model.speed import Estimate
from poise.scheduler.model.topology import Topology
from poise.scheduler.placement.free_gpus import FreeGpus
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import POLICIES, policy_named

KNOWN = Estimated("k", Estimate(((1.0, 1.0, 1.0),)))
ALL = (0, 1, 2, 3)


def a_core(policy: str = "fifo", cluster: Cluster | None = None, settings: Settings = EVENTS) -> Scheduler:
    core = Scheduler(
        cluster or nodes(4, 4), with_rounds(policy_named(policy), settings), placement_named("consolidate"), settings
    )
    core.handle(0.0, [KNOWN])
    return core


def submitted(name: str, gpus: int = 2, yields: Yields = Yields.ANY_TIME) -> Submitted:
    return Submitted(Job(name, 0.0, gpus, yields=yields), "k", 100.0)


def carried(name: str, held: Holding, yields: Yields = Yields.ANY_TIME, attached: float | None = None) -> Carried:
    job = Job(name, 0.0, sum(mask.bit_count() for _, mask in held), yields=yields)
    return Carried(
        job, "k", 100.0, epoch=3, done=0.0, received=0.0, failures=0, since=0.0, gpus=held, held=False, attached=attached
    )


def drained(node: int, closed: tuple[int, ...] = ALL) -> NodeRestricted:
    return NodeRestricted(node, closed, drained=True)


def kept(node: int, closed: tuple[int, ...] = ALL) -> NodeRestricted:
    return NodeRestricted(node, closed, drained=False)


def shown(actions: Sequence[Action]) -> list[tuple[str, object]]:
    """Launches with their GPUs, preemptions with their cause."""
    found: list[tuple[str, object]] = []
    for each in actions:
        if isinstance(each, Launch):
            found.append((each.job, each.gpus))
        elif isinstance(each, Preempt):
            found.append((each.job, each.why))
    return found


def test_a_drained_node_is_left_at_once_and_its_job_goes_on_elsewhere() -> None:
    core = a_core()
    assert shown(core.handle(1, [submitted("a")])) == [("a", (Slots(0, 0b11),))]
    assert shown(core.handle(2, [drained(0)])) == [("a", PreemptionCause.DRAINED), ("a", (Slots(1, 0b11),))]
    assert core.handle(2, [Stopped("a", 1, 1.0)]) == ()
    assert shown(core.handle(3, [submitted("b"), submitted("c")])) == [("b", (Slots(1, 0b1100),))]
    assert shown(core.handle(4, [kept(0, ())])) == [("c", (Slots(0, 0b11),))]


def test_runs_on_a_closed_node_go_on_and_nobody_gets_their_gpus_afterwards() -> None:
    core = a_core("srtf")
    core.handle(1, [submitted("a", 4), submitted("b", 4)])
    assert shown(core.handle(2, [kept(0)])) == []
    short = Submitted(Job("short", 3.0, 4), "k", 1.0)
    assert shown(core.handle(3, [short])) == [("b", PreemptionCause.OUTRANKED), ("short", (Slots(1, 0b1111),))]
    assert core.state.live_gpus() == (8,)
    assert shown(core.handle(4, [Stopped("b", 1, 2.0), Finished("a", 1)])) == []
    assert core.state.live_gpus() == (4,)
    assert core.explain("b").text == "needs 4 GPUs at once; free now: 0 gpu; n0 is closed"


def test_only_the_runs_on_closed_slots_leave() -> None:
    core = a_core()
    core.handle(1, [submitted("a"), submitted("b"), submitted("c", 4)])
    assert shown(core.handle(2, [drained(0, (2,))])) == [("b", PreemptionCause.DRAINED)]
    assert core.state.free.masks == [0b1000, 0]
    assert core.state.free.withheld == [0b0100, 0]


def test_what_an_event_says_replaces_what_was_said_before() -> None:
    core = a_core()
    core.handle(1, [drained(0), drained(0, (0,)), kept(1, (3,))])
    assert core.state.free.masks == [0b1110, 0b0111]
    assert core.state.draining == {0}
    core.handle(2, [kept(0, (0, 1))])
    assert core.state.free.masks == [0b1100, 0b0111]
    assert core.state.draining == set()
    core.handle(3, [kept(0, ()), kept(1, ())])
    assert (core.state.free.masks, core.state.free.closed) == ([0b1111, 0b1111], {})


def test_a_node_that_was_lost_comes_back_with_what_is_closed() -> None:
    core = a_core()
    core.handle(1, [submitted("a", 8), NodeLost(0)])
    core.handle(2, [kept(0, (0, 1))])
    assert core.state.live_gpus() == (4,)
    assert shown(core.handle(3, [NodeReturned(0)])) == []
    assert core.state.free.masks == [0b1100, 0b1111]
    assert core.explain("a").code == "unavailable"
    assert core.explain("a").text == "needs 8 GPUs at once; free now: 6 gpu; 2 GPUs of n0 are closed"
    assert [job for job, _ in shown(core.handle(4, [kept(0, ())]))] == ["a"]


def test_a_job_that_needs_what_is_closed_or_lost_waits_and_says_so() -> None:
    core = a_core(cluster=nodes(2, 2, 2, 2, 2))
    lost: list[Event] = [drained(0, (0, 1)), kept(1, (0,)), NodeLost(2), NodeLost(3), NodeLost(4)]
    assert shown(core.handle(1, [submitted("a", 4), *lost])) == []
    away = "n0 is drained, 1 GPU of n1 is closed, n2 is lost, and 2 other nodes likewise"
    assert core.explain("a").text == f"needs 4 GPUs at once; free now: 1 gpu; {away}"
    assert core.explain("a").code == "unavailable"
    core.handle(2, [kept(0, ()), kept(1, ()), submitted("b", 1)])
    assert core.explain("a").code == "running"
    core.handle(3, [drained(0, (0, 1))])
    assert core.explain("a").code == "unavailable"


@pytest.mark.parametrize("policy", POLICIES)
def test_drains_do_not_wait_for_the_end_of_a_round_nor_for_minimum_run_times(policy: str) -> None:
    how = Settings(cadence=Cadence.ROUNDS, round=1000.0, minimum_run=500.0)
    story = simulate(
        [a_job(f"j{each}", gpus=2, seconds=300) for each in range(4)], policy, nodes(4, 4), placement="consolidate",
        settings=how, outages=[Drain(7.0, 0, 50.0, ALL), Drain(1200.0, 1, 50.0, ALL)],
    )  # fmt: skip
    preempted = [(now, each.why) for now, each in story.actions(Preempt) if each.why is PreemptionCause.DRAINED]
    if not story.actions(Compute):
        assert {now for now, _ in preempted} >= {7.0}
    assert all(story.status(f"j{each}").is_final for each in range(4))


def test_a_job_that_never_yields_stays_until_it_ends() -> None:
    core = a_core()
    core.handle(1, [submitted("a", 4, Yields.NEVER)])
    assert shown(core.handle(2, [drained(0)])) == []
    assert shown(core.handle(3, [Finished("a", 1), submitted("b", 4)])) == [("b", (Slots(1, 0b1111),))]


def test_a_job_that_yields_once_attached_leaves_when_it_is() -> None:
    core = a_core(settings=replace(EVENTS, minimum_run=100.0))
    core.handle(1, [submitted("a", 4, Yields.ATTACHED)])
    assert shown(core.handle(2, [drained(0)])) == []
    assert shown(core.handle(3, [Attached("a", 1)])) == [("a", PreemptionCause.DRAINED), ("a", (Slots(1, 0b1111),))]


def test_a_drain_that_becomes_known_late_is_carried_out_with_the_next_news() -> None:
    core = a_core()
    core.handle(1, [submitted("a", 4)])
    assert shown(core.handle(2, [Belated(), drained(0)])) == []
    assert shown(core.handle(2, [])) == [("a", PreemptionCause.DRAINED), ("a", (Slots(1, 0b1111),))]


HELD = (Slots(0, 0b11),)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("before", "first"),
    [
        ((), []),
        ((kept(0, (0,)),), []),
        ((drained(0, (0,)),), [("a", PreemptionCause.DRAINED)]),
        ((drained(0, (2, 3)),), []),
        ((NodeLost(0),), [("a", PreemptionCause.UNPLANNED)]),
        ((NodeLost(0), kept(0, (0,)), NodeReturned(0)), []),
    ],
)
def test_what_is_known_of_nodes_may_come_before_carried_jobs(
    policy: str, before: tuple[Event, ...], first: list[tuple[str, object]]
) -> None:
    """At the start of a chapter: a run goes on where GPUs are closed, and leaves where they are drained or lost."""
    core = Scheduler(nodes(4, 4), with_rounds(policy_named(policy), EVENTS), placement_named("consolidate"), EVENTS)
    found = shown(core.handle(10.0, [KNOWN, *before, carried("a", HELD)]))
    assert [each for each in found if each[0] == "a"][: len(first)] == first
    if not first:
        assert found == []
        assert core.state.of(core.state.rows["a"]) == HELD
    core.handle(11.0, [Finished("a", 3)])
    assert core.explain("a").code == "finished"
    closed = core.state.free.closed.get(0, 0)
    assert core.state.free.masks[0] == (0b1111 & ~closed if core.state.free.alive[0] else 0)


def test_two_carried_jobs_that_share_closed_gpus_go_on_or_leave_together() -> None:
    both = Colocated("k", "k", ((0.6, 0.6),))
    core = a_core("gandiva")
    assert shown(core.handle(10.0, [both, kept(0, (1,)), carried("a", HELD), carried("b", HELD)])) == []
    assert core.state.ledger.partner == {0: 1, 1: 0}
    core.handle(11.0, [Finished("a", 3)])
    assert (core.state.free.masks, core.state.free.withheld) == ([0b1100, 0b1111], [0, 0])
    core.handle(12.0, [Finished("b", 3)])
    assert (core.state.free.masks, core.state.free.withheld) == ([0b1101, 0b1111], [0b0010, 0])
    core = a_core("gandiva")
    found = shown(core.handle(10.0, [both, drained(0, (1,)), carried("a", HELD), carried("b", HELD)]))
    assert found[:2] == [("a", PreemptionCause.DRAINED), ("b", PreemptionCause.DRAINED)]
    assert core.state.free.withheld == [0b0010, 0]


def test_nobody_is_put_beside_a_run_on_closed_gpus() -> None:
    """Two jobs want the only two GPUs, and would share them; if one of those is closed, the second job waits."""
    both = Colocated("k", "k", ((0.9, 0.9),))
    for closed, want in (((), 2), ((1,), 1)):
        core = a_core("gandiva:quantum=4,period=6", nodes(2))
        core.handle(1.0, [both, submitted("a")])
        core.handle(2.0, [kept(0, closed), submitted("b")])
        for now in range(3, 30):
            core.handle(float(now), [])
        assert len(core.state.ledger.holdings) == want


def test_trials_go_on_where_a_gpu_of_the_pool_is_closed_and_no_new_ones_begin() -> None:
    how = replace(EVENTS, validation_gpus=1, validation_time=10.0)
    core = a_core(settings=how)
    assert shown(core.handle(1, [submitted("a")])) == [("a", (Slots(1, 0b1000),))]
    assert shown(core.handle(2, [drained(1)])) == []
    assert shown(core.handle(3, [submitted("b")])) == [("b", (Slots(0, 0b11),))]
    assert shown(core.handle(11, [])) == [("a", PreemptionCause.VALIDATED), ("a", (Slots(0, 0b1100),))]
    assert shown(core.handle(12, [submitted("c"), kept(1, ())])) == [("c", (Slots(1, 0b1000),))]


def test_tasks_on_drained_gpus_are_computed_to_their_end_and_no_new_ones_begin_there() -> None:
    jobs = [a_job("a", gpus=2, seconds=40, batches=8)]
    story = simulate(jobs, "hare:long=0.01", nodes(2, 2), outages=[Drain(3.0, 0, 1e6, (0, 1))])
    assert story.finishes
    starts: list[tuple[float, Compute | Launch]] = [*story.actions(Compute), *story.actions(Launch)]
    late = [action for now, action in starts if now >= 3.0]
    assert late
    assert all(slots.node == 1 for action in late for slots in action.gpus)


def test_a_slot_that_is_not_there_is_refused() -> None:
    core = a_core()
    with pytest.raises(IndexError, match="node 0 has no slot 4"):
        core.handle(1, [drained(0, (0, 4))])
    with pytest.raises(IndexError):
        core.handle(1, [drained(2)])


def test_the_ledger_refuses_a_run_on_a_closed_slot() -> None:
    ledger = Ledger(Topology(nodes(4, 4)))
    ledger.open(0, (Slots(0, 0b0001),), 1, 1)
    ledger.restrict(0, 0b0011)
    for wrong in (
        lambda: ledger.open(1, (Slots(0, 0b0110),), 2, 2),
        lambda: ledger.lend(1, (Slots(0, 0b0010),)),
        lambda: ledger.extend(1, (Slots(0, 0b0010),), (0,)),
        lambda: ledger.join(1, 0),
    ):
        with pytest.raises(InvariantError, match=r"slots \d+ are closed"):
            wrong()
    assert ledger.holders(0, 0b0011) == [0]
    assert ledger.open(2, (Slots(0, 0b1100),), 2, 2) == 2
    ledger.restrict(0, 0)
    assert ledger.open(3, (Slots(0, 0b0010),), 1, 1) == 1
    assert ledger.lose(0) == [0, 2, 3]


def test_free_gpus_refuse_to_count_a_closed_one_twice() -> None:
    free = FreeGpus(Topology(nodes(4)))
    free.restrict(0, 0b0011)
    with pytest.raises(InvariantError):
        free.take((Slots(0, 0b0001),))
    with pytest.raises(InvariantError):
        free.give((Slots(0, 0b0001),))
    free.take_unheld((Slots(0, 0b0101),))
    with pytest.raises(InvariantError):
        free.take_unheld((Slots(0, 0b0001),))
    assert (free.masks, free.withheld, free.idle) == ([0b1000], [0b0010], [1])
    free.give((Slots(0, 0b0101),))
    assert (free.masks, free.withheld, free.idle) == ([0b1100], [0b0011], [2])


def test_drained_gpus_are_not_there_as_far_as_utilisation_goes_and_closed_ones_are_while_in_use() -> None:
    """Four GPUs for 100 s, of which two are closed from 50 s on: left to the job there, or taken from it."""
    jobs = [a_job("a", gpus=4, seconds=100)]
    for leaves, there in ((False, 400.0), (True, 4 * 50.0 + 2 * 50.0 + 4 * 50.0)):
        story = simulate(jobs, cluster=a_cluster("gpu:4"), outages=[Drain(50.0, 0, 50.0, (0, 1), leaves)])
        history = History.of(story.entries, story.cluster)
        assert utilisation(history, 0.0, story.finishes["a"]) == pytest.approx(400.0 / there)
