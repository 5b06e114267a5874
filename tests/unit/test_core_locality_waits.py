"""Waiting for locality under any policy: how long a job insists, and that it insists no longer."""

from dataclasses import replace

import pytest
from tests.builders import EVENTS, Story, a_job, nodes, simulate

from poise.lab.traces.schema import TraceJob
from poise.scheduler.core.reasons import Code
from poise.scheduler.core.settings import DelayScheduling
from poise.scheduler.model.action import Launch, Waited
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.speed import Locality

PACKED, RACK, CLUSTER = Locality

HALVES = nodes(4, 4)
"""Where two jobs of 3 GPUs leave one GPU on each node."""


def waited(story: Story, job: str) -> list[Waited]:
    return [launch.waited for _, launch in story.actions(Launch) if launch.job == job]


def a_squeeze(*, at: float = 0.0, seconds: float = 100.0) -> list[TraceJob]:
    full = [a_job(name, gpus=3, seconds=seconds) for name in "xy"]
    return [*full, a_job("pair", at=at, gpus=2, seconds=seconds + 20)]


@pytest.mark.parametrize("policy", ["fifo", "fifo-skip", "srtf", "srtf+stable", "tiresias", "max-min", "fifo+stable"])
def test_a_job_insists_on_few_nodes_and_is_content_with_any_after_a_while(policy: str) -> None:
    how = replace(EVENTS, packed_wait=20.0)
    story = simulate(a_squeeze(at=1), policy, HALVES, placement="consolidate", settings=how)
    assert story.starts["pair"] == 21
    assert waited(story, "pair")[0] == (0, 20, 0)
    assert len(story.runs_of("pair")[0].gpus) == 2


def test_a_job_that_finds_a_node_in_time_is_packed() -> None:
    how = replace(EVENTS, packed_wait=20.0)
    jobs = [a_job("x", gpus=3, seconds=15), a_job("y", gpus=3, seconds=99), a_job("pair", gpus=2)]
    story = simulate(jobs, "fifo", HALVES, placement="consolidate", settings=how)
    assert story.starts["pair"] == 15
    assert len(story.runs_of("pair")[0].gpus) == 1


def test_a_job_that_waits_for_locality_says_so() -> None:
    how = replace(EVENTS, packed_wait=20.0)
    story = simulate(a_squeeze(), "fifo", HALVES, placement="consolidate", settings=how, until=10)
    assert story.scheduler.explain("pair").code is Code.FRAGMENTATION


def test_the_head_of_a_queue_that_blocks_it_is_looked_at_once_it_insists_on_less() -> None:
    how = replace(EVENTS, packed_wait=20.0)
    jobs = [*a_squeeze(at=1), a_job("behind", at=2)]
    story = simulate(jobs, "fifo", HALVES, placement="consolidate", settings=how)
    assert story.starts["pair"] == 21
    assert story.starts["behind"] == 100


@pytest.mark.parametrize(("at", "wait"), [(0.7, 0.1), (0.1, 0.2), (1e9 + 0.1, 0.3), (3.3, 1.1)])
def test_no_moment_is_missed_whatever_its_rounding(at: float, wait: float) -> None:
    """0.7 + 0.1 - 0.7 is less than 0.1."""
    how = replace(EVENTS, packed_wait=wait)
    story = simulate(a_squeeze(at=at, seconds=2e9), "fifo", HALVES, placement="consolidate", settings=how, until=at + 5)
    assert story.starts["pair"] == at + wait


RACKS = nodes(4, 4, 4, racks=(0, 0, 1))


@pytest.mark.parametrize(
    ("packed", "rack", "start", "spread"),
    [(10.0, 30.0, 10, [0, 1]), (0.0, 30.0, 0, [0, 1]), (10.0, 0.0, 10, [0, 1]), (30.0, 10.0, 30, [0, 1])],
)
def test_one_rack_is_waited_for_after_few_nodes(packed: float, rack: float, start: float, spread: list[int]) -> None:
    """One GPU is free on each of three nodes, two of which share a rack."""
    full = [a_job(name, gpus=3, seconds=100) for name in "xyz"]
    how = replace(EVENTS, packed_wait=packed, rack_wait=rack)
    story = simulate([*full, a_job("pair", gpus=2)], "fifo", RACKS, placement="consolidate", settings=how)
    assert story.starts["pair"] == start
    assert [slots.node for slots in story.runs_of("pair")[0].gpus] == spread


def test_two_racks_will_do_once_neither_is_insisted_on() -> None:
    cluster: Cluster = nodes(4, 4, racks=(0, 1))
    how = replace(EVENTS, packed_wait=10.0, rack_wait=25.0)
    story = simulate(a_squeeze(), "fifo", cluster, placement="consolidate", settings=how)
    assert story.starts["pair"] == 25


def test_a_job_insists_anew_after_it_lost_its_gpus() -> None:
    """Preempted at 30 by a short job, it waits for one node until 50."""
    how = replace(EVENTS, packed_wait=20.0)
    jobs = [
        a_job("pair", gpus=2, seconds=1000),
        a_job("x", at=30, gpus=3, seconds=500),
        a_job("y", at=30, gpus=3, seconds=500),
    ]
    story = simulate(jobs, "srtf", HALVES, placement="consolidate", settings=how, until=200)
    assert [(run.began, len(run.gpus)) for run in story.runs_of("pair")] == [(0, 1), (50, 2)]


def test_a_gang_that_no_node_holds_waits_for_no_node() -> None:
    how = replace(EVENTS, packed_wait=1e6)
    story = simulate([a_job("wide", gpus=6)], "fifo", HALVES, placement="consolidate", settings=how)
    assert story.starts["wide"] == 0


def test_insistence_relaxes_at_its_moments_and_never_tightens() -> None:
    insistence = DelayScheduling(10.0, 30.0)
    assert [insistence.at(5.0, now) for now in (5.0, 14.9, 15.0, 34.9, 35.0)] == [PACKED, PACKED, RACK, RACK, CLUSTER]
    assert insistence.relaxations(5.0) == [15.0, 35.0]
