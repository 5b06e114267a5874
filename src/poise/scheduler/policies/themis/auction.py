"""One sale of Themis: who is asked, who wins what, where it is placed, and who gets what is left over.

The arbiter (`planner.py`) calls, in this order:

    inherit     GPUs of a job of a sweep that has ended go to a sibling, until the lease ends
    hand_out    if what is free does for everything that is wanted, it is simply given: an auction would change nothing
    auction     otherwise: leases that have ended come back and are sold with what is free

`auction` follows the steps of docs/algorithms/themis.md, one method each: the worst-off apps are asked; for each GPU type
their agents bid, the Nash optimum is found, hidden payments are taken and winners are placed (`_sell`); what is left over,
which includes what was paid, goes to apps that were not asked (`_give_rest`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import ceil

import numpy as np

from poise.scheduler.model.arithmetic import Bools
from poise.scheduler.model.cluster import NodeGpus, Site, site_of
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies.placement_draft import PlacementDraft
from poise.scheduler.policies.themis.bidders import (
    App,
    AppAgent,
    AppRegistry,
    Bid,
    Bidders,
    Erring,
    GpuOffer,
    Honest,
    Member,
    counts_of,
)
from poise.scheduler.solve import pseudo_random
from poise.scheduler.solve.auction import clear

WORTH_MOVING = 1.1
"""How many times as fast another place must be for a job to leave the GPUs that it could keep: a restart costs too."""
_ROUNDING = 1e-9


class Payment(StrEnum):
    """What a winner pays with: GPUs of what it won, or time of its lease on all of it."""

    GPUS = "gpus"
    LEASE = "lease"


@dataclass(frozen=True, slots=True)
class AuctionRules:
    """The parameters of an auction.

    f         part of the apps, the best off, that is not asked
    error     how far off bids are;  payment: what winners pay with;  seed: of what is drawn
    agents    makes the agent that bids for an app
    """

    f: float = 0.8
    error: float = 0.0
    payment: Payment = Payment.GPUS
    seed: int = 0
    agents: Callable[[App], AppAgent] = Honest


def invited(apps: int, f: float) -> int:
    """How many of `apps` apps are shown the GPUs: 1 − f of them, the worst off, at least one."""
    return max(1, ceil((1 - f) * apps - _ROUNDING))


def kept(bid: Bid, units: int, share: float, held: int) -> int:
    """How many of its uses a winner of `units` GPUs keeps after the hidden payment, which leaves it the part `share`.

    As many whole gangs as fit into that part; the first one in any case if the app holds no GPU, because a gang that is
    cut in two is worth nothing to any app.
    """
    won = bid.units.index(units)
    rest = sum(each <= share * units + _ROUNDING for each in bid.units[1 : won + 1])
    return rest if held else max(rest, min(won, 1))


class Sale:
    """A sale in the making.

    number   how many sales there were before: every sale draws from streams of its own
    ahead    jobs of sweeps that wait for their siblings at a rung, and make way for them
    sites    by row, where jobs are that get GPUs, or keep those whose lease has ended
    parts    by row, the part of a lease that a winner gets, if payments shorten leases
    until    by row, the end of a lease that was inherited
    worth    Σ ln V of the bidders in the Nash optimum, over all GPU types
    draft    free GPUs, as the sale goes on
    """

    def __init__(
        self,
        rules: AuctionRules,
        snapshot: Snapshot,
        registry: AppRegistry,
        number: int,
        ahead: frozenset[int] = frozenset(),
    ) -> None:
        columns = snapshot.columns
        self._rules, self._snapshot, self._registry = rules, snapshot, registry
        self._number, self._ahead = number, ahead
        self._has, self._most = snapshot.ints(columns.gpus), snapshot.ints(columns.most)
        self._wants = (self._has < self._most) & ~snapshot.among(snapshot.pinned)
        self.draft = PlacementDraft(snapshot.placement)
        self.sites: dict[int, Site] = {}
        self.parts: dict[int, float] = {}
        self.until: dict[int, float] = {}
        self.worth = 0.0
        self._is_expired = np.zeros(len(snapshot.active), dtype=bool)
        self._expired: set[int] = set()

    # --- the outcome

    def claims(self) -> tuple[Claim, ...]:
        """Claims of jobs that get other GPUs than they have."""
        holdings, gang = self._snapshot.placement.holdings, self._snapshot.columns.gang
        return tuple(
            Claim(row, gpus=None if _size(site) == gang[row] else _size(site), site=site)
            for row, site in self.sites.items()
            if row not in holdings or site_of(holdings[row]) != site
        )

    def stops(self) -> tuple[int, ...]:
        """Jobs whose lease has ended and was not renewed."""
        return tuple(sorted(self._expired.difference(self.sites)))

    def leaves_demand(self) -> bool:
        """Whether a job has less than it can use."""
        wanting = zip(self._snapshot.rows[self._wants].tolist(), self._most[self._wants].tolist(), strict=True)
        return bool(self.stops()) or any(_size(self.sites.get(row, ())) < self._can_use(row, most) for row, most in wanting)

    def _can_use(self, row: int, most: int) -> int:
        """The most GPUs that a job can run with."""
        columns = self._snapshot.columns
        least = columns.least[row]
        return most if least == most else counts_of(self._snapshot.estimate(row), columns.gang[row], least, most)[-1]

    # --- before the auction

    def inherit(self, app: int, site: Site, until: float) -> None:
        """Keep the GPUs of a job that has ended with its app, until the lease ends."""
        waiting = self._snapshot.rows[self._wants & (self._has == 0)].tolist()
        heir = self._heir(app, site, (row for row in waiting if row not in self.sites)) if self._is_free(site) else None
        if heir is not None:
            self._take(heir, site)
            self.until[heir] = until

    def _heir(self, app: int, site: Site, rows: Iterable[int]) -> int | None:
        """The first of these jobs that is of the app and wants just the GPUs of this site."""
        columns, kind, locality = self._snapshot.columns, self._type_of(site), self.draft.locality(site)
        alike = (row for row in rows if columns.app[row] == app and columns.gang[row] == _size(site))
        return next((row for row in alike if self._snapshot.estimate(row).rates[kind][locality] > 0), None)

    def hand_out(self) -> bool:
        """Give every job all it wants, of the type on which it is fastest; nothing to any job if that cannot be."""
        columns, placement = self._snapshot.columns, self._snapshot.placement
        rows = [row for row in self._snapshot.rows[self._wants].tolist() if row not in self.sites]
        if len(rows) > sum(self.draft.idle):
            return False
        wanted = []  # by job: the type, how many more GPUs, how many in all
        needed = [0] * len(self.draft.idle)
        for row in rows:
            gpus = self._can_use(row, columns.most[row])
            if row in placement.holdings:
                kind, more = placement.topology.type_of[placement.holdings[row][0].node], gpus - columns.gpus[row]
            else:
                rates = self._snapshot.estimate(row).at(gpus)
                kind, more = max(range(len(rates)), key=lambda each: rates[each][Locality.PACKED]), gpus
            wanted.append((kind, more, gpus))
            needed[kind] += more
        if any(need > idle for need, idle in zip(needed, self.draft.idle, strict=True)):
            return False
        for row, (kind, more, gpus) in zip(rows, wanted, strict=True):
            if more == gpus:
                self._take(row, self.draft.tightest(kind, gpus))
            else:
                self._grow(row, site_of(placement.holdings[row]), more)
        return True

    # --- steps 1 and 2: who is asked

    def auction(self, is_expired: Bools) -> None:
        """Sell what is free and what is under leases that have ended, if any job could use any of it."""
        snapshot, rules = self._snapshot, self._rules
        more = np.where(self._has > 0, 1, snapshot.ints(snapshot.columns.least))[self._wants]
        self._is_expired = is_expired & snapshot.running
        if not len(more) or (max(self.draft.idle) < int(more.min()) and not self._is_expired.any()):
            return
        self._expired = set(snapshot.rows[self._is_expired].tolist())
        self.draft.release(snapshot.placement.holdings[row] for row in sorted(self._expired))
        market = Bidders(snapshot, self._registry, self._is_expired)
        off = np.ones(market.apps)  # by how much apps are wrong about their ρ
        if rules.error:
            stream = pseudo_random.stream(rules.seed, 1, self._number)
            off = 1.0 + rules.error * (2.0 * pseudo_random.uniform(stream, market.apps) - 1.0)
        asked = market.worst_first(off)[: invited(market.apps, rules.f)].tolist()
        bidders = {place: members for place in asked if (members := self._wanting(market, place))}
        # One auction per type, the fastest first; agents bid for the next with what they have just won.
        for gpu_type in market.best_types():
            self._sell(gpu_type, market, bidders)
        self._give_rest(market, bidders, set(asked))
        if self._ahead:
            self._take_turns()

    def _wanting(self, market: Bidders, place: int) -> list[Member]:
        """The jobs of an app, if any of them can use more GPUs: those whose lease has ended first, then by submission.

        Jobs that would wait for their siblings at a rung anyway come last; heirs of this sale are served already.
        """
        indices = market.rows_of(place)
        got = (self._held(int(market.rows[index]), int(market.held[index])) for index in indices)
        if all(gpus >= self._most[index] for gpus, index in zip(got, indices, strict=True)):
            return []
        if len(indices) > 1:
            rows = market.rows
            indices.sort(key=lambda index: (int(rows[index]) in self._ahead, not self._is_expired[index], index))
        members = [market.member(index) for index in indices if int(market.rows[index]) not in self.until]
        return members if any(each.held < each.counts[-1] for each in members) else []

    # --- steps 3 and 4: bids, the Nash optimum, payments

    def _sell(self, gpu_type: int, market: Bidders, bidders: dict[int, list[Member]]) -> None:
        """Auction off the free GPUs of a type, and place what was won; `bidders` then stand with what they have."""
        rules, offer = self._rules, GpuOffer(gpu_type, self.draft.copy())
        if not offer.gpus:
            return
        bids: dict[int, Bid] = {}
        for place, members in bidders.items():
            agent = rules.agents(market.view(place, members))
            if rules.error:
                stream = pseudo_random.stream(rules.seed, 2, self._number, int(market.ids[place]), gpu_type)
                agent = Erring(agent, rules.error, stream)
            bid = agent.bid(offer)
            if len(bid.units) > 1:
                bids[place] = bid
        cleared = clear([bid.table() for bid in bids.values()], offer.gpus)
        self.worth += cleared.objective
        won: dict[int, int] = {}
        for (place, bid), units, share in zip(bids.items(), cleared.units.tolist(), cleared.share.tolist(), strict=True):
            if rules.payment is Payment.LEASE:
                uses = bid.uses[: bid.units.index(units)]
                self.parts.update((use.row, share) for use in uses)
            else:
                uses = bid.uses[: kept(bid, units, share, sum(each.held for each in bidders[place]))]
            won.update(uses)
        if won:
            members_of = {each.row: each for place in bids for each in bidders[place]}
            self._place(gpu_type, [(members_of[row], gpus) for row, gpus in won.items()])
            for place in bids:
                bidders[place] = [self._as_placed(each) for each in bidders[place]]

    def _place(self, gpu_type: int, winners: list[tuple[Member, int]]) -> None:
        """Place winners: first those that stay where they are, then the largest gangs, so that the fewest are split."""
        late = []
        for member, gpus in winners:
            if member.held:
                self._grow(member.row, self._site(member.row), gpus - member.held)
            elif not self._stay(member, gpus, gpu_type):
                late.append((member, gpus))
        for member, gpus in sorted(late, key=lambda each: -each[1]):
            site = self.draft.tightest(gpu_type, gpus)
            if site is not None and not self._stay(member, gpus, gpu_type, site):
                self._take(member.row, site)

    def _stay(self, member: Member, gpus: int, gpu_type: int, other: Site | None = None) -> bool:
        """Let a job whose lease has ended keep the same GPUs, unless it would be much faster at the `other` place.

        Without another place, the best that there could be is compared: packed.
        """
        if member.row not in self._expired:
            return False
        site = site_of(self._snapshot.placement.holdings[member.row])
        if _size(site) != gpus or self._type_of(site) != gpu_type or not self._is_free(site):
            return False
        rates = member.rates(gpus)[gpu_type]
        there = Locality.PACKED if other is None else self.draft.locality(other)
        if rates[there] > WORTH_MOVING * rates[self.draft.locality(site)]:
            return False
        self._take(member.row, site)
        return True

    def _as_placed(self, member: Member) -> Member:
        """The member with what it holds after this sale."""
        site = self.sites.get(member.row)
        return member if site is None else member.on(_size(site), self._type_of(site), self.draft.locality(site))

    # --- step 5: what is left over

    def _give_rest(self, market: Bidders, bidders: dict[int, list[Member]], asked: set[int]) -> None:
        """Give what is left to apps that were not asked, then to those that were, each in an order that is drawn.

        A job that held GPUs under a lease that has just ended, of an app that was not asked, is the first to get the same
        GPUs again: it simply goes on.
        """
        rules = self._rules
        stream = pseudo_random.stream(rules.seed, 4, self._number)
        expired = np.flatnonzero(self._is_expired).tolist()
        for index in pseudo_random.shuffled(expired, partial(pseudo_random.bits, stream)):
            row = int(market.rows[index])
            if row not in self.sites and int(market.app[index]) not in asked:
                site = site_of(self._snapshot.placement.holdings[row])
                if self._is_free(site):
                    self._take(row, site)
        others = [place for place in range(market.apps) if place not in asked]
        able = max(self.draft.idle) > 0
        rest = {place: members for place in others if able and (members := self._wanting(market, place))}
        stream = pseudo_random.stream(rules.seed, 3, self._number)
        for apps in (rest, bidders):
            drawn = pseudo_random.shuffled([*apps], partial(pseudo_random.bits, stream))
            self._deal({place: apps[place] for place in drawn})

    def _deal(self, apps: dict[int, list[Member]]) -> None:
        """Node by node, the fullest first: to an app that has GPUs on the node, then on the rack, then to any."""
        topology = self.draft.topology
        homes: dict[int, set[int]] = {}
        for place, members in apps.items():
            rows = (each.row for each in members if each.held or each.row in self.sites)
            if nodes := {part.node for row in rows for part in self._site(row)}:
                homes[place] = nodes
        for node in sorted(range(len(self.draft.free)), key=lambda each: (self.draft.free[each], each)):
            while self.draft.free[node] and apps:
                here = [place for place in apps if node in homes.get(place, ())]
                rack = topology.rack_of[node]
                near = [place for place in apps if any(topology.rack_of[home] == rack for home in homes.get(place, ()))]
                if not any(self._give(place, apps, node) for place in (*here, *near, *apps)):
                    break

    def _give(self, place: int, apps: dict[int, list[Member]], node: int) -> bool:
        """Give an app its next gang, or one more step of GPUs for a job, on this node if it has enough; says if it could."""
        gpu_type = self.draft.topology.type_of[node]
        for member in apps[place]:
            has = self._held(member.row, member.held)
            gpus = next((each for each in member.counts if each > has), 0)
            if not gpus or member.row in self.until or gpus - has > self.draft.idle[gpu_type]:
                continue
            if member.rates(gpus)[gpu_type][Locality.CLUSTER] <= 0:
                continue
            if not has:
                if not self._stay(member, gpus, gpu_type):
                    fits = gpus <= self.draft.free[node]
                    self._take(member.row, (NodeGpus(node, gpus),) if fits else self.draft.tightest(gpu_type, gpus))
                return True
            if self._type_of(self._site(member.row)) == gpu_type:
                self._grow(member.row, self._site(member.row), gpus - has)
                return True
        return False

    def _take_turns(self) -> None:
        """Jobs of a sweep that are ahead at the end of a lease hand their GPUs to siblings that have none, gang for gang."""
        columns = self._snapshot.columns
        empty = [row for row in self._snapshot.active if row not in self.sites and row not in self._ahead]
        waiting = [row for row in empty if columns.apps[row] is not None and (not columns.gpus[row] or row in self._expired)]
        for row in sorted(self._ahead & self._expired & self.sites.keys()):
            heir = self._heir(columns.app[row], self.sites[row], waiting)
            if heir is not None:
                self.sites[heir] = self.sites.pop(row)
                waiting.remove(heir)

    # --- where things are

    def _held(self, row: int, before: int) -> int:
        """GPUs that a job has: those of this sale, or those it had before, under a lease that goes on."""
        site = self.sites.get(row)
        return before if site is None else _size(site)

    def _site(self, row: int) -> Site:
        return self.sites.get(row) or site_of(self._snapshot.placement.holdings[row])

    def _type_of(self, site: Site) -> int:
        return self.draft.topology.type_of[site[0].node]

    def _is_free(self, site: Site) -> bool:
        return all(self.draft.free[part.node] >= part.gpus for part in site)

    def _take(self, row: int, site: Site | None) -> None:
        assert site is not None
        self.draft.take(site)
        self.sites[row] = site

    def _grow(self, row: int, site: Site, more: int) -> None:
        """Give a job more GPUs, on its own nodes as far as they have some."""
        gpus = dict(site)
        for node in gpus:
            here = min(more, self.draft.free[node])
            self.draft.take((NodeGpus(node, here),))
            gpus[node] += here
            more -= here
        if more:
            rest = self.draft.tightest(self._type_of(site), more)
            assert rest is not None
            self.draft.take(rest)
            for part in rest:
                gpus[part.node] = gpus.get(part.node, 0) + part.gpus
        self.sites[row] = tuple(NodeGpus(node, count) for node, count in sorted(gpus.items()))


def _size(site: Site) -> int:
    """GPUs of a site."""
    return sum(part.gpus for part in site)
