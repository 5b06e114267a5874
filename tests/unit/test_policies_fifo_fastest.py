"""First in, first out and shortest first, each on its fastest free type (docs/algorithms/gavel.md)."""

from collections.abc import Sequence
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_job, simulate
from tests.workloads import a_workload as built

from poise.lab.simulator.outages import Outage
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.workload import Allocation, Leftover, Workload
from poise.scheduler.policies.gavel_baselines import FifoFastest, Sjf, Sticky

G = [[40, 10], [12, 4], [100, 50]]
"""Example G: steps per second on a V100 and a K80."""


def a_workload(
    speed: Sequence[Sequence[float]],
    gpus: Sequence[float],
    *,
    steps: Sequence[float] | None = None,
    gang: Sequence[float] | None = None,
    held: Sequence[int] | None = None,
) -> Workload:
    """Jobs in order of arrival. If there are twice as many columns as types, the second half are the spread ones."""
    n = len(speed)
    arrivals, rows = range(n), range(10, 10 + n)
    return built(speed, gpus, gang=gang, held=held, steps=steps or [1.0] * n, submitted=arrivals, rows=rows)


def fifo(workload: Workload, sticky: Sticky = Sticky.ON) -> Allocation:
    return FifoFastest(sticky).allocate(workload, None)[0]


def sjf(workload: Workload) -> Allocation:
    return Sjf().allocate(workload, None)[0]


def columns(allocation: Allocation) -> list[int | None]:
    """The column of each job that is to run."""
    assert set(np.unique(allocation.share)) <= {0.0, 1.0}
    return [int(row.argmax()) if row.any() else None for row in allocation.share]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    types, jobs = draw(st.integers(1, 3)), draw(st.integers(0, 12))
    gpus = draw(st.lists(st.integers(0, 8), min_size=types, max_size=types))
    speeds = st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.5]), min_size=types, max_size=types)
    gang = draw(st.lists(st.sampled_from([1, 1, 2, 4]), min_size=jobs, max_size=jobs))
    speed = draw(st.lists(speeds, min_size=jobs, max_size=jobs))
    held, free = [-1] * jobs, list(gpus)
    for job in range(jobs):
        kind = draw(st.integers(-1, types - 1))
        if kind >= 0 and speed[job][kind] > 0 and gang[job] <= free[kind]:
            held[job] = kind
            free[kind] -= gang[job]
    steps = draw(st.lists(st.sampled_from([1.0, 7.0, 30.0, inf]), min_size=jobs, max_size=jobs))
    return a_workload(speed, gpus, steps=steps, gang=gang, held=held)


def test_fifo_fastest_answers_example_g_as_the_paper_does() -> None:
    allocation = fifo(a_workload(G, [1, 1]))
    assert columns(allocation) == [0, 1, None]
    assert allocation.objective == pytest.approx(11 / 3)


def test_fifo_fastest_uses_all_types_and_no_more_than_there_is() -> None:
    """Defect 1 of Gavel's code: the twenty were nearly all put on one type."""
    allocation = fifo(a_workload([[3, 2, 1]] * 20, [4, 4, 4]))
    assert columns(allocation) == [0] * 4 + [1] * 4 + [2] * 4 + [None] * 8


def test_fifo_fastest_lets_nobody_pass_the_head_of_the_queue() -> None:
    allocation = fifo(a_workload([[1]] * 3, [4], gang=[3, 2, 1]))
    assert columns(allocation) == [0, None, None]
    assert allocation.leftover is Leftover.IDLE


def test_fifo_fastest_lets_nobody_pass_inside_the_first_round_either() -> None:
    """Rounds are counted from the first that happens, here a node that goes away, in a service its start."""
    jobs = [a_job("a", at=1, seconds=50), a_job("wide", at=2, gpus=2, seconds=50), a_job("late", at=3, seconds=50)]
    how = Settings(cadence=Cadence.ROUNDS, round=360.0)
    story = simulate(jobs, "fifo-fastest", "v100:2,k80:1", settings=how, outages=[Outage(0.0, 1, 1e6)])
    assert story.starts == {"a": 1.0, "wide": 51.0, "late": 101.0}


def test_fifo_fastest_keeps_a_running_job_on_its_type_only_if_sticky() -> None:
    workload = a_workload(G, [1, 1], held=[1, -1, -1])
    assert columns(fifo(workload)) == [1, 0, None]
    assert columns(fifo(workload, Sticky.OFF)) == [0, 1, None]


def test_fifo_fastest_keeps_a_spread_gang_where_it_is() -> None:
    workload = a_workload([[4, 2, 3, 1], [4, 2, 3, 1]], [2, 2], gang=[2, 2], held=[2, -1])
    assert columns(fifo(workload)) == [2, 1]


def test_fifo_fastest_never_gives_a_type_on_which_a_job_does_not_run() -> None:
    assert columns(fifo(a_workload([[0, 1], [0, 1], [1, 0]], [1, 1]))) == [1, None, None]


def test_fifo_fastest_says_if_the_head_of_the_queue_can_never_start() -> None:
    assert fifo(a_workload([[1], [1]], [4], gang=[1, 8])).remarks == (
        "row 11 holds up the queue: no GPU type that it runs on has 8 GPUs alive",
    )
    assert fifo(a_workload([[1], [1]], [4], gang=[1, 4])).remarks == ()


def test_sjf_takes_the_shortest_on_what_is_still_free() -> None:
    allocation = sjf(a_workload(G, [1, 1], steps=[4000, 2400, 20000]))
    assert columns(allocation) == [0, None, 1]
    assert allocation.objective == 100.0


def test_sjf_passes_over_gangs_that_do_not_fit() -> None:
    assert columns(sjf(a_workload([[1]] * 3, [4], steps=[1, 2, 3], gang=[3, 2, 1]))) == [0, None, 0]


def test_sjf_preempts_for_a_shorter_job() -> None:
    assert columns(sjf(a_workload([[1], [1]], [1], steps=[9, 5], held=[0, -1]))) == [None, 0]


def test_sjf_serves_jobs_of_unknown_length_last_by_arrival() -> None:
    assert columns(sjf(a_workload([[1, 2]] * 4, [1, 1], steps=[inf, 5, inf, 1e9]))) == [None, 1, None, 0]
    assert columns(sjf(a_workload([[1, 2]] * 3, [1, 1], steps=[inf, inf, 1e9]))) == [0, None, 1]


@given(workloads(), st.sampled_from([Sticky.ON, Sticky.OFF]))
def test_allocations_fit_and_are_repeatable(workload: Workload, sticky: Sticky) -> None:
    for policy in (FifoFastest(sticky), Sjf()):
        allocation, _ = policy.allocate(workload, policy.start())
        used = workload.gang @ allocation.share
        assert np.all(used <= workload.gpus)
        assert np.all(allocation.share.sum(axis=1) <= 1)
        assert not np.any(allocation.share[workload.speed == 0])
        again, _ = policy.allocate(workload, policy.start())
        assert again.share.tobytes() == allocation.share.tobytes()


@given(workloads())
def test_fifo_fastest_never_stops_who_runs(workload: Workload) -> None:
    share = fifo(workload).share
    running = np.flatnonzero(workload.held >= 0)
    assert np.all(share[running, workload.held[running]] == 1.0)


@given(workloads())
def test_sjf_leaves_no_gpus_to_a_waiting_gang_that_would_fit(workload: Workload) -> None:
    share = sjf(workload).share
    free = workload.gpus - workload.gang @ share
    waiting = share.sum(axis=1) == 0
    assert not np.any((workload.gang[waiting, None] <= free) & (workload.speed[waiting] > 0))
