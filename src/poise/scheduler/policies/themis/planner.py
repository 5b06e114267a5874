"""Finish-time fairness by partial-allocation auctions (`themis`; Mahajan et al., Themis, NSDI'20).

Free GPUs, and those whose leases have ended while a job wants more than it has, are put up for auction:

    1  ρ_a of each active app with the GPUs that it holds; the worst off first
    2  the first (1 − f)·n of them, at least one, are shown the GPUs
    3  their agents answer with valuation tables: V_a = 1/ρ_a as a function of how many more GPUs they get (`bidders.py`)
    4  Nash optimum G over the tables; the hidden payment leaves a the part c_a of G_a (`scheduler/solve/auction.py`)
    5  what is left over goes to apps that were not asked, drawn at random: first one that holds a GPU on the node, then
       one on the rack, then any; if none of them can use it, to those that were asked
    6  a lease on everything that was given (`Leases`)

All leases that have ended by now are one auction; an app that wins as many GPUs as it had keeps the very same ones. There
is an auction for each GPU type, the fastest first; agents bid with what they have just won. Whole gangs only: of G_a as
many gangs as fit into c_a·|G_a| GPUs are kept, and the first one in any case by an app that would hold nothing otherwise;
or all of G_a, for the part c_a of a lease. docs/algorithms/themis.md compares this with the paper.

`auction.py` is one sale, `bidders.py` the apps and their agents, `halving.py` what an app does with its own jobs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Floats, Ints
from poise.scheduler.model.cluster import Site, site_of
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Plan
from poise.scheduler.policies import papers
from poise.scheduler.policies.listing import (
    Capability,
    Family,
    Listing,
    Parameter,
    PolicyProperty,
    Traits,
    choice,
    portion,
    positive,
    whole_number,
)
from poise.scheduler.policies.themis.auction import WORTH_MOVING, AuctionRules, Payment, Sale
from poise.scheduler.policies.themis.bidders import AppRegistry
from poise.scheduler.policies.themis.halving import Halving
from poise.scheduler.policies.upgrades import upgrades

SHORTEST = 0.1
"""Part of a lease that is left of it, at least, if payments shorten leases."""


@dataclass(frozen=True)
class Leases:
    """The right to hold GPUs until a time. Leases end together, so that what comes back is worth an auction.

    A lease that is granted at t ends at the first multiple of its length, counted from the origin, that is at least half a
    length away: after half of it to one and a half, and one on average. While no job wants more GPUs, a lease that has
    ended goes on by itself. So most leases follow from when the run began; kept here, by ascending row, are only those
    that did not begin with a run or that end earlier.
    """

    length: float
    rows: Ints
    since: Floats
    until: Floats

    @staticmethod
    def of(length: float) -> "Leases":
        """No leases yet; `length` in seconds."""
        return Leases(length, np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))

    def end(self, origin: float, granted: Floats) -> Floats:
        """When leases end that are granted at these times."""
        lengths: Floats = np.ceil((granted - origin) / self.length + 0.5)
        return origin + lengths * self.length

    def end_of_one(self, snapshot: Snapshot) -> float:
        """When a lease ends that is granted now."""
        return float(self.end(snapshot.origin, np.array([snapshot.now]))[0])

    def ends(self, snapshot: Snapshot) -> Floats:
        """When the leases of all active jobs end; never for jobs that hold nothing or are pinned."""
        started = snapshot.floats(snapshot.columns.started)
        until = self.end(snapshot.origin, started)
        if len(self.rows):
            at, is_there = _found(self.rows, snapshot.rows)
            counts = is_there & (self.since[at] >= started)
            until = np.where(counts, self.until[at], until)
        return np.where(snapshot.running & ~snapshot.among(snapshot.pinned), until, np.inf)

    def renewed(self, snapshot: Snapshot, until: Floats, is_noted: Bools) -> "Leases":
        """The leases with those just granted; those of rows that are no longer active are forgotten."""
        _, kept = _found(snapshot.rows[~is_noted], self.rows)
        rows = np.concatenate((self.rows[kept], snapshot.rows[is_noted]))
        order = np.argsort(rows, kind="stable")
        since = np.concatenate((self.since[kept], np.full(int(is_noted.sum()), snapshot.now)))
        ends = np.concatenate((self.until[kept], until[is_noted]))
        return Leases(self.length, rows[order], since[order], ends[order])


def _found(rows: Ints, wanted: Ints) -> tuple[Ints, Bools]:
    """Where each of the wanted rows would be among ascending rows, and whether it is there."""
    if not len(rows):
        return np.zeros(len(wanted), dtype=np.int64), np.zeros(len(wanted), dtype=bool)
    at = np.minimum(np.searchsorted(rows, wanted), len(rows) - 1)
    return at, rows[at] == wanted


class SiblingHoldings(NamedTuple):
    """What a job of a sweep holds, and until when: if the job ends, its siblings inherit it."""

    app: int
    site: Site
    until: float


@dataclass(frozen=True, slots=True)
class ThemisMemory:
    """Memory of the policy: apps, leases, auctions held so far, and what jobs of sweeps hold (`estates`, by row)."""

    registry: AppRegistry
    leases: Leases
    auctions: int = 0
    estates: Mapping[int, SiblingHoldings] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Themis(AuctionRules):
    """The arbiter: the rules of its auctions, and beyond them

    lease     seconds
    halving   beyond each rung, one in this many jobs of a sweep goes on (`halving.py`)
    """

    lease: float = 600.0
    halving: float = 2.0

    def start(self) -> ThemisMemory:
        """The memory before the first plan."""
        return ThemisMemory(AppRegistry(), Leases.of(self.lease))

    def plan(self, snapshot: Snapshot, memory: ThemisMemory) -> tuple[Plan, ThemisMemory]:
        """What changes: jobs that go on need no claim. Apps give up hopeless jobs before anything is sold."""
        market = replace(memory, registry=memory.registry.at(snapshot))
        if not market.registry.sweeps:
            return self._shared(snapshot, market)
        halving = Halving(self.halving)
        if ends := halving.endings(snapshot, market.registry):
            return replace(Plan.changing(wake=snapshot.now), ends=ends), market
        plan, market = self._shared(snapshot, market)
        return replace(plan, wake=min(plan.wake, halving.next_look(snapshot, market.registry))), market

    def _shared(self, snapshot: Snapshot, market: ThemisMemory) -> tuple[Plan, ThemisMemory]:
        """Sell if a job waits or an elastic one can use more; else let jobs change to much faster GPUs that stand idle."""
        columns, pinned = snapshot.columns, snapshot.pinned
        rows = (row for row in market.registry.elastic if row not in pinned)
        if snapshot.is_contended or any(0 < columns.gpus[row] < columns.most[row] for row in rows):
            return self._sold(snapshot, market)
        plan = Plan.changing(wake=inf)
        if len(snapshot.idle) > 1 and any(snapshot.idle):  # at the end of a lease; there are several types
            better = upgrades(snapshot, rest=self.lease, cost=(1 - 1 / WORTH_MOVING) * self.lease)
            plan = Plan.changing(better.claims, wake=better.later)
        return plan, self._noted(snapshot, market, {}, ())

    def _sold(self, snapshot: Snapshot, market: ThemisMemory) -> tuple[Plan, ThemisMemory]:
        """Hand GPUs on inside sweeps, then give out what is free; if that does not do, sell it with what comes back."""
        ahead = Halving(self.halving).ahead(snapshot, market.registry) if market.registry.sweeps else frozenset()
        sale = Sale(self, snapshot, market.registry, market.auctions, ahead)
        for row, estate in market.estates.items():
            if estate.until > snapshot.now and row not in snapshot.placement.holdings:
                sale.inherit(*estate)
        is_enough = sale.hand_out()
        if is_enough and not sale.until:  # leases that begin with runs: nothing to note
            return Plan.changing(sale.claims()), self._noted(snapshot, market, sale.sites, ())
        ends = market.leases.ends(snapshot)
        if not is_enough:
            sale.auction(ends <= snapshot.now)
        # When leases end after the sale, and which are new; never for jobs that hold nothing or merely went on.
        now, full = snapshot.now, market.leases.end_of_one(snapshot)
        until, is_new = np.where(ends <= now, inf, ends), np.zeros(len(ends), dtype=bool)
        rows = sorted(sale.sites)
        for index, row in zip(np.searchsorted(snapshot.rows, rows).tolist(), rows, strict=True):
            part = max(sale.parts.get(row, 1.0), SHORTEST)
            until[index] = sale.until.get(row, now + part * (full - now) if part < 1 else full)
            is_new[index] = True
        later = until[until > now]
        wake = float(later.min()) if len(later) and sale.leaves_demand() else inf
        plan = Plan.changing(sale.claims(), sale.stops(), wake)
        if sale.sites:
            leases = market.leases.renewed(snapshot, until, is_new)
            market = replace(market, leases=leases, auctions=market.auctions + 1)
        return plan, self._noted(snapshot, market, sale.sites, plan.stops or ())

    def _noted(
        self, snapshot: Snapshot, market: ThemisMemory, sites: Mapping[int, Site], stops: tuple[int, ...]
    ) -> ThemisMemory:
        """The memory with what jobs of sweeps hold once the plan has been carried out."""
        if not market.registry.sweeps:
            return market
        ends = dict(zip(snapshot.active, market.leases.ends(snapshot).tolist(), strict=True))
        full = market.leases.end_of_one(snapshot)
        columns, holdings = snapshot.columns, snapshot.placement.holdings
        estates = {}
        for row in snapshot.active:
            if columns.apps[row] is not None and row not in stops and (row in sites or row in holdings):
                site = sites.get(row) or site_of(holdings[row])
                estates[row] = SiblingHoldings(columns.app[row], site, ends[row] if ends[row] < inf else full)
        return replace(market, estates=MappingProxyType(estates))


LISTING = Listing(
    "themis",
    Family.MARKET,
    "auctions of GPUs under leases among the worst-off apps, with hidden payments",
    "Mahajan et al., Themis, NSDI'20",
    (PolicyProperty.WORK_CONSERVING,),
    Themis,
    (
        Parameter("f", "0.8", "part of the apps, the best off, that is not shown the GPUs; 0 shows them to all", portion),
        Parameter("lease", "600", "seconds that GPUs are granted for, on average", positive),
        Parameter("error", "0", "bids are off by up to this part, as drawn", portion),
        Parameter("payment", "gpus", "winners pay with GPUs of what they won, or with time of their lease", choice(Payment)),
        Parameter("seed", "0", "of what is drawn: who gets what is left over, and how bids are off", whole_number),
        Parameter("halving", "2", "beyond each rung, one in this many jobs of a sweep goes on; 1: all do", positive),
    ),
    can=frozenset({Capability.AUCTIONS, Capability.ELASTIC}),
    traits=Traits(
        optimises="the worst finish-time fairness of an app, then the product of 1/rho",
        fairness="finish time shared over finish time alone on 1/N of the cluster, by app",
        heterogeneity="one auction a type, the fastest first; the paper knows no types",
        gang="whole gangs; payments round down to them",
        elasticity="bids for more GPUs of elastic jobs, and of sweeps",
        verified="the worked auctions exactly; payments ((n-1)/n)^(n-1); no gain from lying with divisible GPUs; "
        "lower worst rho than las, srtf and fifo on a mix that is sensitive to placement",
    ),
    url=papers.THEMIS,
)
