"""The Gittins index (docs/algorithms/tiresias.md) in numbers, in closed forms, and at work."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_job, simulate

from poise.scheduler.policies.tiresias import Sizes

FIVE = Sizes.of(np.array([1.0, 2.0, 3.0, 10.0, 100.0]))


@pytest.mark.parametrize(
    ("attained", "want", "delta"), [(0, 0.25, 3), (1, 0.2857, 2), (2, 0.3333, 1), (3, 0.0714, 7), (10, 0.0111, 90)]
)
def test_the_index_of_five_samples_is_as_published(attained: float, want: float, delta: float) -> None:
    assert FIVE.best_index(attained) == pytest.approx(want, abs=5e-5)
    assert FIVE.index(attained, delta) == FIVE.best_index(attained)


@pytest.mark.parametrize(("delta", "want"), [(1, 0.2), (2, 0.2222), (3, 0.25), (10, 0.1538), (100, 0.0431)])
def test_the_index_of_a_fresh_job_depends_on_how_far_it_looks(delta: float, want: float) -> None:
    assert FIVE.index(0, delta) == pytest.approx(want, abs=5e-5)


def test_a_job_larger_than_all_before_has_no_index() -> None:
    assert FIVE.best_index(100) == 0
    assert FIVE.index(100, 5) == 0
    assert Sizes.of(np.empty(0)).best_index(0) == 0


@given(st.floats(1, 1e6), st.floats(0, 0.99))
def test_the_index_of_equal_jobs_is_one_over_what_is_left(size: float, part: float) -> None:
    equal = Sizes.of(np.array([size] * 3))
    attained = size * part
    assert equal.best_index(attained) == pytest.approx(1 / (size - attained))


def test_the_index_of_memoryless_jobs_does_not_change_with_service() -> None:
    """1000 quantiles of an exponential distribution of mean 10; the far tail is too thin to say anything."""
    quantiles = -10 * np.log1p(-(np.arange(1000) + 0.5) / 1000)
    sizes = Sizes.of(quantiles)
    for attained in (0.0, 1.0, 5.0, 10.0, 20.0):
        assert sizes.index(attained, 5.0) == pytest.approx(0.1, rel=0.02)


def test_the_index_rises_where_jobs_are_ever_likelier_to_end() -> None:
    uniform = Sizes.of(np.arange(1.0, 101.0))
    indices = [uniform.best_index(attained) for attained in np.arange(0, 100, 5.0)]
    assert indices == sorted(indices)


def test_the_index_falls_where_jobs_that_last_will_last() -> None:
    pareto = Sizes.of((1 - (np.arange(200) + 0.5) / 200) ** -1.0)
    indices = [pareto.best_index(attained) for attained in (1.0, 2.0, 4.0, 8.0, 16.0)]
    assert indices == sorted(indices, reverse=True)


def exact(samples: list[int], attained: int, delta: Fraction) -> Fraction:
    """P(S − a <= Δ | S > a) / E[min(S − a, Δ) | S > a], by the definition."""
    alive = [size - attained for size in samples if size > attained]
    return Fraction(sum(left <= delta for left in alive)) / sum(min(Fraction(left), delta) for left in alive)


samples = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(samples, st.integers(0, 45), st.integers(1, 50))
def test_the_index_is_what_its_definition_says(values: list[int], attained: int, delta: int) -> None:
    sizes = Sizes.of(np.array(values, dtype=np.float64))
    if attained >= max(values):
        assert sizes.index(attained, delta) == sizes.best_index(attained) == 0
        return
    assert sizes.index(attained, delta) == pytest.approx(float(exact(values, attained, Fraction(delta))))
    ends = [Fraction(size - attained) for size in values if size > attained]
    best = max(exact(values, attained, each) for each in ends)
    assert sizes.best_index(attained) == pytest.approx(float(best))
    assert best >= exact(values, attained, Fraction(delta)), "the supremum is reached at a sample"


def test_a_distribution_is_fitted_anew_when_it_has_grown_by_a_tenth() -> None:
    sizes = Sizes.of(np.arange(1.0, 21.0))
    sizes, stale = sizes.with_sample(5.0)
    assert not stale
    assert len(sizes.samples) == 20
    sizes, stale = sizes.with_sample(6.0)
    assert stale
    assert sorted(sizes.samples)[4:8] == [5.0, 5.0, 6.0, 6.0]
    assert len(sizes.samples) == 22


LEARNT = [a_job(f"learnt-{i}", at=i / 10, seconds=size) for i, size in enumerate((2, 2, 50, 50))]
"""Over at 104 s on one GPU: a job that lasts longer than 2 s lasts 50."""

TRIED = [*LEARNT, a_job("tried", at=104, seconds=10, dies=(2,)), a_job("fresh", at=105, seconds=10)]


def test_a_fresh_job_outranks_one_that_has_shown_to_be_long() -> None:
    """1/26 against 1/48 a second; by arrival in the queue the interrupted job would go on at once."""
    story = simulate(TRIED, "tiresias-gittins:samples=4", "gpu:1")
    assert story.starts["fresh"] == 106
    assert simulate(TRIED, "tiresias", "gpu:1").starts["fresh"] == 116


def test_the_order_is_that_of_tiresias_until_enough_jobs_have_finished() -> None:
    assert simulate(TRIED, "tiresias-gittins:samples=5", "gpu:1").starts["fresh"] == 116


def test_the_last_queue_is_first_come_first_served() -> None:
    story = simulate(TRIED, "tiresias-gittins:samples=4,limits=1", "gpu:1")
    assert story.starts["fresh"] == 105, "in the first queue, before the job that left it"
    one_second = [*LEARNT, a_job("tried", at=104, seconds=10, dies=(2,)), a_job("later", at=106, seconds=10)]
    story = simulate(one_second, "tiresias-gittins:samples=4,limits=1", "gpu:1")
    assert [run.job for run in story.runs if run.began >= 104] == ["tried", "later", "tried", "later"]
