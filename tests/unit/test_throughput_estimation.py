"""Estimates of speeds that were never measured."""

from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from poise.scheduler.model.errors import ThroughputError
from poise.scheduler.model.speed import Locality
from poise.scheduler.throughput.estimation import (
    EstimateError,
    Profile,
    Report,
    estimated,
    filled,
    parse_profile,
    stand_ins,
)
from poise.scheduler.throughput.matrix_completion import Offsets, completed, nearest
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs, Together
from poise.scheduler.throughput.table import read_throughputs, shipped

GAVEL = Path(__file__).resolve().parents[3] / "shared/data/gavel/simulation_throughputs.json"
PACKED, RACK, CLUSTER = Locality
KNOWN = Profile(types=None)
TYPES = {"k80": 1.0, "p100": 3.0, "v100": 5.0}
LEVELS = {"small": 40.0, "mild": 10.0, "large": 2.0, "twin": 7.0}
KEPT = {
    "small": {"small": 0.9, "mild": 0.8, "large": 0.5, "twin": 0.8},
    "mild": {"small": 0.7, "mild": 0.6, "large": 0.0, "twin": 0.6},
    "large": {"small": 0.3, "mild": 0.0, "large": 0.0, "twin": 0.0},
    "twin": {"small": 0.7, "mild": 0.6, "large": 0.0, "twin": 0.6},
}
"""What is kept of the speed alone, the same on every type; `twin` behaves as `mild` does."""


def job(model: str) -> JobClass:
    return JobClass(model)


def separable(skip: tuple[tuple[str, str], ...] = ()) -> Throughputs:
    """Every class gains as much from a faster type, is twice as fast on two GPUs, and loses a fifth if those are spread."""
    alone = [
        Alone(job(model), gpu_type, gpus, level, speed * factor * gpus * (0.8 if level is RACK else 1.0))
        for model, speed in LEVELS.items()
        for gpu_type, factor in TYPES.items()
        for gpus, level in ((1, PACKED), (2, PACKED), (2, RACK))
        if (model, gpu_type) not in skip
    ]
    return Throughputs.of("separable", "v100", alone, sharing())


def sharing() -> list[Together]:
    def rate(model: str, other: str, gpu_type: str) -> float:
        return KEPT[model][other] * LEVELS[model] * TYPES[gpu_type]

    return [
        Together(job(one), job(other), on, 1, (rate(one, other, on), rate(other, one, on)))
        for one, other in combinations_with_replacement(LEVELS, 2)
        for on in TYPES
    ]


@cache
def public() -> Throughputs:
    if not GAVEL.exists():
        pytest.skip(f"needs {GAVEL}")
    return read_throughputs(GAVEL)


@cache
def of_public(profile: Profile) -> tuple[Throughputs, Report]:
    return estimated(public(), profile)


def low_rank(seed: int, rank: int = 2) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed)
    whole = draws.normal(size=(20, rank)) @ draws.normal(size=(rank, 15))
    return whole, np.where(draws.random(whole.shape) < 0.7, whole, np.nan)


# Completion


@pytest.mark.parametrize("offsets", Offsets)
@pytest.mark.parametrize("seed", range(3))
def test_completion_recovers_a_matrix_of_exactly_that_rank(seed: int, offsets: Offsets) -> None:
    whole, known = low_rank(seed)
    found = completed(known, rank=2, regulariser=1e-6, offsets=offsets)
    assert found == pytest.approx(whole, abs=1e-3 * np.abs(whole).max())


def test_completion_recovers_levels_of_rows_and_columns_at_rank_zero() -> None:
    whole = np.array([1e4, 0.0, -3.0])[:, None] + np.array([0.5, 2.0, 7.0, 11.0])
    known = whole.copy()
    known[0, 1:] = known[1, 3] = known[2, 0] = np.nan
    assert completed(known, rank=0, regulariser=1.0, offsets=Offsets.BOTH) == pytest.approx(whole, abs=1e-4)


def test_completion_never_changes_what_is_known() -> None:
    _, known = low_rank(5)
    found = completed(known, rank=1, regulariser=10.0, offsets=Offsets.BOTH)
    assert (found == known)[~np.isnan(known)].all()
    assert not np.isnan(found).any()


def test_completion_of_a_row_of_which_nothing_but_zeros_is_known_is_zero() -> None:
    known = np.array([[0.0, np.nan, np.nan], [0.2, 0.4, 0.6], [0.1, 0.7, 0.3], [np.nan, np.nan, np.nan]])
    found = completed(known, rank=10, regulariser=1e-2, offsets=Offsets.NONE)
    assert not found[[0, 3]].any()


@pytest.mark.parametrize("seed", range(30))
def test_completion_does_not_run_away_from_what_is_known(seed: int) -> None:
    """Noise, and a first row of which little is known: without a bound some of these answers are six times as far out."""
    known = np.random.default_rng(seed).normal(scale=3.0, size=(4, 9))
    known[0, 3:] = np.nan
    found = completed(known, rank=1, regulariser=1e-2, offsets=Offsets.BOTH)
    assert np.abs(found).max() < 4 * np.nanmax(np.abs(known))


def test_completion_of_nothing_is_zero() -> None:
    assert not completed(np.full((2, 3), np.nan), rank=1, regulariser=1.0, offsets=Offsets.BOTH).any()


def test_nearest_row_is_the_one_of_the_same_direction() -> None:
    references = np.array([[0.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.1, 0.2, 0.1]])
    assert nearest(np.array([0.4, 0.8, 0.4]), references, np.random.default_rng(0)) == 2
    assert nearest(np.array([0.01, 0.0, 0.0]), references, np.random.default_rng(0)) == 1


def test_nearest_row_of_a_zero_row_is_by_seeded_chance() -> None:
    references = np.eye(50)
    chosen = [nearest(np.zeros(50), references, np.random.default_rng(seed)) for seed in range(8)]
    assert chosen == [nearest(np.zeros(50), references, np.random.default_rng(seed)) for seed in range(8)]
    assert len({*chosen}) > 4


# Speeds alone


def test_speeds_of_a_separable_table_are_exact_from_one_type() -> None:
    table = separable()
    believed, report = estimated(table, Profile(types=1, rank=1))
    for each in table.classes():
        for gpu_type in TYPES:
            for gpus in (1, 2):
                assert believed.row(*each, gpu_type, gpus) == pytest.approx(table.row(*each, gpu_type, gpus), rel=1e-3)
    # 4 classes x 2 types not profiled x (1 GPU, 2 GPUs packed, 2 GPUs spread)
    assert report.alone.count == 24
    assert report.alone.p90 < 1e-3


@pytest.mark.slow
def test_speeds_that_were_profiled_are_believed_as_measured() -> None:
    table = public()
    believed, report = of_public(Profile(types=2))
    for each in table.classes():
        same = [
            gpu_type
            for gpu_type in table.gpu_types
            if all(believed.row(*each, gpu_type, gpus) == table.row(*each, gpu_type, gpus) for gpus in (1, 2, 4, 8))
        ]
        assert len(same) >= 2
    assert len(report.newcomers) == 26


def test_speeds_where_a_class_does_not_run_stay_zero() -> None:
    alone = [Alone(job(model), on, 1, PACKED, 2.0) for model in ("a", "b", "c") for on in ("k80", "v100")]
    alone += [Alone(job("big"), "v100", 1, PACKED, 3.0), Alone(job("big"), "k80", 1, PACKED, 0.0)]
    believed, _ = estimated(Throughputs.of("t", "v100", alone), Profile(types=1))
    assert believed.rate("big", None, "k80", 1, PACKED) == 0.0
    assert believed.measures("big", None, "k80")
    assert believed.rate("big", None, "v100", 1, PACKED) == 3.0


def test_speeds_that_nothing_is_linked_to_are_left_out() -> None:
    alone = [
        Alone(job("a"), "v100", 1, PACKED, 1.0),
        Alone(job("a"), "k80", 1, PACKED, 0.5),
        Alone(job("b"), "tpu", 1, PACKED, 9.0),
    ]
    believed, report = estimated(Throughputs.of("t", "v100", alone), Profile(types=1))
    assert report.left_out == 1
    assert [believed.measures("a", None, on) for on in ("v100", "k80")].count(True) == 1
    assert believed.measures("b", None, "tpu")


@pytest.mark.slow
def test_speeds_of_a_spread_gang_are_never_estimated_above_those_of_a_packed_one() -> None:
    believed, _ = of_public(Profile(types=1))
    for each in public().classes():
        for gpu_type in public().gpu_types:
            packed, rack, cluster = believed.row(*each, gpu_type, 4)
            assert packed >= rack >= cluster or believed.row(*each, gpu_type, 4) == public().row(*each, gpu_type, 4)


@pytest.mark.slow
def test_references_are_known_in_full() -> None:
    table = public()
    believed, report = of_public(Profile(references=16))
    old = [each for each in table.classes() if each not in report.newcomers]
    assert len(old) == 16
    for each in old:
        assert all(believed.row(*each, on, gpus) == table.row(*each, on, gpus) for on in TYPES for gpus in (1, 2, 4, 8))
        assert all(believed.pair(each, other, on, 1) == table.pair(each, other, on, 1) for other in old for on in TYPES)


# Pairs


def test_pairs_of_a_newcomer_are_its_stand_in_s_row_times_its_own_speed() -> None:
    references = [job("small"), job("mild"), job("large")]
    assert stand_ins(separable(), references, 1, Profile(pairs=1.0))[job("twin")] == job("mild")
    believed, report = estimated(separable(), Profile(types=None, pairs=0.7))
    assert report.together.count > 0
    pair = believed.pair(job("twin"), job("twin"), "v100", 1)  # nobody is ever measured beside its own kind
    assert pair == pytest.approx((0.6 * 7.0 * 5.0,) * 2)


def test_pairs_of_two_newcomers_are_those_of_their_stand_ins() -> None:
    table = separable()
    for seed in range(20):
        profile = Profile(types=None, pairs=1.0, references=2, seed=seed)
        believed, report = estimated(table, profile)
        if [*report.newcomers] == [job("mild"), job("twin")]:
            references = [job("small"), job("large")]
            stand_in = stand_ins(table, references, 1, profile)[job("mild")].model
            share = KEPT[stand_in][stand_in]
            assert believed.pair(job("mild"), job("twin"), "p100", 1) == pytest.approx((share * 30.0, share * 21.0))
            return
    pytest.fail("no seed makes mild and twin the newcomers")


def test_pairs_use_the_columns_of_references_alone() -> None:
    """What newcomers do beside each other is not to be seen: a table that differs only there has the same estimates."""
    table = separable()
    profile = Profile(pairs=0.5, references=2, seed=3)
    believed, report = estimated(table, profile)
    one, other = report.newcomers
    pairs = [each._replace(rates=(1e-3, 1e-3)) if {each.first, each.second} <= {one, other} else each for each in sharing()]
    alone = [
        Alone(each, on, gpus, level, table.rate(*each, on, gpus, level))
        for each in table.classes()
        for on in TYPES
        for gpus, level in ((1, PACKED), (2, PACKED), (2, RACK))
    ]
    changed, _ = estimated(Throughputs.of("separable", "v100", alone, pairs), profile)
    assert changed == believed


@pytest.mark.slow
def test_pairs_without_any_measurement_fall_back_to_a_seeded_choice() -> None:
    chosen = [stand_ins(separable(), separable().classes(), 1, Profile(pairs=0.0, seed=seed)) for seed in range(8)]
    again = [stand_ins(separable(), separable().classes(), 1, Profile(pairs=0.0, seed=seed)) for seed in range(8)]
    assert chosen == again
    assert len({each[job("mild")] for each in chosen}) > 1


def test_pairs_of_a_gang_that_nobody_shares_are_not_known() -> None:
    believed, _ = estimated(separable(), KNOWN)
    assert believed.pair(job("mild"), job("small"), "v100", 2) is None
    assert stand_ins(separable(), separable().classes(), 2, KNOWN) == {}


@pytest.mark.slow
def test_stand_in_of_every_class_is_itself_if_all_are_references_and_everything_is_measured() -> None:
    found = stand_ins(public(), public().classes(), 1, Profile(pairs=1.0))
    assert len(found) == 26
    assert all(each == stand_in for each, stand_in in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [0.0, 0.2, 1.0])
def test_stand_ins_are_references(pairs: float) -> None:
    references = public().classes()[5:21]
    found = stand_ins(public(), references, 1, Profile(pairs=pairs))
    assert len(found) == 26
    assert {*found.values()} <= {*references}
    if pairs == 1.0:
        assert all(found[each] == each for each in references)


# What it is worth


@cache
def one_gpu() -> Throughputs:
    """The public table with its pairs of one GPU only: hardly any larger gangs fit on the same GPUs."""
    table = public()
    return replace(table, _pairs={pair: rates for pair, rates in table._pairs.items() if pair[3] == 1})


def mean_errors(profile: Profile) -> tuple[float, float]:
    """Of speeds alone, and of what is kept beside another; over two draws."""
    reports = [estimated(one_gpu(), replace(profile, seed=seed))[1] for seed in range(2)]
    return fmean(each.alone.mean for each in reports), fmean(each.together.mean for each in reports)


@pytest.mark.slow
def test_error_of_speeds_alone_falls_as_more_types_are_profiled() -> None:
    one, two = (mean_errors(Profile(types=types, pairs=0.0))[0] for types in (1, 2))
    average = mean_errors(Profile(types=1, pairs=0.0, rank=0))[0]
    assert two < one < average
    assert mean_errors(Profile(types=None, pairs=1.0))[0] == 0.0


@pytest.mark.slow
def test_error_of_pairs_falls_as_more_of_them_are_measured() -> None:
    nothing, tenth, half = (mean_errors(Profile(types=None, pairs=pairs))[1] for pairs in (0.0, 0.1, 0.5))
    assert half < tenth < nothing


def test_error_counts_are_those_of_what_was_estimated() -> None:
    believed, report = estimated(separable(), Profile(types=None, pairs=1.0))
    assert believed.row("mild", None, "v100", 2) == (100.0, 80.0, 80.0)
    assert report.alone == EstimateError()
    # 10 pairs x 3 types, both of a pair. Three of them do not fit: they count only if they are said to.
    assert 42 <= report.together.count <= 60
    assert report.left_out == 0


def test_error_of_errors_is_their_median_mean_and_ninth_decile() -> None:
    assert EstimateError.of([*range(10), 21]) == EstimateError(11, 5.0, 6.0, 9.0)
    assert EstimateError.of([]) == EstimateError(0, 0.0, 0.0, 0.0)


def test_report_is_one_line() -> None:
    report = Report((job("a"),), EstimateError(4, 0.1, 0.2, 0.3), EstimateError(2, 0.1, 0.05, 0.3), 0.25, 0)
    assert str(report) == (
        "1 job classes estimated: 4 speeds alone, off by 10.0% (median), 30.0% (p90); "
        "2 beside another, off by 0.050 of the speed alone (mean), 25.0% of pairs misjudged"
    )


@pytest.mark.slow
def test_estimate_is_the_same_for_the_same_seed_and_not_for_another() -> None:
    assert estimated(public(), Profile(references=16)) == of_public(Profile(references=16))
    assert estimated(public(), Profile(references=16, seed=1)) != of_public(Profile(references=16))


# Gaps of a real table


def test_filled_table_has_the_types_that_a_class_was_not_measured_on() -> None:
    table = separable(skip=(("twin", "k80"), ("twin", "p100")))
    full = filled(table, [job("Twin")], Profile(rank=1))
    assert full.row("twin", None, "v100", 2) == table.row("twin", None, "v100", 2)
    assert full.row("twin", None, "p100", 2) == pytest.approx((42.0, 33.6, 33.6), rel=1e-3)
    assert full.row("small", None, "k80", 1) == table.row("small", None, "k80", 1)


def test_filled_table_keeps_every_pair_that_was_measured_and_adds_those_that_were_not() -> None:
    table = separable()
    less = Throughputs.of(
        "less",
        "v100",
        [Alone(each, on, 1, PACKED, table.rate(*each, on, 1, PACKED)) for each in table.classes() for on in TYPES],
        [each for each in sharing() if each.second != job("twin") or each.first.model == "small"],
    )
    full = filled(less, [job("twin")], Profile())
    for one in table.classes():
        for other in table.classes():
            known = less.pair(one, other, "v100", 1)
            assert full.pair(one, other, "v100", 1) == known if known else full.pair(one, other, "v100", 1) is not None


def test_filled_shipped_table_has_plausible_speeds() -> None:
    full = filled(shipped(), [JobClass("ResNet50")], Profile())
    h100, v100 = full.rate("ResNet50", None, "h100", 1, PACKED), full.rate("ResNet50", None, "v100", 1, PACKED)
    assert v100 == shipped().rate("ResNet50", None, "v100", 1, PACKED)
    assert 2 < h100 / v100 < 8


# The specification


def test_profile_specification_names_every_parameter() -> None:
    spec = "profiled:types=2,pairs=0.5,references=16,rank=3,regulariser=0.1,seed=7"
    assert parse_profile(spec) == Profile(2, 0.5, 16, 3, 0.1, 7)
    assert parse_profile("profiled") == Profile() == Profile(1, 0.2, None, 10, 0.01, 0)
    assert parse_profile("profiled:types=all,references=all") == Profile(types=None)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("guess", "expected profiled:KEY=VALUE"),
        ("profiled:", "expected profiled:KEY=VALUE"),
        ("profiled:colour=1", "each key once, of types, pairs, references, rank, regulariser, seed"),
        ("profiled:rank=1,rank=2", "each key once"),
        ("profiled:types=0", "types: expected a whole number from 1"),
        ("profiled:types=", "types: expected a whole number"),
        ("profiled:pairs=1.5", "pairs: expected a number from 0 to 1, got '1.5'"),
        ("profiled:pairs=nan", "pairs: expected a number"),
        ("profiled:pairs=all", "pairs: expected a number"),
        ("profiled:seed=1_0", "seed: expected a whole number"),
        ("profiled:regulariser=0", "regulariser: expected a number"),
    ],
)
def test_profile_specification_that_makes_no_sense_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ThroughputError, match=r"^estimate ") as refused:
        parse_profile(spec)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_estimate_with_nobody_left_to_be_new_is_refused() -> None:
    with pytest.raises(
        ThroughputError, match="expected fewer references than the 4 job classes of table 'separable', got 4"
    ):
        estimated(separable(), Profile(references=4))
