"""The rows of the catalogue that answer with shares of time."""

from poise.policies import (
    allox,
    fifo_fastest,
    finish_time,
    hierarchical,
    isolated,
    makespan,
    max_min,
    max_throughput,
    min_cost,
    proportional,
    shares,
    sjf,
    strategy_proof,
)
from poise.policies.listing import Claim, Family, Listing, Parameter, choice, fraction, weights

_GAVEL = "Narayanan et al., Gavel, OSDI'20"
_THEN = Parameter(
    "then",
    "throughput",
    "what becomes of what the worst-off jobs cannot use: throughput, water-filling or nothing",
    choice(max_min.Then),
)
_SECOND = Parameter("then", "throughput", "what becomes of the rest: throughput, or nothing", choice(shares.Second))

SHARES = (
    Listing(
        "max-min",
        Family.SHARE,
        "the worst-off job as well off as can be, by effective throughput",
        f"{_GAVEL} §4.1",
        (Claim.NO_DURATIONS, Claim.WORK_CONSERVING),
        max_min.MaxMin,
        (
            Parameter("norm", "proportional", "what a job's throughput is measured by", choice(shares.Norm)),
            _THEN,
        ),
    ),
    Listing(
        "finish-time",
        Family.SHARE,
        "the smallest worst ratio of finish time to finish time on an n-th of the cluster",
        f"Mahajan et al., Themis, NSDI'20; as a program: {_GAVEL} §4.2",
        (Claim.WORK_CONSERVING,),
        finish_time.FinishTime,
        (_SECOND,),
    ),
    Listing(
        "makespan",
        Family.SHARE,
        "the last job ends as early as can be",
        f"{_GAVEL} §4.2",
        (Claim.WORK_CONSERVING,),
        makespan.Makespan,
        (_SECOND,),
    ),
    Listing(
        "max-throughput",
        Family.SHARE,
        "the most throughput in total; promises nobody anything",
        f"{_GAVEL} §4.2",
        (Claim.NO_DURATIONS, Claim.WORK_CONSERVING),
        max_throughput.MaxThroughput,
        (
            Parameter(
                "count", "normalised", "steps relative to a fair share (normalised), or raw steps", choice(shares.Count)
            ),
        ),
    ),
    Listing(
        "min-cost",
        Family.SHARE,
        "the most throughput for the money, deadlines kept",
        f"{_GAVEL} §4.2",
        (Claim.DEADLINES,),
        min_cost.MinCost,
        (
            Parameter("form", "ratio", "ratio: throughput ÷ cost; sum: Σ throughput ÷ price", choice(min_cost.Form)),
            Parameter("count", "raw", "raw steps, or normalised", choice(shares.Count)),
        ),
    ),
    Listing(
        "hierarchical",
        Family.SHARE,
        "fair between tenants, and inside each by fairness or arrival: water-filling",
        f"{_GAVEL} §4.3",
        (Claim.NO_DURATIONS, Claim.WORK_CONSERVING),
        hierarchical.Hierarchical,
        (
            Parameter("inside", "fair", "fair or fifo among the jobs of a tenant", choice(hierarchical.Inside)),
            Parameter("weights", "1", "of the tenants in order of first submission; 1 for those not listed", weights),
        ),
    ),
    Listing(
        "isolated",
        Family.SHARE,
        "an n-th of every GPU type for each of n jobs",
        f"{_GAVEL}: the baseline of sharing incentive",
        (Claim.NO_DURATIONS, Claim.WORK_CONSERVING),
        isolated.Isolated,
    ),
    Listing(
        "proportional",
        Family.SHARE,
        "time on every type in proportion to how many GPUs there are of it",
        f"{_GAVEL}: the normaliser of its code",
        (Claim.NO_DURATIONS, Claim.WORK_CONSERVING),
        proportional.Proportional,
    ),
    Listing(
        "strategy-proof",
        Family.SHARE,
        "proportional fairness with discounts that make lying about speeds useless",
        f"Cole et al., EC'13; {_GAVEL}'s code",
        (Claim.NO_DURATIONS, Claim.WORK_CONSERVING),
        strategy_proof.StrategyProof,
    ),
    Listing(
        "fifo-fastest",
        Family.SHARE,
        "arrival order, each job on its fastest free type; the head blocks",
        f"{_GAVEL} §4.2",
        (Claim.NO_DURATIONS, Claim.IN_ORDER),
        fifo_fastest.FifoFastest,
        (
            Parameter(
                "sticky",
                "on",
                "a running job stays where it is (on), or moves to what comes free",
                choice(fifo_fastest.Sticky),
            ),
        ),
    ),
    Listing(
        "sjf",
        Family.SHARE,
        "shortest job first, each on its fastest free type, preemptive",
        f"{_GAVEL} §4.2",
        (Claim.WORK_CONSERVING,),
        sjf.Sjf,
    ),
    Listing(
        "allox",
        Family.SHARE,
        "least average completion time by matching jobs to machines and positions",
        "Le et al., AlloX, EuroSys'20",
        (Claim.NO_PREEMPTION,),
        allox.AlloX,
        (Parameter("alpha", "1", "part of the waiting jobs that is looked at, by arrival", fraction),),
    ),
)
