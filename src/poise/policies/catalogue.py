"""The table of contents: every policy by name, with its paper, its claims and its parameters; and how to ask for one.

`name`, `name:key=value,key=value` (lists with `/`), and combinators with `+`: `tiresias:limits=300/900,promote=8+agnostic`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from poise.model.errors import RequestError, UnknownNameError
from poise.model.plan import Order, Planner, Policy
from poise.policies import agnostic, fifo, gittins, las, remaining, smallest_first, stable, stride, tiresias


class Claim(StrEnum):
    """What a policy promises; the tests hold it to that."""

    NO_PREEMPTION = "never preempts"
    WORK_CONSERVING = "no GPU idles while a waiting gang would fit"
    NO_DURATIONS = "needs no knowledge of durations"
    IN_ORDER = "starts jobs in the order of submission"


class Family(StrEnum):
    """What a policy answers with."""

    QUEUE = "queue"
    STRIDE = "stride"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: how its text is read, its default as text, and what it means."""

    name: str
    default: str
    meaning: str
    read: Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Listing:
    """A row of the catalogue."""

    name: str
    family: Family
    summary: str
    paper: str
    claims: tuple[Claim, ...]
    make: Callable[..., Order | Planner]
    parameters: tuple[Parameter, ...] = ()


@dataclass(frozen=True, slots=True)
class Combinator:
    """A row of the combinators: a policy in, another one out."""

    name: str
    summary: str
    apply: Callable[[Policy], Policy]


SMALLEST = 0.001
"""Of a parameter that is an amount of time or service: what is smaller makes runs that never end."""


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError("expected a finite number that is not negative")
    if 0 < value < SMALLEST:
        raise ValueError(f"expected 0, or at least {SMALLEST}")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise ValueError("expected a number above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("expected a whole number that is not negative")
    return value


def _limits(text: str) -> tuple[float, ...]:
    values = tuple(_positive(part) for part in text.split("/"))
    if any(later <= earlier for earlier, later in pairwise(values)):
        raise ValueError("expected rising limits, e.g. 3250/7200")
    return values


def _choice(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    def read(text: str) -> StrEnum:
        if text not in set(kind):
            raise ValueError(f"expected {' or '.join(kind)}")
        return kind(text)

    return read


_LIMITS = Parameter("limits", "3250/7200", "service at which a job moves to the next queue, in GPU-seconds", _limits)
_PROMOTE = Parameter(
    "promote",
    "0",
    "waiting of this many times its running time brings a job back to the first queue; 0: never",
    _number,
)
_PACKLIMIT = Parameter(
    "packlimit", "0.5", "models of greater skew (largest tensor ÷ size) insist on the fewest nodes", _number
)
_TIRESIAS = "Gu et al., Tiresias, NSDI'19"

POLICIES: Mapping[str, Listing] = {
    listing.name: listing
    for listing in (
        Listing(
            "fifo",
            Family.QUEUE,
            "arrival order; the head blocks",
            "the baseline of the field",
            (Claim.NO_PREEMPTION, Claim.NO_DURATIONS, Claim.IN_ORDER),
            fifo.fifo,
        ),
        Listing(
            "fifo-skip",
            Family.QUEUE,
            "arrival order; those behind may pass a gang that does not fit",
            "first job fit of the Tiresias simulator, NSDI'19",
            (Claim.NO_PREEMPTION, Claim.NO_DURATIONS, Claim.WORK_CONSERVING),
            fifo.fifo_skip,
        ),
        Listing(
            "smallest-first",
            Family.QUEUE,
            "fewest GPUs first, preemptive",
            "sjf of the Tiresias simulator, NSDI'19",
            (Claim.NO_DURATIONS, Claim.WORK_CONSERVING),
            smallest_first.smallest_first,
        ),
        Listing(
            "srtf",
            Family.QUEUE,
            "least remaining time first, preemptive",
            "Schrage 1968; SRTF in Tiresias, NSDI'19",
            (Claim.WORK_CONSERVING,),
            remaining.srtf,
        ),
        Listing(
            "srsf",
            Family.QUEUE,
            "least remaining GPU-time first, preemptive",
            "SRSF in Tiresias, NSDI'19 §2.2",
            (Claim.WORK_CONSERVING,),
            remaining.srsf,
        ),
        Listing(
            "lrtf",
            Family.QUEUE,
            "most remaining time first, preemptive",
            "the opposite of SRTF, as a bound",
            (Claim.WORK_CONSERVING,),
            remaining.lrtf,
        ),
        Listing(
            "las",
            Family.QUEUE,
            "least attained seconds first, preemptive at rounds",
            "Nuyens and Wierman 2008; Tiresias, NSDI'19 §3.2",
            (Claim.NO_DURATIONS, Claim.WORK_CONSERVING),
            las.las,
        ),
        Listing(
            "tiresias",
            Family.QUEUE,
            "queues by attained GPU-time (discretised 2D-LAS)",
            _TIRESIAS,
            (Claim.NO_DURATIONS,),
            tiresias.tiresias,
            (
                _LIMITS,
                _PROMOTE,
                _PACKLIMIT,
                Parameter("service", "gpu-seconds", "what is counted: gpu-seconds or seconds", _choice(tiresias.Service)),
            ),
        ),
        Listing(
            "tiresias-gittins",
            Family.QUEUE,
            "queues by attained GPU-time, highest Gittins index first inside each",
            _TIRESIAS,
            (Claim.NO_DURATIONS,),
            gittins.gittins,
            (
                _LIMITS,
                _PROMOTE,
                _PACKLIMIT,
                Parameter("delta", "limit", "how far the index looks: limit of the queue, or best", _choice(gittins.Delta)),
                Parameter("samples", "10", "finished jobs needed before the index is used", _count),
            ),
        ),
        Listing(
            "stride",
            Family.STRIDE,
            "gang-aware stride: time slices in proportion to weight",
            "Chaudhary et al., Gandiva_fair, EuroSys'20 §3.2",
            (Claim.NO_DURATIONS,),
            stride.Stride,
            (
                Parameter("quantum", "60", "length of a time slice in seconds", _positive),
                Parameter("clamp", "lag", "lag bounds how far a job may fall behind; off does not", _choice(stride.Clamp)),
            ),
        ),
    )
}

COMBINATORS: Mapping[str, Combinator] = {
    combinator.name: combinator
    for combinator in (
        Combinator("agnostic", "takes all GPU types for equally fast", agnostic.agnostic),
        Combinator("stable", "equal ranks keep the order of the previous decision", stable.stable),
    )
}


def policy_named(spec: str) -> Policy:
    """The policy that a specification asks for."""
    base, *combinators = spec.split("+")
    policy = Policy(spec, _answer(base, spec))
    for name in combinators:
        if name not in COMBINATORS:
            raise UnknownNameError("combinator", name, COMBINATORS)
        policy = COMBINATORS[name].apply(policy)
    return replace(policy, name=spec)


def _answer(base: str, spec: str) -> Order | Planner:
    name, _, arguments = base.partition(":")
    listing = POLICIES.get(name)
    if listing is None:
        raise UnknownNameError("policy", name, POLICIES)
    known = {parameter.name: parameter for parameter in listing.parameters}
    values: dict[str, Any] = {}
    for argument in filter(None, arguments.split(",")):
        key, equals, text = argument.partition("=")
        if key not in known:
            raise UnknownNameError(f"parameter of {name}", key, known or {"(it takes none)"})
        if not equals or key in values:
            raise RequestError(f"policy {spec!r}: write each parameter once, as {key}=VALUE")
        try:
            values[key] = known[key].read(text)
        except ValueError as error:
            raise RequestError(f"policy {spec!r}: {key}={text!r}: {error}") from None
    return listing.make(**values)
