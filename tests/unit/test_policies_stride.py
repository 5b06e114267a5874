"""Stride, plain and gang-aware (docs/algorithms/gandiva-fair.md): the published tables, shares, and the lag clamp."""

from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_job, simulate

from poise.scheduler.policies.stride import NO_PASSES, Clamp, Passes, WeightedGang, serve

FIVE = {"E": 4, "A": 1, "B": 1, "C": 2, "D": 2}
"""Gangs in the order of the queue; four GPUs."""


def quanta(gangs: list[WeightedGang], gpus: int, number: int, clamp: Clamp) -> list[list[WeightedGang]]:
    """Who is served at each quantum."""
    passes, served = NO_PASSES, []
    for _ in range(number):
        chosen, passes = serve(gangs, passes, gpus, clamp)
        served.append(chosen)
    return served


def five(tickets: dict[str, float] | None = None) -> list[WeightedGang]:
    return [WeightedGang(ord(name), gpus, (tickets or {}).get(name, 1.0)) for name, gpus in FIVE.items()]


def names(chosen: list[WeightedGang]) -> str:
    return "".join(sorted(chr(gang.row) for gang in chosen))


def shares(gangs: list[WeightedGang], gpus: int, number: int, clamp: Clamp) -> list[float]:
    """GPUs that each job has on average."""
    served = quanta(gangs, gpus, number, clamp)
    return [sum(gang.gpus for chosen in served for gang in chosen if gang.row == each.row) / number for each in gangs]


@pytest.mark.parametrize("clamp", Clamp)
def test_plain_stride_serves_in_proportion_to_tickets(clamp: Clamp) -> None:
    b, a = WeightedGang(ord("B"), 1, 1.0), WeightedGang(ord("A"), 1, 4.0)
    assert "".join(map(names, quanta([b, a], 1, 9, clamp))) == "BAAAABAAA"


@pytest.mark.parametrize("clamp", Clamp)
def test_gang_aware_stride_comes_to_the_published_table(clamp: Clamp) -> None:
    want = ["E", "ABC", "ABD", "ABC", "ABD", "E", "ABC", "ABD", "ABC"]
    assert [names(chosen) for chosen in quanta(five(), 4, 9, clamp)] == want


def test_passes_before_each_quantum_are_the_published_ones() -> None:
    passes = NO_PASSES
    seen = []
    for _ in range(9):
        seen.append([passes.of.get(ord(name), 0.0) for name in "ABCDE"])
        _, passes = serve(five(), passes, 4, Clamp.OFF)
    assert seen == [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 4],
        [1, 1, 2, 0, 4],
        [2, 2, 2, 2, 4],
        [3, 3, 4, 2, 4],
        [4, 4, 4, 4, 4],
        [4, 4, 4, 4, 8],
        [5, 5, 6, 4, 8],
        [6, 6, 6, 6, 8],
    ]


def test_equal_tickets_give_every_gang_the_same_gpu_time() -> None:
    assert shares(five(), 4, 100, Clamp.OFF) == [0.8] * 5


def test_no_gpu_idles_in_the_published_example() -> None:
    assert all(sum(gang.gpus for gang in chosen) == 4 for chosen in quanta(five(), 4, 100, Clamp.LAG))


def test_tickets_as_large_as_gangs_give_gpu_time_in_proportion() -> None:
    gangs = five({name: float(gpus) for name, gpus in FIVE.items()})
    assert shares(gangs, 4, 100, Clamp.OFF) == pytest.approx([1.6, 0.4, 0.4, 0.8, 0.8])


GREEDY = [WeightedGang(0, 1, 2.0), WeightedGang(1, 2, 1.0), WeightedGang(2, 4, 1.0)]
"""The first is entitled to two of four GPUs and can use one."""


def test_without_a_clamp_a_job_entitled_to_more_than_its_gang_starves_a_large_one() -> None:
    assert shares(GREEDY, 4, 2000, Clamp.OFF) == pytest.approx([0.889, 1.777, 0.446], abs=0.005)


def test_the_lag_clamp_gives_the_large_gang_its_turn() -> None:
    assert shares(GREEDY, 4, 2000, Clamp.LAG) == pytest.approx([0.8, 1.6, 0.8], abs=0.01)


def test_an_arrival_starts_with_the_least_pass_of_the_others() -> None:
    passes = Passes(MappingProxyType({0: 7.0, 1: 5.0}), 6.0)
    chosen, after = serve([WeightedGang(0, 1, 1.0), WeightedGang(1, 1, 1.0), WeightedGang(2, 1, 1.0)], passes, 2, Clamp.OFF)
    assert [gang.row for gang in chosen] == [1, 2]
    assert after.of == {0: 7.0, 1: 6.0, 2: 6.0}


def test_a_job_that_left_is_forgotten() -> None:
    passes = Passes(MappingProxyType({0: 7.0, 1: 5.0}), 6.0)
    assert set(serve([WeightedGang(0, 1, 1.0)], passes, 2, Clamp.LAG)[1].of) == {0}


PACKS = ((4,), (2, 2), (2, 1, 1), (1, 1, 1, 1), (1, 2, 1))
"""Ways to fill four GPUs."""


@st.composite
def feasible(draw: st.DrawFn) -> list[WeightedGang]:
    """Packs of gangs that fill four GPUs, each pack with its share of time: tickets that somebody can do justice to."""
    packs = draw(st.lists(st.tuples(st.sampled_from(PACKS), st.sampled_from((1.0, 2.0, 3.0))), min_size=1, max_size=4))
    sizes = [(size, size * weight) for pack, weight in packs for size in pack]
    return [WeightedGang(row, size, tickets) for row, (size, tickets) in enumerate(draw(st.permutations(sizes)))]


@given(feasible())
def test_gpu_time_in_every_window_is_close_to_the_entitlement(gangs: list[WeightedGang]) -> None:
    """|GPU-time − W·G·t/Σt| <= 2·max g."""
    tickets = sum(gang.tickets for gang in gangs)
    served = quanta(gangs, 4, 60, Clamp.LAG)
    most = 2 * max(gang.gpus for gang in gangs)
    for gang in gangs:
        lag = [0.0]
        for chosen in served:
            lag.append(lag[-1] + (gang.gpus if gang in chosen else 0) - 4 * gang.tickets / tickets)
        assert max(lag) - min(lag) <= most + 1e-9


def test_a_simulation_gives_every_gang_the_same_gpu_time_and_leaves_no_gpu_idle() -> None:
    """At equal pass who runs goes on, so the order is not that of the table; the shares are."""
    jobs = [a_job(name, gpus=gpus, seconds=1000) for name, gpus in FIVE.items()]
    story = simulate(jobs, "stride:quantum=10,clamp=off", "gpu:4", until=499)
    busy = {name: sum((min(run.ended, 500) - run.began) * FIVE[name] for run in story.runs_of(name)) for name in FIVE}
    assert busy == dict.fromkeys(FIVE, 400)


def test_weights_are_tickets() -> None:
    jobs = [a_job("light", seconds=1000), a_job("heavy", seconds=1000, weight=3)]
    story = simulate(jobs, "stride:quantum=10", "gpu:1", until=799)
    busy = {name: sum(min(run.ended, 800) - run.began for run in story.runs_of(name)) for name in ("light", "heavy")}
    assert busy == {"light": 200, "heavy": 600}


def test_gpus_freed_inside_a_time_slice_go_to_those_who_wait() -> None:
    jobs = [a_job("short", gpus=4, seconds=5), a_job("long", gpus=4, seconds=100)]
    assert simulate(jobs, "stride:quantum=60").starts == {"short": 0, "long": 5}


def test_time_slices_go_on_after_a_time_without_jobs() -> None:
    jobs = [a_job("first"), a_job("second", at=1000)]
    assert simulate(jobs, "stride").starts == {"first": 0, "second": 1000}
