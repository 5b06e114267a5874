"""What the catalogue says of a policy: a `Listing`, which stands beside the policy's code.

A listing is all that the rest of Poise may know of a policy. Where the service, the simulator or a benchmark behaves
differently from policy to policy, it asks for a claim, a capability or a promise; it never compares names or classes.

Below the listing are the readers of parameters: each turns the text of a specification (`stride:quantum=30`) into a value,
or raises ValueError with what it expected.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Any

from poise.scheduler.model.plan import Order, Planner, Policy
from poise.scheduler.model.workload import Allocator
from poise.scheduler.policies.promises import Promise, no_shares


class Family(StrEnum):
    """What a policy answers with: an order of jobs, time slices, shares of time, or exactly who gets which GPUs."""

    QUEUE = "queue"
    STRIDE = "stride"
    SHARE = "share"
    MARKET = "market"


class PolicyProperty(StrEnum):
    """What holds under a policy on every trace: tests check it in random worlds, `poise audit` what concerns sharing."""

    NO_PREEMPTION = "never preempts"
    WORK_CONSERVING = "no GPU idles while a waiting gang would fit"
    NO_DURATIONS = "needs no knowledge of durations"
    IN_ORDER = "starts jobs in the order of submission"
    DEADLINES = "says so when a deadline cannot be met"
    BOUND = "says what no schedule can be below"
    SHARING_INCENTIVE = "no job of one GPU is worse off than alone on an N-th of the cluster"
    NO_ENVY = "nobody would rather have what another has"
    PARETO = "nobody could be faster without somebody slower"
    NO_INFLATION = "who buys fast GPUs gains nothing by inflating its speed-up"
    NO_STARVATION = "nobody is passed over for ever in a crowded stream"


class Capability(StrEnum):
    """What a policy can make use of, or is made for, beyond whole gangs of rigid jobs."""

    SIZES = "needs to know how long jobs are"
    TENANTS = "divides GPUs among tenants"
    TRADES = "lets tenants trade fast GPUs for slow ones"
    DEADLINES = "keeps deadlines where they can be kept"
    PRIORITIES = "looks at the priorities that owners state"
    ELASTIC = "starts elastic jobs with fewer GPUs than they ask for"
    PAIRS = "puts two jobs on the same GPUs"
    AUCTIONS = "auctions free GPUs among apps, without regard to GPU types"
    LISTS_TASKS = "plans every task of jobs of known length ahead"
    SINGLE_GPUS = "made for jobs of one GPU; a gang counts as one machine"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: how its text is read, its default as text, and what it means."""

    name: str
    default: str
    meaning: str
    read: Callable[[str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Where a policy stands among the systems of the field, in a few words each, and what of it was verified here."""

    optimises: str
    fairness: str
    heterogeneity: str
    gang: str
    elasticity: str = "none"
    verified: str


UNSTATED = Traits(**dict.fromkeys((each.name for each in fields(Traits)), "not stated"))
"""The traits of a policy from outside whose author states none."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What there is to say of one policy.

    paper     what the policy is from;  url: where that can be read, None where it is no paper
    make      builds the policy from the values of its parameters
    can       its capabilities, except SIZES, which every policy has that does not claim the opposite
    promise   what it promises to those who share, from the values of its parameters
    plain     values of parameters that `+plain` fixes: those of the authors' code, which has no second aim
    live      values of parameters that the live service fixes, because processes cannot do what a simulator can
    origin    where it comes from, if not from the catalogue
    """

    name: str
    family: Family
    summary: str
    paper: str
    claims: tuple[PolicyProperty, ...]
    make: Callable[..., Order | Planner | Allocator | Policy]
    parameters: tuple[Parameter, ...] = ()
    traits: Traits = field(default=UNSTATED, kw_only=True)
    can: frozenset[Capability] = field(default=frozenset(), kw_only=True)
    promise: Callable[..., Promise] = field(default=no_shares, kw_only=True)
    plain: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    live: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    origin: str = field(default="", kw_only=True)
    url: str | None = field(default=None, kw_only=True)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the policy can do or is made for."""
        return self.can if PolicyProperty.NO_DURATIONS in self.claims else self.can | {Capability.SIZES}


def listed(  # noqa: PLR0913 - the fields of a listing
    family: Family,
    name: str,
    summary: str,
    paper: str,
    claims: tuple[PolicyProperty, ...],
    make: Callable[..., Order | Planner | Allocator],
    parameters: tuple[Parameter, ...] = (),
    *,
    optimises: str,
    fairness: str,
    heterogeneity: str,
    gang: str,
    verified: str,
    **more: Any,  # noqa: ANN401 - the fields of `Listing` that have defaults
) -> Listing:
    """A listing that states its traits beside its other fields, so that policies of a family can have some in common."""
    traits = Traits(optimises=optimises, fairness=fairness, heterogeneity=heterogeneity, gang=gang, verified=verified)
    return Listing(name, family, summary, paper, claims, make, parameters, traits=traits, **more)


queue_listing = partial(listed, Family.QUEUE, heterogeneity="on its fastest free type; never moved")
share_listing = partial(
    listed,
    Family.SHARE,
    heterogeneity="chooses types by measured throughput",
    gang="whole, in rounds by how far behind its share",
)


@dataclass(frozen=True, slots=True)
class Combinator:
    """A row of the combinators: a policy in, and values of its parameters; another policy out.

    to     the kind of answer that a policy must have for it
    sets   values of the policy's own parameters that it fixes
    can    capabilities that it adds
    """

    name: str
    summary: str
    apply: Callable[..., Policy]
    parameters: tuple[Parameter, ...] = ()
    to: type[Order] | type[Allocator] | None = None
    sets: Callable[[Listing], Mapping[str, Any]] = lambda _listing: {}
    can: frozenset[Capability] = frozenset()


SMALLEST = 0.001
"""The least positive amount of time or service that a parameter may have; smaller ones make runs that never end."""


def number(text: str) -> float:
    """A finite number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError("expected a finite number that is not negative")
    if 0 < value < SMALLEST:
        raise ValueError(f"expected 0, or at least {SMALLEST}")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = number(text)
    if value == 0:
        raise ValueError("expected a number above 0")
    return value


def whole_number(text: str) -> int:
    """A whole number that is not negative."""
    if not text.isascii() or not text.isdigit():
        raise ValueError("expected a whole number that is not negative")
    return int(text)


def rising(text: str) -> tuple[float, ...]:
    """Rising limits, with `/` between them."""
    values = positives(text)
    if any(later <= earlier for earlier, later in pairwise(values)):
        raise ValueError("expected rising limits, e.g. 3250/7200")
    return values


def choice(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    """One of the members of an enumeration."""

    def read(text: str) -> StrEnum:
        if text not in set(kind):
            raise ValueError(f"expected {' or '.join(kind)}")
        return kind(text)

    return read


def at_least_one(text: str) -> int:
    """A whole number from 1."""
    value = whole_number(text)
    if value < 1:
        raise ValueError("expected 1 or more")
    return value


def fraction(text: str) -> float:
    """A number above 0, at most 1."""
    value = positive(text)
    if value > 1:
        raise ValueError("expected a number above 0, at most 1")
    return value


def portion(text: str) -> float:
    """A number from 0 to 1."""
    value = number(text)
    if value > 1:
        raise ValueError("expected a number from 0 to 1")
    return value


def positives(text: str) -> tuple[float, ...]:
    """Numbers above 0 with `/` between them."""
    return tuple(positive(part) for part in text.split("/"))


def per_tenant(text: str) -> tuple[tuple[str, float], ...]:
    """A number above 0 for each of some tenants: `alice:2/bob:1`."""
    named: dict[str, float] = {}
    for part in text.split("/"):
        name, colon, value = part.rpartition(":")
        if not colon or not name or name in named:
            raise ValueError("expected each tenant once with its number, e.g. alice:2/bob:1")
        named[name] = positive(value)
    return tuple(named.items())


def equal_or_per_tenant(text: str) -> tuple[tuple[str, float], ...]:
    """`equal`: no numbers; or one for each of some tenants."""
    return () if text == "equal" else per_tenant(text)
