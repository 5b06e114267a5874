"""Apps and those who bid for them (Themis, NSDI'20 §4-5; docs/algorithms/themis.md).

An app is jobs that belong together; a job that names none is one by itself. With C GPUs in all:

    N_a       mean number of active apps since a came
    T_id      = Σ_k W_k / min(C / N_a, Σ_k d_k)        jobs k of a that were not given up: GPU-seconds of work W_k on the
                                                       cluster's mix of types, and GPUs d_k that they ask for
    T_sh(G)   = elapsed + Σ_k (GPU-seconds of work left in job k, where it would be) / |G|
    ρ(G)      = T_sh(G) / T_id;    ρ(∅) = 1e6;    V(G) = 1 / ρ(G)

The file goes from the small to the large: a `Bid` and the `GpuOffer` that it answers; `AppAgent`, who bids for an app, and
`Honest`, who does so as the scheduler believes; `AppRegistry`, which apps there are; `Bidders`, all of them at an auction.

The arbiter knows an agent by `bid` alone, so that an app may send its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Floats, Ints
from poise.scheduler.model.job import Status
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.speed import Estimate, Locality, Rates
from poise.scheduler.policies.placement_draft import PlacementDraft
from poise.scheduler.solve.auction import BidTable
from poise.scheduler.solve.pseudo_random import uniform

NOTHING = 1e6
"""ρ of an app that holds no GPU."""
_LEAST = 1e-9
"""ρ below which there is nothing left to tell apart."""


class Use(NamedTuple):
    """What an app does with GPUs that it gets: the job in this row has `gpus` then, all in all."""

    row: int
    gpus: int


class Bid(NamedTuple):
    """A valuation table: with `units[i]` more GPUs the app has ρ = `rho[i]`, and does `uses[:i]` with them.

    Units ascend from 0, and each use takes whole gangs.
    """

    units: tuple[int, ...]
    rho: tuple[float, ...]
    uses: tuple[Use, ...]

    def table(self) -> BidTable:
        """The bid as the auction reads it: the logarithm of V = 1/ρ.

        ρ(∅) is the same for all. So that an app which would be badly off even with its first gang has more to gain by it,
        not less, what it lacks then counts for the first gang.
        """
        worth = [-log(max(each, _LEAST)) for each in self.rho]
        if self.rho[0] >= NOTHING and len(worth) > 1:
            worth[0] += 2.0 * min(worth[1], 0.0)
        return BidTable(np.array(self.units, dtype=np.int64), np.array(worth))


class GpuOffer:
    """The GPUs of one type that are up for auction: how many, and how close together a gang of them can be."""

    def __init__(self, gpu_type: int, draft: PlacementDraft) -> None:
        self.gpu_type = gpu_type
        self.gpus = draft.idle[gpu_type]
        self._draft = draft
        self._series: dict[int, tuple[PlacementDraft, list[Locality]]] = {}

    def locality(self, gang: int, before: int = 0) -> Locality:
        """Locality of a gang at its tightest place, once `before` gangs of the same size have taken theirs."""
        trial, found = self._series.get(gang) or self._series.setdefault(gang, (self._draft.copy(), []))
        while len(found) <= before:
            site = trial.tightest(self.gpu_type, gang)
            if site is None:
                return Locality.CLUSTER
            trial.take(site)
            found.append(trial.locality(site))
        return found[before]


class AppAgent(Protocol):
    """Who bids for an app."""

    def bid(self, offer: GpuOffer) -> Bid:
        """The app's valuation of more GPUs, out of those on offer."""


@dataclass(frozen=True, slots=True)
class Member:
    """A live job of an app.

    counts   GPUs that it can run with, ascending;  gang: GPUs that it asks for
    held     GPUs under a lease that goes on, with `speed` steps/s; 0 and 0 if there are none
    left     steps left;  best: steps/s of its gang on its fastest type, packed
    rates    steps/s by number of GPUs;  gpu_type: of those that it holds, -1 if it holds none
    """

    row: int
    gang: int
    counts: Sequence[int]
    held: int
    speed: float
    left: float
    best: float
    rates: Callable[[int], Rates]
    gpu_type: int = -1

    def gpu_seconds(self) -> float:
        """Work left: where it runs, or, while it waits, where it would like to."""
        return self.left * self.held / self.speed if self.held else self.left * self.gang / self.best

    def on(self, gpus: int, gpu_type: int, locality: Locality) -> "Member":
        """The member with these GPUs."""
        return replace(self, held=gpus, speed=self.rates(gpus)[gpu_type][locality], gpu_type=gpu_type)


@dataclass(frozen=True, slots=True)
class App:
    """What an agent knows: seconds since the app's first job came, T_id, and the live jobs in the order it serves them."""

    elapsed: float
    alone: float
    members: tuple[Member, ...]

    def rho(self, gpus: int, gpu_seconds: float) -> float:
        """ρ with this many GPUs for this much work left."""
        return (self.elapsed + gpu_seconds / gpus) / self.alone if gpus else NOTHING

    def rho_now(self) -> float:
        """ρ with what it holds."""
        return self.rho(sum(each.held for each in self.members), sum(each.gpu_seconds() for each in self.members))


@dataclass(frozen=True, slots=True)
class Honest:
    """Bids for an app what the scheduler believes.

    For the first of its jobs, the first two, and so on; then for more GPUs for those that can use more. Each line of the
    table is at the tightest place that the offer has for as many GPUs.
    """

    app: App

    def bid(self, offer: GpuOffer) -> Bid:
        """One line for each further gang, or each further GPU of a job that can use it; as many as are on offer."""
        app = self.app
        held = sum(each.held for each in app.members)
        work = sum(each.gpu_seconds() for each in app.members)
        units, rho, uses = [0], [app.rho(held, work)], []
        for use, more, change in _uses(app.members, offer):
            if units[-1] + more > offer.gpus:
                break
            work += change
            units.append(units[-1] + more)
            rho.append(app.rho(held + units[-1], work))
            uses.append(use)
        return Bid(tuple(units), tuple(rho), tuple(uses))


def _uses(members: Sequence[Member], offer: GpuOffer) -> Iterator[tuple[Use, int, float]]:
    """What an app would do with more GPUs, use by use: the GPUs that it takes, and the change of its work left.

    First whole gangs for jobs that have none, then more for jobs that can use more, each in turn.
    """
    growing: list[tuple[Member, int, float]] = []
    placed: dict[int, int] = {}
    for each in members:
        has, work = each.held, each.gpu_seconds()
        if not has:
            has = each.counts[0]
            speed = each.rates(has)[offer.gpu_type][offer.locality(has, placed.get(has, 0))]
            if speed <= 0:
                continue
            placed[has] = placed.get(has, 0) + 1
            yield Use(each.row, has), has, each.left * has / speed - work
            work = each.left * has / speed
        if has < each.counts[-1] and each.gpu_type in (-1, offer.gpu_type):
            growing.append((each, has, work))
    while growing:
        grown = [_more(*each, offer) for each in growing]
        for (each, has, work), (more, changed) in zip(growing, grown, strict=True):
            if more > has:
                yield Use(each.row, more), more - has, changed - work
        both = zip(growing, grown, strict=True)
        growing = [(each, more, after) for (each, _, _), (more, after) in both if more < each.counts[-1]]


def _more(member: Member, has: int, work: float, offer: GpuOffer) -> tuple[int, float]:
    """The next larger count that a job can run with here, and its work left with that; its largest one if there is none."""
    for more in member.counts:
        if more > has:
            speed = member.rates(more)[offer.gpu_type][offer.locality(more)]
            if speed > 0:
                return more, member.left * more / speed
    return member.counts[-1], work


@dataclass(frozen=True, slots=True)
class Erring:
    """An agent that is wrong: each of its values is off by a factor from 1 − error to 1 + error, drawn from a stream."""

    agent: AppAgent
    error: float
    stream: int

    def bid(self, offer: GpuOffer) -> Bid:
        """What the agent bids, with errors."""
        bid = self.agent.bid(offer)
        factors = 1.0 + self.error * (2.0 * uniform(self.stream, len(bid.rho)) - 1.0)
        return bid._replace(rho=tuple((np.array(bid.rho) * factors).tolist()))


UNKNOWN = 3600.0
"""Seconds of work on its fastest type that a job of unknown length is taken to have left, beyond as much as it has done."""
_SLACK = 64
"""Apps that are gone and still remembered, at most, beyond as many as are active."""
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class AppRegistry:
    """The apps, kept from plan to plan.

    area      ∫ active apps dt up to `now`, and how many there are from then on
    begun     of active apps, by index: when the first job came, and `area` then
    sweeps    of apps that have a name: rows of all jobs that ever came
    active    rows that were there;  elastic: those of them that can do with other numbers of GPUs than they ask for
    """

    now: float = 0.0
    area: float = 0.0
    apps: int = 0
    begun: Mapping[int, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
    sweeps: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    active: frozenset[int] = frozenset()
    elastic: tuple[int, ...] = ()

    def at(self, snapshot: Snapshot) -> "AppRegistry":
        """The registry as of now."""
        columns, now = snapshot.columns, snapshot.now
        area = self.area + self.apps * (now - self.now)
        active = frozenset(snapshot.active)
        begun, sweeps, elastic = self.begun, self.sweeps, self.elastic
        if new := sorted(active - self.active):
            opened, named, flexible = dict(begun), dict(sweeps), [*elastic]
            for row in new:
                app = columns.app[row]
                opened.setdefault(app, (min(columns.submitted[row], now), area))
                if columns.apps[row] is not None and row not in named.get(app, ()):
                    named[app] = (*named.get(app, ()), row)
                if columns.least[row] < columns.most[row]:
                    flexible.append(row)
            if len(opened) > 2 * len(snapshot.active) + _SLACK:  # apps that are long gone are forgotten
                live = {columns.app[row] for row in snapshot.active}
                opened = {app: each for app, each in opened.items() if app in live}
                named = {app: rows for app, rows in named.items() if app in live}
            elastic = tuple([row for row in flexible if not Status(columns.status[row]).is_final])
            begun, sweeps = MappingProxyType(opened), MappingProxyType(named)
        apps = len({columns.app[row] for row in snapshot.active}) if sweeps else len(snapshot.active)
        return AppRegistry(now, area, apps, begun, sweeps, active, elastic)

    def live(self, app: int, snapshot: Snapshot) -> list[int]:
        """Rows of the jobs of a sweep that have not ended."""
        status = snapshot.columns.status
        return [row for row in self.sweeps[app] if not Status(status[row]).is_final]


class Bidders:
    """All active apps at an auction, as columns by app, in the order of their first jobs.

    rows, app        active rows, and the place of each one's app among the apps
    rho              with the GPUs that it holds under leases that go on
    hopes            ρ if it had all the GPUs that it asks for from now on, close together on the fastest type
    elapsed, alone   seconds since its first job came; T_id
    """

    def __init__(self, snapshot: Snapshot, registry: AppRegistry, is_expired: Bools) -> None:
        columns = snapshot.columns
        self._snapshot, self._registry, self.rows = snapshot, registry, snapshot.rows
        self.ids, self.first, self.app = np.unique(snapshot.ints(columns.app), return_index=True, return_inverse=True)
        self.app = self.app.reshape(-1)
        self.held: Ints = np.where(is_expired, 0, snapshot.ints(columns.gpus))
        self.gang = snapshot.gang.astype(np.float64)
        self.best = np.maximum(snapshot.floats(columns.best), _TINY)
        self.rate = np.where(self.held > 0, np.maximum(snapshot.floats(columns.rate), _TINY), 0.0)
        self.total, self.left = snapshot.floats(columns.steps), snapshot.steps_left
        if not (is_known := np.isfinite(self.total)).all():  # a guess for jobs of unknown length
            guess = snapshot.steps_so_far + UNKNOWN * self.best
            self.total = np.where(is_known, self.total, snapshot.steps_so_far + guess)
            self.left = np.where(is_known, self.left, guess)
        self.kinds, of_kind, self.kind = np.unique(snapshot.ints(columns.kind), return_index=True, return_inverse=True)
        self.estimates = [snapshot.estimate(int(self.rows[row])) for row in of_kind]
        self._begun = np.array([registry.begun[app] for app in self.ids.tolist()]).reshape(-1, 2)
        self.alone = self._alone()
        self.elapsed = snapshot.now - self._begun[:, 0]
        self.size = self._sum(self.held.astype(np.float64))
        hoped = self.left * self.gang / self.best
        with np.errstate(divide="ignore", invalid="ignore"):
            held = np.where(self.held > 0, self.left * self.held / self.rate, hoped)
            self.rho = np.where(self.size > 0, (self.elapsed + self._sum(held) / self.size) / self.alone, NOTHING)
        self.hopes = (self.elapsed + self._sum(hoped) / self._sum(self.gang)) / self.alone

    @property
    def apps(self) -> int:
        """How many there are."""
        return len(self.ids)

    def _sum(self, by_row: Floats) -> Floats:
        total: Floats = np.bincount(self.app, by_row, self.apps).astype(np.float64)
        return total

    def _alone(self) -> Floats:
        """T_id of each app, with jobs of sweeps that have finished; not with those that were given up."""
        columns, registry, gpus = self._snapshot.columns, self._registry, self._snapshot.placement.topology.totals
        mix = np.array([_mixed(each, gpus) for each in self.estimates])
        speed = np.maximum(mix[self.kind], _TINY)
        work, demand = self._sum(self.total * self.gang / speed), self._sum(self.gang)
        for place, app in enumerate(self.ids.tolist() if registry.sweeps else ()):
            for row in registry.sweeps.get(app, ()):
                if columns.status[row] == Status.FINISHED:
                    rate = max(_mixed(self._snapshot.estimate(row), gpus), _TINY)
                    work[place] += columns.steps[row] * columns.gang[row] / rate
                    demand[place] += columns.gang[row]
        span = registry.now - self._begun[:, 0]
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(span > 0, (registry.area - self._begun[:, 1]) / span, registry.apps)
        slices = self._snapshot.gpus / np.maximum(mean, 1.0)  # C / N of each app
        return np.maximum(work / np.minimum(slices, demand), _TINY)

    def worst_first(self, off: Floats) -> Ints:
        """Places of the apps by falling ρ, each off by a factor.

        Of those that hold nothing, which all have the same ρ, the one that would be worst off even if it had everything
        from now on comes first; then by the submission of their first job.
        """
        holds = self.size > 0
        return np.lexsort((self.first, -off * np.where(holds, self.rho, self.hopes), holds))

    def best_types(self) -> list[int]:
        """GPU types, the one first on which these jobs are fastest on average."""
        many = np.bincount(self.kind, minlength=len(self.kinds))
        types = range(len(self._snapshot.placement.topology.types))
        if len(types) == 1:
            return [0]
        speeds = [(jobs, each.packed, max(each.best(), _TINY)) for jobs, each in zip(many, self.estimates, strict=True)]
        relative = [sum(jobs * packed[kind] / best for jobs, packed, best in speeds) for kind in types]
        return sorted(types, key=lambda kind: (-relative[kind], kind))

    def rows_of(self, place: int) -> list[int]:
        """Indices of the rows of an app."""
        if not self._registry.sweeps:
            return [int(self.first[place])]
        return np.flatnonzero(self.app == place).tolist()

    def member(self, index: int) -> Member:
        """One row, as an agent sees it."""
        columns, floor, row = self._snapshot.columns, self._snapshot.placement, int(self.rows[index])
        gang, held, estimate = columns.gang[row], int(self.held[index]), self.estimates[int(self.kind[index])]
        is_pinned = row in self._snapshot.pinned
        counts = (held,) if is_pinned else counts_of(estimate, gang, columns.least[row], columns.most[row])
        speed, left, best = float(self.rate[index]), float(self.left[index]), float(self.best[index])
        gpu_type = floor.topology.type_of[floor.holdings[row][0].node] if held else -1
        return Member(row, gang, counts, held, speed, left, best, estimate.at, gpu_type)

    def view(self, place: int, members: Sequence[Member]) -> App:
        """An app, with its members in the order in which it serves them."""
        return App(float(self.elapsed[place]), float(self.alone[place]), tuple(members))


def counts_of(estimate: Estimate, gang: int, least: int, most: int) -> Sequence[int]:
    """GPUs that a job can run with, ascending."""
    if least == most or not estimate.others:
        return (gang,)
    return sorted({gang, *(gpus for gpus, _ in estimate.others if least <= gpus <= most)})


def _mixed(estimate: Estimate, gpus: Sequence[int]) -> float:
    """Steps/s on the cluster's mix of types."""
    return sum(row[Locality.PACKED] * count for row, count in zip(estimate.rates, gpus, strict=True)) / sum(gpus)
