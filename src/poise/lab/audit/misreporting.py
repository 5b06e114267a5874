"""Gain from lying: is anybody better off for saying what is not true?

One agent lies about all its jobs, all others are honest, and the world stays what it is. With every factor f of `FACTORS`
it says

    speed_ups   that its fastest GPU type is f times as fast for it as it is
    sizes       that it has f times the work
    bids        twice the speed-up and half the work; or that it cannot use its slowest type, or its fastest: hidden bundles

The gain is measured in truth. In a standing crowd it is true progress over the window, in parts of what an equal slice would
have done; where jobs run to their ends, the part of its mean completion time that the liar saves. The bound is two turns of
its whole demand, on its fastest type, as a part of the same.

A buyer is somebody who, honest, holds more than an equal part of its fastest type.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from poise.lab.audit.findings import TOO_SHORT, Case
from poise.lab.audit.playback import Lie, Played, play
from poise.lab.report.axes import amount
from poise.scheduler.model.job import Job

DEFLATING = (0.5, 0.8)
INFLATING = (1.25, 2.0)
FACTORS = (*DEFLATING, *INFLATING)


class LieKind(StrEnum):
    """What a lie is about."""

    SPEED_UPS = "speed_ups"
    INFLATION = "inflated_speed_ups"
    BUYERS_INFLATION = "inflated_speed_ups_of_buyers"
    SIZES = "sizes"
    BIDS = "bids"


@dataclass(frozen=True, slots=True)
class LieOutcome:
    """What a lie was about, and what came of it."""

    kinds: tuple[LieKind, ...]
    case: Case


@dataclass(frozen=True, slots=True)
class Liar:
    """Somebody who may lie: its jobs, and the names of its fastest and slowest GPU type; None if it can use one only."""

    agent: str
    jobs: Sequence[Job]
    fastest: str
    slowest: str | None
    speedup: float

    @staticmethod
    def of(honest: Played, agent: str, jobs: Sequence[Job]) -> "Liar":
        """Its first job stands for all of them."""
        named = zip(honest.cluster.gpu_types, honest.rates(jobs[0]), strict=True)
        rates = {name.lower(): rate for name, rate in named if rate > 0}
        fastest, slowest = max(rates, key=rates.__getitem__), min(rates, key=rates.__getitem__)
        return Liar(agent, jobs, fastest, slowest if len(rates) > 1 else None, rates[fastest] / rates[slowest])

    def about_speeds(self, factors: Iterable[float] = FACTORS) -> Iterator[tuple[LieKind, Lie]]:
        """Lies about its fastest type; none if it can use one type only."""
        return ((LieKind.SPEED_UPS, Lie(((self.fastest, factor),))) for factor in factors if self.slowest)

    def in_bids(self) -> Iterator[tuple[LieKind, Lie]]:
        """It is fast and has little to do; or there are types that it hides."""
        yield LieKind.BIDS, Lie(((self.fastest, FACTORS[-1]),), FACTORS[0])
        if self.slowest is not None:
            yield LieKind.BIDS, Lie(((self.slowest, 0.0),))
            yield LieKind.BIDS, Lie(((self.fastest, 0.0),))

    def about_sizes(self) -> Iterator[tuple[LieKind, Lie]]:
        """Lies about sizes alone."""
        return ((LieKind.SIZES, Lie(size=factor)) for factor in FACTORS)


def liars(honest: Played) -> list[Liar]:
    """Those with the largest, the middle and the smallest speed-up."""
    found = sorted((Liar.of(honest, agent, jobs) for agent, jobs in honest.agents.items()), key=lambda liar: -liar.speedup)
    places = dict.fromkeys((0, len(found) // 2, len(found) - 1)) if found else {}
    return [found[place] for place in places]


def by_progress(honest: Played, liar: Liar, lies: Iterable[tuple[LieKind, Lie]]) -> Iterator[LieOutcome]:
    """Lies in a standing crowd."""
    buyer = (LieKind.BUYERS_INFLATION,) if _buys(honest, liar) else ()
    for kind, lie in lies:
        lying = play(honest.instance, {job.id: lie for job in liar.jobs})
        also = (LieKind.INFLATION, *buyer) if _inflates(kind, lie) else ()
        yield LieOutcome((kind, *also), _by_progress(honest, lying, liar, lie))


def _inflates(kind: LieKind, lie: Lie) -> bool:
    return kind is LieKind.SPEED_UPS and lie.speeds[0][1] in INFLATING


def _buys(honest: Played, liar: Liar) -> bool:
    """It holds more than an equal part of its fastest type."""
    fast = [name.lower() for name in honest.cluster.gpu_types].index(liar.fastest)
    spells = (spell for job in liar.jobs for spell in honest.held_by(job.id) if spell.gpu_type == fast)
    held = sum((spell.end - spell.start) * spell.gpus for spell in spells)
    window = honest.end - honest.instance.trace.jobs[0].job.submitted
    return held > honest.counts[fast] * window / len(honest.agents)


def _by_progress(honest: Played, lying: Played, liar: Liar, lie: Lie) -> Case:
    before, after = (sum(played.progress(job) for job in liar.jobs) for played in (honest, lying))
    demand = sum(job.gpus for job in liar.jobs)
    window = honest.end - honest.instance.trace.jobs[0].job.submitted
    part = min(1.0, honest.cluster.gpus / len(honest.agents) / demand)
    fair = sum(honest.mean_rate(job) for job in liar.jobs) * part * window
    turns = 2.0 * honest.instance.turn * sum(max(honest.rates(job)) for job in liar.jobs)
    text = f"does {amount(after, 'plain')} steps instead of {amount(before, 'plain')}"
    data = {"honest_steps": before, "lying_steps": after, "equal_slice_steps": fair}
    return _case(honest, liar, lie, (after - before) / fair, turns / fair, text, data)


def by_completion(honest: Played, liar: Liar, lies: Iterable[tuple[LieKind, Lie]]) -> Iterator[LieOutcome]:
    """Lies where jobs run to their ends; none if they are too short. One for which a job is turned away is left out."""
    before = _completion(honest, liar.jobs)
    if 2.0 * honest.instance.turn > TOO_SHORT * before:
        return
    for kind, lie in lies:
        lying = play(honest.instance, {job.id: lie for job in liar.jobs})
        also = (LieKind.INFLATION,) if _inflates(kind, lie) else ()
        if not lying.refused(liar.jobs):
            yield LieOutcome((kind, *also), _by_completion(honest, lying, liar, lie))


def _by_completion(honest: Played, lying: Played, liar: Liar, lie: Lie) -> Case:
    before, after = (_completion(played, liar.jobs) for played in (honest, lying))
    text = f"is done after {amount(after, 'seconds')} instead of {amount(before, 'seconds')}"
    if len(liar.jobs) > 1:
        text += " on average"
    data = {"honest_seconds": before, "lying_seconds": after}
    return _case(honest, liar, lie, (before - after) / before, 2.0 * honest.instance.turn / before, text, data)


def _completion(played: Played, jobs: Sequence[Job]) -> float:
    return sum(played.ended(job.id) - job.submitted for job in jobs) / len(jobs)


def _case(honest: Played, liar: Liar, lie: Lie, gain: float, bound: float, text: str, data: dict[str, float]) -> Case:
    whole = {"instance": honest.instance.name, "agent": liar.agent, "lie": f"says that it {lie}", **data}
    return Case(gain, bound, f"{honest.instance.name}: {liar.agent} says that it {lie}, and {text}", whole)
