"""The rows of the catalogue that answer with shares of time."""

from typing import Any

from poise.scheduler.policies import (
    allox,
    finish_time,
    gavel,
    gavel_queues,
    min_cost,
    shares,
    strategy_proof,
)
from poise.scheduler.policies.listing import (
    Family,
    Listing,
    Parameter,
    PolicyClaim,
    Traits,
    choice,
    fraction,
    weights,
)
from poise.scheduler.policies.promises import AmongTenants, Promise, among_jobs, among_jobs_alike

_GAVEL = "Narayanan et al., Gavel, OSDI'20"
_THEN = Parameter(
    "then",
    "throughput",
    "what becomes of what the worst-off jobs cannot use: throughput, water-filling or nothing",
    choice(gavel.SecondaryObjective),
)
_SECOND = Parameter("then", "throughput", "what becomes of the rest: throughput, or nothing", choice(shares.SecondAim))


def _by_tenant(weights: tuple[float, ...] = (), **_parameters: Any) -> Promise:  # noqa: ANN401 - all that it takes
    return AmongTenants(listed=weights)


SHARES = (
    Listing(
        "max-min",
        Family.SHARE,
        "the worst-off job as well off as can be, by effective throughput",
        f"{_GAVEL} §4.1",
        (
            PolicyClaim.NO_DURATIONS,
            PolicyClaim.WORK_CONSERVING,
            PolicyClaim.SHARING_INCENTIVE,
            PolicyClaim.PARETO,
            PolicyClaim.NO_STARVATION,
        ),
        gavel.MaxMin,
        (
            Parameter("norm", "proportional", "what a job's throughput is measured by", choice(shares.Norm)),
            _THEN,
        ),
        promise=among_jobs,
        traits=Traits(
            optimises="the least effective throughput over jobs",
            fairness="max-min over throughput relative to a fair share",
            heterogeneity="chooses types by measured throughput",
            gang="whole, in rounds by how far behind its share",
            elasticity="none",
            verified="the worked examples, to 1e-6; the numbers of Gavel's code on its traces, within 5 %",
        ),
    ),
    Listing(
        "finish-time",
        Family.SHARE,
        "the smallest worst ratio of finish time to finish time on an n-th of the cluster",
        f"Mahajan et al., Themis, NSDI'20; as a program: {_GAVEL} §4.2",
        (PolicyClaim.WORK_CONSERVING, PolicyClaim.SHARING_INCENTIVE, PolicyClaim.PARETO, PolicyClaim.NO_STARVATION),
        finish_time.FinishTime,
        (_SECOND,),
        promise=among_jobs,
        traits=Traits(
            optimises="the worst finish-time ratio",
            fairness="max-min over finish time against an n-th of the cluster",
            heterogeneity="chooses types by measured throughput",
            gang="whole, in rounds by how far behind its share",
            elasticity="none",
            verified="the worked examples, to 1e-5; the numbers of Gavel's code on its traces, within 5 %",
        ),
    ),
    Listing(
        "makespan",
        Family.SHARE,
        "the last job ends as early as can be",
        f"{_GAVEL} §4.2",
        (PolicyClaim.WORK_CONSERVING, PolicyClaim.PARETO),
        gavel.Makespan,
        (_SECOND,),
        traits=Traits(
            optimises="the moment at which the last job ends",
            fairness="none: whoever ends last counts",
            heterogeneity="chooses types by measured throughput",
            gang="whole, in rounds by how far behind its share",
            elasticity="none",
            verified="the worked example, to 1e-6; the makespans of Gavel's code on its traces, within 1 %",
        ),
    ),
    Listing(
        "max-throughput",
        Family.SHARE,
        "the most throughput in total; promises nobody anything",
        f"{_GAVEL} §4.2",
        (PolicyClaim.NO_DURATIONS, PolicyClaim.WORK_CONSERVING, PolicyClaim.PARETO),
        gavel.MaxThroughput,
        (
            Parameter(
                "count", "normalised", "steps relative to a fair share (normalised), or raw steps", choice(shares.Count)
            ),
        ),
        traits=Traits(
            optimises="throughput in total",
            fairness="none",
            heterogeneity="chooses types by measured throughput",
            gang="whole, in rounds by how far behind its share",
            elasticity="none",
            verified="the worked example, raw and normalised; the numbers of Gavel's code on its traces, within 5 %",
        ),
    ),
    Listing(
        "min-cost",
        Family.SHARE,
        "the most throughput for the money, deadlines kept",
        f"{_GAVEL} §4.2",
        (PolicyClaim.DEADLINES,),
        min_cost.MinCost,
        (
            Parameter("form", "ratio", "ratio: throughput ÷ cost; sum: Σ throughput ÷ price", choice(min_cost.CostForm)),
            Parameter("count", "raw", "raw steps, or normalised", choice(shares.Count)),
        ),
        traits=Traits(
            optimises="throughput for the money",
            fairness="none; deadlines are kept where they can be",
            heterogeneity="chooses types by throughput and price",
            gang="whole, in rounds by how far behind its share",
            elasticity="none",
            verified="the worked ratios, to 1e-4; says so when a deadline cannot be met",
        ),
    ),
    Listing(
        "hierarchical",
        Family.SHARE,
        "fair between tenants, and inside each by fairness or arrival: water-filling",
        f"{_GAVEL} §4.3",
        (
            PolicyClaim.NO_DURATIONS,
            PolicyClaim.WORK_CONSERVING,
            PolicyClaim.SHARING_INCENTIVE,
            PolicyClaim.PARETO,
            PolicyClaim.NO_STARVATION,
        ),
        gavel.Hierarchical,
        (
            Parameter("inside", "fair", "fair or fifo among the jobs of a tenant", choice(gavel.Inside)),
            Parameter("weights", "1", "of the tenants in order of first submission; 1 for those not listed", weights),
        ),
        promise=_by_tenant,
        traits=Traits(
            optimises="the least share over tenants, then over their jobs",
            fairness="weighted max-min over tenants; fair or by arrival inside",
            heterogeneity="chooses types by measured throughput",
            gang="whole, in rounds by how far behind its share",
            elasticity="none",
            verified="the worked example in three variants; one tenant is lexicographic max-min",
        ),
    ),
    Listing(
        "isolated",
        Family.SHARE,
        "an n-th of every GPU type for each of n jobs",
        f"{_GAVEL}: the baseline of sharing incentive",
        (
            PolicyClaim.NO_DURATIONS,
            PolicyClaim.WORK_CONSERVING,
            PolicyClaim.SHARING_INCENTIVE,
            PolicyClaim.NO_ENVY,
            PolicyClaim.NO_STARVATION,
        ),
        gavel.IsolatedShares,
        promise=among_jobs_alike,
        traits=Traits(
            optimises="nothing: the baseline of sharing incentive",
            fairness="an n-th of every type for each job",
            heterogeneity="gives everybody the same mix of types",
            gang="whole, in rounds by how far behind its share",
            elasticity="none",
            verified="the same least share as max-min blind to types; the numbers of Gavel's code, within 0.5 %",
        ),
    ),
    Listing(
        "proportional",
        Family.SHARE,
        "time on every type in proportion to how many GPUs there are of it",
        f"{_GAVEL}: the normaliser of its code",
        (
            PolicyClaim.NO_DURATIONS,
            PolicyClaim.WORK_CONSERVING,
            PolicyClaim.SHARING_INCENTIVE,
            PolicyClaim.NO_ENVY,
            PolicyClaim.NO_STARVATION,
        ),
        gavel.Proportional,
        promise=among_jobs_alike,
        traits=Traits(
            optimises="nothing: the normaliser",
            fairness="time on every type by how many GPUs there are of it",
            heterogeneity="gives everybody the same mix of types",
            gang="whole, in rounds by how far behind its share",
            elasticity="none",
            verified="allocations are feasible in random worlds and do not look at speeds",
        ),
    ),
    Listing(
        "strategy-proof",
        Family.SHARE,
        "proportional fairness with discounts that make lying about speeds useless",
        f"Cole et al., EC'13; {_GAVEL}'s code",
        (PolicyClaim.NO_DURATIONS, PolicyClaim.WORK_CONSERVING, PolicyClaim.NO_ENVY, PolicyClaim.NO_INFLATION),
        strategy_proof.StrategyProof,
        promise=among_jobs,
        traits=Traits(
            optimises="the product of throughputs, less a discount",
            fairness="proportional fairness; lying about speeds gains nothing",
            heterogeneity="chooses types by stated throughput",
            gang="whole, in rounds by how far behind its share",
            elasticity="none",
            verified="the worked allocation and discounts, to 1e-3; no misreport on a grid gains",
        ),
    ),
    Listing(
        "fifo-fastest",
        Family.SHARE,
        "arrival order, each job on its fastest free type; the head blocks",
        f"{_GAVEL} §4.2",
        (PolicyClaim.NO_DURATIONS, PolicyClaim.IN_ORDER, PolicyClaim.NO_STARVATION),
        gavel_queues.FifoFastest,
        (
            Parameter(
                "sticky",
                "on",
                "a running job stays where it is (on), or moves to what comes free",
                choice(gavel_queues.Sticky),
            ),
        ),
        traits=Traits(
            optimises="speed of the first jobs",
            fairness="order of arrival",
            heterogeneity="each job on its fastest free type",
            gang="whole; the head blocks",
            elasticity="none",
            verified="the worked example; starts in order in random worlds",
        ),
    ),
    Listing(
        "sjf",
        Family.SHARE,
        "shortest job first, each on its fastest free type, preemptive",
        f"{_GAVEL} §4.2",
        (PolicyClaim.WORK_CONSERVING,),
        gavel_queues.Sjf,
        traits=Traits(
            optimises="average completion time, with durations known",
            fairness="none: long jobs may starve",
            heterogeneity="each job on its fastest free type",
            gang="whole, shortest first",
            elasticity="none",
            verified="no GPU idles that a gang could use, in random worlds",
        ),
    ),
    Listing(
        "allox",
        Family.SHARE,
        "least average completion time by matching jobs to machines and positions",
        "Le et al., AlloX, EuroSys'20",
        (PolicyClaim.NO_PREEMPTION,),
        allox.AlloX,
        (Parameter("alpha", "1", "part of the waiting jobs that is looked at, by arrival", fraction),),
        traits=Traits(
            optimises="average completion time, by matching",
            fairness="none, or arrival order by `alpha`",
            heterogeneity="chooses types by processing time and position",
            gang="whole; several GPUs count as one machine",
            elasticity="none",
            verified="the worked matrix, exactly; the matching against brute force",
        ),
    ),
)
