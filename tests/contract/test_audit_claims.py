"""What the catalogue claims of those who share a cluster is what an audit measures."""

import pytest

from poise.lab.audit.audit import AUDITED, audit, built_in_tasks, check_claims
from poise.lab.experiment import Experiment
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.policies.catalogue import POLICIES, PolicyProperty

LONG = {"gandiva-fair", "strategy-proof"}
"""Policies that take their time over what they claim."""

CLAIMS = [
    pytest.param(name, claim, marks=pytest.mark.slow if name in LONG else ())
    for name, listing in POLICIES.items()
    for claim in listing.claims
    if claim in AUDITED
]


@pytest.mark.parametrize(("name", "claim"), CLAIMS)
def test_a_claim_of_the_catalogue_is_what_the_audit_measures(name: str, claim: PolicyProperty) -> None:
    experiment = Experiment(parse_cluster("gpu:1"), name)
    about, kind = AUDITED[claim]
    findings = audit(built_in_tasks(experiment), [about], [] if kind is None else [kind])
    (answer,) = (each for each in check_claims(experiment, findings) if each.claim is claim)
    assert answer.found.cases > 0
    assert answer.holds, answer.text
