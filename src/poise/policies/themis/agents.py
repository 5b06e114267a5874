"""Agents bid for apps (Themis, NSDI'20 §4-5; ALGORITHMS §3.1, §3.3): what so many more GPUs are worth to an app.

    T_sh(G) = elapsed + Σ_k (GPU-seconds of work left in job k, where it would be) / |G|
    ρ(G)    = T_sh(G) / T_id;    ρ(∅) = 1e6;    V(G) = 1 / ρ(G)

The arbiter knows an agent by `bid` alone, so that an app may send its own. The agent that stands in for an app that sends
none (`Honest`) bids for its jobs as the scheduler believes them to be: for the first of them, the first two, and so on;
then for more GPUs for those that can use more. One table of counts: as many GPUs as there are, at the tightest place that
the offer has for them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import NamedTuple, Protocol

import numpy as np

from poise.model.speed import Locality, Rates
from poise.policies.sketch import Sketch
from poise.solve.auction import Table
from poise.solve.chance import uniform

NOTHING = 1e6
"""ρ of an app that holds no GPU."""
_LEAST = 1e-9
"""ρ below which there is nothing left to tell apart."""


class Use(NamedTuple):
    """What an app does with GPUs that it gets: the job in this row is to have so many, all in all."""

    row: int
    gpus: int


class Bid(NamedTuple):
    """A valuation table: with `units[i]` more GPUs the app has ρ = `rho[i]`, and does `uses[:i]` with them.

    Units ascend from 0, and each use takes whole gangs.
    """

    units: tuple[int, ...]
    rho: tuple[float, ...]
    uses: tuple[Use, ...]

    def table(self) -> Table:
        """As the auction reads it: the logarithm of V = 1/ρ.

        Who holds nothing and would be badly off even with its first gang has the more to gain by it, not the less.
        """
        worth = [-log(max(each, _LEAST)) for each in self.rho]
        if self.rho[0] >= NOTHING and len(worth) > 1:
            worth[0] += 2.0 * min(worth[1], 0.0)
        return Table(np.array(self.units, dtype=np.int64), np.array(worth))


class Offer:
    """The GPUs of one type that are up for auction: how many, and how close together so many of them can be."""

    def __init__(self, gpu_type: int, sketch: Sketch) -> None:
        self.gpu_type = gpu_type
        self.gpus = sketch.idle[gpu_type]
        self._sketch = sketch
        self._series: dict[int, tuple[Sketch, list[Locality]]] = {}

    def locality(self, gang: int, before: int = 0) -> Locality:
        """Of a gang at its tightest place, once so many gangs of the same size have taken theirs."""
        trial, found = self._series.get(gang) or self._series.setdefault(gang, (self._sketch.copy(), []))
        while len(found) <= before:
            site = trial.tightest(self.gpu_type, gang)
            if site is None:
                return Locality.CLUSTER
            trial.take(site)
            found.append(trial.locality(site))
        return found[before]


class Agent(Protocol):
    """Who bids for an app."""

    def bid(self, offer: Offer) -> Bid:
        """The app's valuation of more GPUs, out of those on offer."""


@dataclass(frozen=True, slots=True)
class Member:
    """A live job of an app.

    counts   GPUs that it can run with, ascending;  gang: GPUs that it asks for
    held     GPUs under a lease that goes on, with `speed` steps/s; 0 and 0 if there are none
    left     steps left;  best: steps/s of its gang on its fastest type, packed
    rates    steps/s with so many GPUs;  gpu_type: of those that it holds, -1 if it holds none
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
        """The same with these GPUs."""
        return replace(self, held=gpus, speed=self.rates(gpus)[gpu_type][locality], gpu_type=gpu_type)


@dataclass(frozen=True, slots=True)
class App:
    """What an agent knows: seconds since the app's first job came, T_id, and the live jobs in the order it serves them."""

    elapsed: float
    alone: float
    members: tuple[Member, ...]

    def rho(self, gpus: int, gpu_seconds: float) -> float:
        """With so many GPUs for so much work."""
        return (self.elapsed + gpu_seconds / gpus) / self.alone if gpus else NOTHING

    def rho_now(self) -> float:
        """With what it holds."""
        return self.rho(sum(each.held for each in self.members), sum(each.gpu_seconds() for each in self.members))


@dataclass(frozen=True, slots=True)
class Honest:
    """Bids for an app what the scheduler believes."""

    app: App

    def bid(self, offer: Offer) -> Bid:
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


def _uses(members: Sequence[Member], offer: Offer) -> Iterator[tuple[Use, int, float]]:
    """What an app would do with more GPUs, one use after the other: GPUs that it takes, and what it does to the work left.

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
        growing = [
            (each, more, after) for (each, _, _), (more, after) in zip(growing, grown, strict=True) if more < each.counts[-1]
        ]


def _more(member: Member, has: int, work: float, offer: Offer) -> tuple[int, float]:
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

    agent: Agent
    error: float
    stream: int

    def bid(self, offer: Offer) -> Bid:
        """What the agent bids, give or take."""
        bid = self.agent.bid(offer)
        factors = 1.0 + self.error * (2.0 * uniform(self.stream, len(bid.rho)) - 1.0)
        return bid._replace(rho=tuple((np.array(bid.rho) * factors).tolist()))
