"""One quantum of split stride over the GPUs of one type: who runs, and where (Gandiva_fair, EuroSys'20 §3.3).

Every job has a home: a node, or a few nodes if its gang spans them. `lag` says how many quanta of its own service it is
behind what its tenant's tickets give it; it is bounded (`accounts.py`).

    centre   a gang that spans nodes reserves them if it is further behind than the small jobs that live there, each node
             taken as one: their mean lag by tickets is the lag of the node's aggregate
    nodes    small jobs by decreasing lag, each on its home; one that does not fit is passed over and keeps its lag
    budgets  all of that only as far as the tenant is behind its share of the whole pool. So imbalances between nodes cost
             some tenant a quantum, and not its share
    filling  homes fill up regardless of budgets; then GPUs that no job at home can use take waiting jobs from elsewhere
    choice   where tenants are then off their budgets, or GPUs idle, the gangs are chosen so that they are not
             (`best_gangs`) and seated with few moves; a gang that finds no place is passed over and keeps its lag

A tenant that gets more than its budget starts with less in the next quantum: lags of tenants are bounded by gangs, not by
time. `decide`, at the end, is what the planner calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Floats, Ints
from poise.scheduler.model.cluster import NodeGpus, Site

EVENNESS = 10.0
"""How much more it counts that a tenant is off its budget than that one of its jobs is."""

IDLENESS = 12.0
"""What an idle GPU costs, in gains of a GPU-quantum."""

AMOUNTS = 48
"""Amounts of GPUs that are considered for a tenant, the best ones by themselves."""


@dataclass(frozen=True, slots=True)
class StrideGang:
    """A job that may run: its GPUs, and what is gained if it does."""

    row: int
    gpus: int
    gain: float


def imbalance(left: Mapping[int, float], shares: Mapping[int, float], idle: int) -> float:
    """What it costs that tenants are off their budgets by `left` GPUs and that GPUs are idle."""
    off = sum(left[tenant] ** 2 / share for tenant, share in shares.items() if share > 0)
    return EVENNESS * off + IDLENESS * idle


def best_gangs(
    gangs: Mapping[int, Sequence[StrideGang]], gpus: int, *, shares: Mapping[int, float], budgets: Mapping[int, float]
) -> set[int]:
    """Rows of the gangs that run, of at most `gpus` GPUs in all, so that tenants get their due and few GPUs idle.

    For a tenant u with budget b_u (its share and what it is behind) and jobs j with gang g_j, r_j = tickets ÷ gang, and lag
    l_j in quanta against the other jobs of the tenant:

        gain of a set S   Σ g_j · (2 (l_j + r_j) − 1) over S: by how much it lowers Σ g_j · l_j² of the tenant's jobs
        f_u(a)            the largest gain of a set with a GPUs in all, less EVENNESS · (b_u − a)² ÷ share_u
        choice            max Σ f_u(a_u) − IDLENESS · idle, where idle = GPUs − Σ a_u

    Exact: two knapsacks, one over the jobs of each tenant and one over tenants. O((J + U) · N) for J jobs, U tenants and N
    GPUs. Where the gangs can live is not looked at here.
    """
    tables = [
        _GangTable(own, shares[tenant], budgets[tenant], gpus) for tenant, own in sorted(gangs.items()) if shares[tenant] > 0
    ]
    size = gpus + 1
    best: Floats = np.full(size, -np.inf)  # the best value by GPUs of all tenants so far
    best[0] = 0.0
    amounts: list[Ints] = []  # for each tenant, the GPUs that it has of them
    for table in tables:
        after: Floats = np.full(size, -np.inf)
        amount: Ints = np.zeros(size, dtype=np.int64)
        for own_gpus in table.amounts():
            value = best[: size - own_gpus] + table.value[own_gpus]
            better = value > after[own_gpus:]
            after[own_gpus:][better] = value[better]
            amount[own_gpus:][better] = own_gpus
        best = after
        amounts.append(amount)
    total = int(np.argmax(best + IDLENESS * np.arange(gpus + 1)))
    rows: set[int] = set()
    for table, amount in zip(reversed(tables), reversed(amounts), strict=True):
        spent = int(amount[total])
        rows |= table.rows(spent)
        total -= spent
    return rows


class _GangTable:
    """The best sets of one tenant's jobs by their GPUs in all."""

    def __init__(self, gangs: Sequence[StrideGang], share: float, budget: float, gpus: int) -> None:
        self._gangs = gangs
        most = min(gpus, sum(each.gpus for each in gangs))
        gain: Floats = np.full(most + 1, -np.inf)
        gain[0] = 0.0
        self._taken: list[Bools] = []
        for each in gangs:
            size = min(each.gpus, most + 1)
            with_it = gain[: most + 1 - size] + each.gain
            taken: Bools = np.zeros(most + 1, dtype=bool)
            taken[size:] = with_it > gain[size:]
            gain[size:] = np.maximum(with_it, gain[size:])
            self._taken.append(taken)
        self.value: Floats = gain - EVENNESS * (budget - np.arange(most + 1)) ** 2 / share

    def rows(self, gpus: int) -> set[int]:
        """Jobs in the best set of this many GPUs."""
        found = set()
        for each, taken in zip(reversed(self._gangs), reversed(self._taken), strict=True):
            if taken[gpus]:
                found.add(each.row)
                gpus -= each.gpus
        return found

    def amounts(self) -> list[int]:
        """Numbers of GPUs to look at."""
        able = np.flatnonzero(self.value > -np.inf)
        chosen: list[int] = able[np.argsort(-self.value[able], kind="stable")[:AMOUNTS]].tolist()
        return sorted(chosen)


EVEN = 0.05
"""Imbalance for each GPU of the pool up to which split stride is taken as it comes out."""

TRIES = 8
"""Sets of gangs that are looked at where it is not."""

KEEP = 2.0
"""What it is worth, for each GPU and in gains, that a running job goes on where it is."""

CANDIDATES = 3
"""Nodes, those with most room, that are looked at for making room."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A job that wants its gang on the GPUs of a pool.

    tickets   GPUs that it is to have in the long run
    lag       quanta that it is behind
    home      where it lives; None if the nodes that are there cannot hold it
    since     when it began to wait; minus infinity for a running job
    may_move  whether it may get another home now
    """

    row: int
    tenant: int
    gang: int
    tickets: float
    lag: float
    home: Site | None
    since: float
    may_move: bool

    @property
    def is_large(self) -> bool:
        """Whether it spans nodes."""
        return self.home is not None and len(self.home) > 1

    @property
    def runs(self) -> bool:
        """Whether it has GPUs now."""
        return self.since == -inf

    @property
    def order(self) -> tuple[float, float, int]:
        """The furthest behind first; of equals those that run, then those that have waited longest."""
        return (-self.lag, self.since, self.row)


class Quantum:
    """The GPUs of a pool in the next quantum, in the making.

    sizes    all GPUs by node;  room: unreserved ones
    chosen   who runs, and where
    left     GPUs that each tenant may still have within its budget; negative if it has more
    """

    def __init__(
        self, sizes: Mapping[int, int], room: Mapping[int, int], *, shares: Mapping[int, float], budgets: Mapping[int, float]
    ) -> None:
        self.room, self.left = dict(room), dict(budgets)
        self.idle = sum(self.room.values())
        self._sizes, self._shares = sizes, shares
        self._largest = max(sizes.values(), default=0)
        self.chosen: dict[int, Site] = {}
        self._seated: dict[int, Contender] = {}
        self._staying: dict[int, int] = {}  # GPUs of jobs that go on there: others rather go elsewhere

    def settle(self, contenders: Iterable[Contender]) -> None:
        """Split stride: centre, nodes, and whatever else fills the GPUs."""
        ordered = sorted(contenders, key=lambda each: each.order)
        self._centre(ordered)
        for each in ordered:  # small jobs at home
            if not each.is_large and self._affords(each):
                self._try(each, each.home)
        self.fill(ordered)

    def _centre(self, ordered: Sequence[Contender]) -> None:
        """Gangs that span nodes, against one aggregate per node."""
        large = [each for each in ordered if each.is_large]
        if large:
            aggregates = aggregate_lags(ordered)
            for each in large:
                # The lag of the aggregates by the GPUs that are asked of each node; -1 if no small job lives there.
                here = [(aggregates[node], gpus) for node, gpus in each.home or () if node in aggregates]
                lag = sum(lag * gpus for lag, gpus in here) / sum(gpus for _, gpus in here) if here else -1.0
                if each.lag >= lag and self._affords(each) and not self._try(each, each.home) and each.may_move:
                    self.move(each)

    def fill(self, contenders: Iterable[Contender]) -> None:
        """The rest of the GPUs, budget or not: at home first, those of the tenants with most budget left; then anywhere."""
        rest = [each for each in contenders if each.row not in self.chosen]
        rest.sort(key=lambda each: (-self.left.get(each.tenant, 0.0), each.order))
        for each in rest:
            if not self.idle:
                return
            self._try(each, each.home)
        for offer in (self.move, self._make_room):
            for each in rest:
                if each.row not in self.chosen and each.gang <= self.idle:
                    offer(each)

    def seat(self, ordered: Sequence[Contender]) -> None:
        """One after the other: at home, else on the tightest place, else where others can make way."""
        for each in ordered:
            if each.runs and each.home is not None and not each.is_large:
                node = each.home[0].node
                self._staying[node] = self._staying.get(node, 0) + each.gang
        for each in ordered:
            if not self._try(each, each.home):
                self.move(each)
        for each in ordered:
            if each.row not in self.chosen:
                self._make_room(each)

    @property
    def imbalance(self) -> float:
        """How far tenants are off their budgets, and GPUs idle: see `imbalance`."""
        return imbalance(self.left, self._shares, self.idle)

    def cost(self, gains: Mapping[int, float]) -> float:
        """Imbalance less what the chosen jobs gain; a job that is moved does not go on."""
        moved = sum(each.gang for row, each in self._seated.items() if each.runs and self.chosen[row] != each.home)
        return self.imbalance + KEEP * moved - sum(gains[row] for row in self.chosen)

    def move(self, each: Contender) -> bool:
        """To the node with the least room that is enough; a gang that no node holds to those with most room."""
        if each.gang > self.idle:
            return False
        site = self._tightest(each.gang)
        if site is None and each.gang > self._largest:
            parts, left = [], each.gang
            rooms = sorted(self.room.items(), key=lambda item: (-item[1], self._staying.get(item[0], 0), item[0]))
            for node, room in rooms:
                parts.append(NodeGpus(node, min(room, left)))
                left -= parts[-1].gpus
                if not left:
                    break
            site = tuple(sorted(parts))
        return self._try(each, site)

    def _affords(self, each: Contender) -> bool:
        """Half a gang over budget is as good as half a gang under it; a gang larger than the share has its turn too."""
        share = self._shares.get(each.tenant, 0.0)
        return share > 0 and self.left.get(each.tenant, 0.0) >= min(each.gang, share) / 2

    def _try(self, each: Contender, site: Site | None) -> bool:
        room = self.room
        if site is None or each.row in self.chosen or any(room.get(node, 0) < gpus for node, gpus in site):
            return False
        for node, gpus in site:
            room[node] -= gpus
        self.idle -= each.gang
        self.left[each.tenant] = self.left.get(each.tenant, 0.0) - each.gang
        self.chosen[each.row] = site
        self._seated[each.row] = each
        return True

    def _make_room(self, each: Contender) -> bool:
        """Small jobs that are chosen on some node make way to where there is room, if that lets one more run."""
        if each.gang > self._largest:
            return False
        for node in sorted(self.room, key=lambda node: (-self.room[node], node))[:CANDIDATES]:
            if self._sizes[node] >= each.gang and self._clear(node, each.gang):
                return self._try(each, (NodeGpus(node, each.gang),))
        return False

    def _clear(self, node: int, gpus: int) -> bool:
        """Free this many GPUs of a node by moving small jobs elsewhere, those first that do not run now, then the largest.

        Nothing changes if that is not possible.
        """
        room, need = dict(self.room), gpus - self.room[node]
        moves: dict[int, Site] = {}
        here = (self._seated[row] for row, site in self.chosen.items() if len(site) == 1 and site[0].node == node)
        able = [each for each in here if each.may_move or not each.runs]
        for each in sorted(able, key=lambda each: (each.runs, -each.gang, each.row)):
            if each.gang <= need:
                site = self._tightest(each.gang, but=node)
                if site is not None:
                    self.room[site[0].node] -= each.gang
                    self.room[node] += each.gang
                    moves[each.row] = site
                    need -= each.gang
        if need > 0:
            self.room = room
            return False
        self.chosen.update(moves)
        return True

    def _tightest(self, gang: int, but: int = -1) -> Site | None:
        """The node with the least room that is enough, other than one."""
        fitting = [
            (room, self._staying.get(node, 0), node) for node, room in self.room.items() if room >= gang and node != but
        ]
        return (NodeGpus(min(fitting)[2], gang),) if fitting else None


def decide(
    sizes: Mapping[int, int], contenders: Sequence[Contender], *, shares: Mapping[int, float], budgets: Mapping[int, float]
) -> Quantum:
    """Split stride; where that leaves tenants uneven or GPUs idle, the best gangs that find a place, if they are better."""
    blank = partial(Quantum, sizes, sizes, shares=shares, budgets=budgets)
    best = blank()
    best.settle(contenders)
    gpus = sum(sizes.values())
    if best.imbalance <= EVEN * gpus:
        return best
    jobs: dict[int, list[Contender]] = {}
    for each in contenders:
        jobs.setdefault(each.tenant, []).append(each)
    able = {tenant: _with_gains(own) for tenant, own in jobs.items()}
    gains = {gang.row: gang.gain for own in able.values() for gang in own}
    for _ in range(TRIES):
        rows = best_gangs(able, gpus, shares=shares, budgets=budgets)
        other = _seated(blank, [each for each in contenders if each.row in rows])
        unseated = rows - other.chosen.keys()
        other.fill(contenders)
        best = min(best, other, key=lambda each: each.cost(gains))
        if not unseated:
            break
        able = {tenant: [each for each in own if each.row not in unseated] for tenant, own in able.items()}
    return best


def _seated(blank: Callable[[], Quantum], wanted: Sequence[Contender]) -> Quantum:
    """Running jobs stay if all find a place then; otherwise the largest come first."""
    quantum = blank()
    quantum.seat(sorted(wanted, key=lambda each: (not each.runs, -each.gang, each.order)))
    if len(quantum.chosen) < len(wanted):
        quantum = blank()
        quantum.seat(
            sorted(wanted, key=lambda each: (each.may_move or not each.runs, -each.gang, not each.runs, each.order))
        )
    return quantum


def _with_gains(jobs: Sequence[Contender]) -> list[StrideGang]:
    """A tenant's gangs with what is gained if they run: lags are against the mean of the tenant's jobs."""
    tickets = sum(each.tickets for each in jobs)
    mean = sum(each.tickets * each.lag for each in jobs) / tickets if tickets else 0.0
    return [
        StrideGang(each.row, each.gang, each.gang * (2 * (each.lag - mean) - 1 + KEEP * each.runs) + 2 * each.tickets)
        for each in jobs
    ]


def aggregate_lags(contenders: Iterable[Contender]) -> dict[int, float]:
    """By node: the mean lag of the small jobs that live there, by tickets.

    That is the lag of an entity whose size is the node and whose tickets are theirs: its pass rises by what they are
    granted ÷ their tickets, as the mean of their passes does.
    """
    tickets: dict[int, float] = {}
    lags: dict[int, float] = {}
    for each in contenders:
        if each.home is not None and not each.is_large:
            node = each.home[0].node
            tickets[node] = tickets.get(node, 0.0) + each.tickets
            lags[node] = lags.get(node, 0.0) + each.tickets * each.lag
    return {node: lags[node] / tickets[node] for node in tickets if tickets[node] > 0}
