"""What there is to measure, as tasks that can be done one by one or side by side, and what their results say together."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from poise.lab.audit import envy, misreporting, pareto, sharing_incentive, starvation
from poise.lab.audit.findings import Case, Finding, Property
from poise.lab.audit.instances import (
    CROWDED,
    GANG_STREAM,
    STANDING,
    STREAMS,
    Among,
    Instance,
    InstanceDraw,
    InstanceShape,
    turn_of,
)
from poise.lab.audit.misreporting import LieKind
from poise.lab.audit.playback import play
from poise.lab.experiment import Experiment
from poise.lab.traces.schema import Trace
from poise.scheduler.core.settings import Settings
from poise.scheduler.policies.catalogue import POLICIES, PolicyClaim

LYING = 2
"""Of the standing crowds, the first so many are those in which agents lie."""

INFLATION = {misreporting.LieKind.SPEED_UPS, misreporting.LieKind.INFLATION, misreporting.LieKind.BUYERS_INFLATION}
"""Kinds that an inflated speed-up may belong to."""

LIARS = 3
"""Agents that lie in each of them."""


PARTS: Mapping[Property, tuple[str, ...]] = {
    Property.PARETO_EFFICIENCY: tuple(pareto.ParetoKind),
    Property.STRATEGY_PROOFNESS: tuple(misreporting.LieKind),
}
"""Kinds of cases that are told apart."""


class Measurement(NamedTuple):
    """A case of a property, and the kinds that it belongs to."""

    about: Property
    kinds: tuple[str, ...]
    case: Case


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work by itself: the properties that it says something about, how to do it, and which kinds of their cases

    it is about; empty: those that are there.
    """

    about: tuple[Property, ...]
    work: Callable[[], list[Measurement]]
    kinds: frozenset[str] = frozenset()


def built_in(experiment: Experiment, *, seed: int = 0, draws: int = 1, turn: float | None = None) -> list[Task]:
    """The tasks of an audit on instances drawn from so many seeds on; policy and settings are those of the experiment.

    turn   seconds for which GPUs are given out at the longest; None: what holds with these settings
    """
    seconds = turn_of(experiment.settings) if turn is None else turn
    return [task for number in range(draws) for task in _drawn(InstanceDraw(experiment, seconds, seed + number))]


def clusters() -> list[str]:
    """Those of the built-in instances."""
    return list(dict.fromkeys(shape.cluster for shape in (*STREAMS, GANG_STREAM, *STANDING, CROWDED)))


def _drawn(draw: InstanceDraw) -> Iterator[Task]:
    strategy = (Property.STRATEGY_PROOFNESS,)
    for shape in STREAMS:
        yield Task((Property.SHARING_INCENTIVE,), partial(_share, draw, shape, Property.SHARING_INCENTIVE))
    gangs = Property.SHARING_INCENTIVE_OF_GANGS
    yield Task((gangs,), partial(_share, draw, GANG_STREAM, gangs))
    for shape in STANDING:
        yield Task((Property.ENVY_FREENESS, Property.PARETO_EFFICIENCY), partial(_stand, draw, shape))
        yield Task((Property.PARETO_EFFICIENCY,), partial(_look, draw, shape))
    yield Task((Property.STARVATION_FREEDOM,), partial(_starve, draw, CROWDED))
    for shape in STANDING[:LYING]:
        for place in range(LIARS):
            for factors, kinds in (
                (misreporting.DEFLATING, {misreporting.LieKind.SPEED_UPS}),
                (misreporting.INFLATING, INFLATION),
            ):
                yield Task(strategy, partial(_lie_about_speeds, draw, shape, place, factors), frozenset(kinds))
            yield Task(strategy, partial(_lie_in_bids, draw, shape, place), frozenset({misreporting.LieKind.BIDS}))
            yield Task(strategy, partial(_lie_about_sizes, draw, shape, place), frozenset({misreporting.LieKind.SIZES}))


def _share(draw: InstanceDraw, shape: InstanceShape, about: Property) -> list[Measurement]:
    return [Measurement(about, (), case) for case in sharing_incentive.cases_on_slices(play(draw.stream(shape)))]


def _stand(draw: InstanceDraw, shape: InstanceShape) -> list[Measurement]:
    played = play(draw.standing(shape))
    envious = [Measurement(Property.ENVY_FREENESS, (), case) for case in envy.cases(played)]
    return envious + [
        Measurement(Property.PARETO_EFFICIENCY, (pareto.ParetoKind.SHARES,), case) for case in pareto.in_the_long(played)
    ]


def _look(draw: InstanceDraw, shape: InstanceShape) -> list[Measurement]:
    played = play(draw.batch(shape))
    return [
        Measurement(Property.PARETO_EFFICIENCY, (pareto.ParetoKind.MOMENTS,), case) for case in pareto.at_moments(played)
    ]


def _starve(draw: InstanceDraw, shape: InstanceShape) -> list[Measurement]:
    played = play(starvation.cut(draw.crowded(shape)))
    return [Measurement(Property.STARVATION_FREEDOM, (), case) for case in starvation.cases(played)]


def _lie_about_speeds(draw: InstanceDraw, shape: InstanceShape, place: int, factors: tuple[float, ...]) -> list[Measurement]:
    honest = play(draw.standing(shape))
    liar = misreporting.liars(honest)[place]
    return _told(misreporting.by_progress(honest, liar, liar.about_speeds(factors)))


def _lie_in_bids(draw: InstanceDraw, shape: InstanceShape, place: int) -> list[Measurement]:
    honest = play(draw.standing(shape))
    liar = misreporting.liars(honest)[place]
    return _told(misreporting.by_progress(honest, liar, liar.in_bids()))


def _lie_about_sizes(draw: InstanceDraw, shape: InstanceShape, place: int) -> list[Measurement]:
    honest = play(draw.batch(shape))
    liar = misreporting.liars(honest)[place]
    return _told(misreporting.by_completion(honest, liar, liar.about_sizes()))


def _told(attempts: Iterable[misreporting.LieOutcome]) -> list[Measurement]:
    return [Measurement(Property.STRATEGY_PROOFNESS, each.kinds, each.case) for each in attempts]


def on_trace(trace: Trace, experiment: Experiment, *, turn: float | None = None) -> list[Task]:
    """The tasks of an audit on a trace: agents are its tenants, or its jobs if it has one tenant only."""
    tenants = {each.job.tenant for each in trace.jobs}
    among = Among.TENANTS if len(tenants) > 1 else Among.JOBS
    instance = Instance(trace, experiment, turn_of(experiment.settings) if turn is None else turn, among)
    honest = (Property.SHARING_INCENTIVE, Property.ENVY_FREENESS, Property.PARETO_EFFICIENCY, Property.STARVATION_FREEDOM)
    lies = (Task((Property.STRATEGY_PROOFNESS,), partial(_lie_in_trace, instance, place)) for place in range(LIARS))
    return [Task(honest, partial(_watch, instance)), *lies]


def _watch(instance: Instance) -> list[Measurement]:
    """All that the honest run says."""
    played = play(instance)
    shared = (
        sharing_incentive.cases_on_slices(played) if instance.among is Among.JOBS else sharing_incentive.tenant_cases(played)
    )
    return [
        *(Measurement(Property.SHARING_INCENTIVE, (), case) for case in shared),
        *(Measurement(Property.ENVY_FREENESS, (), case) for case in envy.cases(played)),
        *(Measurement(Property.PARETO_EFFICIENCY, (pareto.ParetoKind.MOMENTS,), case) for case in pareto.at_moments(played)),
        *(Measurement(Property.STARVATION_FREEDOM, (), case) for case in starvation.cases(played)),
    ]


def _lie_in_trace(instance: Instance, place: int) -> list[Measurement]:
    honest = play(instance)
    liars = misreporting.liars(honest)
    if place >= len(liars):
        return []
    liar = liars[place]
    lies = (*liar.about_speeds(), *liar.about_sizes(), *liar.in_bids())
    return _told(misreporting.by_completion(honest, liar, lies))


def findings(tasks: Iterable[Task], found: Iterable[Measurement]) -> dict[Property, Finding]:
    """What the results of these tasks say of each property that they are about."""
    everything = list(found)
    wanted = {about for task in tasks for about in task.about}
    return {
        about: Finding.of(
            (each.case for each in everything if each.about is about),
            {
                kind: [each.case for each in everything if each.about is about and kind in each.kinds]
                for kind in PARTS.get(about, ())
            },
        )
        for about in Property
        if about in wanted
    }


def audit(
    tasks: Iterable[Task], about: Iterable[Property] = tuple(Property), kinds: Iterable[str] = ()
) -> dict[Property, Finding]:
    """Do the tasks about these properties one by one; if kinds of cases are named, only the tasks that have some of them."""
    wanted, some = set(about), frozenset(kinds)
    chosen = [task for task in tasks if wanted & set(task.about) and not (some and task.kinds and not some & task.kinds)]
    every = findings(chosen, (each for task in chosen for each in task.work()))
    return {name: finding for name, finding in every.items() if name in wanted}


# What the catalogue claims of a policy, held against what was measured.
#
# Claims are about a policy by its name alone, on built-in instances, with the usual settings.

AUDITED: Mapping[PolicyClaim, tuple[Property, LieKind | None]] = {
    PolicyClaim.SHARING_INCENTIVE: (Property.SHARING_INCENTIVE, None),
    PolicyClaim.NO_ENVY: (Property.ENVY_FREENESS, None),
    PolicyClaim.PARETO: (Property.PARETO_EFFICIENCY, None),
    PolicyClaim.NO_INFLATION: (Property.STRATEGY_PROOFNESS, LieKind.BUYERS_INFLATION),
    PolicyClaim.NO_STARVATION: (Property.STARVATION_FREEDOM, None),
}
"""The property that each claim is about, and the kind of its cases, if not all of them."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claim, and what was found about it."""

    claim: PolicyClaim
    about: Property
    found: Finding

    @property
    def holds(self) -> bool:
        """Nothing that was measured contradicts it."""
        return self.found.holds is not False

    @property
    def text(self) -> str:
        """The counterexample; empty if there is none."""
        case = self.found.counterexample
        return "" if case is None else case.text

    def document(self) -> dict[str, Any]:
        """As JSON."""
        measured = self.found.document()
        return {"claim": str(self.claim), "property": str(self.about), "measured": measured["worst"], "holds": self.holds}


def claimed(experiment: Experiment, found: Mapping[Property, Finding]) -> list[Claimed]:
    """The claims that these findings are about; none for a policy with parameters or in other than the usual settings."""
    listing = POLICIES.get(experiment.policy)
    usual = Experiment(experiment.cluster)
    as_usual = (experiment.settings, experiment.placement, experiment.truth) == (Settings(), usual.placement, usual.truth)
    if listing is None or not as_usual:
        return []
    answers = [(claim, *AUDITED[claim]) for claim in listing.claims if claim in AUDITED]
    return [Claimed(claim, about, _found(found[about], kind)) for claim, about, kind in answers if about in found]


def _found(finding: Finding, kind: LieKind | None) -> Finding:
    return finding if kind is None else finding.parts[kind]
