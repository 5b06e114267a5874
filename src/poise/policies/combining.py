"""How combinators for share policies are applied: an allocator in, another one out."""

from collections.abc import Callable
from dataclasses import replace

from poise.model.errors import RequestError
from poise.model.plan import Policy
from poise.model.workload import Allocator


def on_shares(policy: Policy, combinator: str, make: Callable[[Allocator], Allocator]) -> Policy:
    """The same policy with another allocator; refused for a policy that does not answer with shares."""
    if not isinstance(policy.answer, Allocator):
        raise RequestError(f"+{combinator} applies to policies that answer with shares; {policy.name!r} does not")
    return replace(policy, answer=make(policy.answer))
