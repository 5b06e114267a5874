"""AlloX (docs/algorithms/allox.md): the published example, exactness against brute force, gangs, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.workloads import a_workload as built

from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.workload import Allocation, Leftover, Workload
from poise.scheduler.policies.allox import AlloX

Floats = NDArray[np.float64]

EXAMPLE = [[10, 5], [8, 6], [4, 1], [20, 4]]
"""Seconds of four jobs on two machines."""


def a_workload(
    seconds: Sequence[Sequence[float]] | Floats,
    gpus: Sequence[float],
    *,
    gang: Sequence[float] | None = None,
    held: Sequence[int] | None = None,
    steps: Sequence[float] | None = None,
) -> Workload:
    """Jobs in order of arrival, by the seconds that they need on each column for one step; inf where they cannot run."""
    n = len(seconds)
    speed = (1 / np.array(seconds, dtype=np.float64).reshape(n, len(seconds[0]) if n else len(gpus))).tolist()
    rows = range(10, 10 + n)
    return built(speed, gpus, gang=gang, held=held, steps=steps or [1.0] * n, rows=rows)


def allox(workload: Workload, alpha: float = 1.0) -> Allocation:
    return AlloX(alpha).allocate(workload, None)[0]


def columns(allocation: Allocation) -> list[int | None]:
    """The column of each job that is to run."""
    assert set(np.unique(allocation.share)) <= {0.0, 1.0}
    return [int(row.argmax()) if row.any() else None for row in allocation.share]


def brute_force(seconds: Floats, machines: Sequence[tuple[int, float]]) -> float:
    """The least sum of completion times over all ways to deal jobs to machines (type, seconds until it is free)."""
    best = inf
    for dealt in product(range(len(machines)), repeat=len(seconds)):
        total = 0.0
        for machine, (kind, release) in enumerate(machines):
            queue = sorted(seconds[job, kind] for job, where in enumerate(dealt) if where == machine)
            total += sum(release + sum(queue[: place + 1]) for place in range(len(queue)))
        best = min(best, total)
    return best


def play(workload: Workload, alpha: float = 1.0) -> Floats:
    """Completion times if the policy decides whenever a job ends, and all it believes is true."""
    done, now, left, held = np.full(workload.jobs, inf), 0.0, workload.steps_left.copy(), workload.held.copy()
    active = np.arange(workload.jobs)
    while len(active):
        seen = replace(workload.only(active), steps_left=left[active], held=held[active])
        share = allox(seen, alpha).share
        assert np.all(share[seen.held >= 0, seen.held[seen.held >= 0]] == 1.0), "running jobs keep their machine"
        assert np.all(seen.gang @ share <= seen.gpus)
        held[active] = np.where(share.any(axis=1), share.argmax(axis=1), -1)
        running = active[held[active] >= 0]
        assert len(running), "somebody waits, all is free, and nobody starts"
        speed = workload.speed[running, held[running]]
        wait = left[running] / speed
        ended = running[wait <= wait.min()]
        now += wait.min()
        left[running] = np.maximum(left[running] - speed * wait.min(), 1e-12)
        done[ended] = now
        active = np.setdiff1d(active, ended)
    return done


def table(rows: int, types: int, *, forbidden: bool) -> st.SearchStrategy[Floats]:
    seconds = st.one_of(st.integers(1, 9).map(float), st.floats(0.5, 100))
    if forbidden:
        seconds = st.one_of(seconds, st.just(inf))
    return st.lists(st.lists(seconds, min_size=types, max_size=types), min_size=rows, max_size=rows).map(np.array)


@st.composite
def queues(draw: st.DrawFn, gang: int = 1) -> Workload:
    """Up to 5 waiting jobs of one gang size on up to 3 machines of up to 2 types; each can run somewhere."""
    types = draw(st.integers(1, 2))
    machines = draw(st.sampled_from([(1,), (2,), (3,)] if types == 1 else [(1, 1), (1, 2), (2, 1)]))
    seconds = draw(table(draw(st.integers(1, 5)), types, forbidden=True))
    seconds[np.isinf(seconds).all(axis=1), 0] = 3.0
    # GPUs that are not enough for one more machine are of no use.
    gpus = [gang * number + draw(st.integers(0, gang - 1)) for number in machines]
    return a_workload(seconds, gpus, gang=[gang] * len(seconds))


@st.composite
def mixtures(draw: st.DrawFn) -> Workload:
    """Gangs of 1, 2 and 4, some running, on up to 3 types, the last of which holds them all."""
    types, jobs = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    gpus = [*draw(st.lists(st.integers(0, 6), min_size=types - 1, max_size=types - 1)), draw(st.integers(4, 6))]
    seconds = draw(table(jobs, types, forbidden=True))
    seconds[np.isinf(seconds[:, -1]), -1] = 3.0
    gang = draw(st.lists(st.sampled_from([1, 1, 2, 4]), min_size=jobs, max_size=jobs))
    held, free = [-1] * jobs, list(gpus)
    for job in range(jobs):
        kind = draw(st.integers(-1, types - 1))
        if kind >= 0 and seconds[job, kind] < inf and gang[job] <= free[kind]:
            held[job] = kind
            free[kind] -= gang[job]
    return a_workload(seconds, gpus, gang=gang, held=held)


def machines_of(workload: Workload) -> list[tuple[int, float]]:
    gang = workload.gang[0]
    return [(kind, 0.0) for kind, gpus in enumerate(workload.gpus) for _ in range(int(gpus // gang))]


def test_allox_gives_the_published_example() -> None:
    allocation = allox(a_workload(EXAMPLE, [1, 1]))
    assert allocation.objective == pytest.approx(24)
    assert columns(allocation) == [None, 0, 1, None]
    assert allocation.leftover is Leftover.IDLE
    assert play(a_workload(EXAMPLE, [1, 1])) == pytest.approx([10, 8, 1, 5])


@given(queues())
def test_allox_equals_brute_force_offline(workload: Workload) -> None:
    allocation = allox(workload)
    with np.errstate(divide="ignore"):
        best = brute_force(1 / workload.speed, machines_of(workload))
    assert allocation.objective == pytest.approx(best)
    assert play(workload).sum() == pytest.approx(best)


@given(queues(gang=3))
def test_allox_is_exact_for_gangs_of_one_size(workload: Workload) -> None:
    with np.errstate(divide="ignore"):
        best = brute_force(1 / workload.speed, machines_of(workload))
    assert allox(workload).objective == pytest.approx(best)
    assert play(workload).sum() == pytest.approx(best)


@given(table(6, 2, forbidden=False), st.integers(1, 3))
def test_allox_plans_with_the_time_at_which_machines_come_free(seconds: Floats, running: int) -> None:
    held = [0, 1, 0][:running] + [-1] * (6 - running)
    workload = a_workload(seconds, [2, 1], held=held)
    kinds = [held[job] for job in range(running)]
    machines = [(kind, float(seconds[job, kind])) for job, kind in enumerate(kinds)]
    machines += [(kind, 0.0) for kind, gpus in enumerate((2, 1)) for _ in range(gpus - kinds.count(kind))]
    best = brute_force(seconds[running:], machines)
    assert allox(workload).objective == pytest.approx(best)
    ends = sum(seconds[job, kind] for job, kind in enumerate(kinds))
    assert play(workload).sum() == pytest.approx(best + ends)


def test_allox_waits_for_a_fast_machine_rather_than_start_on_a_slow_one() -> None:
    allocation = allox(a_workload([[5, 100], [10, 100]], [1, 1], held=[0, -1]))
    assert columns(allocation) == [0, None]
    assert allocation.objective == pytest.approx(15)


def test_allox_looks_at_no_more_jobs_than_alpha_says() -> None:
    seconds = [[9], [8], [7], [1]]
    assert columns(allox(a_workload(seconds, [1]))) == [None, None, None, 0]
    assert columns(allox(a_workload(seconds, [1]), alpha=0.75)) == [None, None, 0, None]
    assert columns(allox(a_workload(seconds, [1]), alpha=0.01)) == [0, None, None, None]
    assert columns(allox(a_workload(seconds, [2]), alpha=0.01)) == [0, 0, None, None]


@pytest.mark.parametrize("alpha", [0.0, -1.0, 1.01, float("nan")])
def test_allox_refuses_an_alpha_that_means_nothing(alpha: float) -> None:
    with pytest.raises(RequestError, match="alpha is"):
        AlloX(alpha)


@given(mixtures(), st.sampled_from([1.0, 0.5]))
def test_allox_fits_and_keeps_who_runs_and_finishes_everybody(workload: Workload, alpha: float) -> None:
    assert np.all(np.isfinite(play(workload, alpha)))


@given(mixtures())
def test_allox_gives_the_same_answer_to_the_same_question(workload: Workload) -> None:
    first, again = allox(workload), allox(workload)
    assert first.share.tobytes() == again.share.tobytes()
    assert (first.objective, first.remarks) == (again.objective, again.remarks)


def test_allox_books_the_largest_gangs_first() -> None:
    assert columns(allox(a_workload([[1], [1], [50]], [4], gang=[1, 1, 4]))) == [None, None, 0]


def test_allox_fills_gpus_kept_for_a_gang_with_jobs_that_end_before_it_starts() -> None:
    """One GPU of three is busy for 10 s, and then all are for the gang of 3."""
    workload = a_workload([[10], [5], [11], [9], [3]], [3], gang=[1, 3, 1, 1, 1], held=[0, -1, -1, -1, -1])
    assert columns(allox(workload)) == [0, None, None, 0, 0]
    assert play(workload)[1] == pytest.approx(15)


def test_allox_keeps_a_spread_gang_where_it_is() -> None:
    workload = a_workload([[4, 2, 8, 6], [4, 2, 8, 6]], [2, 2], gang=[2, 2], held=[3, -1])
    assert columns(allox(workload)) == [3, 0]


def test_allox_never_starts_a_job_where_it_does_not_run() -> None:
    allocation = allox(a_workload([[inf, 2], [inf, 1]], [1, 1]))
    assert columns(allocation) == [None, 1]
    assert allocation.objective == pytest.approx(4)


def test_allox_serves_jobs_of_unknown_length_last_and_says_so() -> None:
    allocation = allox(a_workload([[1, 2]] * 3, [1, 1], steps=[inf, inf, 1]))
    assert columns(allocation) == [1, None, 0]
    assert allocation.remarks == ("jobs of unknown length and served last: rows 10, 11",)


def test_allox_does_not_count_on_gpus_whose_release_nobody_knows() -> None:
    allocation = allox(a_workload([[1, 1], [1, 100]], [1, 1], held=[0, -1], steps=[inf, 1]))
    assert columns(allocation) == [0, 1]
    alone = allox(a_workload([[1], [1]], [1], held=[0, -1], steps=[inf, 1]))
    assert columns(alone) == [0, None]


def test_allox_refuses_gangs_that_no_type_can_hold_and_says_so() -> None:
    allocation = allox(a_workload([[1, 1], [inf, 1], [1, 1]], [2, 1], gang=[3, 2, 1]))
    assert columns(allocation) == [None, None, 0]
    assert allocation.remarks == ("jobs refused, for no GPU type that they run on has enough GPUs alive: rows 10, 11",)


def test_allox_of_nobody_is_empty() -> None:
    assert allox(a_workload([], [1, 1])).share.shape == (0, 2)
