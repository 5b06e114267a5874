"""Programs of `problem.py` in which rows may share (`Market.beside`): a linear program that grows as it is needed.

Rows of one kind are first taken together as a crowd (`crowds.py`), so that there are as many unknowns as there are kinds,
not rows. Two things are then added until nothing is missing, each time starting from the answer before (`master.py`):

    pairs    of crowds, on a column, that would pay at the prices of the moment (column generation)
    cuts     that tell what the rows of a crowd want one by one, where its time could not be divided to give it to them

A pair on a column is left out from the start if T/T_alone + T'/T'_alone <= 1 there: time slicing does as much (ALGORITHMS
§2.4; exact). At the end a crowd's time is divided among its rows. Should a row then have to be beside itself, it leaves its
crowd and the program is solved again: in the worst case every row is on its own, which is the program as it is defined.

Alike rows (`Market.count`) are as if written out: x, throughput and pressure are those of each one of them, and the
objective counts all. `Pairs.share` is the total time of a pair of rows over all their members: each one of row `first`
spends share / count[first] of its time in it (twice that where a row with count >= 2 shares with itself), and the resource
is occupied for size · share. first <= second. `value` is what time alone is worth; time together is worth in proportion to
its throughput.
"""

from dataclasses import dataclass
from enum import Enum, auto
from math import nan

import highspy
import numpy as np
from highspy import HighsModelStatus
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Floats, Ints, dot
from poise.scheduler.model.errors import GaveUpError, InfeasibleError
from poise.scheduler.model.workload import Pairs
from poise.scheduler.solve.program import ShareProblem, Solution

# Rows of one kind taken together as a crowd: what a crowd's time can give its rows, and how it is divided among them.
#
# A crowd has time Y_w in each way w to run (alone on a column, or beside another crowd there), at speed s_w. Each row m
# stands
# for n_m alike members; a member runs for at most 1 and wants throughput r_m. Let F(k) be what the fastest k units of time
# give (no more than Y_w of each way; what is missing is idle). Then time can be divided so that all get what they want
#
# if and only if    Σ of the k largest wants <= F(k)   for all k.                                                   (*)
#
# Needed: k members have k units of time at most. Enough: lay all time (idle at last) in a line, fastest first. In order of
# decreasing wants, a row takes a stretch of length n_m that gives just n_m r_m, or the slowest stretch if that gives
# more, and
# what is left is closed up; (*) then holds for the others: stretches before it are faster than anything that is wanted, and
# those that reach past it lost just what was taken. F is concave and the wants of one row are equal, so k need only run over
# whole rows.
#
# Because F(k) = min over λ >= 0 of kλ + Σ_w (s_w - λ)⁺ Y_w, each k in (*) is linear in Y once its λ is known: a `Cut`.


@dataclass(frozen=True)
class Cut:
    """Σ_w (speed_w - over)⁺ Y_w + people · over >= what `members` (indices of rows) want together."""

    crowd: int
    over: float
    members: Ints
    people: float


def missing(crowd: int, rows: Ints, ways: tuple[Floats, Floats], wants: Floats, count: Floats, least: float) -> Cut | None:
    """The line of (*) that is broken most, None if none is by `least` a member. `ways` is speeds and times."""
    order = np.argsort(-wants, kind="stable")
    order = order[wants[order] > 0]
    if not len(order):
        return None
    people = np.cumsum(count[order])
    asked = np.cumsum(wants[order] * count[order])
    speed, reach, given = _line(*ways)
    short = (asked - np.interp(people, reach, given)) / people
    worst = int(short.argmax())
    if short[worst] <= least:
        return None
    segment = int(np.searchsorted(reach, people[worst], side="left"))
    over = float(speed[segment - 1]) if segment <= len(speed) else 0.0
    return Cut(crowd, over, np.sort(rows[order[: worst + 1]]), float(people[worst]))


def divided(speed: Floats, time: Floats, wants: Floats, count: Floats) -> Floats:
    """(rows, ways): the time of each row, so that all of it is given out and all wants are met if (*) holds."""
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


def in_proportion(time: Floats, wants: Floats, count: Floats) -> Floats:
    """(rows, ways): every way divided as wants are."""
    weight = wants * count if (wants > 0).any() else count
    return np.outer(weight / weight.sum(), time)


def crossed(left: Floats, right: Floats) -> tuple[Ints, Ints, Floats]:
    """Pairs (i, j, time) in which each i spends left_i and each j right_j of equal totals; as few as can be, in order."""
    ends_left, ends_right = np.cumsum(left), np.cumsum(right)
    total = min(ends_left[-1], ends_right[-1])
    ends = np.unique(np.minimum(np.concatenate([ends_left, ends_right]), total))
    starts = np.concatenate([[0.0], ends[:-1]])
    middle = (starts + ends) / 2.0
    i = np.minimum(np.searchsorted(ends_left, middle), len(left) - 1)
    j = np.minimum(np.searchsorted(ends_right, middle), len(right) - 1)
    return i, j, ends - starts


def folded(time: Floats) -> tuple[Ints, Ints, Floats]:
    """Pairs (i, j, time) of one crowd in which each i spends time_i; no i is beside itself if it has at most half of all."""
    ends = np.cumsum(time)
    half = ends[-1] / 2.0
    first = np.diff(np.minimum(ends, half), prepend=0.0)
    return crossed(first, time - first)


def _line(speed: Floats, time: Floats) -> tuple[Floats, Floats, Floats]:
    """Speeds in descending order, and where F bends: the points and its values there."""
    order = np.argsort(-speed, kind="stable")
    speed, time = speed[order], time[order]
    reach = np.concatenate([[0.0], np.cumsum(time)])
    return speed, reach, np.concatenate([[0.0], np.cumsum(speed * time)])


def _stretch(left: list[float], rate: list[float], length: float, want: float) -> list[float]:
    """The time of each segment in the slowest stretch of this length that gives what is wanted, the fastest if none does.

    It begins as the fastest, and moves on: what it leaves behind at its tail it takes up at its head.
    """
    part = _fastest(left, length)
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


def _fastest(left: list[float], length: float) -> list[float]:
    """As much time as this, from the first segments."""
    part = []
    for have in left:
        part.append(min(have, length))
        length -= part[-1]
    return part


# The linear program over crowds that `pairs.py` grows: its unknowns are the times of crowds, alone and together.

INF = highspy.kHighsInf
TOLERANCE = 1e-9
"""Of the simplex method, where all numbers are of order 1."""
PAYS = 1e-9
"""What a pair must bring to be added."""
MOST_ROUNDS = 500
MOST_ITERATIONS = 500_000
ALL_AT_ONCE = 3_000
"""So few pairs are all put in from the start."""
BEST = 4
"""Otherwise each crowd gets so many of its best pairs at a time."""
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


class Scaled:
    """A problem in numbers of order 1: throughput as part of a row's fastest, time in units of `ease`, t in units of `unit`.

    alone      (kinds, columns), together (kinds, kinds, columns): throughput; 0 where a column has no capacity
    pays       (kinds, kinds, columns): where sharing can do more than taking turns
    ease       about the part of time for which everybody can run
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
        self._share(beside.throughput / scale[:, None, None], size)
        crowd = dot(market.size, self.count)
        self.ease = min(1.0, float(market.capacity.sum()) / crowd) if crowd > 0 and market.capacity.any() else 1.0
        self.base = np.zeros(market.rows) if problem.base is None else problem.base / self.fastest
        slope = np.zeros(market.rows) if problem.slope is None or not problem.level else problem.slope / self.fastest
        if problem.level and not (slope > 0).any():
            raise InfeasibleError("the level has no bound: nothing is asked of any row")
        self.unit = self.ease / slope.max() if problem.level else 1.0
        self.slope = slope * self.unit
        self.level = problem.level * self.unit

    def _share(self, together: Floats, size: Floats) -> None:
        alone = self.alone[:, None, :]
        ratio = np.divide(together, alone, out=np.zeros_like(together), where=alone > 0)
        turned = ratio.transpose(1, 0, 2)
        self.pays = (ratio > 0) & (turned > 0) & (ratio + turned > 1.0) & (size[:, None] == size)[:, :, None]
        self.ratio, self.together = ratio, together

    def alike(self) -> Ints:
        """The crowd of each row: rows of one kind whose time is worth the same."""
        value = self.problem.value
        key = self.kind[:, None].astype(np.float64)
        key = key if value is None else np.concatenate([key, value], axis=1)
        return np.unique(key, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def wants(self, level: float) -> Floats:
        """What is asked for at this level, as part of the fastest."""
        return np.maximum(self.base + self.slope * level, 0.0)


class Crowds:
    """Rows by crowd: who is in it, how many they are with all that are alike, its kind, size, and what its time is worth."""

    def __init__(self, scaled: Scaled, crowd_of: Ints) -> None:
        self.many = int(crowd_of.max(initial=-1)) + 1
        order = np.argsort(crowd_of, kind="stable")
        self.rows = np.split(order, np.searchsorted(crowd_of[order], np.arange(1, self.many)))
        one = np.array([rows[0] for rows in self.rows], dtype=np.int64)
        self.people = np.bincount(crowd_of, weights=scaled.count, minlength=self.many)
        self.kind, self.size = scaled.kind[one], scaled.market.size[one]
        self.value = (
            np.zeros((self.many, scaled.alone.shape[1])) if scaled.problem.value is None else scaled.problem.value[one]
        )


class _Aim(Enum):
    """What the program is solved for."""

    FEASIBLE = auto()
    BEST = auto()


class Master:
    """The program. After `solve`: `time` of each column (first, second or -1 if alone, column of the market) and `level`.

    lines      time of each crowd <= 1 (a member) · each resource <= 1 (of its capacity) · cuts >= what is asked for
    columns    t · shortfall, 0 but while a first feasible answer is looked for · times
    """

    def __init__(self, scaled: Scaled, crowds: Crowds) -> None:
        self.scaled, self.crowds = scaled, crowds
        self.effort, self.aim = 0, _Aim.BEST
        self.first = self.second = self.column = np.empty(0, dtype=np.int64)
        self.unit = self.cost = np.empty(0)
        self.cuts: list[Cut] = []
        self.lines = crowds.many + len(scaled.market.capacity)
        self.known: set[tuple[int, float, bytes]] = set()
        self.pairs = self._pairs()
        self.outside = np.ones(len(self.pairs[0]), dtype=bool)
        self.worth = self._worth()
        self.model = self._started()

    def solve(self) -> None:
        """Add pairs and cuts until nothing is missing."""
        self._add_cuts(self._asked())
        alone, column = np.nonzero(self.scaled.alone[self.crowds.kind] > 0)
        self._add(alone, np.full(len(alone), -1), column)
        if len(self.outside) <= ALL_AT_ONCE:
            self._add_pairs(np.arange(len(self.outside)))
        for _ in range(MOST_ROUNDS):
            self._run()
            fresh, cuts = self._paying(), self._missing()
            if not len(fresh) and not cuts:
                return
            self._add_pairs(fresh)
            self._add_cuts(cuts)
        raise GaveUpError(f"sharing is not settled after {MOST_ROUNDS} rounds; use fewer rows or allow no sharing")

    # What is read from the last answer

    def ways(self, crowd: int) -> tuple[Ints, Floats, Floats]:
        """The columns that a crowd spends time in, its speed there, and its time (twice the column's if beside itself)."""
        used = np.array(self.used[crowd], dtype=np.int64)
        mate = np.where(self.first[used] == crowd, self.second[used], self.first[used])
        own = np.where(mate == crowd, 2.0, 1.0)
        return used, self._speed(np.full(len(used), crowd), mate, self.column[used]), self.time[used] * own

    def pressure(self) -> Floats:
        """Of each row, in the problem's units: the prices of all cuts that it is part of."""
        answer = np.zeros(self.scaled.market.rows)
        for cut, price in zip(self.cuts, self.cut_prices, strict=True):
            answer[cut.members] += price
        return answer * self.worth / self.scaled.fastest

    def _read(self) -> None:
        answer = self.model.getSolution()
        values, prices = np.array(answer.col_value), np.array(answer.row_dual)
        self.level, self.shortfall = float(values[0]), max(float(values[1]), 0.0)
        self.time = np.maximum(values[2:], 0.0) * self.unit
        self.used: list[list[int]] = [[] for _ in range(self.crowds.many)]
        for at in np.nonzero(self.time > 0)[0].tolist():
            for crowd in {int(self.first[at]), int(self.second[at])} - {-1}:
                self.used[crowd].append(at)
        self.line_prices = np.maximum(-prices[: self.lines], 0.0)
        people = np.array([cut.people for cut in self.cuts])
        self.cut_prices = np.maximum(prices[self.lines :], 0.0) / (people * self.scaled.ease)

    # The model

    def _worth(self) -> float:
        """The largest number in the objective, by which all of it is divided."""
        value = np.abs(self.crowds.value).max(axis=1, initial=0.0) * self.crowds.people * self.scaled.ease
        return max(abs(self.scaled.level), float(value.max(initial=0.0))) or 1.0

    def _started(self) -> highspy.Highs:
        model = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, setting in SOLVER:
            model.setOptionValue(name, setting)
        ones, no_entries = (
            np.ones(self.lines),
            (0, np.zeros(self.lines, dtype=np.int32), np.empty(0, dtype=np.int32), np.empty(0)),
        )
        model.addRows(self.lines, -INF * ones, ones, *no_entries)
        model.addCol(
            -self.scaled.level / self.worth, -INF if self.scaled.level else 0.0, INF if self.scaled.level else 0.0, 0, [], []
        )
        model.addCol(0.0, 0.0, 0.0, 0, [], [])
        return model

    def _run(self) -> None:
        """Solve from where it stands; if nothing is feasible yet, look for what is."""
        status = self._simplex()
        if status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):
            self._make_feasible()
            status = self._simplex()
        if status != HighsModelStatus.kOptimal:
            raise GaveUpError(f"the linear program with sharing ended as {self.model.modelStatusToString(status)!r}")
        self._read()

    def _simplex(self) -> HighsModelStatus:
        self.model.run()
        self.effort += max(int(self.model.getInfo().simplex_iteration_count), 0)
        return self.model.getModelStatus()

    def _make_feasible(self) -> None:
        """Make the shortfall as small as can be, adding pairs that help; refuse if it stays."""
        self._turn_to(_Aim.FEASIBLE, INF)
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
        self._turn_to(_Aim.BEST, self.shortfall)

    def _turn_to(self, aim: _Aim, shortfall: float) -> None:
        """Set what is minimised, and the shortfall that is allowed."""
        self.aim = aim
        every = np.arange(2 + len(self.cost), dtype=np.int32)
        best = np.concatenate([[-self.scaled.level / self.worth, 0.0], self.cost])
        self.model.changeColsCost(len(every), every, best if aim is _Aim.BEST else (every == 1).astype(np.float64))
        self.model.changeColBounds(1, 0.0, shortfall)

    # Columns

    def _pairs(self) -> tuple[Ints, Ints, Ints]:
        """All pairs of crowds that may pay: first <= second, column."""
        kind, every = self.crowds.kind, np.arange(self.crowds.many)
        pays = self.scaled.pays[kind[:, None], kind]
        pays &= (every[:, None] <= every)[:, :, None]
        pays[every, every] &= (self.crowds.people >= 2)[:, None]
        return np.nonzero(pays)  # type: ignore[return-value]  # three axes, three arrays

    def _speed(self, crowd: Ints, mate: Ints, column: Ints) -> Floats:
        """Throughput of a crowd beside another, or alone."""
        kind = self.crowds.kind
        together = self.scaled.together[kind[crowd], kind[mate], column]
        return np.where(mate < 0, self.scaled.alone[kind[crowd], column], together)

    def _unit_of(self, first: Ints, second: Ints) -> Floats:
        """Time that one unit of a column stands for: about what its smaller crowd can spend there."""
        people = self.crowds.people
        fewer = np.minimum(people[first], people[second]) / np.where(first == second, 2.0, 1.0)
        return self.scaled.ease * np.where(second < 0, people[first], fewer)

    def _add_pairs(self, chosen: Ints) -> None:
        """Take these of `pairs` in."""
        self.outside[chosen] = False
        self._add(*(each[chosen] for each in self.pairs))

    def _add(self, first: Ints, second: Ints, column: Ints) -> None:
        """New columns, with their part in every line that there is."""
        if not len(first):
            return
        unit, market, many = self._unit_of(first, second), self.scaled.market, self.crowds.many
        resource = market.resource[column]
        entries = [(np.arange(len(first)), many + resource, self.crowds.size[first] * unit / market.capacity[resource])]
        cost = np.zeros(len(first))
        two = np.nonzero((second >= 0) & (second != first))[0]
        time = unit * np.where(second == first, 2.0, 1.0)
        for at, crowd, mate in ((np.arange(len(first)), first, second), (two, second[two], first[two])):
            speed = self._speed(crowd, mate, column[at])
            entries.append((at, crowd, time[at] / self.crowds.people[crowd]))
            entries.append(self._in_cuts(at, crowd, speed, time[at]))
            alone = self.scaled.alone[self.crowds.kind[crowd], column[at]]
            cost[at] -= self.crowds.value[crowd, column[at]] * speed / alone * time[at] / self.worth
        self._append_columns(cost, entries)
        self.first, self.second = np.append(self.first, first), np.append(self.second, second)
        self.column, self.unit = np.append(self.column, column), np.append(self.unit, unit)
        self.cost = np.append(self.cost, cost)

    def _in_cuts(self, at: Ints, crowd: Ints, speed: Floats, time: Floats) -> tuple[Ints, Ints, Floats]:
        """Entries (column, line, number) of columns in the cuts of their crowds."""
        cut_crowd = np.array([cut.crowd for cut in self.cuts], dtype=np.int64)
        over = np.array([cut.over for cut in self.cuts])
        people = np.array([cut.people for cut in self.cuts])
        order = np.argsort(cut_crowd, kind="stable")
        start = np.searchsorted(cut_crowd[order], crowd, side="left")
        many = np.searchsorted(cut_crowd[order], crowd, side="right") - start
        of = np.repeat(np.arange(len(at)), many)
        cut = order[np.arange(len(of)) - np.repeat(np.cumsum(many) - many - start, many)]
        number = np.maximum(speed[of] - over[cut], 0.0) * time[of] / (people[cut] * self.scaled.ease)
        some = number > 0
        return at[of[some]], self.lines + cut[some], number[some]

    def _append_columns(self, cost: Floats, entries: list[tuple[Ints, Ints, Floats]]) -> None:
        column, line, number = (np.concatenate(each) for each in zip(*entries, strict=True))
        order = np.lexsort((line, column))
        start = np.searchsorted(column[order], np.arange(len(cost))).astype(np.int32)
        shown = cost if self.aim is _Aim.BEST else np.zeros(len(cost))
        low, high = np.zeros(len(cost)), np.full(len(cost), INF)
        self.model.addCols(len(cost), shown, low, high, len(line), start, line[order].astype(np.int32), number[order])

    def _paying(self) -> Ints:
        """The best pairs of each crowd, of those that would improve the answer at its prices: indices into `pairs`."""
        if not self.outside.any():
            return np.empty(0, dtype=np.int64)
        first, second, column = self.pairs
        kind, gain = self.crowds.kind, self._gain()
        rent = self.line_prices[self.crowds.many :] / np.maximum(self.scaled.market.capacity, 1e-300)
        profit = gain[first, kind[second], column] + gain[second, kind[first], column]
        profit -= self.crowds.size[first] * rent[self.scaled.market.resource[column]]
        profit *= self._unit_of(first, second)
        fresh = np.nonzero((profit > PAYS) & self.outside)[0]
        fresh = fresh[np.argsort(-profit[fresh], kind="stable")]
        best = (_turn(first[fresh]) < BEST) | (_turn(second[fresh]) < BEST)
        return np.sort(fresh[best])

    def _gain(self) -> Floats:
        """(crowds, kinds, columns): what a unit of a crowd's time beside a kind brings, less what its time is worth."""
        kind, scaled = self.crowds.kind, self.scaled
        gain = np.zeros((self.crowds.many, *scaled.alone.shape))
        for cut, price in zip(self.cuts, self.cut_prices, strict=True):
            if price > 0:
                gain[cut.crowd] += price * np.maximum(scaled.together[kind[cut.crowd]] - cut.over, 0.0)
        if scaled.problem.value is not None and self.aim is _Aim.BEST:
            gain += self.crowds.value[:, None, :] * scaled.ratio[kind] / self.worth
        busy = self.line_prices[: self.crowds.many] / self.crowds.people
        return np.asarray(gain - busy[:, None, None])

    # Cuts

    def _asked(self) -> list[Cut]:
        """For each crowd, what all who ask for something want together."""
        asks = (self.scaled.base > 0) | (self.scaled.slope > 0)
        members = [rows[asks[rows]] for rows in self.crowds.rows]
        return [Cut(i, 0.0, rows, float(self.scaled.count[rows].sum())) for i, rows in enumerate(members) if len(rows)]

    def _missing(self) -> list[Cut]:
        """What the rows of a crowd want, where its time could not be divided to give it to them."""
        wants, count, cuts = self.scaled.wants(self.level), self.scaled.count, []
        for crowd, rows in enumerate(self.crowds.rows):
            if len(rows) > 1:
                ways = self.ways(crowd)[1:]
                cut = missing(crowd, rows, ways, wants[rows], count[rows], 2 * TOLERANCE * self.scaled.ease)
                cuts += [cut] if cut else []
        return [cut for cut in cuts if _mark(cut) not in self.known]  # a known one is met but for rounding

    def _add_cuts(self, cuts: list[Cut]) -> None:
        for cut in cuts:
            self.cuts.append(cut)
            self.known.add(_mark(cut))
            unit, count = cut.people * self.scaled.ease, self.scaled.count[cut.members]
            at = np.nonzero((self.first == cut.crowd) | (self.second == cut.crowd))[0]
            first, second = self.first[at], self.second[at]
            mate = np.where(first == cut.crowd, second, first)
            speed = self._speed(np.full(len(at), cut.crowd), mate, self.column[at])
            number = np.maximum(speed - cut.over, 0.0) * self.unit[at] * np.where(first == second, 2.0, 1.0) / unit
            numbers = np.concatenate([[-dot(count, self.scaled.slope[cut.members]) / unit, 1.0], number])
            asked = (dot(count, self.scaled.base[cut.members]) - cut.people * cut.over) / unit
            columns = np.concatenate([[0, 1], at + 2]).astype(np.int32)
            self.model.addRow(asked, INF, len(columns), columns, numbers)


def _mark(cut: Cut) -> tuple[int, float, bytes]:
    """What tells cuts apart."""
    return cut.crowd, cut.over, cut.members.tobytes()


def _turn(groups: Ints) -> Ints:
    """How many of the same group come before each."""
    order = np.argsort(groups, kind="stable")
    start = np.searchsorted(groups[order], groups, side="left")
    place = np.empty(len(groups), dtype=np.int64)
    place[order] = np.arange(len(groups))
    return place - start


NOTHING = 1e-12
"""Shares below this are rounding."""


def maximise_with_pairs(problem: ShareProblem) -> Solution:
    """The best answer with time together: feasible to 1e-6, its objective within 1e-6 (relative) of the optimum.

    Deterministic. Raises InfeasibleError if nothing meets what is asked for, GaveUpError if the effort allowed is spent.
    """
    if problem.log is not None:
        raise GaveUpError("logarithms with sharing are not solved: leave out `log` or `beside`")
    scaled = Scaled(problem)
    crowd_of, effort = scaled.alike(), 0
    while True:
        crowds = Crowds(scaled, crowd_of)
        master = Master(scaled, crowds)
        master.solve()
        effort += master.effort
        division = _Division(scaled, crowds, master)
        if not len(division.lonely):
            return division.solution(problem, effort)
        crowd_of = _apart(crowd_of, division.lonely)


def _apart(crowd_of: Ints, rows: Ints) -> Ints:
    """Each of these rows in a crowd of its own."""
    after = crowd_of.copy()
    after[rows] = crowd_of.max() + 1 + np.arange(len(rows))
    return np.unique(after, return_inverse=True)[1]


@dataclass(frozen=True)
class _PairPart:
    """Who of a crowd runs in a way, and for how long."""

    rows: Ints
    time: Floats


class _Division:
    """The time of crowds divided among their rows. `lonely`: rows that would be beside themselves."""

    def __init__(self, scaled: Scaled, crowds: Crowds, master: Master) -> None:
        self.scaled, self.crowds, self.master = scaled, crowds, master
        self.wants = scaled.wants(master.level)
        self.parts: dict[tuple[int, int], _PairPart] = {}
        lonely = [self._divide(crowd) for crowd in range(crowds.many)]
        self.lonely = np.concatenate(lonely)

    def _divide(self, crowd: int) -> Ints:
        """Divide, and say who would be beside itself."""
        rows = self.crowds.rows[crowd]
        used, speed, time = self.master.ways(crowd)
        wants, count = self.wants[rows], self.scaled.count[rows]
        own = self.master.first[used] == self.master.second[used]
        parts = divided(speed, time, wants, count) if len(rows) > 1 else time[None, :]
        alone = _beside_itself(parts, own, count)
        if alone.any():
            even = in_proportion(time, wants, count)
            if (even.sum(axis=1) <= count).all() and not _beside_itself(even, own, count).any():
                parts, alone = even, np.zeros(len(rows), dtype=bool)
        for way, part in zip(used, parts.T, strict=True):
            self.parts[crowd, int(way)] = _PairPart(rows, part)
        lonely: Ints = rows[alone]
        return lonely

    def solution(self, problem: ShareProblem, effort: int) -> Solution:
        """The answer in the problem's own units."""
        scaled, master = self.scaled, self.master
        x = np.zeros(problem.market.speed.shape)
        pairs: list[tuple[Ints, Ints, Ints, Floats]] = []
        for way in np.nonzero(master.time > 0)[0]:
            first, second, column = int(master.first[way]), int(master.second[way]), int(master.column[way])
            part = self.parts[first, int(way)]
            if second < 0:
                x[part.rows, column] += part.time / scaled.count[part.rows]
            else:
                pairs.append(self._paired(part, None if first == second else self.parts[second, int(way)], column))
        x[x < NOTHING] = 0.0
        shared = _sorted(pairs)
        throughput = _throughput(problem, scaled, x, shared)
        return Solution(
            x, throughput, master.level * scaled.unit if problem.level else nan, master.pressure(), shared, effort
        )

    def _paired(self, part: _PairPart, other: _PairPart | None, column: int) -> tuple[Ints, Ints, Ints, Floats]:
        """Pairs of rows (first <= second), from what each side spends in them."""
        if other is None:
            i, j, time = folded(part.time)
            first, second = part.rows[i], part.rows[j]
            real = (first != second) | (self.scaled.count[first] >= 2)
        else:
            i, j, time = crossed(part.time, other.time)
            first, second = part.rows[i], other.rows[j]
            real = np.ones(len(time), dtype=bool)
        real &= time > NOTHING
        low, high = np.minimum(first, second)[real], np.maximum(first, second)[real]
        return low, high, np.full(len(low), column, dtype=np.int64), time[real]


def _beside_itself(parts: Floats, own: NDArray[np.bool_], count: Floats) -> NDArray[np.bool_]:
    """Which single rows have more than half of the time that their crowd spends with itself."""
    half = parts[:, own].sum(axis=0) / 2.0
    greedy: NDArray[np.bool_] = (parts[:, own] > half + 1e-9).any(axis=1)
    return greedy & (count < 2)


def _sorted(pairs: list[tuple[Ints, Ints, Ints, Floats]]) -> Pairs:
    """By first, second, column."""
    if not pairs:
        return Pairs.none()
    first, second, column, time = (np.concatenate(each) for each in zip(*pairs, strict=True))
    order = np.lexsort((column, second, first))
    return Pairs(first[order], second[order], column[order], time[order])


def _throughput(problem: ShareProblem, scaled: Scaled, x: Floats, shared: Pairs) -> Floats:
    """Of each one of every row's members."""
    market, kind = problem.market, scaled.kind
    theta: Floats = (market.speed * x).sum(axis=1)
    for one, other in ((shared.first, shared.second), (shared.second, shared.first)):
        rate = scaled.together[kind[one], kind[other], shared.column] * scaled.fastest[one]
        np.add.at(theta, one, rate * shared.share / scaled.count[one])
    return theta
