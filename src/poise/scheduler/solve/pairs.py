"""Programs of `program.py` in which two rows may share GPUs (`GpuMarket.beside`): column generation over pairs.

With n rows there are n²/2 pairs on every column, far too many unknowns to write down. Four observations make it small.

1. Rows of one kind are alike but for what is asked of them. They are taken together as a *group*, and the unknowns are the
   times of groups: there are as many as kinds, not rows (`_Groups`).
2. A pair on a column is useless if T/T_alone + T'/T'_alone <= 1 there: taking turns does as much. Leaving it out is exact
   (`_ScaledProblem.pays`; docs/algorithms/gavel.md).
3. Few of the remaining pairs are used in the end. The *master program* starts without them, and gets those that would pay at
   the prices of its last answer, until none would (`_Master`). Each solve starts from the previous basis.
4. What the rows of a group want one by one matters only where the group's time cannot be divided to give it to them. Then a
   *cut* is added that rules this division out (`missing`), and the master is solved again.

At the end the time of each group is divided among its rows (`_divide`). If a row would then have to run beside itself, it
leaves its group and everything starts again. In the worst case every row is on its own, which is the program as it is
defined, so that this always ends.

Alike rows (`GpuMarket.count`) are treated as if written out: x, throughput and pressure are those of each member of a row,
the objective counts all. `Pairs.share` is the total time of a pair of rows over all their members: each member of row
`first` spends share / count[first] of its time in it (twice that where a row of count >= 2 shares with itself), and the
resource is occupied for size · share. first <= second. `value` is what time alone is worth; time together is worth in
proportion to its throughput.
"""

from dataclasses import dataclass
from math import nan

import highspy
import numpy as np
from highspy import HighsModelStatus

from poise.scheduler.model.arithmetic import Bools, Floats, Ints, dot
from poise.scheduler.model.errors import GaveUpError, InfeasibleError
from poise.scheduler.model.workload import Pairs
from poise.scheduler.solve.program import ShareProblem, Solution

INF = highspy.kHighsInf
TOLERANCE = 1e-9
"""Of the simplex method; all numbers are scaled to order 1."""
PAYS = 1e-9
"""Profit from which on a pair is added."""
MOST_ROUNDS = 500
MOST_ITERATIONS = 500_000
ALL_AT_ONCE = 3_000
"""Up to this many pairs are all put in from the start."""
BEST = 4
"""Otherwise each group gets this many of its best pairs per round."""
NOTHING = 1e-12
"""Shares below this are rounding."""
SOLVER: tuple[tuple[str, bool | int | float | str], ...] = (
    ("output_flag", False),
    ("threads", 1),
    ("parallel", "off"),
    ("random_seed", 0),
    ("solver", "simplex"),
    ("presolve", "off"),
    ("primal_feasibility_tolerance", TOLERANCE),
    ("dual_feasibility_tolerance", TOLERANCE),
    ("simplex_iteration_limit", MOST_ITERATIONS),
)


def maximise_with_pairs(problem: ShareProblem) -> Solution:
    """The best answer with time together: feasible to 1e-6, its objective within 1e-6 (relative) of the optimum.

    Deterministic. Raises InfeasibleError if nothing meets what is asked for, GaveUpError if the effort allowed is spent.
    """
    if problem.log is not None:
        raise GaveUpError("logarithms with sharing are not solved: leave out `log` or `beside`")
    scaled = _ScaledProblem(problem)
    group_of, effort = scaled.alike(), 0
    while True:
        groups = _Groups(scaled, group_of)
        master = _Master(scaled, groups)
        master.solve()
        effort += master.effort
        parts, lonely = _divide(scaled, groups, master)
        if not len(lonely):
            return _solution(problem, scaled, master, parts, effort)
        group_of = group_of.copy()
        group_of[lonely] = group_of.max() + 1 + np.arange(len(lonely))
        group_of = np.unique(group_of, return_inverse=True)[1]


# Scaling and grouping


class _ScaledProblem:
    """The problem in numbers of order 1: throughput relative to a row's fastest, time in units of `ease`, t of `unit`.

    alone       (kinds, columns): throughput alone; 0 where a column has no capacity
    together    (kinds, kinds, columns): throughput of the first beside the second
    ratio       (kinds, kinds, columns): together ÷ alone
    pays        (kinds, kinds, columns): where sharing can do more than taking turns
    ease        roughly the fraction of time for which all rows can run
    base, slope (rows,): θ >= base + slope · t is asked
    """

    def __init__(self, problem: ShareProblem) -> None:
        market, beside = problem.market, problem.market.beside
        if beside is None:
            raise GaveUpError("a market without `beside` has nothing to share: solve it without sharing")
        self.problem, self.market, self.kind = problem, market, beside.kind
        self.count = np.ones(market.rows) if market.count is None else market.count
        self.fastest = np.where(market.fastest > 0, market.fastest, 1.0)
        kinds = len(beside.throughput)
        scale, size = np.ones(kinds), np.zeros(kinds)
        scale[self.kind], size[self.kind] = self.fastest, market.size
        self.alone = np.zeros((kinds, market.speed.shape[1]))
        self.alone[self.kind] = market.speed / self.fastest[:, None]
        self.alone[:, market.capacity[market.resource] <= 0] = 0.0
        self.together = beside.throughput / scale[:, None, None]
        alone = self.alone[:, None, :]
        self.ratio = np.divide(self.together, alone, out=np.zeros_like(self.together), where=alone > 0)
        turned = self.ratio.transpose(1, 0, 2)
        is_equal = (size[:, None] == size)[:, :, None]
        self.pays = (self.ratio > 0) & (turned > 0) & (self.ratio + turned > 1.0) & is_equal
        demand = dot(market.size, self.count)
        self.ease = min(1.0, float(market.capacity.sum()) / demand) if demand > 0 and market.capacity.any() else 1.0
        self.base = np.zeros(market.rows) if problem.base is None else problem.base / self.fastest
        slope = np.zeros(market.rows) if problem.slope is None or not problem.level else problem.slope / self.fastest
        if problem.level and not (slope > 0).any():
            raise InfeasibleError("the level has no bound: nothing is asked of any row")
        self.unit = self.ease / slope.max() if problem.level else 1.0
        self.slope = slope * self.unit
        self.level = problem.level * self.unit

    def alike(self) -> Ints:
        """The group of each row: rows of one kind whose time is worth the same."""
        value = self.problem.value
        key = self.kind[:, None].astype(np.float64)
        key = key if value is None else np.concatenate([key, value], axis=1)
        return np.unique(key, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def wants(self, level: float) -> Floats:
        """What is asked for at this level, relative to the fastest."""
        return np.maximum(self.base + self.slope * level, 0.0)


class _Groups:
    """The groups, by index.

    rows       the rows of each
    members    members of those rows, added up
    kind, size, value   of its rows, which have them in common
    """

    def __init__(self, scaled: _ScaledProblem, group_of: Ints) -> None:
        self.many = int(group_of.max(initial=-1)) + 1
        order = np.argsort(group_of, kind="stable")
        self.rows = np.split(order, np.searchsorted(group_of[order], np.arange(1, self.many)))
        one = np.array([rows[0] for rows in self.rows], dtype=np.int64)
        self.members = np.bincount(group_of, weights=scaled.count, minlength=self.many)
        self.kind, self.size = scaled.kind[one], scaled.market.size[one]
        value = scaled.problem.value
        self.value = np.zeros((self.many, scaled.alone.shape[1])) if value is None else value[one]


# What a group's time can give its rows, and how to divide it.
#
# A group has time Y_a in each activity a (alone on a column, or beside another group there), at speed s_a. Each row m stands
# for n_m alike members; a member runs for at most 1 unit of time and wants throughput r_m. Let F(k) be what the fastest k
# units of time give (no more than Y_a of each activity; what is missing is idle). Then the time can be divided so that all
# members get what they want
#
#     if and only if    Σ of the k largest wants <= F(k)   for all k.                                                (*)
#
# Necessary: k members have at most k units of time. Sufficient: lay all time in a line, fastest first, idle time last. In
# order of decreasing wants, each row takes a stretch of length n_m that gives exactly n_m r_m, or the slowest stretch if
# even that gives more; then the line is closed up. (*) still holds for the other rows: stretches before the one taken are
# faster than anything wanted, and those that reach past it lost exactly what was taken. F is concave and the wants of one
# row are equal, so it is enough to check k at whole rows.
#
# Because F(k) = min over λ >= 0 of kλ + Σ_a (s_a - λ)⁺ Y_a, each k in (*) is linear in Y once its λ is known: a `Cut`.


@dataclass(frozen=True)
class Cut:
    """The constraint Σ_a (speed_a - over)⁺ Y_a + size · over >= what `rows` want together. `size`: members of those rows."""

    group: int
    over: float
    rows: Ints
    size: float

    @property
    def identity(self) -> tuple[int, float, bytes]:
        """What tells cuts apart."""
        return self.group, self.over, self.rows.tobytes()


def missing(group: int, rows: Ints, spent: tuple[Floats, Floats], wants: Floats, count: Floats, least: float) -> Cut | None:
    """The inequality of (*) that is broken most, as a cut; None if none is broken by more than `least` per member.

    spent   speeds, and times, of the group's activities
    """
    order = np.argsort(-wants, kind="stable")
    order = order[wants[order] > 0]
    if not len(order):
        return None
    size = np.cumsum(count[order])
    asked = np.cumsum(wants[order] * count[order])
    fastest_first = np.argsort(-spent[0], kind="stable")
    speed, time = spent[0][fastest_first], spent[1][fastest_first]
    # F is piecewise linear: it bends at `bends`, where it is `given`.
    bends = np.concatenate([[0.0], np.cumsum(time)])
    given = np.concatenate([[0.0], np.cumsum(speed * time)])
    short = (asked - np.interp(size, bends, given)) / size
    worst = int(short.argmax())
    if short[worst] <= least:
        return None
    segment = int(np.searchsorted(bends, size[worst], side="left"))
    over = float(speed[segment - 1]) if segment <= len(speed) else 0.0
    return Cut(group, over, np.sort(rows[order[: worst + 1]]), float(size[worst]))


def divided(speed: Floats, time: Floats, wants: Floats, count: Floats) -> Floats:
    """(rows, activities): the time of each row, so that all of it is given out, and all wants are met if (*) holds."""
    order = np.argsort(-speed, kind="stable")
    left = [*time[order].tolist(), max(float(count.sum() - time.sum()), 0.0)]
    rate = [*speed[order].tolist(), 0.0]
    parts = np.empty((len(wants), len(left)))
    for row in np.argsort(-wants, kind="stable").tolist():
        part = _stretch(left, rate, float(count[row]), float(count[row] * wants[row]))
        left = [max(have - take, 0.0) for have, take in zip(left, part, strict=True)]
        parts[row] = part
    parts[wants.argmin()] += left  # what rounding left over
    answer = np.empty((len(wants), len(time)))
    answer[:, order] = parts[:, :-1]
    return answer


def _stretch(left: list[float], rate: list[float], length: float, want: float) -> list[float]:
    """The time of each segment in the slowest stretch of this length that gives what is wanted; the fastest if none does.

    It begins as the fastest stretch and moves on: what it gives up at its tail it takes up at its head.
    """
    part = []
    for have in left:
        part.append(min(have, length))
        length -= part[-1]
    spare = sum(have * speed for have, speed in zip(part, rate, strict=True)) - want
    tail, head = 0, 0
    while head < len(left) and spare > 0:
        if part[tail] <= 0:
            tail += 1
            head = max(head, tail)
        elif head == tail or part[head] >= left[head]:
            head += 1
        else:
            loss = rate[tail] - rate[head]
            room = min(part[tail], left[head] - part[head])
            step = min(room, spare / loss) if loss > 0 else room
            part[tail] = 0.0 if step >= part[tail] else part[tail] - step
            part[head] = left[head] if step >= left[head] - part[head] else part[head] + step
            spare = 0.0 if step < room else spare - step * loss
    return part


def crossed(left: Floats, right: Floats) -> tuple[Ints, Ints, Floats]:
    """Pairs (i, j, time) in which each i spends left_i and each j right_j, of equal totals; as few pairs as possible."""
    ends_left, ends_right = np.cumsum(left), np.cumsum(right)
    total = min(ends_left[-1], ends_right[-1])
    ends = np.unique(np.minimum(np.concatenate([ends_left, ends_right]), total))
    starts = np.concatenate([[0.0], ends[:-1]])
    middle = (starts + ends) / 2.0
    i = np.minimum(np.searchsorted(ends_left, middle), len(left) - 1)
    j = np.minimum(np.searchsorted(ends_right, middle), len(right) - 1)
    return i, j, ends - starts


def folded(time: Floats) -> tuple[Ints, Ints, Floats]:
    """Pairs (i, j, time) within one group in which each i spends time_i.

    The line of all times is folded in the middle. No i is beside itself if it has at most half of the total.
    """
    ends = np.cumsum(time)
    half = ends[-1] / 2.0
    first = np.diff(np.minimum(ends, half), prepend=0.0)
    return crossed(first, time - first)


# The master program


class _Master:
    """The linear program over groups that grows as needed.

    An *activity* is a group alone on a column of the market, or two groups together there: `first`, `second` (-1 if alone)
    and `column` are arrays over activities. After `solve`, `time` holds the time of each and `level` is t.

    variables     t; the shortfall, 0 except while a first feasible answer is looked for; then one per activity, in units of
                  `unit`
    constraints   per group: time <= 1 per member; per resource: <= its capacity; then per cut: >= what is asked

    HiGHS keeps its basis while variables and constraints are added, so each further solve takes few pivots.
    """

    def __init__(self, scaled: _ScaledProblem, groups: _Groups) -> None:
        self.scaled, self.groups = scaled, groups
        self.effort, self.seeks_feasible = 0, False
        self.first = self.second = self.column = np.empty(0, dtype=np.int64)
        self.unit = self.cost = np.empty(0)
        self.cuts: list[Cut] = []
        self.known: set[tuple[int, float, bytes]] = set()
        # All pairs of groups that may pay, as first <= second and column. `outside`: not yet in the program.
        kind, every = groups.kind, np.arange(groups.many)
        pays = scaled.pays[kind[:, None], kind]
        pays &= (every[:, None] <= every)[:, :, None]
        pays[every, every] &= (groups.members >= 2)[:, None]
        self.pairs: tuple[Ints, Ints, Ints] = np.nonzero(pays)  # type: ignore[assignment]  # three axes, three arrays
        self.outside = np.ones(len(self.pairs[0]), dtype=bool)
        # The objective is divided by its largest number.
        value = np.abs(groups.value).max(axis=1, initial=0.0) * groups.members * scaled.ease
        self.worth = max(abs(scaled.level), float(value.max(initial=0.0))) or 1.0
        # The constraints that are always there, as yet without entries, and the first two variables.
        self.fixed = groups.many + len(scaled.market.capacity)
        self.model = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, setting in SOLVER:
            self.model.setOptionValue(name, setting)
        ones = np.ones(self.fixed)
        no_entries = (0, np.zeros(self.fixed, dtype=np.int32), np.empty(0, dtype=np.int32), np.empty(0))
        self.model.addRows(self.fixed, -INF * ones, ones, *no_entries)
        bound = INF if scaled.level else 0.0
        self.model.addCol(-scaled.level / self.worth, -bound, bound, 0, [], [])
        self.model.addCol(0.0, 0.0, 0.0, 0, [], [])

    def solve(self) -> None:
        """Add pairs and cuts until nothing is missing."""
        count, several = self.scaled.count, [(i, rows) for i, rows in enumerate(self.groups.rows) if len(rows) > 1]
        asks = (self.scaled.base > 0) | (self.scaled.slope > 0)
        asking = [(group, rows[asks[rows]]) for group, rows in enumerate(self.groups.rows)]
        # To begin with one cut per group: what all its rows want together.
        self._add_cuts([Cut(i, 0.0, rows, float(self.scaled.count[rows].sum())) for i, rows in asking if len(rows)])
        alone, column = np.nonzero(self.scaled.alone[self.groups.kind] > 0)
        self._add(alone, np.full(len(alone), -1), column)
        if len(self.outside) <= ALL_AT_ONCE:
            self._add_pairs(np.arange(len(self.outside)))
        for _ in range(MOST_ROUNDS):
            status = self._simplex()
            if status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):
                self._make_feasible()
                status = self._simplex()
            if status != HighsModelStatus.kOptimal:
                raise GaveUpError(f"the linear program with sharing ended as {self.model.modelStatusToString(status)!r}")
            self._read()
            fresh = self._paying()
            # Cuts for groups whose time cannot be divided to give each row what it wants.
            wants, least = self.scaled.wants(self.level), 2 * TOLERANCE * self.scaled.ease
            found = [missing(i, rows, self.spent(i)[1:], wants[rows], count[rows], least) for i, rows in several]
            cuts = [cut for cut in found if cut and cut.identity not in self.known]  # a known one is met but for rounding
            if not len(fresh) and not cuts:
                return
            self._add_pairs(fresh)
            self._add_cuts(cuts)
        raise GaveUpError(f"sharing is not settled after {MOST_ROUNDS} rounds; use fewer rows or allow no sharing")

    def _simplex(self) -> HighsModelStatus:
        self.model.run()
        self.effort += max(int(self.model.getInfo().simplex_iteration_count), 0)
        return self.model.getModelStatus()

    def _make_feasible(self) -> None:
        """Make the shortfall as small as possible, adding pairs that help; raise InfeasibleError if it stays."""
        self._aim(INF, feasible=True)
        while True:
            if self._simplex() != HighsModelStatus.kOptimal:
                raise GaveUpError("no first answer was found for the linear program with sharing")
            self._read()
            if self.shortfall <= 10 * TOLERANCE:
                break
            fresh = self._paying()
            if not len(fresh):
                raise InfeasibleError("nothing meets what is asked for, even with sharing")
            self._add_pairs(fresh)
        self._aim(self.shortfall, feasible=False)

    def _aim(self, shortfall: float, *, feasible: bool) -> None:
        """Look for a first feasible answer, or for the best one; and set the shortfall that is allowed."""
        self.seeks_feasible = feasible
        every = np.arange(2 + len(self.cost), dtype=np.int32)
        best = np.concatenate([[-self.scaled.level / self.worth, 0.0], self.cost])
        self.model.changeColsCost(len(every), every, (every == 1).astype(np.float64) if feasible else best)
        self.model.changeColBounds(1, 0.0, shortfall)

    # The last answer

    def _read(self) -> None:
        """Keep times, level and prices of the last answer."""
        answer = self.model.getSolution()
        values, prices = np.array(answer.col_value), np.array(answer.row_dual)
        self.level, self.shortfall = float(values[0]), max(float(values[1]), 0.0)
        self.time = np.maximum(values[2:], 0.0) * self.unit
        self.used: list[list[int]] = [[] for _ in range(self.groups.many)]
        for at in np.nonzero(self.time > 0)[0].tolist():
            for group in {int(self.first[at]), int(self.second[at])} - {-1}:
                self.used[group].append(at)
        self.fixed_prices = np.maximum(-prices[: self.fixed], 0.0)
        size = np.array([cut.size for cut in self.cuts])
        self.cut_prices = np.maximum(prices[self.fixed :], 0.0) / (size * self.scaled.ease)

    def spent(self, group: int) -> tuple[Ints, Floats, Floats]:
        """The activities that a group spends time in, its speed and its time there (doubled where it is beside itself)."""
        used = np.array(self.used[group], dtype=np.int64)
        mate = np.where(self.first[used] == group, self.second[used], self.first[used])
        own = np.where(mate == group, 2.0, 1.0)
        return used, self._speed(np.full(len(used), group), mate, self.column[used]), self.time[used] * own

    def pressure(self) -> Floats:
        """By row, in the problem's units: the prices of all cuts that it is part of, added up."""
        answer = np.zeros(self.scaled.market.rows)
        for cut, price in zip(self.cuts, self.cut_prices, strict=True):
            answer[cut.rows] += price
        return answer * self.worth / self.scaled.fastest

    # Activities

    def _speed(self, group: Ints, mate: Ints, column: Ints) -> Floats:
        """Throughput of a group beside another, or alone where `mate` is -1."""
        kind = self.groups.kind
        together = self.scaled.together[kind[group], kind[mate], column]
        return np.where(mate < 0, self.scaled.alone[kind[group], column], together)

    def _unit_of(self, first: Ints, second: Ints) -> Floats:
        """Time that one unit of a variable stands for: about what the smaller group can spend in the activity."""
        members = self.groups.members
        fewer = np.minimum(members[first], members[second]) / np.where(first == second, 2.0, 1.0)
        return self.scaled.ease * np.where(second < 0, members[first], fewer)

    def _add_pairs(self, chosen: Ints) -> None:
        """Take these of `pairs` into the program."""
        self.outside[chosen] = False
        self._add(*(each[chosen] for each in self.pairs))

    def _add(self, first: Ints, second: Ints, column: Ints) -> None:
        """Add activities, with their entries in all constraints that there are."""
        if not len(first):
            return
        unit, market, many = self._unit_of(first, second), self.scaled.market, self.groups.many
        resource = market.resource[column]
        # Entries as (activity, constraint, number).
        entries = [(np.arange(len(first)), many + resource, self.groups.size[first] * unit / market.capacity[resource])]
        cost = np.zeros(len(first))
        two = np.nonzero((second >= 0) & (second != first))[0]
        time = unit * np.where(second == first, 2.0, 1.0)
        for at, group, mate in ((np.arange(len(first)), first, second), (two, second[two], first[two])):
            speed = self._speed(group, mate, column[at])
            entries.append((at, group, time[at] / self.groups.members[group]))
            entries.append(self._in_cuts(at, group, speed, time[at]))
            alone = self.scaled.alone[self.groups.kind[group], column[at]]
            cost[at] -= self.groups.value[group, column[at]] * speed / alone * time[at] / self.worth
        activity, constraint, number = (np.concatenate(each) for each in zip(*entries, strict=True))
        order = np.lexsort((constraint, activity))
        start = np.searchsorted(activity[order], np.arange(len(cost))).astype(np.int32)
        shown = np.zeros(len(cost)) if self.seeks_feasible else cost
        low, high = np.zeros(len(cost)), np.full(len(cost), INF)
        index = constraint[order].astype(np.int32)
        self.model.addCols(len(cost), shown, low, high, len(constraint), start, index, number[order])
        self.first, self.second = np.append(self.first, first), np.append(self.second, second)
        self.column, self.unit = np.append(self.column, column), np.append(self.unit, unit)
        self.cost = np.append(self.cost, cost)

    def _in_cuts(self, at: Ints, group: Ints, speed: Floats, time: Floats) -> tuple[Ints, Ints, Floats]:
        """Entries of activities in the cuts of their groups."""
        cut_group = np.array([cut.group for cut in self.cuts], dtype=np.int64)
        over = np.array([cut.over for cut in self.cuts])
        size = np.array([cut.size for cut in self.cuts])
        order = np.argsort(cut_group, kind="stable")
        start = np.searchsorted(cut_group[order], group, side="left")
        many = np.searchsorted(cut_group[order], group, side="right") - start
        of = np.repeat(np.arange(len(at)), many)
        cut = order[np.arange(len(of)) - np.repeat(np.cumsum(many) - many - start, many)]
        number = np.maximum(speed[of] - over[cut], 0.0) * time[of] / (size[cut] * self.scaled.ease)
        some = number > 0
        return at[of[some]], self.fixed + cut[some], number[some]

    def _paying(self) -> Ints:
        """Pricing: the best pairs of each group that would improve the answer at its prices, as indices into `pairs`."""
        if not self.outside.any():
            return np.empty(0, dtype=np.int64)
        first, second, column = self.pairs
        kind, scaled, groups = self.groups.kind, self.scaled, self.groups
        # (groups, kinds, columns): what a unit of a group's time beside a kind brings, less what its time costs.
        gain = np.zeros((groups.many, *scaled.alone.shape))
        for cut, price in zip(self.cuts, self.cut_prices, strict=True):
            if price > 0:
                gain[cut.group] += price * np.maximum(scaled.together[kind[cut.group]] - cut.over, 0.0)
        if scaled.problem.value is not None and not self.seeks_feasible:
            gain += groups.value[:, None, :] * scaled.ratio[kind] / self.worth
        gain = gain - (self.fixed_prices[: groups.many] / groups.members)[:, None, None]
        rent = self.fixed_prices[groups.many :] / np.maximum(scaled.market.capacity, 1e-300)
        profit = gain[first, kind[second], column] + gain[second, kind[first], column]
        profit -= groups.size[first] * rent[scaled.market.resource[column]]
        profit *= self._unit_of(first, second)
        fresh = np.nonzero((profit > PAYS) & self.outside)[0]
        fresh = fresh[np.argsort(-profit[fresh], kind="stable")]
        best = (_position(first[fresh]) < BEST) | (_position(second[fresh]) < BEST)
        return np.sort(fresh[best])

    # Cuts

    def _add_cuts(self, cuts: list[Cut]) -> None:
        for cut in cuts:
            self.cuts.append(cut)
            self.known.add(cut.identity)
            unit, count = cut.size * self.scaled.ease, self.scaled.count[cut.rows]
            at = np.nonzero((self.first == cut.group) | (self.second == cut.group))[0]
            first, second = self.first[at], self.second[at]
            mate = np.where(first == cut.group, second, first)
            speed = self._speed(np.full(len(at), cut.group), mate, self.column[at])
            number = np.maximum(speed - cut.over, 0.0) * self.unit[at] * np.where(first == second, 2.0, 1.0) / unit
            numbers = np.concatenate([[-dot(count, self.scaled.slope[cut.rows]) / unit, 1.0], number])
            asked = (dot(count, self.scaled.base[cut.rows]) - cut.size * cut.over) / unit
            variables = np.concatenate([[0, 1], at + 2]).astype(np.int32)
            self.model.addRow(asked, INF, len(variables), variables, numbers)


def _position(groups: Ints) -> Ints:
    """How many of the same group come before each."""
    order = np.argsort(groups, kind="stable")
    start = np.searchsorted(groups[order], groups, side="left")
    place = np.empty(len(groups), dtype=np.int64)
    place[order] = np.arange(len(groups))
    return place - start


# From groups back to rows

_Parts = dict[tuple[int, int], tuple[Ints, Floats]]
"""By group and activity: the rows of the group, and the time of each in the activity."""


def _divide(scaled: _ScaledProblem, groups: _Groups, master: _Master) -> tuple[_Parts, Ints]:
    """The time of every group divided among its rows, and the rows that would then be beside themselves."""
    wants_of, parts, lonely = scaled.wants(master.level), _Parts(), []
    for group, rows in enumerate(groups.rows):
        used, speed, time = master.spent(group)
        wants, count = wants_of[rows], scaled.count[rows]
        own = master.first[used] == master.second[used]
        times = divided(speed, time, wants, count) if len(rows) > 1 else time[None, :]
        alone = _beside_itself(times, own, count)
        if alone.any():  # every activity divided as wants are may do, and gives each row less of any one activity
            weight = wants * count if (wants > 0).any() else count
            even = np.outer(weight / weight.sum(), time)
            if (even.sum(axis=1) <= count).all() and not _beside_itself(even, own, count).any():
                times, alone = even, np.zeros(len(rows), dtype=bool)
        for activity, part in zip(used.tolist(), times.T, strict=True):
            parts[group, activity] = rows, part
        lonely.append(rows[alone])
    return parts, np.concatenate(lonely)


def _beside_itself(times: Floats, own: Bools, count: Floats) -> Bools:
    """Which rows of one member have more than half of the time that their group spends with itself (`own`)."""
    half = times[:, own].sum(axis=0) / 2.0
    greedy: Bools = (times[:, own] > half + 1e-9).any(axis=1)
    return greedy & (count < 2)


def _solution(problem: ShareProblem, scaled: _ScaledProblem, master: _Master, parts: _Parts, effort: int) -> Solution:
    """The answer for rows, in the problem's own units."""
    x = np.zeros(problem.market.speed.shape)
    found: list[tuple[Ints, Ints, Ints, Floats]] = []
    for activity in np.nonzero(master.time > 0)[0].tolist():
        group, mate, column = (int(each[activity]) for each in (master.first, master.second, master.column))
        rows, time = parts[group, activity]
        if mate < 0:
            x[rows, column] += time / scaled.count[rows]
            continue
        if group == mate:
            i, j, time = folded(time)
            first, second = rows[i], rows[j]
            real = (first != second) | (scaled.count[first] >= 2)
        else:
            other, others_time = parts[mate, activity]
            i, j, time = crossed(time, others_time)
            first, second = rows[i], other[j]
            real = np.ones(len(time), dtype=bool)
        real &= time > NOTHING
        low, high = np.minimum(first, second)[real], np.maximum(first, second)[real]
        found.append((low, high, np.full(len(low), column, dtype=np.int64), time[real]))
    x[x < NOTHING] = 0.0
    shared = Pairs.none()
    if found:
        first, second, columns, time = (np.concatenate(each) for each in zip(*found, strict=True))
        order = np.lexsort((columns, second, first))
        shared = Pairs(first[order], second[order], columns[order], time[order])
    throughput: Floats = (problem.market.speed * x).sum(axis=1)
    for one, another in ((shared.first, shared.second), (shared.second, shared.first)):
        rate = scaled.together[scaled.kind[one], scaled.kind[another], shared.column] * scaled.fastest[one]
        np.add.at(throughput, one, rate * shared.share / scaled.count[one])
    level = master.level * scaled.unit if problem.level else nan
    return Solution(x, throughput, level, master.pressure(), shared, effort)
