"""A relaxation of chains of rounds of tasks on M machines: a lower bound on Σ w C, and middles to order a list of tasks by.

A chain n has weight w, release time a, R rounds of K tasks that take p seconds each on one machine (its fastest), and s
seconds after each round. In the linear program (docs/algorithms/hare.md) the tasks of a round have one middle H (mean of
start + p/2):

    min Σ w_n C_n     H_1 >= a + p/2;   H_{r+1} >= H_r + p + s;   C_n = H_R + p/2 + s
    Σ_{i∈A} W_i H_i >= (Σ_{i∈A} W_i)² / 2M                                      for every set A of rounds, W = K p

Two facts make it small. A chain is never stretched: delaying its first round costs as much as delaying a later one and
helps every cut at least as much, so the unknown is one delay D_n >= 0 of the chain as a whole. And the H that satisfy all
cuts are those not below the mean busy times m of a mixture of orders on one machine that is M times as fast. So with E, the
middles without delay, and prices λ of the rounds, it is a game that has a value:

    max over λ >= 0, Σ_{i∈n} λ_i <= w_n     min over orders     Σ_i λ_i (m_i − E_i)        = min Σ w_n D_n

The best order for given prices is known exactly: by decreasing λ / W. Every λ gives a lower bound. The prices follow by
multiplicative weights, and the mean of the orders is a mixture whose D_n = max(0, max_i m_i − E_i) satisfy every cut: an
upper bound. It ends when the two are within `GAP` of each other, or after `TURNS`. A turn is one sort. (Linear programs
with cuts separated by prefixes need a row for nearly every chain: with 1,000 of them, 20 rounds of cuts leave a gap of
several per cent and take ten times as long.)

Where chains tie, the optimum is not one point and the answer lies in the middle: they advance together. Identical chains
would too, which helps none of them; so each gives way a little to those before it (`TILT`).

Rounds of a chain are taken together in at most `chunks` parts: cuts are then over unions of parts, which weakens the bound
and never breaks it. With R <= chunks the program is the one above. Time is counted from the earliest release.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from poise.scheduler.model.arithmetic import Floats, Ints, exp
from poise.scheduler.model.errors import RequestError

CHUNKS = 16
GAP = 1e-3
TURNS = 1000
CHECK = 20
"""Turns between two checks of the gap."""
PACE = 10.0
"""How fast prices follow the delays in the first turn; in turn k this divided by √k."""
TILT = 0.1
"""The most of its weight that a chain gives up in favour of identical chains before it."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Rounds that follow one another.

    name      for messages
    release   time before which no task starts
    rounds    rounds left, at least 1
    tasks     K, per round
    first     tasks left of the first round, 1 to K
    seconds   p, of a task on the fastest machine
    sync      s, between the last task of a round and the next round, or the end
    """

    name: str
    weight: float
    release: float
    rounds: int
    tasks: int
    first: int
    seconds: float
    sync: float

    @property
    def step(self) -> float:
        """Least seconds from one round to the next."""
        return self.seconds + self.sync


@dataclass(frozen=True, slots=True)
class Relaxation:
    """By chain the middle of its first round, and the step to each further one; the middles satisfy every cut.

    bound   lower bound on Σ w C, with C counted from time 0 as releases are
    value   Σ w C of these middles, a little above the bound
    """

    first: tuple[float, ...]
    step: tuple[float, ...]
    bound: float
    value: float

    def middle(self, chain: int, turn: int) -> float:
        """H of a round, counted from 0."""
        return self.first[chain] + turn * self.step[chain]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of all chains, one chain after the other. Unit of time: all work on all machines; unit of work: all work.

    start    by chain: its first part
    chain    by part
    middle   E, by part: of its tasks, without delay
    work     W, by part
    weight   by chain
    gentle   by chain: the weight after giving way to identical chains
    """

    start: Ints
    chain: Ints
    middle: Floats
    work: Floats
    weight: Floats
    gentle: Floats


def relax(chains: Sequence[Chain], machines: int, chunks: int = CHUNKS) -> Relaxation:
    """Middles and bound. O(parts log parts) per turn; the same chains give the same answer, bit for bit."""
    if machines < 1:
        raise RequestError("there are no GPUs to plan for")
    for chain in chains:
        if chain.tasks < 1 or not 1 <= chain.first <= chain.tasks:
            left = f"a round of {chain.tasks} tasks, {chain.first} of them left"
            raise RequestError(f"{chain.name}: {left}; at least 1 is needed")
        if chain.rounds < 1:
            raise RequestError(f"{chain.name}: {chain.rounds} rounds are left; at least 1 is needed")
        if not (chain.seconds > 0 and chain.sync >= 0 and chain.weight > 0):
            raise RequestError(f"{chain.name}: seconds and weight must be positive, and synchronisation not negative")
    if not chains:
        return Relaxation((), (), 0.0, 0.0)
    origin = min(chain.release for chain in chains)
    work = [((chain.rounds - 1) * chain.tasks + chain.first) * chain.seconds for chain in chains]
    unit = sum(work) / machines
    least = sum(chain.weight * (chain.release + chain.rounds * chain.step) for chain in chains)
    since = least - origin * sum(chain.weight for chain in chains)
    delays, bound = _play(_parts(chains, origin, unit, machines, chunks), since / unit)
    late = [unit * delay for delay in delays.tolist()]
    return Relaxation(
        first=tuple([chain.release + chain.seconds / 2 + each for chain, each in zip(chains, late, strict=True)]),
        step=tuple([chain.step for chain in chains]),
        bound=least + unit * bound,
        value=least + sum(chain.weight * each for chain, each in zip(chains, late, strict=True)),
    )


def _parts(chains: Sequence[Chain], origin: float, unit: float, machines: int, chunks: int) -> _Parts:
    """Each chain in parts of nearly equal numbers of rounds; a first round of fewer tasks counts for less in its part."""
    rounds = np.array([chain.rounds for chain in chains])
    parts = np.minimum(rounds, chunks)
    start = np.append(0, np.cumsum(parts)[:-1])
    chain = np.repeat(np.arange(len(chains)), parts)
    place = np.arange(len(chain)) - start[chain]
    low, high = (rounds[chain] * (place + more) // parts[chain] for more in (0, 1))
    tasks, first = np.array([each.tasks for each in chains])[chain], np.array([each.first for each in chains])[chain]
    missing = np.where(place == 0, tasks - first, 0)
    count = (high - low) * tasks - missing
    turn = (high - low) * tasks * ((low + high - 1) / 2) / count  # what is missing is of round 0
    seconds, step = np.array([each.seconds for each in chains])[chain], np.array([each.step for each in chains])[chain]
    release = np.array([each.release for each in chains])[chain]
    weight = np.array([each.weight for each in chains])
    # Among identical chains, the k-th of n gives up TILT · k / n of its weight.
    kinds = [(c.weight, c.release, c.rounds, c.tasks, c.first, c.seconds, c.sync) for c in chains]
    size, seen, factors = Counter(kinds), Counter[tuple[float, ...]](), []
    for kind in kinds:
        factors.append(1.0 - TILT * seen[kind] / size[kind])
        seen[kind] += 1
    return _Parts(
        start=start,
        chain=chain,
        middle=(release - origin + seconds / 2 + turn * step) / unit,
        work=count * seconds / (unit * machines),
        weight=weight,
        gentle=weight * np.array(factors),
    )


def _play(parts: _Parts, least: float) -> tuple[Floats, float]:
    """Play the game: delays by chain, and a lower bound of Σ w D. `least` is Σ w C without delays."""
    score, mean = np.zeros(len(parts.chain)), np.zeros(len(parts.chain))
    delays, bound, low = np.zeros(len(parts.start)), 0.0, 0.0
    for turn in range(1, TURNS + 1):
        # Each chain's weight distributed over its parts by their scores, and over not being late at all, whose score is 0.
        most = np.maximum(0.0, np.maximum.reduceat(score, parts.start))
        odds = exp(score - most[parts.chain])
        total = exp(-most) + np.add.reduceat(odds, parts.start)
        prices = odds * (parts.gentle / total)[parts.chain]
        late = _answer(parts, prices) - parts.middle
        score += PACE / sqrt(turn) * late
        mean += (late - mean) * (2.0 / (turn + 1))  # later turns count for more
        low = max(low, float((prices * late).sum()))
        if turn % CHECK == 0:
            honest = prices * (parts.weight / parts.gentle)[parts.chain]
            bound = max(bound, float((honest * (_answer(parts, honest) - parts.middle)).sum()))
            delays = np.maximum(0.0, np.maximum.reduceat(mean, parts.start))
            if float((parts.gentle * delays).sum()) - low <= GAP * (least + low):
                break
    return delays, max(bound, low)


def _answer(parts: _Parts, prices: Floats) -> Floats:
    """Mean busy times of the parts in the best order for these prices, on one machine as fast as all together."""
    order = np.argsort(-prices / parts.work, kind="stable")
    busy = np.empty(len(order))
    busy[order] = np.cumsum(parts.work[order])
    return busy - parts.work / 2
