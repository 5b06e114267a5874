"""What the audit measures, on outcomes whose answers are known: a check that sees nothing fails here."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.audits import a_mixed_instance, an_instance, by_agent, of
from tests.builders import a_job

from poise.lab.analysis.fairness import rho
from poise.lab.audit import envy, pareto, sharing_incentive
from poise.lab.audit.envy import Bundles
from poise.lab.audit.findings import Case, Finding
from poise.lab.audit.instance_run import run_instance
from poise.lab.audit.instances import AgentKind
from poise.lab.audit.pareto import WAITS, TimeShares, TypeAssignment, by_enumeration, by_integer_program
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.policies.gandiva_fair.entitlements import both_gain, trade

G = np.array([[40.0, 10.0], [12.0, 4.0], [100.0, 50.0]])
"""Speeds of the running example of Gavel's policies: one V100, one K80."""


# Findings


def a_case(measured: float, bound: float = 1.0) -> Case:
    return Case(measured, bound, f"measured {measured}", {"agent": "a"})


def test_a_finding_shows_the_case_that_is_furthest_beyond_its_bound() -> None:
    finding = Finding.of([a_case(5.0, bound=6.0), a_case(3.0), a_case(0.5)])
    assert finding.holds is False
    assert finding.document() == {
        "holds": False,
        "worst": 3.0,
        "bound": 1.0,
        "cases": 3,
        "counterexample": {"agent": "a", "text": "measured 3.0"},
    }


def test_what_is_within_its_bound_is_no_counterexample_and_nothing_measured_is_no_verdict() -> None:
    assert Finding.of([a_case(1.0 + 1e-12)]).document()["counterexample"] is None
    assert Finding.of([]).holds is None
    assert Finding.of([a_case(inf)]).document()["worst"] is None


# Sharing incentive


def test_alone_on_a_slice_is_the_closed_form_where_the_number_of_agents_stands_still() -> None:
    slices_of_eight = sharing_incentive.EqualSlices.of([(0.0, 100.0)] * 8, 4, 1)
    assert slices_of_eight.alone(0.0, 30.0) == pytest.approx(60.0)
    assert sharing_incentive.EqualSlices.of([(0.0, 100.0)] * 8, 4, 2).alone(0.0, 20.0) == pytest.approx(80.0)
    assert sharing_incentive.EqualSlices.of([(0.0, 100.0)] * 2, 4, 1).alone(0.0, 30.0) == pytest.approx(30.0), (
        "no faster than a whole GPU"
    )


def test_alone_on_a_slice_follows_the_number_of_agents() -> None:
    spans = [(0.0, 10.0)] * 6 + [(10.0, 50.0)] * 8
    assert sharing_incentive.EqualSlices.of(spans, 4, 1).alone(0.0, 10.0) == pytest.approx(10.0 + (10.0 - 10 * 4 / 6) / 0.5)
    assert sharing_incentive.EqualSlices.of(spans, 4, 1).alone(40.0, 15.0) == pytest.approx(10.0 + 10.0), (
        "nobody else is left after 50 s"
    )


def test_the_second_of_two_equal_jobs_in_a_queue_is_worse_off_than_on_half_a_gpu() -> None:
    run = run_instance(an_instance(a_job("first", seconds=10), a_job("second", seconds=10)))
    found = by_agent(list(sharing_incentive.cases_on_slices(run)))
    assert found["first"].measured == pytest.approx(10 / 15)
    assert found["second"].measured == pytest.approx(20 / 15)
    assert found["second"].bound == pytest.approx(17 / 15), "two turns of a second"
    assert not found["second"].holds


def test_sharing_incentive_is_rho_where_the_number_of_jobs_stands_still() -> None:
    run = run_instance(an_instance(*(a_job(f"{place}", gpus=2, seconds=100) for place in range(2)), cluster="gpu:4"))
    measured = [case.measured for case in sharing_incentive.cases_on_slices(run)]
    assert measured == pytest.approx(rho(run.history, run.history.ended_jobs()).tolist())
    assert measured == pytest.approx([1.0, 1.0])


def test_a_tenant_is_compared_with_itself_on_a_slice_of_whole_gpus() -> None:
    jobs = [of("long", a_job("l", seconds=100)), of("short", a_job("s", at=1, seconds=10))]
    found = by_agent(
        list(sharing_incentive.tenant_cases(run_instance(an_instance(*jobs, cluster="gpu:2", agent_kind=AgentKind.TENANTS))))
    )
    assert found["short"].data["slice"] == "gpu:1@1"
    assert found["short"].measured == found["long"].measured == 1.0


def test_where_a_slice_would_have_no_gpu_the_whole_cluster_is_slower() -> None:
    jobs = [of("a", a_job("a", seconds=10)), of("b", a_job("b", seconds=10))]
    found = by_agent(list(sharing_incentive.tenant_cases(run_instance(an_instance(*jobs, agent_kind=AgentKind.TENANTS)))))
    assert found["a"].data["slice"] == "gpu:1@1 at 1/2 of its speed"
    assert (found["a"].measured, found["b"].measured) == (0.5, 1.0)


def test_who_could_not_run_on_its_slice_has_the_whole_cluster_slower() -> None:
    """A slice of two K80s is wide enough, and of no use to a gang that must have V100s."""
    wide = a_job("w", gpus=2, seconds=100)
    only = of("a", replace(wide, job=replace(wide.job, gpu_types=("v100",))))
    instance = an_instance(only, of("b", a_job("n", seconds=10)), cluster="v100:2,k80:4", agent_kind=AgentKind.TENANTS)
    found = by_agent(list(sharing_incentive.tenant_cases(run_instance(instance))))
    assert found["a"].data["slice"] == "v100:2@2,k80:4 at 1/2 of its speed"
    assert found["a"].measured == 0.5


def test_alone_the_window_closes_at_the_same_moment() -> None:
    """`b` comes after 60 of 100 s and needs 1000: it is watched for 40 s, together and alone."""
    jobs = [of("a", a_job("a", seconds=1000)), of("b", a_job("b", at=60, seconds=1000))]
    found = by_agent(
        list(
            sharing_incentive.tenant_cases(
                run_instance(an_instance(*jobs, cluster="gpu:2", until=100.0, agent_kind=AgentKind.TENANTS))
            )
        )
    )
    assert (found["b"].data["seconds"], found["b"].data["alone_seconds"]) == (40.0, 40.0)


def test_a_slice_has_its_part_of_every_type_or_there_is_none() -> None:
    cluster = parse_cluster("v100:8,k80:6")
    assert str(sharing_incentive.slice_of(cluster, 3)) == "v100:2@2,k80:2@2"
    assert sharing_incentive.slice_of(cluster, 7) is None


# Envy


def bundles(held: list[list[float]], speedups: list[float], demand: float = 100.0) -> Bundles:
    """What tenants hold of a slow and a fast type for one second."""
    rows = np.array(held)[:, :, None]
    return Bundles(
        agents=tuple("abcdef"[: len(held)]),
        seconds=np.ones(1),
        held=rows,
        demand=np.full((len(held), 1), demand),
        active=np.full(1, float(len(held))),
        worth=np.array([[1 / speedup, 1.0] for speedup in speedups]),
        mix=np.array([0.5, 0.5]),
        gpus=24,
    )


@pytest.mark.parametrize("price", [1.0, 1.2, 2.0, 5.9, 6.0, 7.0])
def test_the_worth_of_bundles_says_who_gains_by_a_trade(price: float) -> None:
    """A fast GPU of the first for `price` slow ones of the second (acceptance 28)."""
    before, after = bundles([[4, 4], [4, 4]], [1.2, 6.0]), bundles([[4 + price, 3], [4 - price, 5]], [1.2, 6.0])
    gains = [float(after.value(who, who)[0] - before.value(who, who)[0]) for who in (0, 1)]
    assert (min(gains) > 1e-9) is both_gain(price, buyer=6.0, seller=1.2)


def test_the_worth_of_bundles_is_that_of_the_worked_trades() -> None:
    """Acceptance 29: K80-equivalents 8.8 → 10.4, 28 → 36, 12 → 13.6."""
    speedups = [1.2, 6.0, 2.0]
    after, _ = trade(dict.fromkeys(range(3), (4.0, 4.0)), dict(enumerate(speedups)), slow=0, fast=1)
    held = bundles([list(after[place]) for place in range(3)], speedups)
    equivalents = [float(held.value(who, who)[0]) * speedup for who, speedup in enumerate(speedups)]
    assert equivalents == pytest.approx([10.4, 36.0, 13.6])
    assert [float(held.fair(who)[0]) * speedup for who, speedup in enumerate(speedups)] == pytest.approx([8.8, 28.0, 12.0])


def test_envy_may_remain_after_a_trade() -> None:
    """Acceptance 30: the third, who had .34 to begin with, would rather have what the second bought."""
    held = bundles([[1, 0.1908], [0, 0.4125], [0, 0.3967]], [4.0, 6.0, 8.0])
    value = [[float(held.value(to, of)[0]) for of in range(3)] for to in range(3)]
    assert value[2][1] > value[2][2]
    assert value[0][0] == max(value[0])
    assert value[1][1] == max(value[1])


def test_nobody_values_more_gpus_than_its_jobs_can_use() -> None:
    held = bundles([[0, 1], [0, 8]], [2.0, 2.0], demand=1.0)
    assert float(held.value(0, 1)[0]) == float(held.value(0, 0)[0]) == 1.0


def test_who_waits_envies_who_runs_by_what_it_would_gain() -> None:
    """Two jobs on one GPU for 100 s: an equal slice is 50 s, and the second has got nothing."""
    run = run_instance(an_instance(a_job("first", seconds=1000), a_job("second", seconds=1000), until=100.0))
    found = by_agent(list(envy.cases(run)))
    assert found["second"].measured == pytest.approx(2.0)
    assert found["second"].bound == pytest.approx(2 * 1.0 / 50), "two turns of a second"
    assert found["first"].measured == pytest.approx(-2.0)


def test_agents_that_hardly_met_are_not_compared() -> None:
    run = run_instance(an_instance(a_job("first", seconds=3), a_job("second", at=1, seconds=3)))
    assert list(envy.cases(run)) == []


# Pareto efficiency


def test_equal_slices_can_be_improved_upon_for_everybody_and_max_min_shares_cannot() -> None:
    """Acceptance 2: in the running example everybody can be 1/11 faster than isolated."""
    size, gpus = np.ones(3), np.ones(2)
    isolated = G.mean(axis=1) * 2 / 3
    gain, better = TimeShares(G, size, gpus, isolated).better()
    assert (better >= isolated - 1e-6).all()
    assert gain == pytest.approx(float(np.sum((better - isolated) / G.max(axis=1))))
    assert gain > 0.09 * float(np.sum(isolated / G.max(axis=1)))
    shares = np.array([[5, 0], [5, 1], [1, 10]]) / 11
    assert TimeShares(G, size, gpus, (G * shares).sum(axis=1)).better()[0] == pytest.approx(0.0, abs=1e-6)


def test_equal_slices_cannot_be_improved_upon_where_types_are_alike() -> None:
    """Acceptance 3 and 16: blind to types, isolated is the best there is, and everybody has 2/3 of a GPU."""
    assert TimeShares(np.ones((3, 2)), np.ones(3), np.ones(2), np.full(3, 2 / 3)).better()[0] == pytest.approx(0.0, abs=1e-6)


def a_moment(speed: list[list[float]], held: list[int], gpus: list[int], gang: list[int] | None = None) -> TypeAssignment:
    return TypeAssignment(np.array(speed), np.array(gang or [1] * len(held)), np.array(gpus), np.array(held))


def test_two_jobs_on_each_others_types_are_found() -> None:
    gain, better = a_moment([[4.0, 1.0], [2.0, 2.0]], [1, 0], [1, 1]).better()
    assert (gain, better.tolist()) == (0.75, [0, 1])


def test_an_idle_gpu_is_found_only_if_a_whole_gang_can_use_it() -> None:
    assert a_moment([[1.0], [1.0]], [0, WAITS], [3], [1, 2]).better()[0] == 1.0
    assert a_moment([[1.0], [1.0]], [0, WAITS], [2], [1, 2]).better()[0] == 0.0


def test_nobody_is_slowed_down_for_a_gain_of_others() -> None:
    """The first would lose by half of what it has, and the second would gain five times that."""
    assert a_moment([[2.0, 1.0], [6.0, 1.0]], [0, 1], [1, 1]).better()[0] == 0.0


@given(st.integers(0, 10_000))
def test_an_integer_program_finds_what_trying_everything_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    jobs, types = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    speed = np.round(rng.uniform(0, 5, (jobs, types)), 1)
    gang, gpus, held = rng.integers(1, 3, jobs), rng.integers(1, 5, types), np.full(jobs, WAITS)
    left = gpus.copy()
    for job in range(jobs):
        kind = int(rng.integers(-1, types))
        if kind >= 0 and speed[job, kind] > 0 and gang[job] <= left[kind]:
            held[job], left[kind] = kind, left[kind] - gang[job]
    moment = TypeAssignment(speed, gang, gpus, held)
    options = moment.options()
    values = [moment.value(find(moment, options)) for find in (by_enumeration, by_integer_program)]
    assert values[0] == pytest.approx(values[1])
    assert moment.better()[0] >= -1e-12


def test_a_job_that_is_left_on_a_slow_gpu_is_seen_moment_by_moment() -> None:
    """`a` is done on the V100 after 10 s; `b` stays on the K80 for 100 s although it is 4 times as fast on the V100."""
    run = run_instance(a_mixed_instance("fifo", {"a": 40.0, "b": 100.0}, {"a": 4.0, "b": 4.0}))
    (case,) = pareto.cases_at_moments(run)
    assert case.measured == pytest.approx(0.75 * 90 / (10 + 100))
    assert case.bound == pytest.approx(2 / 55), "of lives of 55 s on average"
    assert "b ran on k80 and could have run on v100" in case.text
    assert not case.holds


def test_shares_that_others_would_better_are_seen_in_the_long() -> None:
    """Each has what it can use less of: 1 + 1 steps/s, where 4 + 1 are to be had."""
    run = run_instance(a_mixed_instance("fifo", {"slow": 1e6, "fast": 1e6}, {"slow": 1.0, "fast": 4.0}, until=100.0))
    (case,) = pareto.cases_of_shares(run)
    assert case.measured == pytest.approx((4.0 - 1.0) / 4.0 / 2)
    assert case.data["could_have"] == pytest.approx([1.0, 4.0])
