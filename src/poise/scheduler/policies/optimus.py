"""Least time to finish by marginal gain (`optimus`; Peng et al., Optimus, EuroSys'18; docs/algorithms/optimus.md).

Q_m steps that job m has left, f_m(w) its steps per second with w GPUs. Every interval all GPUs are distributed anew:

    1   in order of arrival, while GPUs last, every job its least number of GPUs
    2   the next GPU to the job with the largest  Q_m/f_m(w) − Q_m/f_m(w+1);  until none is left, or none saves time

    3   where: jobs by number of GPUs, rising; evenly over as few of the emptiest nodes as hold them

Q_m comes from the losses that a job has reported: a curve is fitted to them (`scheduler/solve/curve_fitting.py`), and the
job is done where no epoch lowers its loss by `delta`. Jobs that report nothing have the steps that they declare; a job of
which nothing is known gets its least number of GPUs. Between intervals no job is disturbed: jobs that come get what is
free, by the same two rules.

Published for one kind of GPU. Here a running job keeps its type as long as there is room, and a waiting one takes the
fastest that has room for its least; 2 is done type by type. A rigid job is a ladder of one rung: its gang, or nothing.
O(U log J) an interval for U units given out.

`Optimus` is the policy; below it stand its parts: the greedy of rule 2, the place of rule 3, and the work left of the jobs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from heapq import heappop, heappush
from math import inf, isfinite
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from poise.scheduler.model.cluster import NodeGpus, Site
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim, Plan
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.units import next_round_end
from poise.scheduler.policies import papers
from poise.scheduler.policies.listing import (
    Capability,
    Family,
    Listing,
    Parameter,
    PolicyProperty,
    Traits,
    choice,
    fraction,
    number,
    positive,
)
from poise.scheduler.policies.placement_draft import PlacementDraft
from poise.scheduler.solve.curve_fitting import FEWEST_POINTS, convergence


class FreeNodes(StrEnum):
    """Which nodes a gang goes to: evenly to the emptiest, as published (§4.2), or to the tightest that hold it.

    With equal parts no worker lags behind.
    """

    EMPTIEST = "emptiest"
    TIGHTEST = "tightest"


@dataclass(frozen=True, slots=True)
class Optimus:
    """Marginal gain, every `interval` seconds.

    delta   part of the greatest loss by which an epoch must lower it for a job to go on
    nodes   where gangs go
    keep    how much more a GPU that a job holds is counted than one that it would be restarted for, as a part
    """

    interval: float = 600.0
    delta: float = 0.01
    nodes: FreeNodes = FreeNodes.EMPTIEST
    keep: float = 0.0

    def start(self) -> "SpeedOutlook":
        """The memory before the first plan."""
        return SpeedOutlook()

    def plan(self, snapshot: Snapshot, memory: "SpeedOutlook") -> tuple[Plan, "SpeedOutlook"]:
        """At the end of an interval for all jobs; inside one, for those that wait."""
        columns = snapshot.columns
        arrived = range(memory.seen, len(columns.ids))
        if arrived:
            elastic = memory.is_elastic or any(columns.least[row] < columns.most[row] for row in arrived)
            memory = replace(memory, seen=arrived.stop, is_elastic=elastic)
        if not (snapshot.is_contended or memory.is_elastic):
            return Plan.changing((), (), inf), memory
        if snapshot.now < memory.due:
            return self._filled(snapshot, memory), memory
        work = _Work(snapshot, memory.forecasts, self.delta)
        due = next_round_end(snapshot.origin, snapshot.now, self.interval)
        return self._anew(work, due), replace(memory, due=due, forecasts=work.forecasts())

    def _filled(self, snapshot: Snapshot, memory: "SpeedOutlook") -> Plan:
        """What is free goes to waiting jobs; other changes are left to the end of the interval."""
        waiting = snapshot.rows[~snapshot.running]
        able = waiting[snapshot.ints(snapshot.columns.least)[~snapshot.running] <= max(snapshot.idle)].tolist()
        work = _Work(snapshot, memory.forecasts, self.delta)
        seats, left = work.first_seats(able, list(snapshot.idle))
        granted = self._grown(work, seats, left)
        claims = self._sited(granted, PlacementDraft(snapshot.placement)) if granted else ()
        is_settled = len(granted) == len(waiting) and not memory.is_elastic
        return Plan.changing(claims, (), inf if is_settled else memory.due)

    def _anew(self, work: "_Work", due: float) -> Plan:
        """Every job's number of GPUs from scratch; only jobs whose number or type changes are touched."""
        snapshot = work.snapshot
        holdings, pinned = snapshot.placement.holdings, snapshot.pinned
        held = {row: held for row in holdings if row not in pinned and (held := work.held(row))}
        capacity = list(snapshot.idle)  # GPUs by type that are free, or held by jobs that may be resized
        for gpu_type, count in held.values():
            capacity[gpu_type] += count
        seats, left = work.first_seats((row for row in snapshot.active if row not in pinned), capacity)
        granted = self._grown(work, seats, left)
        changed = {row: seat for row, seat in granted.items() if held.get(row) != (seat.gpu_type, seat.gpus)}
        stops = tuple(row for row in held if row not in granted)
        if not (changed or stops):
            return Plan.changing((), (), due if work.may_change else inf)
        draft = PlacementDraft(snapshot.placement)
        draft.release(holdings[row] for row in (*stops, *(row for row in changed if row in held)))
        plan = Plan.changing(self._sited(changed, draft), stops, due if work.may_change else inf)
        return replace(plan, more=partial(_rest, work))

    def _grown(self, work: "_Work", seats: "dict[int, Seat]", left: Sequence[int]) -> "dict[int, Seat]":
        """The second rule, on each type."""
        starts: dict[int, dict[int, Seat]] = {}
        for row, seat in seats.items():
            if len(work.ladders(row)[seat.gpu_type]) > 1:
                starts.setdefault(seat.gpu_type, {})[row] = seat
        grown = dict(seats)
        for gpu_type, elastic in starts.items():
            tops = {row: work.top(row, seat) for row, seat in elastic.items()}
            if sum(tops[row].gpus - seat.gpus for row, seat in elastic.items()) <= left[gpu_type]:
                grown.update(tops)  # there is enough for all: the outcome of the greedy, without its order
                continue
            granted: Granted[Seat] = greedily(elastic, partial(work.offers, self.keep), left[gpu_type])
            work.may_change = True
            grown.update(granted.states)
        return grown

    def _sited(self, seats: "Mapping[int, Seat]", draft: PlacementDraft) -> tuple[Claim, ...]:
        """Claims on nodes, the fewest GPUs first."""
        claims = []
        for row, seat in sorted(seats.items(), key=lambda each: (each[1].gpus, each[0])):
            site = site_for(draft, seat.gpu_type, seat.gpus, self.nodes)
            if site is not None:
                draft.take(site)
                claims.append(Claim(row, gpus=seat.gpus, site=site))
        return tuple(claims)


LISTING = Listing(
    "optimus",
    Family.MARKET,
    "each job its least GPUs, then every further GPU where it saves most time; resizes elastic jobs",
    "Peng et al., Optimus, EuroSys'18",
    (PolicyProperty.WORK_CONSERVING,),
    Optimus,
    (
        Parameter("interval", "600", "seconds from one distribution of all GPUs to the next", positive),
        Parameter(
            "delta", "0.01", "a job is done when an epoch lowers its loss by less than this part of the greatest", fraction
        ),
        Parameter("nodes", "emptiest", "gangs go evenly to the emptiest nodes, or to the tightest ones", choice(FreeNodes)),
        Parameter(
            "keep", "0", "how much more a GPU counts that a job holds than one it is restarted for, as a part", number
        ),
    ),
    can=frozenset({Capability.ELASTIC}),
    traits=Traits(
        optimises="time to finish, summed over jobs, by marginal gain",
        fairness="none: every job its least GPUs, in order of arrival",
        heterogeneity="blind: a job's GPUs are of one type, the fastest with room",
        gang="rigid jobs whole or not at all",
        elasticity="grows and shrinks jobs every 10 minutes",
        verified="the example with parameter servers, exactly; fits recover known curves; gains never rise",
    ),
    url=papers.OPTIMUS,
)


State = TypeVar("State")


class MarginalOffer(NamedTuple, Generic[State]):
    """A unit that could be added: what it saves, what it costs, and what its contender is with it."""

    saves: float
    cost: int
    after: State


class Grant(NamedTuple, Generic[State]):
    """A unit that was added: to whom, what it saves for its cost, and what its contender is now."""

    to: int
    gain: float
    state: State


@dataclass(frozen=True, slots=True)
class Granted(Generic[State]):
    """The outcome: the state of every contender, the units in the order in which they were given, what is left over."""

    states: dict[int, State]
    grants: tuple[Grant[State], ...]
    left: int


def greedily(
    starts: Mapping[int, State], offers: Callable[[int, State], Iterable[MarginalOffer[State]]], capacity: int
) -> Granted[State]:
    """Give units out, the largest saving for its cost first, until none is left or none saves anything.

    `capacity` is what is left once every contender has its start. Equal gains go to the lower key, and of one contender's
    to the first that it offers. A unit that costs more than is left is passed over. O(log n) per unit. It knows nothing of
    what a unit is: Optimus proper adds parameter servers and workers; where jobs reduce among themselves there are only
    GPUs.
    """
    states, grants, asking = dict(starts), list[Grant[State]](), list(starts)
    heap: list[tuple[float, int, MarginalOffer[State]]] = []
    while True:
        for key in asking:
            able = [offer for offer in offers(key, states[key]) if offer.saves > 0 and offer.cost <= capacity]
            if able:
                best = max(able, key=lambda offer: offer.saves / offer.cost)
                heappush(heap, (-(best.saves / best.cost), key, best))
        if not heap:
            return Granted(states, tuple(grants), capacity)
        gain, key, offer = heappop(heap)
        asking = [key]
        if offer.cost <= capacity:
            capacity -= offer.cost
            states[key] = offer.after
            grants.append(Grant(key, -gain, offer.after))


def site_for(draft: PlacementDraft, gpu_type: int, gpus: int, nodes: FreeNodes) -> Site | None:
    """A site with this many free GPUs of a type; None if there are not enough.

    The emptiest: one node if it holds the gang; else the least k such that the k emptiest nodes hold it in parts that
    differ by one GPU at most; else as the tightest.
    """
    free = draft.free
    if nodes is FreeNodes.EMPTIEST and draft.idle[gpu_type] >= gpus:
        if (site := draft.roomiest(gpu_type, gpus)) is not None:
            return site
        able = [node for node, kind in enumerate(draft.topology.type_of) if kind == gpu_type and free[node]]
        able.sort(key=lambda node: (-free[node], node))
        for count in range(2, min(gpus, len(able)) + 1):
            part, larger = divmod(gpus, count)
            if free[able[count - 1]] >= part and (not larger or free[able[larger - 1]] > part):
                return tuple(sorted(NodeGpus(node, part + (place < larger)) for place, node in enumerate(able[:count])))
    return draft.tightest(gpu_type, gpus)


class Seat(NamedTuple):
    """GPUs of a type that a job gets: a rung of its ladder."""

    gpu_type: int
    rung: int
    gpus: int


class Rung(NamedTuple):
    """A number of GPUs that a job can run with, and the seconds that a step then takes."""

    gpus: int
    seconds: float


Ladder = tuple[Rung, ...]
"""The rungs of a job on one GPU type, rising; empty if it cannot run there."""


class Forecast(NamedTuple):
    """The step at which a job is believed to be done, from this many reports of its loss; None: they do not tell."""

    reports: int
    step: float | None


@dataclass(frozen=True, slots=True)
class SpeedOutlook:
    """What is remembered: when all GPUs are next distributed, forecasts by row, and whether any row seen is elastic."""

    due: float = -inf
    forecasts: MappingProxyType[int, Forecast] = field(default_factory=lambda: MappingProxyType({}))
    seen: int = 0
    is_elastic: bool = False


class _Work:
    """Ladders, holdings and work left of the jobs of a snapshot, as far as they are asked for.

    may_change   whether time alone may change the outcome
    """

    def __init__(self, snapshot: Snapshot, forecasts: Mapping[int, Forecast], delta: float) -> None:
        self.snapshot, self._delta = snapshot, delta
        self.may_change = False
        self._forecasts = dict(forecasts)
        self._ladders: dict[int, tuple[Ladder, ...]] = {}
        self._lefts: dict[int, float] = {}
        self._tops: dict[tuple[int, int], Seat] = {}

    def held(self, row: int) -> tuple[int, int] | None:
        """Type and number of the GPUs that a job holds; None if it waits."""
        floor = self.snapshot.placement
        holding = floor.holdings.get(row)
        return None if holding is None else (floor.topology.type_of[holding[0].node], self.snapshot.columns.gpus[row])

    def forecasts(self) -> MappingProxyType[int, Forecast]:
        """Forecasts to remember: those of jobs that are still there."""
        active = set(self.snapshot.active)
        return MappingProxyType({row: each for row, each in self._forecasts.items() if row in active})

    def first_seats(self, rows: Iterable[int], left: list[int]) -> tuple[dict[int, Seat], list[int]]:
        """The first rule: the least GPUs in order of arrival, on the type that a job holds, else on its fastest.

        Returns what is left of each type as well.
        """
        seats: dict[int, Seat] = {}
        for row in rows:
            ladders = self.ladders(row)
            able = [kind for kind, ladder in enumerate(ladders) if ladder and ladder[0].gpus <= left[kind]]
            if not able:
                continue
            mine = self.held(row)
            best = mine[0] if mine and mine[0] in able else min(able, key=lambda kind: ladders[kind][0].seconds)
            seats[row] = Seat(best, 0, ladders[best][0].gpus)
            left[best] -= seats[row].gpus
            if not any(left):
                break
        return seats, left

    def ladders(self, row: int) -> tuple[Ladder, ...]:
        """The numbers of GPUs that a job can run with, by type; jobs of one kind have the same."""
        columns = self.snapshot.columns
        kind = columns.kind[row]
        if kind not in self._ladders:
            estimate = self.snapshot.estimate(row)
            numbers = sorted([(columns.gang[row], estimate.rates), *estimate.others])
            self._ladders[kind] = tuple(
                tuple(
                    Rung(gpus, 1.0 / rates[gpu_type][Locality.PACKED])
                    for gpus, rates in numbers
                    if columns.least[row] <= gpus <= columns.most[row] and rates[gpu_type][Locality.PACKED] > 0
                )
                for gpu_type in range(len(estimate.rates))
            )
        return self._ladders[kind]

    def offers(self, keep: float, row: int, seat: Seat) -> tuple[MarginalOffer[Seat], ...]:
        """The next rung of a job, if there is one. One that it stands on already counts a little more (`keep`)."""
        ladder = self.ladders(row)[seat.gpu_type]
        if seat.rung + 1 == len(ladder):
            return ()
        after = ladder[seat.rung + 1]
        saves = self.left(row) * (ladder[seat.rung].seconds - after.seconds)
        if keep and (held := self.held(row)) and held[0] == seat.gpu_type and after.gpus <= held[1]:
            saves *= 1.0 + keep
        return (MarginalOffer(saves, after.gpus - seat.gpus, Seat(seat.gpu_type, seat.rung + 1, after.gpus)),)

    def top(self, row: int, seat: Seat) -> Seat:
        """Where a job would come to if there were GPUs enough."""
        if self.left(row) <= 0:
            return seat
        key = (self.snapshot.columns.kind[row], seat.gpu_type)
        top = self._tops.get(key)
        if top is None:
            ladder, rung = self.ladders(row)[seat.gpu_type], 0
            while rung + 1 < len(ladder) and ladder[rung + 1].seconds < ladder[rung].seconds:
                rung += 1
            top = self._tops[key] = Seat(seat.gpu_type, rung, ladder[rung].gpus)
        return top

    def left(self, row: int) -> float:
        """Steps that a job has left; 0 if nothing is known of it."""
        left = self._lefts.get(row)
        if left is None:
            columns, now = self.snapshot.columns, self.snapshot.now
            done = columns.steps_done[row] + columns.rate[row] * max(now - columns.progress_from[row], 0.0)
            points = self.snapshot.losses.get(row, ())
            forecast = self._forecast(row, points) if len(points) >= FEWEST_POINTS else None
            total = columns.steps[row] if forecast is None else forecast
            if not isfinite(total):
                self.may_change = True  # it may report its loss
            left = self._lefts[row] = max(total - done, 0.0) if isfinite(total) else 0.0
        return left

    def _forecast(self, row: int, points: Sequence[tuple[float, float]]) -> float | None:
        """The step at which the losses say that the job is done; an epoch is the distance from one report to the next."""
        known = self._forecasts.get(row)
        if known is None or known.reports != len(points):
            curve = convergence([step for step, _ in points], [loss for _, loss in points])
            epoch = (points[-1][0] - points[0][0]) / (len(points) - 1)
            step = None if curve is None else curve.converged(epoch, self._delta)
            known = self._forecasts[row] = Forecast(len(points), step)
        return known.step


def _rest(work: _Work, idle: tuple[int, ...]) -> tuple[Claim, ...]:
    """Jobs that still wait get what is left over after all, for instance because a job could not be stopped yet."""
    snapshot = work.snapshot
    waiting = snapshot.ints(snapshot.columns.least) <= max(idle)
    waiting &= ~snapshot.running
    seats, _ = work.first_seats(snapshot.rows[waiting].tolist(), list(idle))
    return tuple(Claim(row, types=(seat.gpu_type,), gpus=seat.gpus) for row, seat in seats.items())
