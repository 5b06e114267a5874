"""Every policy of the catalogue keeps the laws that `poise check-policy` holds any policy to, and its claims."""

import pytest

from poise.lab.conformance.check import check_policy
from poise.lab.conformance.laws import name_of
from poise.lab.conformance.worlds import odd_worlds, random_world
from poise.scheduler.policies.catalogue import POLICIES, PolicyProperty

LONG = {
    "gandiva-fair",
    "finish-time",
    "min-cost",
    "hierarchical",
    "strategy-proof",
    "max-throughput",
    "max-min",
    "hare",
    "stride",
}
"""Policies that take their time."""
NOT_CHECKED = {name_of(PolicyProperty.DEADLINES), name_of(PolicyProperty.BOUND)}
"""Claims that have tests of their own."""


@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.slow if each in LONG else ()) for each in POLICIES])
def test_a_policy_of_the_catalogue_keeps_the_laws_and_its_claims(name: str) -> None:
    report = check_policy(name, worlds=[*odd_worlds(), *map(random_world, range(2 if name in LONG else 6))])
    assert not report.broken, str(report)
    assert {each.law for each in report.verdicts if each.holds is None} <= NOT_CHECKED
    assert all(each.worlds > 0 for each in report.verdicts if each.holds)
