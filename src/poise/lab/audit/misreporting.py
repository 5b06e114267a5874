"""Strategy-proofness: does an agent gain by misreporting?

One agent lies about all its jobs, all others are honest, and the world stays what it is. With each factor f of `FACTORS` it
states

    speed_ups   that its fastest GPU type is f times as fast for it as it is
    sizes       that it has f times the work
    bids        twice the speed-up and half the work; or that it cannot use its slowest type, or its fastest: hidden bundles

The gain is measured in truth. In a standing instance it is true progress over the window, in parts of what an equal slice
would have done; where jobs run to their ends, the part of its mean completion time that the liar saves. The bound is two
turns of its whole demand, on its fastest type, as a part of the same.

A buyer is an agent that, honest, holds more than an equal part of its fastest type.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from poise.lab.audit.findings import TOO_SHORT, Case
from poise.lab.audit.instance_run import InstanceRun, Lie, run_instance
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
    """What a lie was about, and what it gained."""

    kinds: tuple[LieKind, ...]
    case: Case


@dataclass(frozen=True, slots=True)
class Liar:
    """An agent that may lie, its jobs, and the names of its fastest and slowest GPU type (None if it can use one only)."""

    agent: str
    jobs: Sequence[Job]
    fastest: str
    slowest: str | None
    speedup: float

    @staticmethod
    def of(honest: InstanceRun, agent: str, jobs: Sequence[Job]) -> "Liar":
        """Its first job stands for all of them."""
        named = zip(honest.cluster.gpu_types, honest.rates(jobs[0]), strict=True)
        rates = {name.lower(): rate for name, rate in named if rate > 0}
        fastest, slowest = max(rates, key=rates.__getitem__), min(rates, key=rates.__getitem__)
        return Liar(agent, jobs, fastest, slowest if len(rates) > 1 else None, rates[fastest] / rates[slowest])

    def about_speeds(self, factors: Iterable[float] = FACTORS) -> Iterator[tuple[LieKind, Lie]]:
        """Lies about its fastest type; none if it can use one type only."""
        return ((LieKind.SPEED_UPS, Lie(((self.fastest, factor),))) for factor in factors if self.slowest)

    def in_bids(self) -> Iterator[tuple[LieKind, Lie]]:
        """States that it is fast and has little to do; or hides types that it can use."""
        yield LieKind.BIDS, Lie(((self.fastest, FACTORS[-1]),), FACTORS[0])
        if self.slowest is not None:
            yield LieKind.BIDS, Lie(((self.slowest, 0.0),))
            yield LieKind.BIDS, Lie(((self.fastest, 0.0),))

    def about_sizes(self) -> Iterator[tuple[LieKind, Lie]]:
        """Lies about sizes alone."""
        return ((LieKind.SIZES, Lie(size=factor)) for factor in FACTORS)

    def in_every_way(self) -> Iterator[tuple[LieKind, Lie]]:
        """All of these lies."""
        return chain(self.about_speeds(), self.about_sizes(), self.in_bids())


def liars(honest: InstanceRun) -> list[Liar]:
    """The agents with the largest, the middle and the smallest speed-up."""
    found = sorted((Liar.of(honest, agent, jobs) for agent, jobs in honest.agents.items()), key=lambda liar: -liar.speedup)
    places = dict.fromkeys((0, len(found) // 2, len(found) - 1)) if found else {}
    return [found[place] for place in places]


def by_progress(honest: InstanceRun, liar: Liar, lies: Iterable[tuple[LieKind, Lie]]) -> Iterator[LieOutcome]:
    """Outcomes in a standing instance."""
    window, agents = honest.end - honest.start, len(honest.agents)
    fast = [name.lower() for name in honest.cluster.gpu_types].index(liar.fastest)
    held = sum(
        (hold.end - hold.start) * hold.gpus for job in liar.jobs for hold in honest.held_by(job.id) if hold.gpu_type == fast
    )
    is_buyer = held > honest.counts[fast] * window / agents
    demand = sum(job.gpus for job in liar.jobs)
    part = min(1.0, honest.cluster.gpus / agents / demand)
    fair = sum(honest.mean_rate(job) for job in liar.jobs) * part * window
    turns = 2.0 * honest.instance.turn * sum(max(honest.rates(job)) for job in liar.jobs)
    for kind, lie in lies:
        lying = run_instance(honest.instance, {job.id: lie for job in liar.jobs})
        before, after = (sum(run.progress(job) for job in liar.jobs) for run in (honest, lying))
        text = f"does {amount(after, 'plain')} steps instead of {amount(before, 'plain')}"
        data = {"honest_steps": before, "lying_steps": after, "equal_slice_steps": fair}
        case = _case(honest, liar, lie, (after - before) / fair, turns / fair, text, data)
        yield LieOutcome(_kinds(kind, lie, is_buyer=is_buyer), case)


def by_completion(honest: InstanceRun, liar: Liar, lies: Iterable[tuple[LieKind, Lie]]) -> Iterator[LieOutcome]:
    """Outcomes where jobs run to their ends; none if they are too short. Lies that get a job rejected are left out."""
    before, turns = honest.mean_completion(liar.jobs), 2.0 * honest.instance.turn
    if turns > TOO_SHORT * before:
        return
    for kind, lie in lies:
        lying = run_instance(honest.instance, {job.id: lie for job in liar.jobs})
        if lying.rejected_any(liar.jobs):
            continue
        after = lying.mean_completion(liar.jobs)
        text = f"is done after {amount(after, 'seconds')} instead of {amount(before, 'seconds')}"
        if len(liar.jobs) > 1:
            text += " on average"
        data = {"honest_seconds": before, "lying_seconds": after}
        case = _case(honest, liar, lie, (before - after) / before, turns / before, text, data)
        yield LieOutcome(_kinds(kind, lie, is_buyer=False), case)


def _kinds(kind: LieKind, lie: Lie, *, is_buyer: bool) -> tuple[LieKind, ...]:
    if kind is not LieKind.SPEED_UPS or lie.speeds[0][1] not in INFLATING:
        return (kind,)
    return (kind, LieKind.INFLATION, *((LieKind.BUYERS_INFLATION,) if is_buyer else ()))


def _case(honest: InstanceRun, liar: Liar, lie: Lie, gain: float, bound: float, text: str, data: dict[str, float]) -> Case:
    says = f"says that it {lie}"
    return honest.case(gain, bound, f"{liar.agent} {says}, and {text}", agent=liar.agent, lie=says, **data)
