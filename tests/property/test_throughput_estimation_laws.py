"""What holds for the estimates of every table and profile."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from poise.scheduler.model.speed import Locality
from poise.scheduler.throughput.estimation import (
    Pair,
    Profile,
    estimated,
    filled,
    profiled_pairs,
    profiled_types,
    stand_ins,
)
from poise.scheduler.throughput.matrix_completion import Offsets, completed
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs, Together

TYPES = ("v100", "k80", "a100")
CLASSES = tuple(JobClass(model, batch) for model in ("lm", "vgg") for batch in (None, 8, 64))
PLACES = ((1, Locality.PACKED), (2, Locality.PACKED), (2, Locality.RACK))
PROFILES = st.builds(
    Profile,
    types=st.none() | st.integers(1, 3),
    pairs=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    rank=st.sampled_from([0, 1, 10]),
    seed=st.integers(0, 3),
)


@st.composite
def tables(draw: st.DrawFn) -> Throughputs:
    """Dense, but for gaps and zeros; a few numbers decide, for most of the time of a law goes into drawing."""
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    classes = CLASSES[: draw(st.integers(1, len(CLASSES)))]
    gaps, zeros = draw(st.sampled_from([0.0, 0.3])), draw(st.sampled_from([0.0, 0.2]))
    alone = [
        Alone(job, on, gpus, level, 0.0 if numbers.random() < zeros else math.exp(numbers.normal()))
        for job in classes
        for on, (gpus, level) in itertools.product(TYPES, PLACES)
        if numbers.random() >= gaps or (on, gpus) == ("v100", 1)
    ]
    speeds = {(each.job, each.gpu_type, each.gpus): each.rate for each in alone if each.locality is Locality.PACKED}
    together = [
        Together(one, other, on, gpus, (speeds[one, on, gpus] * fit, speeds[other, on, gpus] * fit * 0.5))
        for one, other in itertools.combinations_with_replacement(classes, 2)
        for on, gpus in itertools.product(TYPES, (1, 2))
        if (one, on, gpus) in speeds and (other, on, gpus) in speeds and numbers.random() >= gaps
        for fit in (float(numbers.choice([0.0, 0.25, 0.5, 0.9, 1.0])),)
    ]
    return Throughputs.of("drawn", "v100", alone, together)


def answers(table: Throughputs) -> dict[tuple[object, ...], tuple[float, ...]]:
    """Everything that a table says."""
    said: dict[tuple[object, ...], tuple[float, ...]] = {}
    said.update({(job, on, n): row for job, types in table._rows.items() for on in types for n, row in types[on].items()})
    said.update(table._pairs.items())
    return said


@pytest.mark.slow
@given(tables(), PROFILES)
def test_estimates_are_the_same_every_time(table: Throughputs, profile: Profile) -> None:
    assert estimated(table, profile) == estimated(table, profile)


@pytest.mark.slow
@given(tables(), PROFILES)
def test_estimates_answer_no_question_that_the_truth_does_not(table: Throughputs, profile: Profile) -> None:
    believed, _ = estimated(table, profile)
    truth = answers(table)
    for question, rates in answers(believed).items():
        assert all(math.isfinite(rate) and rate >= 0 for rate in rates)
        if len(question) == 3:
            assert [rate > 0 for rate in rates] == [rate > 0 for rate in truth[question]]
    assert answers(believed).keys() <= truth.keys()


@pytest.mark.slow
@given(tables(), PROFILES)
def test_estimate_of_a_job_beside_another_is_never_faster_than_alone(table: Throughputs, profile: Profile) -> None:
    believed, _ = estimated(table, profile)
    for (one, other, on, gpus), rates in believed._pairs.items():
        for job, rate in zip((one, other), rates, strict=True):
            was_measured = rate in table._pairs[one, other, on, gpus]
            assert was_measured or rate <= believed.row(*job, on, gpus)[Locality.PACKED] * (1 + 1e-12)


@pytest.mark.slow
@given(tables(), PROFILES)
def test_nothing_is_wrong_where_everything_was_measured(table: Throughputs, profile: Profile) -> None:
    believed, report = estimated(table, replace(profile, types=None))
    assert report.alone.count == report.left_out == 0
    assert believed._rows == table._rows


@given(tables(), PROFILES, st.integers(0, 5), st.sampled_from([1e-3, 7.0, 1e4]))
def test_estimates_do_not_depend_on_what_a_step_is(table: Throughputs, profile: Profile, which: int, unit: float) -> None:
    """Steps of one class that are `unit` times smaller make its speeds larger by that, and change nobody else's."""
    assume(which < len(table.classes()))
    profile = replace(profile, rank=min(profile.rank, 1))
    chosen = table.classes()[which]
    rows = {
        job: {on: {n: _times(row, unit if job == chosen else 1.0) for n, row in types[on].items()} for on in types}
        for job, types in table._rows.items()
    }
    before, after = estimated(table, profile)[0], estimated(replace(table, _rows=rows, _pairs={}), profile)[0]
    for job, types in before._rows.items():
        for on, counts in types.items():
            for gpus, row in counts.items():
                expected = _times(row, unit if job == chosen else 1.0)
                assert after._rows[job][on][gpus] == pytest.approx(expected, rel=1e-2)


def _times(row: tuple[float, float, float], factor: float) -> tuple[float, float, float]:
    packed, rack, cluster = row
    return packed * factor, rack * factor, cluster * factor


@given(st.permutations(TYPES), st.integers(1, 2), st.sampled_from(CLASSES), st.integers(0, 5))
def test_longer_profile_contains_the_shorter_one(order: list[str], types: int, job: JobClass, seed: int) -> None:
    runs = dict.fromkeys(order, 1.0)
    short, long = (profiled_types(job, runs, Profile(types=count, seed=seed)) for count in (types, types + 1))
    assert long[:types] == short == profiled_types(job, dict.fromkeys(TYPES, 1.0), Profile(types=types, seed=seed))
    pairs: list[Pair] = [(job, other, on, 1) for other in CLASSES for on in order]
    few, many = (profiled_pairs(job, pairs, Profile(pairs=part, seed=seed)) for part in (0.1 * types, 0.8))
    assert many[: len(few)] == few
    assert len(few) == math.ceil(0.1 * types * 18 - 1e-9)


@given(tables(), PROFILES, st.integers(1, 6))
def test_stand_ins_are_never_more_than_there_are_references(table: Throughputs, profile: Profile, count: int) -> None:
    references = table.classes()[:count]
    assert {*stand_ins(table, references, 1, profile).values()} <= {*references}


@pytest.mark.slow
@given(tables(), st.integers(0, 5))
def test_filled_table_says_what_the_table_says_and_more(table: Throughputs, which: int) -> None:
    assume(which < len(table.classes()))
    full = answers(filled(table, [table.classes()[which]], Profile()))
    assert answers(table).items() <= full.items()
    assert all(math.isfinite(rate) and rate >= 0 for rates in full.values() for rate in rates)


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 9), st.integers(0, 4), st.sampled_from(Offsets))
def test_completion_keeps_what_is_known_and_leaves_no_gap(
    seed: int, height: int, width: int, rank: int, offsets: Offsets
) -> None:
    draws = np.random.default_rng(seed)
    known = np.where(draws.random((height, width)) < draws.random(), draws.normal(size=(height, width)), np.nan)
    found = completed(known, rank=rank, regulariser=1e-2, offsets=offsets)
    assert np.isfinite(found).all()
    assert (found == known)[~np.isnan(known)].all()
    if offsets is Offsets.NONE:
        assert np.abs(found).max() <= 2 * np.abs(known[~np.isnan(known)]).max(initial=0.0)
