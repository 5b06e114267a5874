"""The rows of the catalogue that say exactly who gets which GPUs: auctions, trades, affinities, marginal gains, quotas."""

from typing import Any

from poise.scheduler.policies import gandiva, gandiva_emulated, gandiva_fair, hare, optimus, philly, themis
from poise.scheduler.policies.listing import (
    Family,
    Listing,
    Parameter,
    PolicyClaim,
    Traits,
    choice,
    count,
    equal_or_per_tenant,
    fraction,
    number,
    part,
    positive,
)
from poise.scheduler.policies.promises import AmongTenants, Promise, Quotas, among_jobs_alike

_PerTenant = tuple[tuple[str, float], ...]


def _by_tickets(tickets: _PerTenant = (), **_parameters: Any) -> Promise:  # noqa: ANN401 - all that it takes
    return AmongTenants(named=dict(tickets))


def _by_quotas(quotas: _PerTenant = (), **_parameters: Any) -> Promise:  # noqa: ANN401
    return Quotas(stated=dict(quotas))


MARKETS: tuple[Listing, ...] = (
    Listing(
        "gandiva",
        Family.MARKET,
        "nodes serve gangs of one size; turns of a minute under overload; pairs by trial, migration, growth",
        "Xiao et al., Gandiva, OSDI'18",
        (PolicyClaim.NO_DURATIONS, PolicyClaim.WORK_CONSERVING),
        gandiva.Gandiva,
        (
            Parameter("quantum", "60", "length of a turn in seconds, where more jobs share a node than fit on it", positive),
            Parameter("period", "300", "seconds between two looks around: pairs, migration, growth", positive),
            Parameter(
                "fragmented", "0.75", "a node in use with this part of its GPUs free is emptied, if possible", fraction
            ),
        ),
        traits=Traits(
            optimises="early feedback and GPU use",
            fairness="none: jobs of a node take turns",
            heterogeneity="blind: the fastest type with room",
            gang="whole gangs; turns together",
            elasticity="grows onto idle GPUs of the node, gives them back before anybody waits",
            verified="no pair while demand fits; a pair that loses is parted within a period; a shrink comes before a wait",
        ),
    ),
    Listing(
        "gandiva-fair",
        Family.MARKET,
        "tenants' tickets into GPU time: split stride, load balance, trade of fast GPUs for slow ones",
        "Chaudhary et al., Gandiva_fair, EuroSys'20",
        (PolicyClaim.NO_DURATIONS, PolicyClaim.NO_INFLATION),
        gandiva_fair.gandiva_fair,
        (
            Parameter("tickets", "equal", "tickets of tenants, alice:2/bob:1; 1 for those not named", equal_or_per_tenant),
            Parameter("quantum", "60", "length of a time slice in seconds", positive),
            Parameter(
                "division", "gang", "tickets of a tenant's jobs: by gang, or equal", choice(gandiva_fair.TicketDivision)
            ),
            Parameter("trade", "on", "whether tenants trade GPU types: on or off", choice(gandiva_fair.Trading)),
            Parameter(
                "profile",
                "running",
                "speed-ups that count for trades: those of types that jobs have run on (running), or all believed (known)",
                choice(gandiva_fair.Profiling),
            ),
            Parameter("rest", "300", "seconds between two moves of a job from node to node", number),
            Parameter("cost", "60", "seconds of running that a move is taken to cost; it must gain more", number),
        ),
        promise=_by_tickets,
        traits=Traits(
            optimises="GPU time of tenants in proportion to tickets",
            fairness="between tenants, over any hour; jobs of a tenant alike",
            heterogeneity="tickets of every type; fast traded for slow at a second price",
            gang="gang-aware stride, large gangs by the centre, bounded lag",
            elasticity="none; time slices and migration",
            verified="the published tables and trades; every hour within 3 % of the tickets' share of the GPU time used "
            "with gangs of 1 to 16, and mostly of all GPU time; two of four tenants gain about 30 % by trade and "
            "nobody loses",
        ),
    ),
    Listing(
        "gandiva-emulated",
        Family.SHARE,
        "pairs by chance that stay while they gain, and equal time for all: Gandiva as others compare with it",
        "Narayanan et al., Gavel, OSDI'20 §7, after Xiao et al., Gandiva, OSDI'18",
        (PolicyClaim.NO_DURATIONS, PolicyClaim.WORK_CONSERVING),
        gandiva_emulated.GandivaEmulated,
        (Parameter("seed", "0", "of the pairs that are drawn", count),),
        promise=among_jobs_alike,
        traits=Traits(
            optimises="nothing; pairs raise throughput",
            fairness="equal time for every pair and every job without one",
            heterogeneity="blind, but pairs share a type only where they gain there",
            gang="whole gangs; pairs of equal gang",
            elasticity="none",
            verified="no pair while demand fits; no pair that loses; feasible in random workloads",
        ),
    ),
    Listing(
        "optimus",
        Family.MARKET,
        "each job its least GPUs, then every further GPU where it saves most time; resizes elastic jobs",
        "Peng et al., Optimus, EuroSys'18",
        (PolicyClaim.WORK_CONSERVING,),
        optimus.Optimus,
        (
            Parameter("interval", "600", "seconds from one distribution of all GPUs to the next", positive),
            Parameter(
                "delta",
                "0.01",
                "a job is done when an epoch lowers its loss by less than this part of the greatest",
                fraction,
            ),
            Parameter(
                "nodes",
                "emptiest",
                "gangs go evenly to the emptiest nodes, or to the tightest ones",
                choice(optimus.FreeNodes),
            ),
            Parameter(
                "keep", "0", "how much more a GPU counts that a job holds than one it is restarted for, as a part", number
            ),
        ),
        traits=Traits(
            optimises="time to finish, summed over jobs, by marginal gain",
            fairness="none: every job its least GPUs, in order of arrival",
            heterogeneity="blind: a job's GPUs are of one type, the fastest with room",
            gang="rigid jobs whole or not at all",
            elasticity="grows and shrinks jobs every 10 minutes",
            verified="the example with parameter servers, exactly; fits recover known curves; gains never rise",
        ),
    ),
    Listing(
        "philly",
        Family.MARKET,
        "virtual clusters with quotas that lend idle GPUs; locality that relaxes after failed tries",
        "Jeon et al., Philly, ATC'19 §2.3",
        (PolicyClaim.NO_DURATIONS,),
        philly.Philly,
        (
            Parameter(
                "quotas",
                "equal",
                "GPUs of tenants, e.g. prod:64/dev:16; tenants not named share the rest by weight, as many as came so far",
                equal_or_per_tenant,
            ),
            Parameter("busy", "0.9", "part of the GPUs in use from which on jobs over quota are preempted", fraction),
            Parameter("window", "150", "seconds that a try for a place lasts", positive),
            Parameter("backoff", "120", "seconds without a try after one that failed", number),
            Parameter("rack", "3", "failed tries after which any nodes of one rack will do", count),
            Parameter("any", "6", "failed tries after which any nodes will do", count),
        ),
        promise=_by_quotas,
        traits=Traits(
            optimises="locality first, then use of idle GPUs",
            fairness="a quota of GPUs a tenant; idle ones are lent and taken back when 90 % are in use",
            heterogeneity="blind: quotas count GPUs of any type",
            gang="whole, on the fewest nodes; after failed tries in one rack, then anywhere",
            elasticity="none",
            verified="nobody within quota is preempted; tries relax at the published moments; "
            "on the Philly trace delay shifts from fair share to fragmentation as gangs grow",
        ),
    ),
    Listing(
        "themis",
        Family.MARKET,
        "auctions of GPUs under leases among the worst-off apps, with hidden payments",
        "Mahajan et al., Themis, NSDI'20",
        (PolicyClaim.WORK_CONSERVING,),
        themis.themis,
        (
            Parameter("f", "0.8", "part of the apps, the best off, that is not shown the GPUs; 0 shows them to all", part),
            Parameter("lease", "600", "seconds that GPUs are granted for, on average", positive),
            Parameter("error", "0", "bids are off by up to this part, as drawn", part),
            Parameter(
                "payment",
                "gpus",
                "winners pay with GPUs of what they won, or with time of their lease",
                choice(themis.Payment),
            ),
            Parameter("seed", "0", "of what is drawn: who gets what is left over, and how bids are off", count),
            Parameter("halving", "2", "one in so many jobs of a sweep goes on beyond each rung; 1: all do", positive),
        ),
        traits=Traits(
            optimises="the worst finish-time fairness of an app, then the product of 1/rho",
            fairness="finish time shared over finish time alone on 1/N of the cluster, by app",
            heterogeneity="one auction a type, the fastest first; the paper knows no types",
            gang="whole gangs; payments round down to them",
            elasticity="bids for more GPUs of elastic jobs, and of sweeps",
            verified="the worked auctions exactly; payments ((n-1)/n)^(n-1); no gain from lying with divisible GPUs; "
            "lower worst rho than las, srtf and fifo on a mix that is sensitive to placement",
        ),
    ),
    Listing(
        "hare",
        Family.MARKET,
        "least sum of weighted completion times: tasks of jobs whose lengths are known, by middle completion time",
        "Chen et al., Hare, HPDC'22",
        (PolicyClaim.BOUND,),
        hare.hare,
        (
            Parameter("lease", "360", "seconds after which GPUs are dealt out anew", positive),
            Parameter("long", "30", "tasks of at least so many seconds are dealt with one by one", positive),
            Parameter(
                "recompute", "1800", "least seconds between two relaxations; newcomers are fitted in until then", number
            ),
        ),
        traits=Traits(
            optimises="sum of weighted completion times, with lengths known",
            fairness="none: long jobs may wait long",
            heterogeneity="aware; one job may use several types at once",
            gang="needs none where rounds divide into micro-batches; whole gangs otherwise",
            elasticity="any number of GPUs up to the micro-batches of a round",
            verified="the worked example; within the bound of the optimum on 500 instances, 1.02 times it on average",
        ),
    ),
    Listing(
        "hlas",
        Family.MARKET,
        "least attained service, normalised to each job's fastest type, on any mix of GPUs",
        "Chen et al., Hare, HPDC'22 and TCC'24 (its online scheduler, by name)",
        (PolicyClaim.NO_DURATIONS,),
        hare.hlas,
        (
            Parameter("lease", "360", "seconds after which GPUs are dealt out anew", positive),
            Parameter("long", "30", "tasks of at least so many seconds are dealt with one by one", positive),
            Parameter(
                "guard",
                "off",
                "whether a task waits for a faster GPU where that gets it done sooner",
                choice(hare.StarvationGuard),
            ),
        ),
        traits=Traits(
            optimises="average completion time, without durations",
            fairness="equal service, in seconds of each job's own fastest type",
            heterogeneity="aware; one job may use several types at once",
            gang="needs none where rounds divide into micro-batches; whole gangs otherwise",
            elasticity="any number of GPUs up to the micro-batches of a round",
            verified="two equal jobs alternate; slow GPUs are charged less; a newcomer gets the next GPU",
        ),
    ),
)
