"""The table of contents: every policy and combinator by name, and how to ask for one.

A specification is `name`, or `name:key=value,key=value` (lists with `/`), then combinators with `+`:
`tiresias:limits=300/900,promote=8+agnostic`. Each policy's listing stands beside its code; here they are only collected,
in the order in which tables show them.

Policies from outside the package are known once they are registered; `poise.engine.outside` finds them. The name of one may
have a colon in it: `package.module:attribute`, and parameters follow after another one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from poise.scheduler.model.errors import RequestError, UnknownNameError
from poise.scheduler.model.plan import Order, Policy
from poise.scheduler.model.workload import Allocator
from poise.scheduler.policies import (
    allox,
    combinators,
    gavel,
    gavel_baselines,
    optimus,
    philly,
    queues,
    strategy_proof,
    stride,
    tiresias,
)
from poise.scheduler.policies.gandiva import planner as gandiva
from poise.scheduler.policies.gandiva_fair import planner as gandiva_fair
from poise.scheduler.policies.hare import offline as hare
from poise.scheduler.policies.hare import online as hlas
from poise.scheduler.policies.listing import Capability, Combinator, Family, Listing, Parameter, PolicyProperty, at_least_one
from poise.scheduler.policies.promises import Promise
from poise.scheduler.policies.themis import planner as themis

__all__ = [
    "COMBINATORS",
    "POLICIES",
    "Capability",
    "Family",
    "Listing",
    "Parameter",
    "PolicyProperty",
    "capabilities_of",
    "is_known",
    "known",
    "listing_of",
    "policy_named",
    "promise_of",
    "register",
    "with_combinators",
]

_IN_ORDER: tuple[tuple[Listing, ...], ...] = (
    (queues.FIFO, queues.FIFO_SKIP, queues.SMALLEST_FIRST, queues.SRTF, queues.SRSF, queues.LRTF, queues.LAS),
    (tiresias.TIRESIAS, tiresias.TIRESIAS_GITTINS, queues.FFDL, stride.LISTING),
    (gavel.MAX_MIN, gavel.FINISH_TIME, gavel.MAKESPAN, gavel.MAX_THROUGHPUT, gavel.MIN_COST, gavel.HIERARCHICAL),
    (gavel_baselines.ISOLATED, gavel_baselines.PROPORTIONAL, strategy_proof.LISTING),
    (gavel_baselines.FIFO_FASTEST, gavel_baselines.SJF, allox.LISTING),
    (gandiva.LISTING, gandiva_fair.LISTING, gavel_baselines.GANDIVA_EMULATED),
    (optimus.LISTING, philly.LISTING, themis.LISTING, hare.LISTING, hlas.LISTING),
)
POLICIES: Mapping[str, Listing] = {listing.name: listing for group in _IN_ORDER for listing in group}
_OUTSIDE: dict[str, Listing] = {}
"""Policies from outside the package that were registered in this process."""


def register(listing: Listing) -> None:
    """Know a policy from outside the package by its listing's name from now on. Those of the catalogue keep their names."""
    if listing.name in POLICIES:
        raise RequestError(
            f"policy {listing.name!r} of {listing.origin}: the catalogue has a policy of this name; choose another"
        )
    _OUTSIDE[listing.name] = listing


def known() -> Mapping[str, Listing]:
    """All policies that specifications can ask for now: the catalogue, then what was registered."""
    return {**POLICIES, **_OUTSIDE}


def is_known(spec: str) -> bool:
    """Say whether the policy of a specification is in the catalogue or was registered."""
    name, _ = _name_and_arguments(spec)
    return name in POLICIES or name in _OUTSIDE


def _fallback(policy: Policy, to: str = "isolated") -> Policy:
    """The policy with another one behind it; remarks call both by their names in the catalogue."""
    other = policy_named(to).answer
    if not isinstance(other, Allocator):
        raise RequestError(f"+fallback goes to a policy that answers with shares; {to!r} does not")
    names = (listing_of(policy.name).name, listing_of(to).name)
    return combinators.around(policy, lambda allocator: combinators.Fallback(allocator, other, *names))


_COMBINATORS = (
    Combinator("agnostic", "takes all GPU types for equally fast", combinators.agnostic),
    Combinator("stable", "equal ranks keep the order of the previous decision", combinators.stable, to=Order),
    Combinator("ticks", "queues change at whole seconds", combinators.ticks, to=Order),
    Combinator(
        "packed",
        "two jobs may share GPUs where they were measured to gain by it",
        lambda policy: combinators.around(policy, combinators.Packed),
        to=Allocator,
        can=frozenset({Capability.PAIRS}),
    ),
    Combinator(
        "partitioned",
        "the problem in k parts, solved one by one (POP)",
        lambda policy, k=4: combinators.around(policy, lambda each: combinators.Partitioned(each, k)),
        (Parameter("k", "4", "number of parts", at_least_one),),
        to=Allocator,
    ),
    Combinator(
        "fallback",
        "shares by another policy where this one finds none",
        _fallback,
        (Parameter("to", "isolated", "the other policy", str),),
        to=Allocator,
    ),
    Combinator(
        "plain",
        "no second aim: what the objective does not need goes anywhere",
        lambda policy: policy,
        to=Allocator,
        sets=lambda listing: listing.plain,
    ),
)
COMBINATORS: Mapping[str, Combinator] = {combinator.name: combinator for combinator in _COMBINATORS}
_APPLIES_TO: Mapping[type | None, str] = {
    Order: "orders of jobs; {!r} plans as a whole",
    Allocator: "policies that answer with shares; {!r} does not",
}


def policy_named(spec: str, *, live: bool = False) -> Policy:
    """Build the policy that a specification asks for; `live`: as the live service uses it (`Listing.live`)."""
    listing, values = _base(spec)
    chosen = list(_combinators(spec))
    for combinator, _ in chosen:
        values |= combinator.sets(listing)
    if live:
        values |= listing.live
    made = listing.make(**values)
    policy = replace(made, name=spec) if isinstance(made, Policy) else Policy(spec, made)
    for combinator, arguments in chosen:
        if combinator.to is not None and not isinstance(policy.answer, combinator.to):
            raise RequestError(f"+{combinator.name} applies to {_APPLIES_TO[combinator.to].format(spec)}")
        policy = combinator.apply(policy, **arguments)
    return policy


def with_combinators(spec: str, more: str) -> str:
    """A specification with further combinators, `+a+b`, as far as they apply to its policy."""
    answer = policy_named(spec).answer
    kinds = {name: COMBINATORS[name].to for name in more.split("+") if name}
    return spec + "".join(f"+{name}" for name, kind in kinds.items() if kind is None or isinstance(answer, kind))


def listing_of(spec: str) -> Listing:
    """The listing of the policy that a specification asks for, whatever combinators it has."""
    return _base(spec)[0]


def capabilities_of(spec: str) -> frozenset[Capability]:
    """What the policy can do, with what its combinators add."""
    return listing_of(spec).capabilities.union(*(combinator.can for combinator, _ in _combinators(spec)))


def promise_of(spec: str) -> Promise:
    """What the policy promises to those who share. No combinator changes that."""
    listing, values = _base(spec)
    return listing.promise(**values)


def _base(spec: str) -> tuple[Listing, dict[str, Any]]:
    """The listing of a specification's policy, and the values that it gives to parameters."""
    name, arguments = _name_and_arguments(spec)
    listing = POLICIES.get(name) or _OUTSIDE.get(name)
    if listing is None:
        raise UnknownNameError("policy", name, known())
    return listing, _values(name, listing.parameters, arguments, spec)


def _name_and_arguments(spec: str) -> tuple[str, str]:
    """The name of a specification's policy, and what it says of parameters."""
    name, _, arguments = spec.split("+")[0].partition(":")
    attribute, _, rest = arguments.partition(":")
    if name not in POLICIES and f"{name}:{attribute}" in _OUTSIDE:
        return f"{name}:{attribute}", rest
    return name, arguments


def _combinators(spec: str) -> Iterator[tuple[Combinator, dict[str, Any]]]:
    """The combinators of a specification in order, each with the values that it gives to parameters."""
    for part in spec.split("+")[1:]:
        name, _, arguments = part.partition(":")
        combinator = COMBINATORS.get(name)
        if combinator is None:
            raise UnknownNameError("combinator", name, COMBINATORS)
        yield combinator, _values(f"+{name}", combinator.parameters, arguments, spec)


def _values(name: str, parameters: tuple[Parameter, ...], arguments: str, spec: str) -> dict[str, Any]:
    """The values that a specification gives; a single value without a name is that of the only parameter."""
    known = {parameter.name: parameter for parameter in parameters}
    values: dict[str, Any] = {}
    for argument in filter(None, arguments.split(",")):
        key, equals, value = argument.partition("=")
        if not equals and len(known) == 1 and key not in known:
            key, equals, value = next(iter(known)), "=", argument
        if key not in known:
            raise UnknownNameError(f"parameter of {name}", key, known or {"(it takes none)"})
        if not equals or key in values:
            raise RequestError(f"policy {spec!r}: write each parameter once, as {key}=VALUE")
        try:
            values[key] = known[key].read(value)
        except ValueError as error:
            raise RequestError(f"policy {spec!r}: {key}={value!r}: {error}") from None
    return values
