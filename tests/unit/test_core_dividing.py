"""Jobs whose rounds divide under policies that are orders or shares, worked by hand.

A task takes 1 s on a V100 and 3 s on a K80; a job of n rounds of K tasks is one of n seconds on K V100s.
"""

from dataclasses import replace

import pytest
from tests.builders import EVENTS, Story, a_job, nodes, simulate
from tests.whims import a_plan, scripted

from poise.lab.simulator.outages import Outage
from poise.lab.simulator.tasks import FREE
from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import TraceJob
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.action import Preempt, PreemptionCause
from poise.scheduler.model.cluster import Cluster, Node
from poise.scheduler.model.plan import Claim, Policy
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import Topology
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs

FOUR = "v100:2,k80:2"
RATES = (("v100", 1.0), ("k80", 1 / 3))
TABLE = Throughputs.of("thirds", "v100", [Alone(JobClass("m"), name, 1, Locality.PACKED, rate) for name, rate in RATES])


def a_round(name: str, tasks: int, rounds: float, *, at: float = 0.0, sync: float = 0.0) -> TraceJob:
    return a_job(name, gpus=tasks, seconds=rounds, batches=tasks, at=at, sync=sync)


def played(
    jobs: list[TraceJob], policy: str | Policy, cluster: str | Cluster = FOUR, *, settings: Settings = EVENTS,
    placement: str = "consolidate", outages: tuple[Outage, ...] = (),
) -> Story:  # fmt: skip
    truth = Truth(restart_overhead=settings.restart_overhead, checkpoint_every=0.0, switching=FREE)
    return simulate(
        jobs, policy, cluster, settings=settings, believed=TABLE, truth=truth, placement=placement, outages=outages
    )


def mixes(story: Story, job: str) -> list[tuple[float, float, tuple[int, ...]]]:
    """From when until when the job had how many GPUs of each type."""
    topology = Topology(story.cluster)
    return [(run.began, run.ended, topology.mix(run.gpus)) for run in story.runs_of(job)]


# Orders


@pytest.mark.parametrize("policy", ["fifo", "fifo-skip", "srtf", "las", "tiresias"])
def test_a_job_takes_the_fewest_gpus_on_which_its_round_is_shortest(policy: str) -> None:
    """4 tasks: 2 on each V100 take 2 s, and no K80 has done one by then. 8 tasks: 3 on each V100, 1 on each K80."""
    assert mixes(played([a_round("a", 4, 8)], policy), "a") == [(0, 16, (2, 0))]
    assert mixes(played([a_round("a", 8, 4)], policy), "a") == [(0, 12, (2, 2))]


def test_a_job_grows_when_gpus_come_free() -> None:
    """On two K80s a round of 8 takes 12 s; half of one is done at 6, and on all four 1.5 rounds take 4.5 s."""
    story = played([a_job("gang", gpus=2, seconds=6), a_round("a", 8, 2)], "fifo")
    assert mixes(story, "a") == [(0, 6, (0, 2)), (6, 10.5, (2, 2))]
    assert [action.why for _, action in story.actions(Preempt)] == [PreemptionCause.RESIZED]


def test_a_job_shrinks_for_one_of_better_rank_and_grows_back() -> None:
    """1 round by 3, a quarter by 6 on the K80s, the other 8.75 at 3 s each."""
    story = played([a_round("a", 8, 10), a_job("short", at=3, gpus=2, seconds=3)], "srtf")
    assert mixes(story, "short") == [(3, 6, (2, 0))]
    assert mixes(story, "a") == [(0, 3, (2, 2)), (3, 6, (0, 2)), (6, 32.25, (2, 2))]


def test_a_job_that_may_not_be_preempted_grows_but_does_not_shrink() -> None:
    how = replace(EVENTS, minimum_run=100.0)
    story = played([a_round("a", 8, 10), a_job("short", at=3, gpus=2, seconds=3)], "srtf", settings=how)
    assert mixes(story, "a") == [(0, 30, (2, 2))]
    story = played([a_job("gang", gpus=2, seconds=6), a_round("a", 8, 2)], "srtf", settings=how)
    assert mixes(story, "a")[-1][2] == (2, 2)


def test_a_gang_beside_takes_what_is_left_and_of_one_type() -> None:
    story = played([a_round("a", 2, 3), a_job("gang", gpus=2, seconds=3)], "fifo")
    assert mixes(story, "a") == [(0, 3, (2, 0))]
    assert mixes(story, "gang") == [(0, 9, (0, 2))]


def test_a_gang_that_blocks_the_queue_keeps_what_is_free_from_those_behind() -> None:
    jobs = [a_job("one", seconds=4, gpu_types=("v100",)), a_job("gang", gpus=2, gpu_types=("v100",)), a_round("a", 4, 1)]
    assert played(jobs, "fifo").starts == {"one": 0, "gang": 4, "a": 4}
    assert played(jobs, "fifo-skip").starts == {"one": 0, "a": 0, "gang": 4}


def test_who_was_passed_over_gets_what_a_running_job_exchanges_for_better_gpus() -> None:
    """At 9 one K80 comes free, too few for `gang`; but `a`, behind it, leaves the other one for the V100s."""
    jobs = [
        a_job("other", gpus=2, seconds=9, gpu_types=("v100",)), a_job("small", seconds=3, gpu_types=("k80",)),
        a_job("gang", gpus=2, seconds=1, gpu_types=("k80",)), a_round("a", 2, 9),
    ]  # fmt: skip
    story = played(jobs, "fifo-skip")
    assert mixes(story, "a") == [(0, 9, (0, 1)), (9, 16.5, (2, 0))]
    assert mixes(story, "gang") == [(9, 12, (0, 2))]


def test_a_gang_that_wants_to_be_close_together_is_given_a_node_before_jobs_behind_it() -> None:
    """Each of two nodes is half taken by a divisible job, which then makes do with as many GPUs elsewhere."""
    jobs = [
        a_job("x", gpus=1, seconds=50), a_job("y", gpus=3, seconds=3), a_job("z", gpus=2, seconds=4),
        a_round("a", 4, 50), a_job("gang", at=5, gpus=4, seconds=2),
    ]  # fmt: skip
    how = replace(EVENTS, packed_wait=1000.0)
    story = played(jobs, "srtf", nodes(4, 4), settings=how)
    assert story.starts["gang"] == 5
    assert len(story.runs_of("gang")[0].gpus) == 1


def test_a_gang_that_finds_no_place_leaves_its_gpus_to_those_behind() -> None:
    """Nobody may be stopped, and of each node one GPU is free: `gang` insists on one node, and `a` takes both."""
    jobs = [
        a_job("x", gpus=3, seconds=50), a_job("y", gpus=3, seconds=50),
        a_job("gang", at=1, gpus=2, seconds=2), a_round("a", 2, 5, at=1),
    ]  # fmt: skip
    story = played(jobs, "fifo-skip", nodes(4, 4), settings=replace(EVENTS, packed_wait=1000.0))
    assert story.starts["a"] == 1
    assert story.starts["gang"] >= 50


def test_a_lost_node_takes_the_round_with_it_and_the_job_goes_on_with_the_rest() -> None:
    story = played([a_round("a", 8, 4)], "fifo", outages=(Outage(3.0, 1, 6.0),))
    assert mixes(story, "a") == [(0, 3, (2, 2)), (3, 9, (2, 0)), (9, 13.5, (2, 2))]


def test_the_gang_that_policies_think_in_is_no_more_than_the_validation_pool_leaves() -> None:
    """Of four GPUs one is for trials, and a job of four tasks is to have the other three."""
    how = replace(EVENTS, validation_gpus=1, validation_time=0.25)
    story = played([a_round("a", 4, 2)], "max-min", "v100:4", settings=how)
    assert story.scheduler.state.columns.gang[0] == 2  # three GPUs are no faster than two
    assert "a" in story.finishes


# Claims of planners


def test_a_mix_is_given_as_it_was_claimed_or_in_part() -> None:
    plans = {0.0: a_plan(Claim(0, mix=(1, 1)), Claim(1, mix=(2, 0)))}
    story = played([a_round("a", 4, 2), a_round("b", 4, 1)], scripted(plans))
    assert mixes(story, "a") == [(0, 6, (1, 1))]
    assert mixes(story, "b") == [(0, 3, (1, 1))]


def test_a_mix_of_as_many_gpus_as_the_gang_is_not_the_gang_on_one_type() -> None:
    """`a` holds a V100 and a K80; a claim for its gang on V100s moves it there."""
    plans = {0.0: a_plan(Claim(0, mix=(1, 1))), 6.0: a_plan(Claim(0, types=(0,)), stops=(0,))}
    story = played([a_round("a", 4, 4), a_job("later", at=6)], scripted(plans))
    assert mixes(story, "a") == [(0, 6, (1, 1)), (6, 10, (2, 0))]


# Shares


def test_a_share_on_a_type_with_too_few_gpus_for_the_gang_is_filled_with_what_there_is() -> None:
    """`a` thinks in gangs of two K80s; while these are taken, the one V100 will do."""
    cluster = Cluster((Node("v", "v100", 1), Node("k", "k80", 2)))
    story = played([a_job("gang", gpus=2, seconds=4, gpu_types=("k80",)), a_round("a", 4, 2)], "max-min", cluster)
    assert mixes(story, "a")[0] == (0, 8, (1, 0))
