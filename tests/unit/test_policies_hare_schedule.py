"""Hare's list against its worked example, brute force and an independent solver; unfinished rounds; what is refused."""

from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest
from scipy.optimize import linprog  # type: ignore[import-untyped,unused-ignore]
from tests.oracles import least_completion

from poise.scheduler.model.errors import RequestError
from poise.scheduler.policies.hare.list_schedule import (
    Board,
    GpuPool,
    Placed,
    RoundWork,
    Schedule,
    Turn,
    listed,
    middled,
    schedule,
)
from poise.scheduler.policies.hare.offline import guarantee
from poise.scheduler.solve.list_relaxation import Chain, relax

V100_AND_K80 = GpuPool(kinds=(0, 1), free=(0.0, 0.0))
J1 = RoundWork("J1", 1.0, 0.0, rounds=2, tasks=2, seconds=(1.0, 3.0), sync=(0.5, 0.5))
J2 = RoundWork("J2", 1.0, 0.0, rounds=1, tasks=2, seconds=(2.0, 2.5), sync=(0.5, 0.5))
INSTANCES = 500


def work(seconds: float = 1.0, *, rounds: int = 1, tasks: int = 1, **changes: object) -> RoundWork:
    """On GPUs of one type, without synchronisation."""
    made = RoundWork("job", 1.0, 0.0, rounds, tasks, (seconds,), (0.0,))
    return replace(made, **changes)  # type: ignore[arg-type]


def alike(gpus: int, free: float = 0.0) -> GpuPool:
    return GpuPool((0,) * gpus, (free,) * gpus)


def gang(jobs: list[RoundWork]) -> list[float]:
    """Completions one after the other, with one task on each GPU in every round: the slowest sets the pace."""
    ends: list[float] = []
    for job in jobs:
        ends.append((ends[-1] if ends else 0.0) + job.rounds * (max(job.seconds) + max(job.sync)))
    return ends


def test_worked_example_has_the_list_and_the_completions_that_are_stated() -> None:
    turns = list(listed([J1, J2], middled([J1, J2], V100_AND_K80)))
    answer = schedule([J1, J2], V100_AND_K80)
    assert turns == [Turn(0, 0), Turn(1, 0), Turn(0, 1)]
    assert answer.completions == (6.0, 4.5)
    assert answer.value == 10.5


def test_worked_example_is_above_its_optimum_and_below_its_gangs() -> None:
    answer = schedule([J1, J2], V100_AND_K80)
    assert least_completion([J1, J2], V100_AND_K80) == 10.0
    assert 7.24 < answer.bound <= 7.25  # the linear program's optimum
    assert gang([J1, J2]) == [7.0, 10.0]
    assert guarantee([J1, J2], V100_AND_K80.kinds).factor == 15.0


def instance(random: np.random.Generator) -> tuple[list[RoundWork], GpuPool]:
    """Two or three jobs of four to six tasks in all on two or three GPUs; some types cannot compute some jobs."""
    kinds = int(random.integers(1, 4))
    gpus = tuple(random.integers(0, kinds, int(random.integers(2, 4))).tolist())
    while True:
        shape = random.integers(1, (3, 4), (int(random.integers(2, 4)), 2)).tolist()
        if 4 <= sum(rounds * tasks for rounds, tasks in shape) <= 6:
            break
    jobs = []
    for rounds, tasks in shape:
        seconds = random.integers(1, 9, kinds) / 2 * (random.random(kinds) < 0.85)
        seconds[gpus[0]] = seconds[gpus[0]] or 1.5
        sync = tuple((random.integers(0, 4, kinds) / 4).tolist())
        release = float(random.integers(0, 5) * random.integers(0, 2))
        jobs.append(RoundWork("job", float(random.integers(1, 4)), release, rounds, tasks, tuple(seconds.tolist()), sync))
    return jobs, GpuPool(gpus, (0.0,) * len(gpus))


@pytest.fixture(scope="module")
def solved() -> list[tuple[list[RoundWork], GpuPool, Schedule, float]]:
    """Random instances with their lists and their optima."""
    random = np.random.default_rng(5)
    drawn = [instance(random) for _ in range(INSTANCES)]
    return [(jobs, gpus, schedule(jobs, gpus), least_completion(jobs, gpus)) for jobs, gpus in drawn]


@pytest.mark.slow
def test_list_never_exceeds_its_guarantee(solved: list[tuple[list[RoundWork], GpuPool, Schedule, float]]) -> None:
    for jobs, gpus, answer, optimum in solved:
        assert optimum * (1 - 1e-9) <= answer.value <= guarantee(jobs, gpus.kinds).factor * optimum


@pytest.mark.slow
def test_list_is_within_15_per_cent_of_the_optimum_in_the_mean(
    solved: list[tuple[list[RoundWork], GpuPool, Schedule, float]],
) -> None:
    assert np.mean([answer.value / optimum for _, _, answer, optimum in solved]) <= 1.03  # 1.15 is promised


@pytest.mark.slow
def test_bound_is_never_above_the_optimum(solved: list[tuple[list[RoundWork], GpuPool, Schedule, float]]) -> None:
    assert all(answer.bound <= optimum + 1e-9 for _, _, answer, optimum in solved)
    assert np.mean([answer.bound / optimum for _, _, answer, optimum in solved]) > 0.75


def by_linear_program(chains: list[Chain], machines: int) -> float:
    """The optimum of docs/algorithms/hare.md: a variable for each round, a cut for each set of rounds."""
    rounds = [(index, turn) for index, each in enumerate(chains) for turn in range(each.rounds)]
    tasks = [chains[index].first if turn == 0 else chains[index].tasks for index, turn in rounds]
    work = [count * chains[index].seconds for count, (index, _) in zip(tasks, rounds, strict=True)]
    rows: list[list[float]] = []
    least: list[float] = []
    for place, (index, turn) in enumerate(rounds):
        if turn:
            rows.append([(each == place) - (each == place - 1) for each in range(len(rounds))])
            least.append(chains[index].step)
    for some in chain.from_iterable(combinations(range(len(rounds)), size) for size in range(1, len(rounds) + 1)):
        rows.append([work[each] if each in some else 0.0 for each in range(len(rounds))])
        least.append(sum(work[each] for each in some) ** 2 / (2 * machines))
    ends = [turn == chains[index].rounds - 1 for index, turn in rounds]
    cost = [chains[index].weight if end else 0.0 for end, (index, _) in zip(ends, rounds, strict=True)]
    lower = [(chains[index].release + chains[index].seconds / 2, None) for index, _ in rounds]
    found = linprog(cost, A_ub=-np.array(rows), b_ub=-np.array(least), bounds=lower)
    return float(found.fun) + sum(each.weight * (each.seconds / 2 + each.sync) for each in chains)


@pytest.mark.slow
def test_relaxation_agrees_with_the_linear_program_over_all_cuts() -> None:
    random = np.random.default_rng(1)
    for _ in range(40):
        chains: list[Chain] = []
        for _ in range(int(random.integers(1, 4))):
            tasks = int(random.integers(1, 4))
            seconds, sync, weight = random.uniform(0.2, 3.0, 3).tolist()
            later = float(random.uniform(0, 3)) if chains else 0.0
            rounds, first = int(random.integers(1, 4)), int(random.integers(1, tasks + 1))
            chains.append(Chain("chain", weight, later, rounds, tasks, first, seconds, sync))
        answer, exact = relax(chains, 2), by_linear_program(chains, 2)
        assert answer.bound <= exact * (1 + 1e-9) <= answer.value * (1 + 1e-6)
        assert answer.value <= 1.01 * answer.bound


def test_relaxation_of_a_lone_chain_is_its_shortest_time() -> None:
    answer = relax([Chain("chain", 2.0, 5.0, 1_000_000, 4, 4, 0.5, 0.25)], 4)
    assert answer.bound == answer.value == 2.0 * (5.0 + 750_000.0)
    assert answer.first == (5.25,)
    assert answer.middle(0, 3) == 7.5


def test_relaxation_in_fewer_chunks_stays_a_bound() -> None:
    chains = [Chain("chain", 1.0 + index, 0.0, 12, 3, 3, 1.0, 0.1 * index) for index in range(6)]
    fine, coarse = relax(chains, 4, chunks=12), relax(chains, 4, chunks=2)
    assert coarse.bound <= fine.value
    assert coarse.bound > 0.7 * fine.bound


def test_relaxation_puts_jobs_that_are_alike_one_behind_the_other() -> None:
    jobs = [work(rounds=8) for _ in range(4)]
    completions = schedule(jobs, alike(1)).completions
    assert list(completions) == sorted(completions)
    assert completions[0] <= 16.0  # together they would end at 29, 30, 31 and 32


def test_board_ends_a_task_at_once_on_a_slow_gpu_rather_than_later_on_a_fast_one() -> None:
    job = RoundWork("job", 1.0, 0.0, 1, 3, (2.0, 3.0), (0.0, 0.0))
    assert [task.gpu for task in schedule([job], V100_AND_K80).placed] == [0, 1, 0]


def test_board_breaks_a_tie_for_the_type_that_takes_less_time() -> None:
    job = RoundWork("job", 1.0, 0.0, 1, 1, (2.0, 3.0), (0.0, 0.0))
    placed = schedule([job], GpuPool((1, 0), (0.0, 1.0))).placed
    assert placed == (Placed(0, 0, 1, 1.0, 3.0),)


def test_board_leaves_the_gpu_that_is_free_earlier_to_tasks_that_are_ready_earlier() -> None:
    jobs = [work(release=4.0, weight=9.0), work(release=2.0)]
    board = Board(jobs, GpuPool((0, 0), (0.0, 3.0)))
    assert [task.gpu for task in board.place([Turn(0, 0), Turn(1, 0)])] == [1, 0]
    assert board.ready == [5.0, 3.0]


def test_board_synchronises_as_long_as_the_slowest_type_that_took_part() -> None:
    job = RoundWork("job", 1.0, 0.0, 2, 2, (2.0, 1.5), (0.25, 1.0))
    answer = schedule([job], V100_AND_K80)
    assert [task.start for task in answer.placed] == [0.0, 0.0, 3.0, 3.0]
    assert answer.completions == (6.0,)


def test_board_waits_until_a_gpu_is_free() -> None:
    assert schedule([work()], alike(2, 7.0)).placed == (Placed(0, 0, 0, 7.0, 8.0),)


def test_round_under_way_is_completed_with_the_tasks_that_are_left() -> None:
    answer = schedule([work(rounds=2, tasks=3, left=1, until=5.0)], alike(3))
    assert [(task.round, task.start) for task in answer.placed] == [(0, 0.0), (1, 5.0), (1, 5.0), (1, 5.0)]
    assert answer.completions == (6.0,)
    assert answer.bound == 6.0


def test_round_under_way_with_no_task_left_only_waits() -> None:
    jobs = [work(rounds=2, tasks=3, left=0, until=5.0), work(left=0, until=9.0, weight=2.0)]
    answer = schedule(jobs, alike(3))
    assert [task.start for task in answer.placed] == [5.0, 5.0, 5.0]
    assert answer.completions == (6.0, 9.0)
    assert answer.bound == answer.value == 24.0


def test_list_of_a_very_long_job_costs_nothing_before_its_turn() -> None:
    jobs = [work(rounds=10**9, tasks=4), work(release=1.0)]
    turns = listed(jobs, middled(jobs, alike(2)))
    assert {next(turns) for _ in range(5)} >= {Turn(0, 0), Turn(1, 0)}


def test_nothing_to_do_is_done_at_once() -> None:
    assert schedule([], alike(1)) == Schedule((), (), 0.0, 0.0)
    assert guarantee([], (0,)).factor == 3.0


@pytest.mark.parametrize(
    ("seconds", "sync", "alpha"),
    [
        ((1.0, 3.0, 9.0), (0.5, 0.5, 9.0), 3.0),  # no GPU of the third type
        ((1.0, 0.0, 1.0), (0.5, 2.0, 9.0), 1.0),  # the second cannot
        ((1.0, 1.0, 1.0), (0.5, 2.0, 9.0), 4.0),
        ((1.0, 1.0, 1.0), (0.0, 2.0, 9.0), 3.0),  # no ratio of sync, so that of both together
    ],
)
def test_guarantee_counts_types_that_are_there_and_of_use(
    seconds: tuple[float, ...], sync: tuple[float, ...], alpha: float
) -> None:
    answer = guarantee([RoundWork("job", 1.0, 0.0, 1, 1, seconds, sync)], (0, 1))
    assert answer.alpha == alpha
    assert answer.factor == alpha * (2 + alpha)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": 0}, "bad: a round of 0 tasks"),
        ({"rounds": 0}, "bad: 0 rounds left"),
        ({"left": 3}, "bad: 3 tasks left of a round of 1"),
        ({"seconds": (0.0,)}, "bad: no GPU of the cluster is of a type that can compute its tasks"),
        ({"weight": 0.0}, "bad: seconds and weight must be positive"),
    ],
)
def test_bad_job_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        schedule([work(), replace(work(), name="bad", **changes)], alike(2))  # type: ignore[arg-type]


def test_no_gpus_are_refused() -> None:
    with pytest.raises(RequestError, match="no GPUs"):
        schedule([work()], GpuPool((), ()))
    with pytest.raises(RequestError, match="no GPUs"):
        relax([], 0)


@pytest.mark.parametrize(("tasks", "first", "rounds"), [(0, 0, 1), (2, 3, 1), (2, 0, 1), (2, 2, 0)])
def test_relaxation_refuses_a_chain_without_rounds_or_tasks(tasks: int, first: int, rounds: int) -> None:
    with pytest.raises(RequestError, match=r"chain 7: .*at least 1 is needed"):
        relax([Chain("chain 7", 1.0, 0.0, rounds, tasks, first, 1.0, 0.0)], 1)
