"""What policies promise to those who share a cluster: parts of its GPUs over time, while all have enough to run.

A policy divides among jobs, among tenants, or promises nothing: then a weight entitles to nothing. Which it is
stands in its listing (`Listing.promise`), a function of the values of its parameters, which may state more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar


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


@dataclass(frozen=True)
class Promise:
    """What a policy promises. This base promises nothing.

    text   a sentence about the policy: `divides ...`
    """

    text: ClassVar[str] = "promises no shares"

    def parts(self, tenants: Claimants, gpus: int) -> dict[str, float] | None:
        """The part of the cluster's `gpus` that each tenant is promised; None: this kind of policy promises none."""
        return None

    def stated_by(self, tenant: str) -> str | None:
        """The policy's parameter that states this tenant's part whatever its weight; None: its weight counts."""
        return None


@dataclass(frozen=True)
class AmongJobs(Promise):
    """Every job has its part, by its weight, of which its tenant's is a factor; a tenant has what its jobs have."""

    text: ClassVar[str] = "divides among jobs by weight, so a tenant is entitled to what its jobs are"

    def parts(self, tenants: Claimants, gpus: int) -> dict[str, float]:
        """In proportion to what the tenants' jobs weigh."""
        return _divided({name: each.job_weight for name, each in tenants.items()})


@dataclass(frozen=True)
class AmongJobsAlike(Promise):
    """Every job has the same part, whatever it weighs; a tenant has what its jobs have."""

    text: ClassVar[str] = "gives all jobs equal parts whatever they weigh, so a tenant is entitled to what its jobs are"

    def parts(self, tenants: Claimants, gpus: int) -> dict[str, float]:
        """In proportion to how many jobs the tenants have."""
        return _divided({name: float(each.jobs) for name, each in tenants.items()})


@dataclass(frozen=True)
class AmongTenants(Promise):
    """Every tenant that has jobs has its part, by its weight times a factor that the policy's parameters state.

    named    factors of some tenants;  listed: the same in the order of first submission
    """

    named: Mapping[str, float] = field(default_factory=dict)
    listed: tuple[float, ...] = ()
    text: ClassVar[str] = "divides among tenants by weight"

    def parts(self, tenants: Claimants, gpus: int) -> dict[str, float]:
        """By weight, among those who have jobs."""
        factors = dict(zip(tenants, self.listed, strict=False)) | dict(self.named)
        return _divided({name: each.weight * factors.get(name, 1.0) * bool(each.jobs) for name, each in tenants.items()})


@dataclass(frozen=True)
class Quotas(Promise):
    """Some tenants have a stated number of GPUs; all others that were met share by weight what is left."""

    stated: Mapping[str, float] = field(default_factory=dict)
    text: ClassVar[str] = "gives tenants quotas, which those without a stated one divide by weight"

    def parts(self, tenants: Claimants, gpus: int) -> dict[str, float]:
        """Quotas, also of tenants without jobs now: their GPUs are kept for them, and lent meanwhile."""
        left = max(gpus - sum(self.stated.values()), 0.0) / gpus
        others = _divided({name: each.weight for name, each in tenants.items() if name not in self.stated})
        return {name: self.stated[name] / gpus if name in self.stated else left * others[name] for name in tenants}

    def stated_by(self, tenant: str) -> str | None:
        """The quotas of tenants that have one."""
        return "quotas" if tenant in self.stated else None


def always(promise: Promise) -> Callable[..., Promise]:
    """The same promise whatever the values of a policy's parameters."""
    return lambda **_parameters: promise


no_shares, among_jobs, among_jobs_alike = map(always, (Promise(), AmongJobs(), AmongJobsAlike()))


def _divided(weights: Mapping[str, float]) -> dict[str, float]:
    """Parts of 1 in proportion; all 0 if the weights sum to 0."""
    whole = sum(weights.values())
    return {name: weight / whole if whole else 0.0 for name, weight in weights.items()}
