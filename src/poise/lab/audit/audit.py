"""The audit of a policy: what there is to measure, as independent tasks, and what their results say together.

`built_in_tasks` and `trace_tasks` list the tasks, which can be done one by one (`audit`) or in other processes; `findings`
sums up what they measured, one finding per property; `check_claims` holds that against what the catalogue claims.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from poise.lab.audit import envy, instances, misreporting, pareto, sharing_incentive, starvation
from poise.lab.audit.findings import Case, Finding, Property
from poise.lab.audit.instance_run import InstanceRun, Lie, run_instance
from poise.lab.audit.misreporting import Liar, LieKind, LieOutcome
from poise.lab.audit.pareto import ParetoKind
from poise.lab.experiment import Experiment
from poise.lab.traces.schema import Trace
from poise.scheduler.core.settings import Settings
from poise.scheduler.policies.catalogue import PolicyProperty, known

LYING = 2
"""Number of the standing instances, from the first on, in which agents lie."""
LIARS = 3
"""Agents that lie in each of them."""
INFLATION = frozenset({LieKind.SPEED_UPS, LieKind.INFLATION, LieKind.BUYERS_INFLATION})
"""Kinds that an inflated speed-up may belong to."""
PARTS: Mapping[Property, tuple[str, ...]] = {
    Property.PARETO_EFFICIENCY: tuple(ParetoKind),
    Property.STRATEGY_PROOFNESS: tuple(LieKind),
}
"""Kinds of cases for which findings are reported on their own."""

Draw = Callable[[], instances.Instance]
Lies = Callable[[Liar], Iterable[tuple[LieKind, Lie]]]
Judge = Callable[[InstanceRun, Liar, Iterable[tuple[LieKind, Lie]]], Iterable[LieOutcome]]


class Measurement(NamedTuple):
    """A case of a property, and the kinds that it belongs to."""

    about: Property
    kinds: tuple[str, ...]
    case: Case


class Measure(NamedTuple):
    """How the cases of a property are read off a run, and the kinds that they belong to."""

    about: Property
    cases: Callable[[InstanceRun], Iterable[Case]]
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """An independent piece of work; it can be pickled and sent to another process.

    about   the properties that its measurements are about
    kinds   the kinds of cases that they may be of; empty: any
    """

    about: tuple[Property, ...]
    work: Callable[[], list[Measurement]]
    kinds: frozenset[str] = frozenset()


SHARING = Measure(Property.SHARING_INCENTIVE, sharing_incentive.cases_on_slices)
SHARING_OF_GANGS = Measure(Property.SHARING_INCENTIVE_OF_GANGS, sharing_incentive.cases_on_slices)
SHARING_OF_TENANTS = Measure(Property.SHARING_INCENTIVE, sharing_incentive.tenant_cases)
ENVY = Measure(Property.ENVY_FREENESS, envy.cases)
PARETO_SHARES = Measure(Property.PARETO_EFFICIENCY, pareto.cases_of_shares, (ParetoKind.SHARES,))
PARETO_MOMENTS = Measure(Property.PARETO_EFFICIENCY, pareto.cases_at_moments, (ParetoKind.MOMENTS,))
STARVATION = Measure(Property.STARVATION_FREEDOM, starvation.cases)


def built_in_tasks(experiment: Experiment, *, seed: int = 0, draws: int = 1, turn: float | None = None) -> list[Task]:
    """The tasks of an audit on the built-in instances, drawn from `draws` seeds from `seed` on.

    Policy and settings are those of the experiment. `turn`: the longest time, in seconds, for which GPUs are given out;
    None: what these settings imply.
    """
    seconds = instances.turn_of(experiment.settings) if turn is None else turn
    tasks: list[Task] = []
    for number in range(draws):
        draw = instances.InstanceGenerator(experiment, seconds, seed + number)
        tasks += [_honest_task(partial(draw.stream, shape), SHARING) for shape in instances.STREAMS]
        tasks.append(_honest_task(partial(draw.stream, instances.GANG_STREAM), SHARING_OF_GANGS))
        for shape in instances.STANDING:
            tasks.append(_honest_task(partial(draw.standing, shape), ENVY, PARETO_SHARES))
            tasks.append(_honest_task(partial(draw.batch, shape), PARETO_MOMENTS))
        tasks.append(_honest_task(partial(starvation.short_stream, draw, instances.CROWDED), STARVATION))
        for shape in instances.STANDING[:LYING]:
            standing, batch = partial(draw.standing, shape), partial(draw.batch, shape)
            deflated = partial(Liar.about_speeds, factors=misreporting.DEFLATING)
            inflated = partial(Liar.about_speeds, factors=misreporting.INFLATING)
            for place in range(LIARS):
                tasks += [
                    _lying_task(standing, place, deflated, misreporting.by_progress, {LieKind.SPEED_UPS}),
                    _lying_task(standing, place, inflated, misreporting.by_progress, INFLATION),
                    _lying_task(standing, place, Liar.in_bids, misreporting.by_progress, {LieKind.BIDS}),
                    _lying_task(batch, place, Liar.about_sizes, misreporting.by_completion, {LieKind.SIZES}),
                ]
    return tasks


def clusters() -> list[str]:
    """The clusters of the built-in instances."""
    shapes = (*instances.STREAMS, instances.GANG_STREAM, *instances.STANDING, instances.CROWDED)
    return list(dict.fromkeys(shape.cluster for shape in shapes))


def trace_tasks(trace: Trace, experiment: Experiment, *, turn: float | None = None) -> list[Task]:
    """The tasks of an audit on a trace: agents are its tenants, or its jobs if it has one tenant only."""
    has_tenants = len({each.job.tenant for each in trace.jobs}) > 1
    kind = instances.AgentKind.TENANTS if has_tenants else instances.AgentKind.JOBS
    instance = instances.Instance(trace, experiment, instances.turn_of(experiment.settings) if turn is None else turn, kind)
    draw = partial(replace, instance)  # the instance itself: a copy that changes nothing
    sharing = SHARING_OF_TENANTS if has_tenants else SHARING
    lying = (_lying_task(draw, place, Liar.in_every_way, misreporting.by_completion) for place in range(LIARS))
    return [_honest_task(draw, sharing, ENVY, PARETO_MOMENTS, STARVATION), *lying]


# Tasks carry partial functions of what is at module level, since closures cannot be pickled. They draw their instance when
# they are done: that is cheaper than sending it.


def _honest_task(draw: Draw, *measures: Measure) -> Task:
    return Task(tuple(dict.fromkeys(each.about for each in measures)), partial(_measure, draw, measures))


def _measure(draw: Draw, measures: Iterable[Measure]) -> list[Measurement]:
    """Run an instance in which all agents tell the truth."""
    run = run_instance(draw())
    return [Measurement(each.about, each.kinds, case) for each in measures for case in each.cases(run)]


def _lying_task(draw: Draw, place: int, lies: Lies, judge: Judge, kinds: Iterable[LieKind] = ()) -> Task:
    return Task((Property.STRATEGY_PROOFNESS,), partial(_measure_lies, draw, place, lies, judge), frozenset(kinds))


def _measure_lies(draw: Draw, place: int, lies: Lies, judge: Judge) -> list[Measurement]:
    """Run an instance honestly and once for each lie of the liar at this place; nothing if there are fewer liars."""
    honest = run_instance(draw())
    return [
        Measurement(Property.STRATEGY_PROOFNESS, outcome.kinds, outcome.case)
        for liar in misreporting.liars(honest)[place : place + 1]
        for outcome in judge(honest, liar, lies(liar))
    ]


def findings(tasks: Iterable[Task], measurements: Iterable[Measurement]) -> dict[Property, Finding]:
    """What the results of these tasks say of each property that they are about."""
    measured = list(measurements)
    wanted = {about for task in tasks for about in task.about}
    found = {}
    for about in Property:
        if about in wanted:
            mine = [each for each in measured if each.about is about]
            parts = {kind: [each.case for each in mine if kind in each.kinds] for kind in PARTS.get(about, ())}
            found[about] = Finding.of((each.case for each in mine), parts)
    return found


def audit(
    tasks: Iterable[Task], about: Iterable[Property] = tuple(Property), kinds: Iterable[str] = ()
) -> dict[Property, Finding]:
    """Do the tasks about these properties one by one; if kinds of cases are named, only the tasks that have some of them."""
    wanted, some = set(about), frozenset(kinds)
    chosen = [task for task in tasks if wanted & set(task.about) and not (some and task.kinds and not some & task.kinds)]
    found = findings(chosen, (each for task in chosen for each in task.work()))
    return {name: finding for name, finding in found.items() if name in wanted}


# Claims of the catalogue
#
# A claim is about a policy by its name alone, on built-in instances, with the usual settings.

AUDITED: Mapping[PolicyProperty, tuple[Property, LieKind | None]] = {
    PolicyProperty.SHARING_INCENTIVE: (Property.SHARING_INCENTIVE, None),
    PolicyProperty.NO_ENVY: (Property.ENVY_FREENESS, None),
    PolicyProperty.PARETO: (Property.PARETO_EFFICIENCY, None),
    PolicyProperty.NO_INFLATION: (Property.STRATEGY_PROOFNESS, LieKind.BUYERS_INFLATION),
    PolicyProperty.NO_STARVATION: (Property.STARVATION_FREEDOM, None),
}
"""The property that each claim is about, and the kind of its cases, if not all of them."""


@dataclass(frozen=True, slots=True)
class CheckedClaim:
    """A claim, and what was found about it."""

    claim: PolicyProperty
    about: Property
    found: Finding

    @property
    def holds(self) -> bool:
        """Whether nothing that was measured contradicts it."""
        return self.found.holds is not False

    @property
    def text(self) -> str:
        """The counterexample; empty if there is none."""
        case = self.found.counterexample
        return "" if case is None else case.text

    def document(self) -> dict[str, Any]:
        """The claim as JSON."""
        measured = self.found.document()
        return {"claim": str(self.claim), "property": str(self.about), "measured": measured["worst"], "holds": self.holds}


def check_claims(experiment: Experiment, found: Mapping[Property, Finding]) -> list[CheckedClaim]:
    """The claims that these findings are about; none for a policy with parameters or in other than the usual settings."""
    listing = known().get(experiment.policy)
    usual = Experiment(experiment.cluster)
    is_usual = (experiment.settings, experiment.placement, experiment.truth) == (Settings(), usual.placement, usual.truth)
    if listing is None or not is_usual:
        return []
    checked = []
    for claim in listing.claims:
        if claim not in AUDITED:
            continue
        about, kind = AUDITED[claim]
        if about in found:
            checked.append(CheckedClaim(claim, about, found[about] if kind is None else found[about].parts[kind]))
    return checked
