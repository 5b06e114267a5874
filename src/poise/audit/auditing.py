"""What there is to measure, as tasks that can be done one by one or side by side, and what their results say together."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from poise.assembly import Experiment
from poise.audit import envy, lying, pareto, sharing, slices, starving
from poise.audit.findings import Case, Finding, Property
from poise.audit.instances import CROWDED, GANG_STREAM, STANDING, STREAMS, Among, Draw, Instance, Shape, turn_of
from poise.audit.playing import play
from poise.traces.schema import Trace

LYING = 2
"""Of the standing crowds, the first so many are those in which agents lie."""

INFLATION = {lying.Kind.SPEED_UPS, lying.Kind.INFLATION, lying.Kind.BUYERS_INFLATION}
"""Kinds that an inflated speed-up may belong to."""

LIARS = 3
"""Agents that lie in each of them."""


PARTS: Mapping[Property, tuple[str, ...]] = {
    Property.PARETO_EFFICIENCY: tuple(pareto.Kind),
    Property.STRATEGY_PROOFNESS: tuple(lying.Kind),
}
"""Kinds of cases that are told apart."""


class Found(NamedTuple):
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
    work: Callable[[], list[Found]]
    kinds: frozenset[str] = frozenset()


def built_in(experiment: Experiment, *, seed: int = 0, draws: int = 1, turn: float | None = None) -> list[Task]:
    """The tasks of an audit on instances drawn from so many seeds on; policy and settings are those of the experiment.

    turn   seconds for which GPUs are given out at the longest; None: what holds with these settings
    """
    seconds = turn_of(experiment.settings) if turn is None else turn
    return [task for number in range(draws) for task in _drawn(Draw(experiment, seconds, seed + number))]


def clusters() -> list[str]:
    """Those of the built-in instances."""
    return list(dict.fromkeys(shape.cluster for shape in (*STREAMS, GANG_STREAM, *STANDING, CROWDED)))


def _drawn(draw: Draw) -> Iterator[Task]:
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
            for factors, kinds in ((lying.DEFLATING, {lying.Kind.SPEED_UPS}), (lying.INFLATING, INFLATION)):
                yield Task(strategy, partial(_lie_about_speeds, draw, shape, place, factors), frozenset(kinds))
            yield Task(strategy, partial(_lie_in_bids, draw, shape, place), frozenset({lying.Kind.BIDS}))
            yield Task(strategy, partial(_lie_about_sizes, draw, shape, place), frozenset({lying.Kind.SIZES}))


def _share(draw: Draw, shape: Shape, about: Property) -> list[Found]:
    return [Found(about, (), case) for case in sharing.cases(play(draw.stream(shape)))]


def _stand(draw: Draw, shape: Shape) -> list[Found]:
    played = play(draw.standing(shape))
    envious = [Found(Property.ENVY_FREENESS, (), case) for case in envy.cases(played)]
    return envious + [Found(Property.PARETO_EFFICIENCY, (pareto.Kind.SHARES,), case) for case in pareto.in_the_long(played)]


def _look(draw: Draw, shape: Shape) -> list[Found]:
    played = play(draw.batch(shape))
    return [Found(Property.PARETO_EFFICIENCY, (pareto.Kind.MOMENTS,), case) for case in pareto.at_moments(played)]


def _starve(draw: Draw, shape: Shape) -> list[Found]:
    played = play(starving.cut(draw.crowded(shape)))
    return [Found(Property.STARVATION_FREEDOM, (), case) for case in starving.cases(played)]


def _lie_about_speeds(draw: Draw, shape: Shape, place: int, factors: tuple[float, ...]) -> list[Found]:
    honest = play(draw.standing(shape))
    liar = lying.liars(honest)[place]
    return _told(lying.by_progress(honest, liar, liar.about_speeds(factors)))


def _lie_in_bids(draw: Draw, shape: Shape, place: int) -> list[Found]:
    honest = play(draw.standing(shape))
    liar = lying.liars(honest)[place]
    return _told(lying.by_progress(honest, liar, liar.in_bids()))


def _lie_about_sizes(draw: Draw, shape: Shape, place: int) -> list[Found]:
    honest = play(draw.batch(shape))
    liar = lying.liars(honest)[place]
    return _told(lying.by_completion(honest, liar, liar.about_sizes()))


def _told(attempts: Iterable[lying.Attempt]) -> list[Found]:
    return [Found(Property.STRATEGY_PROOFNESS, each.kinds, each.case) for each in attempts]


def on_trace(trace: Trace, experiment: Experiment, *, turn: float | None = None) -> list[Task]:
    """The tasks of an audit on a trace: agents are its tenants, or its jobs if it has one tenant only."""
    tenants = {each.job.tenant for each in trace.jobs}
    among = Among.TENANTS if len(tenants) > 1 else Among.JOBS
    instance = Instance(trace, experiment, turn_of(experiment.settings) if turn is None else turn, among)
    honest = (Property.SHARING_INCENTIVE, Property.ENVY_FREENESS, Property.PARETO_EFFICIENCY, Property.STARVATION_FREEDOM)
    lies = (Task((Property.STRATEGY_PROOFNESS,), partial(_lie_in_trace, instance, place)) for place in range(LIARS))
    return [Task(honest, partial(_watch, instance)), *lies]


def _watch(instance: Instance) -> list[Found]:
    """All that the honest run says."""
    played = play(instance)
    shared = sharing.cases(played) if instance.among is Among.JOBS else slices.cases(played)
    return [
        *(Found(Property.SHARING_INCENTIVE, (), case) for case in shared),
        *(Found(Property.ENVY_FREENESS, (), case) for case in envy.cases(played)),
        *(Found(Property.PARETO_EFFICIENCY, (pareto.Kind.MOMENTS,), case) for case in pareto.at_moments(played)),
        *(Found(Property.STARVATION_FREEDOM, (), case) for case in starving.cases(played)),
    ]


def _lie_in_trace(instance: Instance, place: int) -> list[Found]:
    honest = play(instance)
    liars = lying.liars(honest)
    if place >= len(liars):
        return []
    liar = liars[place]
    lies = (*liar.about_speeds(), *liar.about_sizes(), *liar.in_bids())
    return _told(lying.by_completion(honest, liar, lies))


def findings(tasks: Iterable[Task], found: Iterable[Found]) -> dict[Property, Finding]:
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
