"""What policies promise to those who share a cluster: parts of its GPUs over time, while all have enough to run.

A policy divides among jobs, among tenants, or promises nothing: then no weight entitles anybody to anything. Which it is
stands in the catalogue (`Listing.promise`), with the parameters that state more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Claimant:
    """A tenant: its weight, and of its jobs that run or wait how many there are, and what they weigh in all.

    A job's weight has its tenant's as a factor.
    """

    weight: float = 1.0
    jobs: int = 0
    job_weight: float = 0.0


Claimants = Mapping[str, Claimant]
"""All tenants that were met, in the order of their first submission."""


class Promise(Protocol):
    """What a policy promises."""

    @property
    def text(self) -> str:
        """A sentence about the policy: `divides ...`."""

    def parts(self, tenants: Claimants, gpus: int) -> dict[str, float] | None:
        """The part of so many GPUs that each tenant is promised; None: no policy of this kind promises any."""


@dataclass(frozen=True, slots=True)
class NoShares:
    """No tenant is promised a share."""

    text: str = "promises no shares"

    def parts(self, tenants: Claimants, gpus: int) -> None:
        """None at all."""


@dataclass(frozen=True, slots=True)
class AmongJobs:
    """Every job has its part: by its weight, of which its tenant's is a factor."""

    text: str = "divides among jobs by weight, so a tenant is entitled to what its jobs are"

    def parts(self, tenants: Claimants, gpus: int) -> dict[str, float]:
        """Of each tenant, what its jobs have together."""
        return _divided({name: each.job_weight for name, each in tenants.items()})


@dataclass(frozen=True, slots=True)
class AmongJobsAlike:
    """Every job has the same part, whatever it weighs."""

    text: str = "gives all jobs equal parts whatever they weigh, so a tenant is entitled to what its jobs are"

    def parts(self, tenants: Claimants, gpus: int) -> dict[str, float]:
        """Of each tenant, what its jobs have together."""
        return _divided({name: float(each.jobs) for name, each in tenants.items()})


@dataclass(frozen=True, slots=True)
class AmongTenants:
    """Every tenant that has jobs has its part, by its weight times what the policy states.

    named    factors of some tenants;  listed: the same in the order of first submission
    """

    named: Mapping[str, float] = field(default_factory=dict)
    listed: tuple[float, ...] = ()
    text: str = "divides among tenants by weight"

    def parts(self, tenants: Claimants, gpus: int) -> dict[str, float]:
        """By weight, among those who have jobs."""
        factors = dict(zip(tenants, self.listed, strict=False)) | dict(self.named)
        return _divided({name: each.weight * factors.get(name, 1.0) * bool(each.jobs) for name, each in tenants.items()})


@dataclass(frozen=True, slots=True)
class Quotas:
    """Some tenants have so many GPUs; all others that were met share by weight what is left."""

    stated: Mapping[str, float] = field(default_factory=dict)
    text: str = "gives tenants quotas, which those without a stated one divide by weight"

    def parts(self, tenants: Claimants, gpus: int) -> dict[str, float]:
        """Quotas, also of those who have no jobs now: they are kept for them, and lent."""
        left = max(gpus - sum(self.stated.values()), 0.0) / gpus
        others = _divided({name: each.weight for name, each in tenants.items() if name not in self.stated})
        return {name: self.stated[name] / gpus if name in self.stated else left * others[name] for name in tenants}


def no_shares(**_parameters: Any) -> Promise:  # noqa: ANN401 - whatever a policy takes
    """Of a policy that promises nothing."""
    return NoShares()


def among_jobs(**_parameters: Any) -> Promise:  # noqa: ANN401
    """Of a policy that divides among jobs by weight."""
    return AmongJobs()


def among_jobs_alike(**_parameters: Any) -> Promise:  # noqa: ANN401
    """Of a policy that does not look at weights."""
    return AmongJobsAlike()


def _divided(weights: Mapping[str, float]) -> dict[str, float]:
    """Parts of 1 in proportion; all 0 if the weights sum to 0."""
    whole = sum(weights.values())
    return {name: weight / whole if whole else 0.0 for name, weight in weights.items()}
