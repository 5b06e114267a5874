"""What authors of policies import: the forms that a policy takes, what it sees of jobs, and how it is listed.

    from poise.policies import JobView, Order, PreemptionRule, Rank, Unfitting

A policy is an `Order` (a rank for each job), a `Planner` (a whole plan from a snapshot) or an `Allocator` (long-run shares
of time). docs/reference/policy-api.md describes each name, docs/tutorial/first-policy.md writes a policy from nothing.
"""

from typing import TYPE_CHECKING

from poise.engine.outside import spec_of
from poise.scheduler.model.action import Remark
from poise.scheduler.model.arithmetic import Bools, Floats, Ints
from poise.scheduler.model.errors import PolicyError, RequestError
from poise.scheduler.model.job_table import JobView, Snapshot
from poise.scheduler.model.plan import (
    Claim,
    Grain,
    JobEnding,
    Order,
    Plan,
    Planner,
    Policy,
    PreemptionRule,
    Rank,
    StopMode,
    TieBreak,
    Unfitting,
)
from poise.scheduler.model.speed import Estimate, Locality
from poise.scheduler.model.workload import Allocation, Allocator, Pairs, Workload
from poise.scheduler.policies.listing import (
    Capability,
    Family,
    Listing,
    Parameter,
    PolicyProperty,
    Traits,
    at_least_one,
    choice,
    fraction,
    number,
    portion,
    positive,
    positives,
    rising,
    whole_number,
)

if TYPE_CHECKING:
    from poise.lab.conformance.check import check_policy as check_policy

__all__ = [
    "Allocation",
    "Allocator",
    "Bools",
    "Capability",
    "Claim",
    "Estimate",
    "Family",
    "Floats",
    "Grain",
    "Ints",
    "JobEnding",
    "JobView",
    "Listing",
    "Locality",
    "Order",
    "Pairs",
    "Parameter",
    "Plan",
    "Planner",
    "Policy",
    "PolicyError",
    "PolicyProperty",
    "PreemptionRule",
    "Rank",
    "Remark",
    "RequestError",
    "Snapshot",
    "StopMode",
    "TieBreak",
    "Traits",
    "Unfitting",
    "Workload",
    "at_least_one",
    "check_policy",
    "choice",
    "fraction",
    "number",
    "portion",
    "positive",
    "positives",
    "rising",
    "spec_of",
    "whole_number",
]


def __getattr__(name: str) -> object:
    """`check_policy`, brought in only where it is wanted: it needs the simulator."""
    if name == "check_policy":
        from poise.lab.conformance.check import check_policy

        return check_policy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
