"""Heterogeneity-aware least attained service (docs/algorithms/hare.md), worked by hand at both grains.

A task takes 1 s on a V100 and 3 s on a K80; a job of n rounds of K tasks is one of n seconds on K V100s.
"""

from math import inf

import pytest
from tests.builders import EVENTS, Story, a_job, simulate

from poise.lab.simulator.outages import Outage
from poise.lab.simulator.tasks import FREE
from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.action import Preempt
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import Topology
from poise.scheduler.policies.hare.online import AttainedByType
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs

TASKS, LEASES = "hlas:long=0.5", "hlas:lease=2,long=100"
RATES = (("v100", 1.0), ("k80", 1 / 3))
TABLE = Throughputs.of("thirds", "v100", [Alone(JobClass("m"), name, 1, Locality.PACKED, rate) for name, rate in RATES])


def a_round(name: str, tasks: int, rounds: float, *, at: float = 0.0, sync: float = 0.0) -> TraceJob:
    return a_job(name, gpus=tasks, seconds=rounds, batches=tasks, at=at, sync=sync)


def played(
    jobs: list[TraceJob], policy: str, cluster: str = "v100:1", *, outages: tuple[Outage, ...] = (), until: float = inf
) -> Story:
    truth = Truth(switching=FREE)
    return simulate(jobs, policy, cluster, settings=EVENTS, believed=TABLE, truth=truth, outages=outages, until=until)


def turns(story: Story) -> list[tuple[float, str]]:
    return [(run.began, run.job) for run in story.runs]


def test_two_equal_jobs_alternate_task_by_task() -> None:
    story = played([a_round("a", 1, 3), a_round("b", 1, 3)], TASKS)
    assert turns(story) == [(0, "a"), (1, "b"), (2, "a"), (3, "b"), (4, "a"), (5, "b")]
    assert story.finishes == {"a": 5, "b": 6}


def test_two_equal_jobs_alternate_lease_by_lease() -> None:
    story = played([a_round("a", 1, 6), a_round("b", 1, 6)], LEASES)
    assert turns(story) == [(0, "a"), (2, "b"), (4, "a"), (6, "b"), (8, "a"), (10, "b")]
    assert story.finishes == {"a": 10, "b": 12}


def test_gangs_alternate_lease_by_lease_too() -> None:
    story = played([a_job("a", seconds=6), a_job("b", seconds=6)], LEASES)
    assert turns(story) == [(0, "a"), (2, "b"), (4, "a"), (6, "b"), (8, "a"), (10, "b")]


@pytest.mark.parametrize(("policy", "moment"), [(TASKS, 2.75), (LEASES, 1.5)])
def test_a_job_on_a_slow_gpu_is_charged_less_than_wall_time(policy: str, moment: float) -> None:
    """A third of it, where its own fastest type is three times as fast."""
    story = played([a_round("a", 1, 6), a_round("b", 1, 6)], policy, "v100:1,k80:1", until=moment)
    snapshot = story.scheduler.state.snapshot(moment)
    assert AttainedByType().values(snapshot, {})[0].tolist() == pytest.approx([moment, moment / 3])


def test_an_arrival_gets_the_next_free_gpu() -> None:
    story = played([a_round("a", 3, 2), a_round("b", 1, 1, at=0.5)], TASKS)
    assert story.starts == {"a": 0, "b": 1}
    assert story.finishes == {"b": 2, "a": 7}


def test_an_arrival_is_dealt_gpus_at_once_where_these_are_only_lent() -> None:
    story = played([a_round("a", 2, 9), a_round("b", 1, 1, at=0.5)], "hlas:lease=100,long=100", "v100:2")
    assert story.starts == {"a": 0, "b": 0.5}
    assert [action.job for _, action in story.actions(Preempt)] == [
        "a",
        "a",
    ]  # it makes do with one, and gets the other back
    assert story.finishes == {"b": 1.5, "a": 9.5}


def test_the_guard_leaves_a_slow_gpu_when_waiting_is_sooner() -> None:
    """The second of two tasks is done at 2 if it waits for the V100, and at 3 on the K80."""
    assert played([a_round("a", 2, 1)], f"{TASKS},guard=on", "v100:1,k80:1").finishes == {"a": 2}
    assert played([a_round("a", 2, 1)], TASKS, "v100:1,k80:1").finishes == {"a": 3}


def test_the_guard_counts_the_tasks_that_wait_for_the_same_gpu() -> None:
    """Of eight tasks two are better done on the K80 than behind six others."""
    assert played([a_round("a", 8, 1)], f"{TASKS},guard=on", "v100:1,k80:1").finishes == {"a": 6}


def test_a_gpu_is_free_for_others_during_the_synchronisation() -> None:
    """`a` has its own fastest GPU for 1 s, and puts its round together while `b` computes."""
    jobs = [a_job("a", gpus=1, seconds=2, batches=1, sync=0.25), a_round("b", 1, 1)]
    story = played(jobs, TASKS)
    assert turns(story) == [(0, "a"), (0.75, "b"), (1.75, "a")]


def test_a_job_of_tasks_holds_mixed_gpus_and_charges_them_all() -> None:
    """8 tasks: 3 s on two of each, 3 on each V100 and one on each K80."""
    story = played([a_round("a", 8, 2)], "hlas:long=100", "v100:2,k80:2")
    assert [Topology(story.cluster).mix(run.gpus) for run in story.runs] == [(2, 2)]
    assert story.finishes == {"a": 6}


def test_a_lost_node_costs_the_round_under_way_and_no_more() -> None:
    story = played([a_round("a", 2, 3)], TASKS, outages=(Outage(4.5, 0, 1.0),))
    assert story.finishes == {"a": 7.5}  # two rounds by 4; the third from 5.5 to 7.5


def test_gang_goes_back_to_the_faster_type_when_it_is_free() -> None:
    """The newcomer has the V100 until it is done; who gave it up does not stay on the K80."""
    story = played(
        [a_job("long", seconds=60, model="m"), a_job("short", seconds=4, model="m", at=1)], LEASES, "v100:1,k80:1"
    )
    assert story.finishes["long"] < 70


@pytest.mark.parametrize("batches", [1, None])
def test_job_on_the_slower_type_gets_the_faster_one_once_it_has_had_less(batches: int | None) -> None:
    """At 10 `b` takes the V100; by 26 it has had 16 s, and `a` 10 + 16/3. A lease that changed nothing was not the last."""
    jobs = [a_job(name, seconds=30, model="m", at=at, batches=batches) for name, at in (("a", 0), ("b", 10))]
    story = played(jobs, LEASES, "v100:1,k80:1", until=27)
    kinds = [(run.began, Topology(story.cluster).mix(run.gpus)) for run in story.runs_of("a")]
    assert kinds == [(0, (1, 0)), (10, (0, 1)), (26, (1, 0))]


def test_gang_that_has_waited_for_a_lease_gets_gpus_that_come_free_one_by_one() -> None:
    """Tasks of `a` and `b` end at different moments, so that two GPUs are never free at once by themselves."""
    tasks = [a_round("a", 1, 40), a_round("b", 1, 40, at=0.5)]
    story = played([*tasks, a_job("gang", gpus=2, seconds=1, at=1)], "hlas:lease=5,long=0.5", "v100:2")
    assert story.starts["gang"] <= 8.0
