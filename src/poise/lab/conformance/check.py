"""The check of a policy: every law in every world, and for each that is broken the smallest world found that shows it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from poise.engine import outside
from poise.lab.arguments import whole
from poise.lab.audit.audit import AUDITED, audit, built_in_tasks, check_claims
from poise.lab.conformance.laws import CLAIMS, LAWS, RAISES, CheckedPolicy, Law, name_of
from poise.lab.conformance.play import Play
from poise.lab.conformance.processes import differs_by_process
from poise.lab.conformance.worlds import World, odd_worlds, random_world, smaller
from poise.lab.experiment import Experiment
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.errors import PoiseError
from poise.scheduler.policies.catalogue import capabilities_of, listing_of, policy_named
from poise.scheduler.policies.listing import PolicyProperty

SEEDS = 40
"""Random worlds, if nothing else is said."""
TRIES = 200
"""Smaller worlds that are tried for each law that is broken."""
SHRINKING = 10.0
"""Seconds after which no more of them are tried, for policies that take long."""


@dataclass(frozen=True)
class LawVerdict:
    """What was found about one law or claim.

    worlds    how many it was judged in; 0: nothing was found out about it
    problem   what is wrong, in a sentence; None if it was kept
    world     the smallest world found in which it is broken; None for claims that an audit measures
    """

    law: str
    statement: str
    worlds: int
    problem: str | None = None
    world: World | None = None

    @property
    def holds(self) -> bool | None:
        """Whether it was kept; None if nothing was found out."""
        return False if self.problem is not None else True if self.worlds else None

    def document(self) -> dict[str, Any]:
        """The verdict as JSON."""
        shown = ("law", "statement", "holds", "worlds", "problem")
        return {name: getattr(self, name) for name in shown}


@dataclass(frozen=True)
class ConformanceReport:
    """What was found about a policy."""

    policy: str
    verdicts: tuple[LawVerdict, ...]

    @property
    def broken(self) -> tuple[LawVerdict, ...]:
        """The laws and claims that are broken."""
        return tuple(each for each in self.verdicts if each.holds is False)

    def __str__(self) -> str:
        """One line for each law that is broken; one in all if none is."""
        lines = [f"{self.policy} breaks {each.law} ({each.statement}): {each.problem}" for each in self.broken]
        return "\n".join(lines) or f"{self.policy} keeps {sum(each.holds is True for each in self.verdicts)} laws"


def subject_of(spec: str) -> CheckedPolicy:
    """The policy of a specification as something to check."""
    listing = listing_of(spec) if outside.has_listing(spec) else None
    live = partial(policy_named, spec, live=True)
    return CheckedPolicy(partial(policy_named, spec), live, listing, capabilities_of(spec))


def worlds_from(seed: int, seeds: int) -> Iterator[World]:
    """The odd worlds, then one for each seed."""
    yield from odd_worlds()
    yield from map(random_world, range(seed, seed + seeds))


def check_policy(
    policy: Any,  # noqa: ANN401 - whatever `spec_of` takes
    *,
    seeds: int = SEEDS,
    seed: int = 0,
    worlds: Iterable[World] | None = None,
    show: Callable[[int], None] = lambda _done: None,
) -> ConformanceReport:
    """Check a policy: a specification, or an object as `spec_of` takes it.

    seeds    random worlds, drawn from `seed` on
    worlds   these worlds instead
    show     told how many worlds are done
    """
    spec = outside.spec_of(policy)
    first, drawn = whole(seed, "seed", 0), whole(seeds, "seeds", 0)
    subject = subject_of(spec)
    laws = (Law(RAISES, "no exception while it decides, and an answer in time", _nothing), *LAWS, *_claims_of(subject))
    judged, found = dict.fromkeys(laws, 0), dict[Law, tuple[World, str]]()
    for done, world in enumerate(worlds_from(first, drawn) if worlds is None else worlds):
        show(done)
        for law, problem in _judged(spec, subject, world, [law for law in laws if law not in found]):
            judged[law] += 1
            if problem is not None:
                found[law] = world, problem
    verdicts = [_verdict(spec, subject, law, judged[law], found.get(law)) for law in laws]
    if worlds is None and outside.can_be_imported(spec):
        problem = differs_by_process(spec)
        verdicts.append(LawVerdict("processes", "decides alike in every process, whatever the order of sets", 1, problem))
    return ConformanceReport(spec, (*verdicts, *_audited(spec, subject)))


def _nothing(_subject: CheckedPolicy, _played: Play) -> None:
    return None


def _claims_of(subject: CheckedPolicy) -> list[Law]:
    return [] if subject.listing is None else [CLAIMS[claim] for claim in subject.listing.claims if claim in CLAIMS]


def _judged(spec: str, subject: CheckedPolicy, world: World, laws: Iterable[Law]) -> Iterator[tuple[Law, str | None]]:
    """What laws say of a world. If the policy raises something in it, nothing else can be said."""
    try:
        played = subject.play(world)
    except (PoiseError, Exception) as error:
        yield from ((law, outside.blamed(spec, error)) for law in laws if law.name == RAISES)
        return
    for law in laws:
        if law.applies(subject, world):
            yield law, _problem(spec, subject, law, played)


def _problem(spec: str, subject: CheckedPolicy, law: Law, played: Play) -> str | None:
    try:
        return law.judge(subject, played)
    except Exception as error:  # whatever a policy raises in another run of the world
        return outside.blamed(spec, error)


def _verdict(spec: str, subject: CheckedPolicy, law: Law, worlds: int, found: tuple[World, str] | None) -> LawVerdict:
    if found is None:
        return LawVerdict(law.name, law.statement, worlds)
    world, problem = found

    def problem_in(candidate: World) -> str | None:
        return next((problem for _, problem in _judged(spec, subject, candidate, [law])), None)

    until, tries = monotonic() + SHRINKING, 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in smaller(world):
            tries += 1
            if tries > TRIES or monotonic() >= until:
                break
            if (other := problem_in(candidate)) is not None:
                world, problem, is_smaller = candidate, other, True
                break
    return LawVerdict(law.name, law.statement, worlds, problem, world)


def _audited(spec: str, subject: CheckedPolicy) -> Iterator[LawVerdict]:
    """Claims about those who share a cluster, measured on the audit's instances; those that nothing measures."""
    for claim in () if subject.listing is None else subject.listing.claims:
        if claim in CLAIMS:
            continue
        yield _measured(spec, claim) if claim in AUDITED else LawVerdict(name_of(claim), str(claim), 0)


def _measured(spec: str, claim: PolicyProperty) -> LawVerdict:
    experiment = Experiment(parse_cluster("gpu:1"), spec)
    about, kind = AUDITED[claim]
    try:
        findings: Mapping[Any, Any] = audit(built_in_tasks(experiment), [about], [] if kind is None else [kind])
    except Exception as error:  # whatever a policy raises
        return LawVerdict(name_of(claim), str(claim), 1, outside.blamed(spec, error))
    for each in check_claims(experiment, findings):
        if each.claim is claim:
            return LawVerdict(name_of(claim), str(claim), each.found.cases, None if each.holds else each.text)
    return LawVerdict(name_of(claim), str(claim), 0)
