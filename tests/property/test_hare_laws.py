"""What every schedule of Hare's list algorithm obeys."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.scheduler.policies.hare.list_schedule import GpuPool, Placed, RoundWork, schedule
from poise.scheduler.policies.hare.offline import guarantee

TYPES = 3
Instance = tuple[list[RoundWork], GpuPool]

TIMES = st.one_of(st.integers(1, 40).map(lambda each: each / 8), st.floats(0.01, 50.0))
EARLY = st.one_of(st.just(0.0), st.floats(0.0, 30.0))


@st.composite
def jobs(draw: st.DrawFn, kind: int) -> RoundWork:
    """A job that GPUs of this type can compute; perhaps in the midst of a round."""
    tasks = draw(st.integers(1, 5))
    seconds = [draw(st.one_of(st.just(0.0), TIMES)) for _ in range(TYPES)]
    seconds[kind] = seconds[kind] or draw(TIMES)
    return RoundWork(
        name="job",
        weight=draw(st.sampled_from((0.5, 1.0, 3.0))),
        release=draw(EARLY),
        rounds=draw(st.integers(1, 25)),
        tasks=tasks,
        seconds=tuple(seconds),
        sync=tuple(draw(EARLY) for _ in range(TYPES)),
        left=draw(st.none() | st.integers(0, tasks)),
        until=draw(EARLY),
    )


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    kinds = draw(st.lists(st.integers(0, TYPES - 1), min_size=1, max_size=6))
    free = [draw(EARLY) for _ in kinds]
    return draw(st.lists(jobs(kinds[0]), min_size=1, max_size=5)), GpuPool(tuple(kinds), tuple(free))


@given(instances())
def test_each_task_is_once_on_a_gpu_that_can_compute_it_and_no_gpu_has_two_at_once(instance: Instance) -> None:
    work, gpus = instance
    count: dict[tuple[int, int], int] = defaultdict(int)
    last = list(gpus.free)
    for job, turn, gpu, start, end in schedule(work, gpus).placed:
        count[job, turn] += 1
        seconds = work[job].seconds[gpus.kinds[gpu]]
        assert seconds > 0
        assert end == start + seconds
        assert start >= last[gpu]  # a GPU's tasks come in order of time
        last[gpu] = end
    for job, each in enumerate(work):
        assert [count[job, turn] for turn in range(each.rounds)] == [each.first] + [each.tasks] * (each.rounds - 1)


@given(instances())
def test_rounds_start_after_the_release_and_after_the_round_before_is_synchronised(instance: Instance) -> None:
    work, gpus = instance
    answer = schedule(work, gpus)
    rounds: dict[tuple[int, int], list[Placed]] = defaultdict(list)
    for task in answer.placed:
        rounds[task.job, task.round].append(task)
    for job, each in enumerate(work):
        ready = each.release
        for turn in range(each.rounds):
            tasks = rounds[job, turn]
            assert all(task.start >= ready for task in tasks)
            done = max(ready, each.until) if turn == 0 else ready
            if tasks:
                sync = max(each.sync[gpus.kinds[task.gpu]] for task in tasks)
                done = max(done, max(task.end for task in tasks) + sync)
            ready = done
        assert answer.completions[job] == ready


@given(instances())
def test_value_is_the_weighted_completion_and_not_below_the_bound(instance: Instance) -> None:
    work, gpus = instance
    answer = schedule(work, gpus)
    value = sum(job.weight * end for job, end in zip(work, answer.completions, strict=True))
    assert answer.value == value
    assert answer.bound <= value * (1 + 1e-9)
    assert guarantee(work, gpus.kinds).factor >= 3.0


@pytest.mark.slow
@given(instances())
def test_same_instance_gives_the_same_schedule(instance: Instance) -> None:
    assert schedule(*instance) == schedule(*instance)


@pytest.mark.slow
@given(instances())
def test_twice_the_time_gives_twice_the_schedule(instance: Instance) -> None:
    work, gpus = instance
    longer = [
        replace(
            job,
            release=2 * job.release,
            seconds=tuple(2 * each for each in job.seconds),
            sync=tuple(2 * each for each in job.sync),
            until=2 * job.until,
        )
        for job in work
    ]
    plain, twice = schedule(work, gpus), schedule(longer, GpuPool(gpus.kinds, tuple(2 * free for free in gpus.free)))
    assert twice.placed == tuple(task._replace(start=2 * task.start, end=2 * task.end) for task in plain.placed)
    assert (twice.value, twice.bound) == (2 * plain.value, 2 * plain.bound)


@pytest.mark.slow
@given(instances(), st.sampled_from((0.25, 4.0)))
def test_weights_count_only_relative_to_one_another(instance: Instance, factor: float) -> None:
    work, gpus = instance
    heavier = [replace(job, weight=factor * job.weight) for job in work]
    assert schedule(heavier, gpus).placed == schedule(work, gpus).placed
