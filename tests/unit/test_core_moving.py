"""Defragmentation: small jobs are moved for a gang that insists on few nodes, and when they are not."""

from dataclasses import replace

import pytest
from tests.builders import EVENTS, Story, a_job, nodes, simulate

from poise.lab.traces.schema import TraceJob
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.action import Preempt, PreemptionCause

MOVES = replace(EVENTS, packed_wait=1e6, defragment=10.0)
ORDERS = ["fifo", "fifo-skip", "srtf", "tiresias", "srtf+stable"]


def scattered(*more: TraceJob, seconds: float = 100.0) -> list[TraceJob]:
    """Two jobs on two nodes of 4, one GPU each: six GPUs are free, and no whole node."""
    first = [a_job("fill", gpus=3, seconds=1), a_job("a", seconds=seconds), a_job("b", seconds=seconds)]
    return [*first, *more]


def played(jobs: list[TraceJob], policy: str = "fifo", how: Settings = MOVES, until: float = 1e9) -> Story:
    return simulate(jobs, policy, nodes(4, 4), placement="consolidate", settings=how, until=until)


def moves(story: Story) -> list[tuple[float, str]]:
    assert {action.why for _, action in story.actions(Preempt)} <= {PreemptionCause.MOVED}
    return [(now, action.job) for now, action in story.actions(Preempt)]


GANG = a_job("gang", at=20, gpus=4, seconds=200)


@pytest.mark.parametrize("policy", [*ORDERS, "max-min"])
def test_a_small_job_makes_place_for_a_gang_and_goes_on_elsewhere(policy: str) -> None:
    story = played(scattered(GANG), policy)
    assert story.starts["gang"] == 20
    assert len(story.runs_of("gang")[0].gpus) == 1
    assert len(moves(story)) == 1
    assert story.finishes == {"fill": 1, "a": 100, "b": 100, "gang": 220}


def test_without_it_the_gang_waits() -> None:
    story = played(scattered(GANG), how=replace(MOVES, defragment=0.0))
    assert story.starts["gang"] == 100
    assert moves(story) == []


def test_a_job_is_moved_no_sooner_than_so_long_after_its_start_and_then_at_once() -> None:
    story = played(scattered(GANG), how=replace(MOVES, defragment=30.0))
    assert story.starts["gang"] == 30
    assert [now for now, _ in moves(story)] == [30]


def test_a_job_that_may_not_be_preempted_yet_is_not_moved_either() -> None:
    story = played(scattered(GANG), how=replace(MOVES, minimum_run=50.0))
    assert [now for now, _ in moves(story)] == [50]


def test_a_move_costs_the_restart() -> None:
    story = played(scattered(GANG), how=replace(MOVES, restart_overhead=5.0))
    [(_, moved)] = moves(story)
    assert story.finishes[moved] == 110


def test_a_job_that_would_find_no_other_place_stays() -> None:
    """Three on either node: there is room for one, and nowhere to go for three."""
    jobs = [a_job("a", gpus=3, seconds=100), a_job("b", gpus=3, seconds=100), a_job("gang", at=20, gpus=2)]
    assert moves(played(jobs)) == []


def test_no_job_is_moved_for_one_that_would_not_fit_by_number() -> None:
    jobs = [a_job("a", gpus=3, seconds=100), a_job("b", gpus=2, seconds=100), a_job("gang", at=20, gpus=4)]
    assert moves(played(jobs)) == []


def test_no_job_is_moved_for_one_that_is_no_larger() -> None:
    jobs = [a_job("a", gpus=3, seconds=100), a_job("b", gpus=3, seconds=100), a_job("pair", at=20, gpus=2)]
    assert moves(played(jobs)) == []


def test_no_job_is_moved_for_one_that_goes_anywhere() -> None:
    story = played(scattered(GANG), how=replace(MOVES, packed_wait=0.0))
    assert story.starts["gang"] == 20
    assert moves(story) == []


@pytest.mark.parametrize("policy", ORDERS)
def test_moved_jobs_keep_their_place_in_the_order(policy: str) -> None:
    """After the move everything goes on as it would: later jobs come and go, and all end."""
    later = [a_job(f"l{i}", at=30 + 7 * i, gpus=1 + i % 4, seconds=20 + i) for i in range(12)]
    story = played(scattered(GANG, *later), policy)
    assert len(story.finishes) == 16


def test_the_fewest_gpus_are_cleared() -> None:
    """On nodes with 3, 2 and 1 busy GPUs the last is cleared for a gang of a whole node."""
    full = [a_job("three", gpus=3, seconds=99), a_job("short", seconds=9)]
    full += [a_job("two", gpus=2, seconds=99), a_job("brief", gpus=2, seconds=9)]
    jobs = [*full, a_job("one", seconds=99), a_job("gang", at=20, gpus=4, seconds=5)]
    story = simulate(jobs, "fifo", nodes(4, 4, 4), placement="best-fit", settings=MOVES)
    assert story.starts["gang"] == 20
    assert moves(story) == [(20, "one")]
