"""Weights of tenants, under the policies that divide among tenants: only their ratios count, and more is never less."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_cluster, a_job, simulate
from tests.workloads import overdrawn, throughput, workloads

from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.action import Action
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.workload import Workload
from poise.scheduler.policies.gandiva_fair.entitlements import water_filled
from poise.scheduler.policies.gavel import Hierarchical
from poise.scheduler.policies.shares import inverse, proportional
from poise.scheduler.solve.water_filling import Inside

TENANTS = 3
weights = st.lists(st.sampled_from((0.25, 0.5, 1.0, 2.0, 3.0, 10.0)), min_size=TENANTS, max_size=TENANTS).map(np.array)
insides = st.sampled_from(Inside)


@st.composite
def owned(draw: st.DrawFn) -> Workload:
    """Jobs of a few tenants."""
    workload = draw(workloads())
    tenants = draw(st.lists(st.integers(0, TENANTS - 1), min_size=workload.jobs, max_size=workload.jobs))
    return replace(workload, tenant=np.array(tenants))


def levels(policy: Hierarchical, workload: Workload) -> Floats:
    allocation, _ = policy.allocate(workload, None)
    assert overdrawn(workload, allocation) < 1e-9
    return throughput(workload, allocation) * inverse(proportional(workload))


@given(owned(), insides)
def test_equal_weights_of_tenants_are_as_good_as_none(workload: Workload, inside: Inside) -> None:
    policy = Hierarchical(inside)
    none, ones = (policy.allocate(each, None)[0] for each in (workload, replace(workload, tenant_weight=np.ones(TENANTS))))
    assert (none.share == ones.share).all()
    alike = replace(workload, tenant_weight=np.full(TENANTS, 3.0))
    assert levels(policy, alike) == pytest.approx(levels(policy, workload), abs=1e-4)


@given(owned(), insides, weights)
def test_only_ratios_of_weights_count(workload: Workload, inside: Inside, given_weights: Floats) -> None:
    policy, weighted = Hierarchical(inside), replace(workload, tenant_weight=given_weights)
    before = levels(policy, weighted)
    assert levels(policy, replace(workload, tenant_weight=2.0 * given_weights)) == pytest.approx(before, abs=1e-4)
    scaled = workload.weight * given_weights[workload.tenant]  # as a service does; inside a tenant it cancels out
    assert levels(policy, replace(weighted, weight=scaled)) == pytest.approx(before, abs=1e-4)


@given(owned(), insides, weights, st.integers(0, TENANTS - 1), st.sampled_from((1.5, 4.0)))
def test_more_weight_is_never_less_for_a_tenant(
    workload: Workload, inside: Inside, given_weights: Floats, tenant: int, factor: float
) -> None:
    def of_tenant(weight: Floats) -> float:
        got = levels(Hierarchical(inside), replace(workload, tenant_weight=weight))
        return float((workload.gang * got)[workload.tenant == tenant].sum())

    more = np.where(np.arange(TENANTS) == tenant, factor, 1.0) * given_weights
    assert of_tenant(more) >= of_tenant(given_weights) - 1e-4


@given(weights, st.integers(0, TENANTS - 1), st.lists(st.integers(0, 20), min_size=TENANTS, max_size=TENANTS))
def test_more_tickets_are_never_less_for_a_tenant(tickets: Floats, tenant: int, demand: Sequence[int]) -> None:
    asked = {each: float(gpus) for each, gpus in enumerate(demand)}

    def share(of_tenants: Floats) -> float:
        return water_filled(asked, dict(enumerate(of_tenants.tolist())), 16.0)[tenant]

    more = np.where(np.arange(TENANTS) == tenant, 4.0, 1.0) * tickets
    assert share(more) >= share(tickets) - 1e-9


def played(jobs: Sequence[TraceJob], policy: str, weight: dict[str, float]) -> list[tuple[Action, ...]]:
    """What is decided if tenants weigh so much: all that their jobs say of it, and nothing else."""
    weighted = [replace(each, job=replace(each.job, tenant_weight=weight[each.job.tenant])) for each in jobs]
    return [entry.actions for entry in simulate(weighted, policy, a_cluster("v100:4,k80:4")).entries]


some_jobs = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.sampled_from((1, 2, 4)), st.sampled_from((60.0, 900.0))),
    min_size=4,
    max_size=14,
).map(
    lambda rows: [
        replace(each, job=replace(each.job, tenant=tenant))
        for i, (tenant, at, gpus, seconds) in enumerate(rows)
        for each in [a_job(f"j{i}", at=60.0 * at, gpus=gpus, seconds=seconds)]
    ]
)


@pytest.mark.parametrize("policy", ["gandiva-fair", "philly"])
@given(jobs=some_jobs)
def test_the_same_weight_for_everybody_changes_no_decision(policy: str, jobs: list[TraceJob]) -> None:
    ones = played(jobs, policy, dict.fromkeys("abc", 1.0))
    assert played(jobs, policy, dict.fromkeys("abc", 4.0)) == ones
    assert ones == [entry.actions for entry in simulate(jobs, policy, a_cluster("v100:4,k80:4")).entries]


@pytest.mark.slow
def test_a_weight_of_a_tenant_is_as_good_as_its_tickets() -> None:
    jobs = [
        replace(each, job=replace(each.job, tenant="abc"[i % 3]))
        for i, each in enumerate(a_job(f"j{i}", gpus=1 + i % 2, seconds=3000.0) for i in range(18))
    ]
    weighted = played(jobs, "gandiva-fair", {"a": 2.0, "b": 1.0, "c": 0.5})
    assert weighted == played(jobs, "gandiva-fair:tickets=a:2/b:1/c:0.5", dict.fromkeys("abc", 1.0))
    assert weighted == played(jobs, "gandiva-fair:tickets=a:0.5/b:1/c:0.5", {"a": 4.0, "b": 1.0, "c": 1.0})
    assert weighted != played(jobs, "gandiva-fair", dict.fromkeys("abc", 1.0))
