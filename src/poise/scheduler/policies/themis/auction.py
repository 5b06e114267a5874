"""One sale of Themis: who is asked, who wins what, where it is, and who gets what is left over (ALGORITHMS §3.3)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import ceil

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Floats
from poise.scheduler.model.cluster import NodeGpus, Site, site_of
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies.placement_draft import PlacementDraft
from poise.scheduler.policies.themis.bidders import (
    Agent,
    App,
    AppRegistry,
    Bid,
    Bidders,
    Erring,
    GpuOffer,
    Member,
    counts_of,
)
from poise.scheduler.solve import pseudo_random
from poise.scheduler.solve.auction import clear

WORTH_MOVING = 1.1
"""How many times as fast another place must be for a job that might stay where it is."""
_ROUNDING = 1e-9


class Payment(StrEnum):
    """What a winner pays with: GPUs of what it won, or time of its lease on all of it."""

    GPUS = "gpus"
    LEASE = "lease"


@dataclass(frozen=True, slots=True)
class AuctionRules:
    """The knobs of an auction."""

    f: float
    error: float
    payment: Payment
    seed: int
    agents: Callable[[App], Agent]


def invited(apps: int, f: float) -> int:
    """How many of so many apps are shown the GPUs: the worst off, 1 − f of them, at least one."""
    return max(1, ceil((1 - f) * apps - _ROUNDING))


def kept(bid: Bid, units: int, share: float, held: int) -> int:
    """How many of its uses a winner of so many units keeps after the hidden payment.

    As many whole gangs as fit into its share; the first one in any case if the app holds no GPU: a gang that has been cut
    in two is worth nothing to anybody.
    """
    won = bid.units.index(units)
    rest = sum(each <= share * units + _ROUNDING for each in bid.units[1 : won + 1])
    return rest if held else max(rest, min(won, 1))


class Sale:
    """A sale in the making.

    sites    of jobs that get GPUs, or keep those whose lease has ended: where, by row
    parts    of a lease that winners get, by row; until: ends of leases that were inherited
    worth    Σ ln V of the bidders in the Nash optimum, over all GPU types
    """

    def __init__(
        self, rules: AuctionRules, snapshot: Snapshot, roll: AppRegistry, number: int, ahead: frozenset[int] = frozenset()
    ) -> None:
        columns = snapshot.columns
        self._rules, self._snapshot, self._roll = rules, snapshot, roll
        self._number, self._ahead = number, ahead
        self._has = snapshot.ints(columns.gpus)
        self._most = snapshot.ints(columns.most)
        self._wants = (self._has < self._most) & ~snapshot.among(snapshot.pinned)
        self.sketch = PlacementDraft(snapshot.placement)
        self.sites: dict[int, Site] = {}
        self.parts: dict[int, float] = {}
        self.until: dict[int, float] = {}
        self.worth = 0.0
        self._is_expired = np.zeros(len(snapshot.active), dtype=bool)
        self._expired: set[int] = set()

    # What comes of it

    def claims(self) -> tuple[Claim, ...]:
        """For all that get GPUs other than those they have, the largest first."""
        holdings, gang = self._snapshot.placement.holdings, self._snapshot.columns.gang
        changed = [
            (row, site, _size(site))
            for row, site in self.sites.items()
            if row not in holdings or site_of(holdings[row]) != site
        ]
        return tuple(Claim(row, gpus=None if gpus == gang[row] else gpus, site=site) for row, site, gpus in changed)

    def stops(self) -> tuple[int, ...]:
        """Jobs whose lease has ended and was not renewed."""
        return tuple(sorted(self._expired.difference(self.sites)))

    def leaves_wishes(self) -> bool:
        """Somebody has less than it can use."""
        wanting = zip(self._snapshot.rows[self._wants].tolist(), self._most[self._wants].tolist(), strict=True)
        return bool(self.stops()) or any(_size(self.sites.get(row, ())) < self._can_use(row, most) for row, most in wanting)

    def _can_use(self, row: int, most: int) -> int:
        columns = self._snapshot.columns
        least = columns.least[row]
        return most if least == most else counts_of(self._snapshot.estimate(row), columns.gang[row], least, most)[-1]

    # How it goes

    def inherit(self, app: int, site: Site, until: float) -> None:
        """GPUs of a job that has ended stay with its app until the lease does."""
        waiting = self._snapshot.rows[self._wants & (self._has == 0)].tolist()
        heir = self._heir(app, site, (row for row in waiting if row not in self.sites)) if self._is_free(site) else None
        if heir is not None:
            self._take(heir, site)
            self.until[heir] = until

    def _heir(self, app: int, site: Site, rows: Iterable[int]) -> int | None:
        """The first of these jobs that is of the app and wants just what is here."""
        columns, kind, locality = self._snapshot.columns, self._type_of(site), self.sketch.locality(site)
        alike = (row for row in rows if columns.app[row] == app and columns.gang[row] == _size(site))
        return next((row for row in alike if self._snapshot.estimate(row).rates[kind][locality] > 0), None)

    def hand_out(self) -> bool:
        """Everybody gets all it wants, of the type on which it is fastest; nobody gets anything if that cannot be."""
        rows = [row for row in self._snapshot.rows[self._wants].tolist() if row not in self.sites]
        if len(rows) > sum(self.sketch.idle):
            return False
        wishes = [self._wish(row) for row in rows]
        for gpu_type, idle in enumerate(self.sketch.idle):
            if sum(more for kind, more, _ in wishes if kind == gpu_type) > idle:
                return False
        for row, (gpu_type, more, gpus) in zip(rows, wishes, strict=True):
            if more == gpus:
                self._take(row, self.sketch.tightest(gpu_type, gpus))
            else:
                self._grow(row, site_of(self._snapshot.placement.holdings[row]), more)
        return True

    def _wish(self, row: int) -> tuple[int, int, int]:
        """The type that a job would like, how many more GPUs, and how many in all."""
        columns, floor = self._snapshot.columns, self._snapshot.placement
        gpus = self._can_use(row, columns.most[row])
        if row in floor.holdings:
            return floor.topology.type_of[floor.holdings[row][0].node], gpus - columns.gpus[row], gpus
        rates = self._snapshot.estimate(row).at(gpus)
        return max(range(len(rates)), key=lambda kind: rates[kind][Locality.PACKED]), gpus, gpus

    def auction(self, is_expired: Bools) -> None:
        """Sell what is free and what is under leases that have ended, if anybody could use any of it."""
        snapshot = self._snapshot
        more = np.where(self._has > 0, 1, snapshot.ints(snapshot.columns.least))[self._wants]
        self._is_expired = is_expired & snapshot.running
        if not len(more) or (max(self.sketch.idle) < int(more.min()) and not self._is_expired.any()):
            return
        self._expired = set(snapshot.rows[self._is_expired].tolist())
        self.sketch.release(snapshot.placement.holdings[row] for row in sorted(self._expired))
        crowd = Bidders(snapshot, self._roll, self._is_expired)
        asked = crowd.worst_first(self._off(crowd))[: invited(crowd.apps, self._rules.f)].tolist()
        bidders = {place: members for place in asked if (members := self._wanting(crowd, place))}
        for gpu_type in crowd.best_types():
            self._sell(gpu_type, crowd, bidders)
        self._give_rest(crowd, bidders, set(asked))
        if self._ahead:
            self._take_turns()

    def _off(self, crowd: Bidders) -> Floats:
        """How wrong apps are about their ρ."""
        if not self._rules.error:
            return np.ones(crowd.apps)
        stream = pseudo_random.stream(self._rules.seed, 1, self._number)
        return 1.0 + self._rules.error * (2.0 * pseudo_random.uniform(stream, crowd.apps) - 1.0)

    def _wanting(self, crowd: Bidders, place: int) -> list[Member]:
        """The jobs of an app, if any of them can use more GPUs: those whose lease has ended first, then by submission;

        jobs that would wait for their siblings at a rung anyway come last.
        """
        indices = crowd.rows_of(place)
        if all(self._got(crowd, index) >= self._most[index] for index in indices):
            return []
        if len(indices) > 1:
            rows = crowd.rows
            indices.sort(key=lambda index: (int(rows[index]) in self._ahead, not self._is_expired[index], index))
        members = [crowd.member(index) for index in indices if int(crowd.rows[index]) not in self.until]
        return members if any(each.held < each.counts[-1] for each in members) else []

    def _got(self, crowd: Bidders, index: int) -> int:
        """GPUs that a job has, of leases that go on or of this sale."""
        site = self.sites.get(int(crowd.rows[index]))
        return int(crowd.held[index]) if site is None else _size(site)

    # Steps 3 and 4: bids, the Nash optimum, payments

    def _sell(self, gpu_type: int, crowd: Bidders, bidders: dict[int, list[Member]]) -> None:
        offer = GpuOffer(gpu_type, self.sketch.copy())
        if not offer.gpus:
            return
        bids = {place: self._bid(crowd, place, members, offer) for place, members in bidders.items()}
        bids = {place: bid for place, bid in bids.items() if len(bid.units) > 1}
        cleared = clear([bid.table() for bid in bids.values()], offer.gpus)
        self.worth += cleared.objective
        won: dict[int, int] = {}
        for (place, bid), units, share in zip(bids.items(), cleared.units.tolist(), cleared.share.tolist(), strict=True):
            if self._rules.payment is Payment.LEASE:
                uses = bid.uses[: bid.units.index(units)]
                self.parts.update((use.row, share) for use in uses)
            else:
                uses = bid.uses[: kept(bid, units, share, sum(each.held for each in bidders[place]))]
            won.update(uses)
        if won:
            members = {each.row: each for place in bids for each in bidders[place]}
            self._place(gpu_type, [(members[row], gpus) for row, gpus in won.items()])
            for place in bids:
                bidders[place] = [self._as_placed(each) for each in bidders[place]]

    def _bid(self, crowd: Bidders, place: int, members: list[Member], offer: GpuOffer) -> Bid:
        agent = self._rules.agents(crowd.view(place, members))
        if self._rules.error:
            stream = pseudo_random.stream(self._rules.seed, 2, self._number, int(crowd.ids[place]), offer.gpu_type)
            agent = Erring(agent, self._rules.error, stream)
        return agent.bid(offer)

    def _place(self, gpu_type: int, winners: list[tuple[Member, int]]) -> None:
        """Those first that stay where they are, then the largest: so the fewest are torn apart."""
        late = []
        for member, gpus in winners:
            if member.held:
                self._grow(member.row, self._site(member.row), gpus - member.held)
            elif not self._stay(member, gpus, gpu_type):
                late.append((member, gpus))
        for member, gpus in sorted(late, key=lambda each: -each[1]):
            site = self.sketch.tightest(gpu_type, gpus)
            if site is not None and not self._stay(member, gpus, gpu_type, site):
                self._take(member.row, site)

    def _stay(self, member: Member, gpus: int, gpu_type: int, other: Site | None = None) -> bool:
        """Let a job whose lease has ended keep the same GPUs, unless it is much faster where there is room elsewhere."""
        if member.row not in self._expired:
            return False
        site = site_of(self._snapshot.placement.holdings[member.row])
        if _size(site) != gpus or self._type_of(site) != gpu_type or not self._is_free(site):
            return False
        rates = member.rates(gpus)[gpu_type]
        there = Locality.PACKED if other is None else self.sketch.locality(other)
        if rates[there] > WORTH_MOVING * rates[self.sketch.locality(site)]:
            return False
        self._take(member.row, site)
        return True

    def _as_placed(self, member: Member) -> Member:
        site = self.sites.get(member.row)
        if site is None:
            return member
        return member.on(_size(site), self._type_of(site), self.sketch.locality(site))

    # Step 5: what is left over

    def _give_rest(self, crowd: Bidders, bidders: dict[int, list[Member]], asked: set[int]) -> None:
        """To those who were not asked, then to those who were, each in an order that is drawn."""
        self._go_on(crowd, asked)
        others = [place for place in range(crowd.apps) if place not in asked]
        able = max(self.sketch.idle) > 0
        rest = {place: members for place in others if able and (members := self._wanting(crowd, place))}
        stream = pseudo_random.stream(self._rules.seed, 3, self._number)
        for apps in (rest, bidders):
            self._deal(
                {place: apps[place] for place in pseudo_random.shuffled([*apps], partial(pseudo_random.bits, stream))}
            )

    def _go_on(self, crowd: Bidders, asked: set[int]) -> None:
        """Who held GPUs on a node under a lease that has just ended is the first to get some there: it goes on."""
        indices = np.flatnonzero(self._is_expired).tolist()
        stream = pseudo_random.stream(self._rules.seed, 4, self._number)
        for index in pseudo_random.shuffled(indices, partial(pseudo_random.bits, stream)):
            row = int(crowd.rows[index])
            if row not in self.sites and int(crowd.app[index]) not in asked:
                site = site_of(self._snapshot.placement.holdings[row])
                if self._is_free(site):
                    self._take(row, site)

    def _deal(self, apps: dict[int, list[Member]]) -> None:
        """Node by node, the fullest first: to an app that has GPUs on the node, then on the rack, then to any."""
        topology = self.sketch.topology
        homes = {place: homes for place, members in apps.items() if (homes := self._homes(members))}
        for node in sorted(range(len(self.sketch.free)), key=lambda each: (self.sketch.free[each], each)):
            while self.sketch.free[node] and apps:
                here = [place for place in apps if node in homes.get(place, ())]
                rack = topology.rack_of[node]
                near = [place for place in apps if any(topology.rack_of[home] == rack for home in homes.get(place, ()))]
                if not any(self._give(place, apps, node) for place in (*here, *near, *apps)):
                    break

    def _homes(self, members: Iterable[Member]) -> set[int]:
        rows = (each.row for each in members if each.held or each.row in self.sites)
        return {part.node for row in rows for part in self._site(row)}

    def _give(self, place: int, apps: dict[int, list[Member]], node: int) -> bool:
        """Give the next gang, or a GPU more, to an app, on this node if it is large enough; says whether any could be."""
        gpu_type = self.sketch.topology.type_of[node]
        for member in apps[place]:
            has = self._held(member)
            gpus = next((each for each in member.counts if each > has), 0)
            if not gpus or member.row in self.until or gpus - has > self.sketch.idle[gpu_type]:
                continue
            if member.rates(gpus)[gpu_type][Locality.CLUSTER] <= 0:
                continue
            if not has:
                self._settle(member, gpus, node)
                return True
            if self._type_of(self._site(member.row)) == gpu_type:
                self._grow(member.row, self._site(member.row), gpus - has)
                return True
        return False

    def _settle(self, member: Member, gpus: int, node: int) -> None:
        """Give a job GPUs: those it had, or else on this node, or if it has not enough where it is tightest."""
        gpu_type = self.sketch.topology.type_of[node]
        if not self._stay(member, gpus, gpu_type):
            fits = gpus <= self.sketch.free[node]
            self._take(member.row, (NodeGpus(node, gpus),) if fits else self.sketch.tightest(gpu_type, gpus))

    # Inside an app

    def _take_turns(self) -> None:
        """Jobs that are ahead at the end of a lease hand their GPUs to siblings that have none, gang for gang."""
        columns = self._snapshot.columns
        empty = [row for row in self._snapshot.active if row not in self.sites and row not in self._ahead]
        waiting = [row for row in empty if columns.apps[row] is not None and (not columns.gpus[row] or row in self._expired)]
        for row in sorted(self._ahead & self._expired & self.sites.keys()):
            heir = self._heir(columns.app[row], self.sites[row], waiting)
            if heir is not None:
                self.sites[heir] = self.sites.pop(row)
                waiting.remove(heir)

    # Where things are

    def _held(self, member: Member) -> int:
        site = self.sites.get(member.row)
        return member.held if site is None else _size(site)

    def _site(self, row: int) -> Site:
        return self.sites.get(row) or site_of(self._snapshot.placement.holdings[row])

    def _type_of(self, site: Site) -> int:
        return self.sketch.topology.type_of[site[0].node]

    def _is_free(self, site: Site) -> bool:
        return all(self.sketch.free[part.node] >= part.gpus for part in site)

    def _take(self, row: int, site: Site | None) -> None:
        assert site is not None
        self.sketch.take(site)
        self.sites[row] = site

    def _grow(self, row: int, site: Site, more: int) -> None:
        """More GPUs for a job, on its own nodes as far as they have some."""
        gpus = dict(site)
        for node in gpus:
            here = min(more, self.sketch.free[node])
            self.sketch.take((NodeGpus(node, here),))
            gpus[node] += here
            more -= here
        if more:
            rest = self.sketch.tightest(self._type_of(site), more)
            assert rest is not None
            self.sketch.take(rest)
            for part in rest:
                gpus[part.node] = gpus.get(part.node, 0) + part.gpus
        self.sites[row] = tuple(NodeGpus(node, count) for node, count in sorted(gpus.items()))


def _size(site: Site) -> int:
    """GPUs of a site."""
    return sum(part.gpus for part in site)
