"""What the catalogue claims of a policy, held against what was measured.

Claims are about a policy by its name alone, on built-in instances, with the usual settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poise.assembly import Experiment
from poise.audit.findings import Finding, Property
from poise.audit.lying import Kind
from poise.core.settings import Settings
from poise.policies.catalogue import POLICIES, Claim

AUDITED: Mapping[Claim, tuple[Property, Kind | None]] = {
    Claim.SHARING_INCENTIVE: (Property.SHARING_INCENTIVE, None),
    Claim.NO_ENVY: (Property.ENVY_FREENESS, None),
    Claim.PARETO: (Property.PARETO_EFFICIENCY, None),
    Claim.NO_INFLATION: (Property.STRATEGY_PROOFNESS, Kind.BUYERS_INFLATION),
    Claim.NO_STARVATION: (Property.STARVATION_FREEDOM, None),
}
"""The property that each claim is about, and the kind of its cases, if not all of them."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claim, and what was found about it."""

    claim: Claim
    about: Property
    found: Finding

    @property
    def holds(self) -> bool:
        """Nothing that was measured contradicts it."""
        return self.found.holds is not False

    @property
    def text(self) -> str:
        """The counterexample; empty if there is none."""
        case = self.found.counterexample
        return "" if case is None else case.text

    def document(self) -> dict[str, Any]:
        """As JSON."""
        measured = self.found.document()
        return {"claim": str(self.claim), "property": str(self.about), "measured": measured["worst"], "holds": self.holds}


def claimed(experiment: Experiment, found: Mapping[Property, Finding]) -> list[Claimed]:
    """The claims that these findings are about; none for a policy with parameters or in other than the usual settings."""
    listing = POLICIES.get(experiment.policy)
    usual = Experiment(experiment.cluster)
    as_usual = (experiment.settings, experiment.placement, experiment.truth) == (Settings(), usual.placement, usual.truth)
    if listing is None or not as_usual:
        return []
    answers = [(claim, *AUDITED[claim]) for claim in listing.claims if claim in AUDITED]
    return [Claimed(claim, about, _found(found[about], kind)) for claim, about, kind in answers if about in found]


def _found(finding: Finding, kind: Kind | None) -> Finding:
    return finding if kind is None else finding.parts[kind]
