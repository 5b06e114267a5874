"""What it costs a GPU to turn to another job: nothing, a little, or the whole model. Numbers by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.lab.simulator.tasks import FREE, ResidentModels, Switching, parse_switching, unknown_size
from poise.scheduler.model.cluster import Slots, bits
from poise.scheduler.model.errors import InvariantError, RequestError, UnknownNameError
from poise.scheduler.model.job import Job

COLD, RESIDENT = 7.0, 2.0


def turns(jobs: str, *, keep: int = 4, gpus: ResidentModels | None = None) -> list[float]:
    """What each turn of one GPU costs, job by job."""
    one = gpus or ResidentModels(1, keep, RESIDENT)
    return [one.turn(job, 0, 1, COLD) for job in jobs]


def test_switching_costs_nothing_a_little_or_the_whole_model() -> None:
    assert turns("aabab") == [COLD, 0, COLD, RESIDENT, RESIDENT]


def test_switching_evicts_the_job_whose_run_completed_earliest() -> None:
    """With room for three: d drives out b, since a ran again after it; then b drives out c."""
    assert turns("abcadbac", keep=3) == [COLD, COLD, COLD, RESIDENT, COLD, COLD, RESIDENT, COLD]


def test_switching_with_room_for_one_knows_the_last_job_only() -> None:
    assert turns("aaba", keep=1) == [COLD, 0, COLD, COLD]


def test_switching_with_no_room_is_always_cold() -> None:
    assert turns("aab", keep=0) == [COLD, COLD, COLD]


def test_switching_of_one_gpu_says_nothing_of_others() -> None:
    gpus = ResidentModels(2, 4, RESIDENT)
    assert [gpus.turn("a", node, bit, COLD) for node, bit in ((0, 1), (0, 2), (1, 1), (0, 1))] == [COLD, COLD, COLD, 0]


def test_switching_of_several_gpus_takes_as_long_as_the_slowest() -> None:
    gpus = ResidentModels(2, 4, RESIDENT)
    gpus.turn_all("a", (Slots(0, 0b11),), COLD)
    assert gpus.turn_all("a", (Slots(0, 0b11),), COLD) == 0
    gpus.turn("b", 0, 2, COLD)
    assert gpus.turn_all("a", (Slots(0, 0b11),), COLD) == RESIDENT
    assert gpus.turn_all("a", (Slots(0, 0b11), Slots(1, 0b100)), COLD) == COLD


def test_switching_on_a_node_that_was_lost_is_cold_again() -> None:
    gpus = ResidentModels(2, 4, RESIDENT)
    gpus.turn_all("a", (Slots(0, 1), Slots(1, 1)), COLD)
    gpus.forget(0)
    assert gpus.turn("a", 0, 1, COLD) == COLD
    assert gpus.turn("a", 1, 1, COLD) == 0


def test_switching_by_default_is_a_few_milliseconds_or_the_size_over_the_bus() -> None:
    """ResNet-50's 102 MB at 12 GB/s: 8.5 ms; of unknown size 500 MB: 42 ms."""
    switching = Switching()
    assert switching.cold(102e6) == pytest.approx(0.0085)
    assert switching.cold(unknown_size(Job("a", 0.0, 1))) == pytest.approx(500 / 12_000)
    assert switching.resident == 0.003


def test_a_gpu_computes_for_one_job_at_a_time() -> None:
    gpus = ResidentModels(1, 4, RESIDENT)
    gpus.take("a", (Slots(0, 0b011),))
    with pytest.raises(InvariantError, match="b is to run on node 0, slots 0b110, of which 0b11 are busy"):
        gpus.take("b", (Slots(0, 0b110),))
    gpus.free((Slots(0, 0b010),))
    gpus.take("b", (Slots(0, 0b110),))


@given(st.integers(0, 2**70))
def test_bits_add_up_to_their_mask(mask: int) -> None:
    found = [*bits(mask)]
    assert sum(found) == mask
    assert found == sorted(set(found))
    assert all(bit.bit_count() == 1 for bit in found)


@given(st.lists(st.sampled_from("abcdef"), max_size=40), st.integers(1, 5))
def test_switching_keeps_the_last_jobs_that_ran(jobs: list[str], keep: int) -> None:
    """Against the definition: the last `keep` different jobs before this one."""
    expected = []
    for place, job in enumerate(jobs):
        last = list(dict.fromkeys(reversed(jobs[:place])))[:keep]
        expected.append(0.0 if last[:1] == [job] else RESIDENT if job in last else COLD)
    assert turns("".join(jobs), keep=keep) == expected


@pytest.mark.parametrize(
    ("spec", "costs"),
    [
        ("naive", None),
        ("free", FREE),
        ("resident=0.003", Switching()),
        ("resident=0,bandwidth=6e9,size=1e9,keep=2", Switching(0.0, 6e9, 1e9, 2)),
    ],
)
def test_switching_is_read_as_it_is_written(spec: str, costs: Switching | None) -> None:
    assert parse_switching(spec) == costs


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resident", "resident: expected a number of at least 0, got ''"),
        ("resident=-1", "resident: expected a number of at least 0, got '-1'"),
        ("bandwidth=0", "bandwidth: expected a number of at least 1, got '0'"),
        ("size=inf", "size: expected a number of at least 0, got 'inf'"),
        ("keep=0", "keep: expected a number of at least 1, got '0'"),
        ("keep=2.5", "keep: expected a whole number of jobs, got '2.5'"),
    ],
)
def test_switching_refuses_costs_that_are_none(spec: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_switching(spec)


def test_switching_refuses_costs_that_it_does_not_know() -> None:
    with pytest.raises(UnknownNameError, match="'fast'; known: bandwidth, free, keep, naive, resident, size"):
        parse_switching("fast")
