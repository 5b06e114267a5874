"""The scheduler fact by fact: what it takes in, what it asks for, what it ignores and what it refuses."""

from dataclasses import dataclass, replace
from math import inf

import pytest
from tests.builders import EVENTS, a_cluster, nodes

from poise.engine.assembly import with_rounds
from poise.scheduler.core.ledger import Ledger
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import Abandon, Action, Launch, Preempt, PreemptionCause, Reject, WakeAt
from poise.scheduler.model.cluster import Slots
from poise.scheduler.model.errors import InvariantError, RequestError
from poise.scheduler.model.event import (
    Cancelled,
    Estimated,
    Event,
    Failed,
    Finished,
    NodeLost,
    NodeReturned,
    Stopped,
    Submitted,
    Woke,
)
from poise.scheduler.model.job import Job
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim, Plan, Policy, PreemptionRule, Unfitting
from poise.scheduler.model.speed import Estimate
from poise.scheduler.model.topology import Topology
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import policy_named


def a_scheduler(policy: str | Policy = "fifo", cluster: str = "gpu:4", settings: Settings = EVENTS) -> Scheduler:
    how = policy_named(policy) if isinstance(policy, str) else policy
    return Scheduler(a_cluster(cluster), with_rounds(how, settings), placement_named("count"), settings)


def arrival(name: str, *, gpus: int = 1, at: float = 0.0, steps: float = 10.0) -> list[Event]:
    """A job of a kind that is told with it."""
    kind = f"x{gpus}"
    return [Estimated(kind, Estimate(((1.0, 1.0, 1.0),))), Submitted(Job(name, at, gpus), kind, steps)]


def launched(actions: tuple[Action, ...]) -> list[tuple[str, int]]:
    return [(action.job, action.epoch) for action in actions if isinstance(action, Launch)]


def test_a_job_that_fits_is_launched_in_the_instant_of_its_arrival() -> None:
    [launch] = a_scheduler().handle(0, arrival("a", gpus=2))
    assert launch == Launch("a", 1, (Slots(0, 0b11),), launch.waited)  # type: ignore[union-attr]


def test_a_finished_job_makes_room() -> None:
    scheduler = a_scheduler()
    scheduler.handle(0, arrival("a", gpus=4))
    assert scheduler.handle(1, arrival("b", gpus=4, at=1)) == ()
    assert launched(scheduler.handle(5, [Finished("a", 1)])) == [("b", 1)]


def test_news_of_an_earlier_run_is_recognised_by_its_epoch_and_dropped() -> None:
    scheduler = a_scheduler()
    scheduler.handle(0, arrival("a", gpus=4))
    assert launched(scheduler.handle(1, [Failed("a", 1, "died", 0.5)])) == [("a", 2)]
    assert scheduler.handle(2, [Finished("a", 1), Failed("a", 1, "died", 0.0)]) == ()
    assert scheduler.explain("a").code == "running"
    scheduler.handle(3, [Finished("a", 2)])
    assert scheduler.explain("a").code == "finished"


def test_facts_about_nobody_are_dropped() -> None:
    ghosts: list[Event] = [Finished("x", 1), Failed("x", 1, "died", 0.0), Stopped("x", 1, 0.0), Cancelled("x")]
    assert a_scheduler().handle(0, ghosts) == ()


def test_a_job_cannot_be_submitted_twice() -> None:
    scheduler = a_scheduler()
    scheduler.handle(0, arrival("a"))
    with pytest.raises(InvariantError, match="job 'a' was submitted twice"):
        scheduler.handle(1, arrival("a"))


def test_a_job_of_an_unknown_kind_cannot_be_submitted() -> None:
    with pytest.raises(InvariantError, match="kind 'k' was submitted before any estimate"):
        a_scheduler().handle(0, [Submitted(Job("a", 0.0, 1), "k", 1.0)])


def test_a_run_that_nobody_stopped_cannot_have_stopped() -> None:
    scheduler = a_scheduler()
    scheduler.handle(0, arrival("a"))
    with pytest.raises(InvariantError, match="job 'a' stopped by itself"):
        scheduler.handle(1, [Stopped("a", 1, 0.5)])


def test_a_job_that_failed_too_often_is_abandoned() -> None:
    scheduler = a_scheduler(settings=Settings(Cadence.EVENTS, retries=1))
    scheduler.handle(0, arrival("a"))
    assert launched(scheduler.handle(1, [Failed("a", 1, "died", 0.0)])) == [("a", 2)]
    assert scheduler.handle(2, [Failed("a", 2, "died", 0.0)]) == (Abandon("a", "run 2 failed: died"),)
    assert scheduler.explain("a").text == "run 2 failed: died"


def test_a_final_failure_is_not_retried() -> None:
    scheduler = a_scheduler()
    scheduler.handle(0, arrival("a"))
    assert scheduler.handle(1, [Failed("a", 1, "bad data", 0.0, final=True)]) == (Abandon("a", "run 1 failed: bad data"),)


def test_a_cancelled_job_gives_its_gpus_back_or_leaves_the_queue() -> None:
    scheduler = a_scheduler()
    scheduler.handle(0, [*arrival("a", gpus=4), *arrival("b", gpus=4), *arrival("c", gpus=4)])
    assert scheduler.handle(1, [Cancelled("b")]) == ()
    assert launched(scheduler.handle(2, [Cancelled("a")])) == [("c", 1)]
    assert scheduler.explain("a").text == "cancelled by its owner"
    assert scheduler.handle(3, [Cancelled("a"), Cancelled("b")]) == ()


def test_a_rejected_job_is_remembered_with_the_reason() -> None:
    scheduler = a_scheduler()
    [reject] = scheduler.handle(0, arrival("a", gpus=5))
    assert isinstance(reject, Reject)
    assert scheduler.explain("a").text == reject.reason
    assert scheduler.handle(1, [Cancelled("a")]) == ()


def test_a_lost_node_stops_its_runs_and_a_returned_one_takes_them_again() -> None:
    scheduler = a_scheduler(cluster="gpu:2@1")
    scheduler.handle(0, [*arrival("a"), *arrival("b")])
    assert scheduler.handle(1, [NodeLost(1), Stopped("b", 1, 0.5)]) == ()
    assert scheduler.explain("b").code == "capacity"
    assert launched(scheduler.handle(2, [NodeReturned(1)])) == [("b", 2)]
    assert scheduler.handle(3, [NodeReturned(1), NodeReturned(0)]) == ()


def test_a_node_lost_twice_is_lost_once() -> None:
    scheduler = a_scheduler(cluster="gpu:2@1")
    scheduler.handle(0, arrival("a", gpus=2))
    scheduler.handle(1, [NodeLost(0), NodeLost(0)])
    assert scheduler.state.live_gpus() == (1,)
    assert scheduler.explain("a").code == "unavailable"


def test_late_news_of_a_stop_reaches_a_job_that_runs_elsewhere() -> None:
    scheduler = a_scheduler("srtf", "gpu:1")
    scheduler.handle(0, arrival("long", steps=100))
    scheduler.handle(1, arrival("short", at=1, steps=1))
    scheduler.handle(2, [Finished("short", 1)])
    scheduler.handle(3, [Stopped("long", 1, 42.0)])
    assert scheduler.state.columns.steps_done[0] == 42
    scheduler.handle(4, [Stopped("long", 0, 7.0)])
    assert scheduler.state.columns.steps_done[0] == 42, "of an earlier run still"


def test_a_job_that_just_started_is_protected_and_looked_at_again_when_it_no_longer_is() -> None:
    scheduler = a_scheduler("srtf", "gpu:1", Settings(Cadence.EVENTS, minimum_run=30))
    scheduler.handle(0, arrival("long", steps=100))
    assert scheduler.handle(10, arrival("short", at=10, steps=1)) == (WakeAt(30),)
    preempt, launch = scheduler.handle(30, [Woke()])
    assert isinstance(preempt, Preempt)
    assert (preempt.job, preempt.beneficiary) == ("long", "short")
    assert launched((launch,)) == [("short", 1)]


def test_with_rounds_the_next_boundary_is_asked_for_while_a_decision_is_due() -> None:
    scheduler = a_scheduler("srtf", "gpu:1", Settings(Cadence.ROUNDS, round=60, backfill=False))
    assert launched(scheduler.handle(7, arrival("a", at=7, steps=100))) == [("a", 1)]
    assert scheduler.handle(20, arrival("b", at=20, steps=1)) == (WakeAt(67),)
    assert scheduler.handle(30, arrival("c", at=30, steps=1)) == ()
    assert [type(action) for action in scheduler.handle(67, [Woke()])] == [Preempt, Launch]


def test_a_moment_that_a_planner_named_long_ago_is_not_asked_for_again() -> None:
    """The plan at 0 named 4; nobody was there any more when it came, and now it is 13."""
    scheduler = a_scheduler("stride:quantum=4", settings=Settings(Cadence.ROUNDS, round=10, backfill=False))
    scheduler.handle(0, arrival("a"))
    scheduler.handle(1, [Finished("a", 1)])
    scheduler.handle(10, [Woke()])
    assert scheduler.handle(13, arrival("b", at=13)) == (WakeAt(20),)


def test_being_woken_for_nothing_changes_nothing() -> None:
    scheduler = a_scheduler("tiresias")
    scheduler.handle(0, arrival("a"))
    assert scheduler.handle(1, [Woke()]) == ()
    assert scheduler.handle(1, []) == ()


def test_an_estimate_holds_for_jobs_that_come_after_it() -> None:
    scheduler = a_scheduler("srtf", "gpu:1")
    scheduler.handle(0, arrival("a", steps=10))
    nothing = Estimated("x1", Estimate(((0.0, 0.0, 0.0),)))
    [reject] = scheduler.handle(1, [nothing, Submitted(Job("b", 1.0, 1), "x1", 5.0)])
    assert isinstance(reject, Reject)
    assert reject.reason.endswith("(throughput 0)")
    assert scheduler.explain("a").code == "running"


@dataclass(frozen=True)
class Picky:
    """A planner that claims for the rows it is told to at each moment."""

    rows: dict[float, tuple[int, ...]]
    wake: float = inf

    def start(self) -> None:
        return None

    def plan(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        rows = [row for row in self.rows[snapshot.now] if row in snapshot.rows]
        return Plan(tuple(map(Claim, rows)), Unfitting.SKIPPED, PreemptionRule.BY_RANK, self.wake), None


def picky(rows: dict[float, tuple[int, ...]], wake: float = inf) -> Policy:
    return Policy("picky", Picky(rows, wake))


def test_a_running_job_that_a_plan_leaves_out_is_stopped() -> None:
    scheduler = a_scheduler(picky({0: (0, 1), 1: (1, 2)}))
    scheduler.handle(0, [*arrival("a"), *arrival("b")])
    preempt, launch = scheduler.handle(1, arrival("c", at=1))
    assert preempt == Preempt("a", 1, PreemptionCause.UNPLANNED, None)
    assert launched((launch,)) == [("c", 1)]


def test_a_protected_job_that_a_plan_leaves_out_goes_on() -> None:
    scheduler = a_scheduler(picky({0: (0,), 1: (1,)}), settings=Settings(Cadence.EVENTS, minimum_run=10))
    scheduler.handle(0, arrival("a", gpus=3))
    assert launched(scheduler.handle(1, arrival("b", at=1))) == [("b", 1)]
    assert scheduler.explain("a").code == "running"


def test_the_order_of_a_plan_is_the_order_of_preemption() -> None:
    scheduler = a_scheduler(picky({0: (0, 1), 1: (2, 0, 1)}))
    scheduler.handle(0, [*arrival("a", gpus=2), *arrival("b", gpus=2)])
    preempt, launch = scheduler.handle(1, arrival("c", gpus=1, at=1))
    assert preempt == Preempt("b", 1, PreemptionCause.OUTRANKED, "c")
    assert launched((launch,)) == [("c", 1)]


def test_a_planner_that_never_comes_to_an_end_is_a_bug() -> None:
    scheduler = a_scheduler(picky({0: (0,)}, wake=0.0))
    with pytest.raises(InvariantError, match="policy 'picky' asked for more than 4 plans at one time"):
        scheduler.handle(0, arrival("a"))


@pytest.mark.parametrize(
    ("holding", "gang", "message"),
    [
        ((Slots(0, 0b0011),), 3, "needs 3 to 3 GPUs and is to get 2"),
        ((Slots(0, 0b1000),), 1, "slots 1000 are to be held twice"),
        ((Slots(0, 0b10000),), 1, "node 0 has no such slots: 10000"),
        ((Slots(0, 0b0001), Slots(1, 0)), 1, "node 1 has no such slots: 0"),
        ((Slots(2, 0b0001),), 1, "node 2, which is lost"),
        ((Slots(0, 0b0001), Slots(3, 0b0001)), 2, "GPUs of two types"),
    ],
)
def test_the_ledger_refuses_what_breaks_a_rule(holding: tuple[Slots, ...], gang: int, message: str) -> None:
    ledger = Ledger(Topology(a_cluster("v100:12,k80:4")))
    ledger.open(7, (Slots(0, 0b1000),), 1, 1)
    ledger.lose(2)
    with pytest.raises(InvariantError, match=message):
        ledger.open(1, holding, gang, gang)


def test_the_ledger_refuses_a_second_holding_and_a_second_return() -> None:
    ledger = Ledger(Topology(nodes(4)))
    ledger.open(1, (Slots(0, 0b0001),), 1, 1)
    with pytest.raises(InvariantError, match="row 1 is to hold GPUs twice"):
        ledger.open(1, (Slots(0, 0b0010),), 1, 1)
    ledger.close(1)
    with pytest.raises(InvariantError, match="row 1 is to give back GPUs and holds none"):
        ledger.close(1)


@pytest.mark.parametrize(
    "change", [{"round": 0}, {"round": -1}, {"restart_overhead": -1}, {"minimum_run": -1}, {"retries": -1}]
)
def test_settings_that_mean_nothing_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(RequestError):
        replace(Settings(), **change)  # type: ignore[arg-type]
