"""Philly (docs/algorithms/philly.md): quotas and borrowing, preemption above 90 % use, tries that relax, and causes
of delay."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import Story, a_job, nodes, simulate

from poise.lab.traces.schema import TraceJob
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.model.action import JournalEntry, Launch, Preempt, Waited, WakeAt
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Plan, Policy
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies.catalogue import policy_named
from poise.scheduler.policies.listing import equal_or_per_tenant
from poise.scheduler.policies.philly import Memory, Philly, Tries, VirtualClusters, VirtualClusterUsage
from poise.scheduler.policies.placement_draft import PlacementDraft

PUBLISHED = Tries(window=150, backoff=120, rack=3, any=6)
PLACEMENT = "consolidate"


def of(tenant: str, name: str, *, at: float = 0.0, gpus: int = 1, seconds: float = 10.0) -> TraceJob:
    job = a_job(name, at=at, gpus=gpus, seconds=seconds)
    return replace(job, job=replace(job.job, tenant=tenant))


def play(jobs: list[TraceJob], cluster: Cluster, policy: str = "philly") -> Story:
    return simulate(jobs, policy, cluster, placement=PLACEMENT)


def waited(story: Story, job: str) -> Waited:
    return next(action.waited for _, action in story.actions(Launch) if action.job == job)


# Tries


@pytest.mark.parametrize(
    ("elapsed", "failed", "level"),
    [
        (0, 0, Locality.PACKED),
        (149, 0, Locality.PACKED),
        (150, 1, Locality.PACKED),
        (420, 2, Locality.PACKED),
        (689, 2, Locality.PACKED),
        (690, 3, Locality.RACK),
        (1499, 5, Locality.RACK),
        (1500, 6, Locality.CLUSTER),
        (100_000, 370, Locality.CLUSTER),
    ],
)
def test_tries_fail_at_the_published_moments(elapsed: float, failed: int, level: Locality) -> None:
    assert PUBLISHED.failed(1000.0, 1000.0 + elapsed) == failed
    assert PUBLISHED.level(failed) is level


@given(
    st.floats(0, 1e10),
    st.floats(0.001, 1e4),
    st.floats(0, 1e4).filter(lambda backoff: backoff == 0 or backoff >= 0.001),
    st.integers(0, 60),
)
def test_the_next_try_is_always_later_and_begins_when_it_was_said_to(
    since: float, window: float, backoff: float, count: int
) -> None:
    tries = Tries(window, backoff, 3, 6)
    now = tries.begins(since, count)
    assert tries.next(since, now) > now
    if window > 1e-9 * since:
        assert tries.failed(since, now) == count


def test_a_job_that_finds_no_node_goes_to_a_rack_after_three_tries() -> None:
    """Two GPUs are free on each of two nodes; the fourth try begins at 810."""
    jobs = [of("v", "left", gpus=2, seconds=5000), of("v", "right", gpus=3, seconds=5000)]
    jobs.append(of("v", "wide", at=10, gpus=4, seconds=100))
    story = play(jobs, nodes(4, 5))
    [run] = story.runs_of("wide")
    assert len(run.gpus) == 2
    assert run.began == 10 + 3 * 270


def test_a_job_leaves_its_rack_after_six_tries() -> None:
    jobs = [of("v", "left", gpus=2, seconds=5000), of("v", "right", gpus=3, seconds=5000)]
    jobs.append(of("v", "wide", at=10, gpus=4, seconds=100))
    story = play(jobs, nodes(4, 5, racks=(0, 1)))
    [run] = story.runs_of("wide")
    assert run.began == 10 + 6 * 270
    assert waited(story, "wide") == Waited(0, 1620, 0)


@pytest.mark.parametrize(("freed", "starts"), [(100, 100), (159, 159), (200, 280), (285, 285)])
def test_a_place_that_comes_free_is_taken_in_a_try_and_not_in_a_back_off(freed: float, starts: float) -> None:
    """It is tried from 10 until 160, and again from 280."""
    jobs = [of("v", "long", gpus=2, seconds=5000), of("v", "short", gpus=4, seconds=freed)]
    jobs.append(of("v", "wide", at=10, gpus=4, seconds=100))
    story = play(jobs, nodes(4, 4), "philly:quotas=v:20,rack=100,any=200")
    assert story.starts["wide"] == starts


def test_a_later_job_may_start_while_an_earlier_one_waits() -> None:
    jobs = [of("v", "runs", gpus=3, seconds=100), of("v", "wide", at=1, gpus=4), of("v", "small", at=2, gpus=1)]
    story = play(jobs, nodes(4))
    assert story.starts["small"] == 2
    assert story.starts["wide"] == 100


def test_nobody_is_woken_while_nobody_waits_or_nothing_is_free() -> None:
    full = play([of("v", "runs", gpus=4, seconds=9999), of("v", "waits", at=1, gpus=4)], nodes(4))
    assert not full.actions(WakeAt)
    free = play([of("v", "a", gpus=2, seconds=9999), of("v", "b", at=1, gpus=2)], nodes(4))
    assert not free.actions(WakeAt)


# Quotas


def test_quotas_are_given_or_a_part_of_the_rest_by_weight() -> None:
    roll = VirtualClusterUsage((8.0, float("nan"), float("nan")), 3)
    assert roll.quotas(20, 8.0, [1, 1, 1]) == [8, 6, 6]
    assert roll.quotas(20, 8.0, [5, 1, 3]) == [8, 3, 9]
    assert roll.quotas(6, 8.0, [1, 1, 1]) == [8, 0, 0]
    assert VirtualClusterUsage((float("nan"),) * 4, 4).quotas(16, 0.0, [1] * 4) == [4, 4, 4, 4]
    assert equal_or_per_tenant("equal") == ()
    assert equal_or_per_tenant("prod:64/dev:16") == (("prod", 64.0), ("dev", 16.0))


def test_a_tenant_borrows_what_is_idle() -> None:
    jobs = [of("a", f"a{i}", gpus=2, seconds=100) for i in range(4)] + [of("b", "b", gpus=1, seconds=1)]
    story = play(jobs, nodes(4, 4), "philly:quotas=a:2/b:6")
    assert [story.starts[f"a{i}"] for i in range(3)] == [0, 0, 0]
    assert story.starts["b"] == 0
    assert story.starts["a3"] == 1


def test_a_job_within_its_quota_goes_before_one_that_borrows() -> None:
    jobs = [of("a", "runs", gpus=4, seconds=100), of("a", "first", at=1, gpus=4), of("b", "second", at=2, gpus=4)]
    story = play(jobs, nodes(4), "philly:quotas=a:3/b:4,busy=1")
    assert list(story.starts) == ["runs", "second", "first"]


def test_a_job_over_quota_makes_way_when_nine_tenths_are_in_use() -> None:
    jobs = [of("a", f"a{i}", at=i, gpus=1, seconds=1000) for i in range(10)] + [of("b", "b", at=50, gpus=2, seconds=10)]
    story = play(jobs, nodes(10), "philly:quotas=a:5/b:5")
    stopped = story.actions(Preempt)
    assert [(now, action.job, action.beneficiary) for now, action in stopped] == [(50, "a8", "b"), (50, "a9", "b")]
    assert story.starts["b"] == 50
    assert len(story.finishes) == 11


def test_a_job_that_made_way_waits_for_its_share() -> None:
    jobs = [of("a", "a0", gpus=4, seconds=600), of("a", "a1", at=10, gpus=4, seconds=600)]
    story = play([*jobs, of("b", "b", at=100, gpus=4, seconds=100)], nodes(4, 4), "philly:quotas=a:4/b:4")
    [first, second] = [action.waited for _, action in story.actions(Launch) if action.job == "a1"]
    assert (first, second) == (Waited(0, 0, 0), Waited(100, 0, 0))


def test_a_job_that_made_way_goes_on_elsewhere_at_once_if_there_is_room() -> None:
    """`a1` holds two GPUs of the only node that `b` fits on; two are idle on another."""
    jobs = [of("a", "a0", gpus=16, seconds=600), of("a", "a1", at=1, gpus=2, seconds=600)]
    jobs += [of("a", "gap", at=0, gpus=2, seconds=5), of("b", "b", at=100, gpus=4, seconds=100)]
    story = play(jobs, nodes(16, 4, 2), "philly:quotas=a:16/b:4,busy=0.8")
    runs = story.runs_of("a1")
    assert [(run.began, run.gpus[0].node) for run in runs] == [(1, 1), (100, 2)]
    assert story.starts["b"] == 100


def test_nobody_makes_way_while_less_is_in_use() -> None:
    jobs = [of("a", f"a{i}", at=i, gpus=1, seconds=1000) for i in range(8)] + [of("b", "b", at=50, gpus=3, seconds=10)]
    story = play(jobs, nodes(10), "philly:quotas=a:5/b:5")
    assert story.preemptions == 0
    assert story.starts["b"] == 1000
    assert play(jobs, nodes(10), "philly:quotas=a:5/b:5,busy=0.8").starts["b"] == 50


def test_nobody_makes_way_for_a_job_that_would_be_over_quota_itself() -> None:
    jobs = [of("a", "a", gpus=10, seconds=1000), of("b", "b", at=50, gpus=6, seconds=10)]
    story = play(jobs, nodes(10), "philly:quotas=a:5/b:5")
    assert story.preemptions == 0
    assert waited(story, "b") == Waited(950, 0, 0)


def test_only_jobs_that_took_their_tenant_over_its_quota_make_way() -> None:
    """`a` may have five: of its jobs only those that came after the fifth GPU are in question, however many are wanted."""
    jobs = [of("a", f"a{i}", at=i, gpus=1, seconds=1000) for i in range(10)] + [of("b", "b", at=50, gpus=8, seconds=10)]
    story = play(jobs, nodes(10), "philly:quotas=a:5/b:8")
    assert story.preemptions == 0
    assert story.starts["b"] > 900


def test_jobs_make_way_on_nodes_where_that_helps() -> None:
    """The latest job over quota holds two GPUs of the node beside; only the four on one node make a place."""
    jobs = [of("a", "base", gpus=2, seconds=1000), of("a", "four", at=1, gpus=4, seconds=1000)]
    jobs += [of("a", "two", at=2, gpus=2, seconds=1000), of("b", "b", at=50, gpus=4, seconds=10)]
    story = play(jobs, nodes(4, 4), "philly:quotas=a:2/b:4")
    assert [action.job for _, action in story.actions(Preempt)] == ["four"]
    assert story.starts["b"] == 50


def test_a_job_that_comes_within_its_quota_is_tried_at_once() -> None:
    """It has backed off since 151, and comes within its quota at 200."""
    jobs = [of("a", "short", gpus=2, seconds=200), of("b", "other", gpus=3, seconds=1000)]
    jobs += [of("b", "idle", gpus=1, seconds=1000), of("a", "waits", at=1, gpus=4, seconds=10)]
    story = play(jobs, nodes(4, 4), "philly:quotas=a:4/b:4,rack=99,any=99")
    assert story.starts["waits"] == 200


def test_delay_is_fair_share_over_quota_and_fragmentation_or_capacity_within() -> None:
    jobs = [of("a", "a0", gpus=4, seconds=100), of("b", "b0", gpus=2, seconds=60), of("b", "b1", gpus=2, seconds=100)]
    jobs += [of("a", "over", at=10, gpus=2, seconds=10), of("b", "within", at=10, gpus=4, seconds=10)]
    story = play(jobs, nodes(4, 4), "philly:quotas=a:4/b:8,busy=1")
    assert waited(story, "over") == Waited(50, 0, 0)
    assert waited(story, "within") == Waited(0, 0, 90)


# Laws


def loads() -> st.SearchStrategy[list[TraceJob]]:
    each = st.tuples(
        st.sampled_from("abc"), st.integers(0, 40), st.sampled_from((1, 2, 4, 8)), st.sampled_from((5, 40, 300, 900))
    )
    return st.lists(each, min_size=4, max_size=24).map(
        lambda parts: [of(v, f"j{i}", at=at * 20, gpus=gpus, seconds=s) for i, (v, at, gpus, s) in enumerate(parts)]
    )


clusters = st.sampled_from((nodes(4, 4, 8), nodes(4, 4, 4, 4, racks=(0, 0, 1, 1)), nodes(8, 8)))
quotas = st.sampled_from(("equal", "a:4", "a:8/b:4/c:4", "a:2/b:2/c:12"))


@given(loads(), clusters, quotas)
def test_every_job_ends_whatever_quotas_say(jobs: list[TraceJob], cluster: Cluster, quota: str) -> None:
    assert len(play(jobs, cluster, f"philly:quotas={quota}").finishes) == len(jobs)


@dataclass(frozen=True)
class Watched(Philly):
    """Notes how things stood before each plan: who was over quota, how much was in use, and the plan."""

    notes: ClassVar[list[tuple[list[int], float, Plan, list[bool]]]] = []

    def plan(self, snapshot: Snapshot, memory: Memory) -> tuple[Plan, Memory]:
        roll = VirtualClusterUsage().called(snapshot.columns, self.quotas)
        weights = snapshot.columns.tenant_weights
        everybody = roll.quotas(snapshot.gpus, sum(quota for _, quota in self.quotas), weights)
        before = VirtualClusters(snapshot, everybody)
        over, use = before.over(), 1 - sum(snapshot.idle) / snapshot.gpus
        plan, memory = super().plan(snapshot, memory)
        columns = snapshot.columns
        within = [before.within(columns.tenant[claim.row], columns.gang[claim.row]) for claim in plan.claims]
        self.notes.append((over, use, plan, within))
        return plan, memory


@given(loads(), clusters, quotas)
def test_only_jobs_over_quota_make_way_and_only_at_ninety_percent_for_jobs_within(
    jobs: list[TraceJob], cluster: Cluster, quota: str
) -> None:
    Watched.notes.clear()
    simulate(jobs, Policy("watched", Watched(equal_or_per_tenant(quota))), cluster, placement=PLACEMENT)
    for over, use, plan, within in Watched.notes:
        if plan.stops:
            assert use >= 0.9 - 1e-9
            assert set(plan.stops) <= set(over)
            assert any(within)


@given(loads(), clusters, quotas)
def test_above_ninety_percent_no_job_within_its_quota_waits_for_gpus_of_jobs_over_theirs(
    jobs: list[TraceJob], cluster: Cluster, quota: str
) -> None:
    """After every decision: in a try, at its locality, a job within its quota would not fit if all of those were stopped."""
    policy = policy_named(f"philly:quotas={quota}")
    assert isinstance(policy.answer, Philly)

    def watch(scheduler: Scheduler, entry: JournalEntry) -> None:
        state = scheduler.state
        if not state.waiting_shapes or any(isinstance(action, Preempt) for action in entry.actions):
            return
        snapshot = state.snapshot(entry.now)
        roll = VirtualClusterUsage().called(state.columns, equal_or_per_tenant(quota))
        listed = sum(each for _, each in equal_or_per_tenant(quota))
        everybody = VirtualClusters(snapshot, roll.quotas(snapshot.gpus, listed, state.columns.tenant_weights))
        if sum(snapshot.idle) > 0.1 * snapshot.gpus:
            return
        sketch = PlacementDraft(snapshot.placement)
        sketch.release(snapshot.placement.holdings[row] for row in everybody.over())
        plan, _ = Philly(equal_or_per_tenant(quota)).plan(snapshot, Philly().start())
        for claim in plan.claims:  # as tried for the first time: at the strictest locality
            if everybody.within(state.columns.tenant[claim.row], state.columns.gang[claim.row]) and not plan.stops:
                assert sketch.at(0, state.columns.gang[claim.row], claim.locality) is None

    simulate(jobs, policy, cluster, placement=PLACEMENT, watch=watch)
