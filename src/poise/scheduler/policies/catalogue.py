"""The table of contents: every policy by name, with its paper, its claims and its parameters; and how to ask for one.

`name`, `name:key=value,key=value` (lists with `/`), and combinators with `+`: `tiresias:limits=300/900,promote=8+agnostic`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from poise.scheduler.model.errors import RequestError, UnknownNameError
from poise.scheduler.model.plan import Order, Policy
from poise.scheduler.model.workload import Allocator
from poise.scheduler.policies import (
    combinators,
    partitioned,
)
from poise.scheduler.policies.combinators import on_shares
from poise.scheduler.policies.listing import (
    Combinator,
    Family,
    Listing,
    Parameter,
    PolicyClaim,
    at_least_one,
    text,
)
from poise.scheduler.policies.market_listings import MARKETS
from poise.scheduler.policies.promises import Promise
from poise.scheduler.policies.queue_listings import QUEUES
from poise.scheduler.policies.share_listings import SHARES

__all__ = [
    "COMBINATORS",
    "POLICIES",
    "Family",
    "Listing",
    "Parameter",
    "PolicyClaim",
    "listing_of",
    "policy_named",
    "promise_of",
    "with_combinators",
]

POLICIES: Mapping[str, Listing] = {listing.name: listing for listing in (*QUEUES, *SHARES, *MARKETS)}


def _with_fallback(policy: Policy, to: str = "isolated") -> Policy:
    """Shares by another policy where this one finds none."""
    other = policy_named(to).answer
    if not isinstance(other, Allocator):
        raise RequestError(f"+fallback goes to a policy that answers with shares; {to!r} does not")
    return on_shares(policy, "fallback", lambda allocator: combinators.Fallback(allocator, other))


COMBINATORS: Mapping[str, Combinator] = {
    combinator.name: combinator
    for combinator in (
        Combinator("agnostic", "takes all GPU types for equally fast", combinators.agnostic),
        Combinator("stable", "equal ranks keep the order of the previous decision", combinators.stable, to=Order),
        Combinator("ticks", "queues change at whole seconds", combinators.ticks, to=Order),
        Combinator(
            "packed", "two jobs may share GPUs where they were measured to gain by it", combinators.packed, to=Allocator
        ),
        Combinator(
            "partitioned",
            "the problem in k parts, solved one by one (POP)",
            partitioned.partitioned,
            (Parameter("k", "4", "number of parts", at_least_one),),
            to=Allocator,
        ),
        Combinator(
            "fallback",
            "shares by another policy where this one finds none",
            _with_fallback,
            (Parameter("to", "isolated", "the other policy", text),),
            to=Allocator,
        ),
        Combinator(
            "plain", "no second aim: what the objective does not need goes anywhere", combinators.plain, to=Allocator
        ),
    )
}


def with_combinators(spec: str, more: str) -> str:
    """A specification with further combinators, `+a+b`, as far as they apply to its policy."""
    answer = policy_named(spec).answer
    names = filter(None, more.split("+"))
    return spec + "".join(f"+{name}" for name in names if isinstance(answer, COMBINATORS[name].to))


def listing_of(spec: str) -> Listing:
    """What the catalogue says of the policy that a specification asks for, whatever combinators it has."""
    return _listed(spec.split("+")[0])[0]


def promise_of(spec: str) -> Promise:
    """What the policy that a specification asks for promises to those who share. No combinator changes that."""
    base = spec.split("+")[0]
    listing, arguments = _listed(base)
    return listing.promise(**_values(listing.name, listing.parameters, arguments, spec))


def _listed(base: str) -> tuple[Listing, str]:
    name, arguments = _parted(base)
    listing = POLICIES.get(name)
    if listing is None:
        raise UnknownNameError("policy", name, POLICIES)
    return listing, arguments


def policy_named(spec: str) -> Policy:
    """The policy that a specification asks for."""
    base, *combinators = spec.split("+")
    listing, arguments = _listed(base)
    policy = Policy(spec, listing.make(**_values(listing.name, listing.parameters, arguments, spec)))
    for each in combinators:
        name, arguments = _parted(each)
        combinator = COMBINATORS.get(name)
        if combinator is None:
            raise UnknownNameError("combinator", name, COMBINATORS)
        policy = combinator.apply(policy, **_values(f"+{name}", combinator.parameters, arguments, spec))
    return replace(policy, name=spec)


def _parted(part: str) -> tuple[str, str]:
    name, _, arguments = part.partition(":")
    return name, arguments


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
