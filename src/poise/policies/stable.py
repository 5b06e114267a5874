"""`+stable`: equal ranks keep the order that they had at the previous decision, as in the Tiresias authors' simulator.

That simulator keeps one list and sorts it stably at each event, so that ties depend on history (ALGORITHMS §7.3); without
this combinator they go by submission, then by place in the trace. The preset `tiresias` adds it.
"""

from dataclasses import replace

from poise.model.errors import RequestError
from poise.model.plan import Order, Policy, Tied


def stable(policy: Policy) -> Policy:
    """The same order, with ties by the previous decision."""
    if not isinstance(policy.answer, Order):
        raise RequestError(f"+stable applies to orders of jobs; {policy.name!r} plans as a whole")
    return replace(policy, answer=replace(policy.answer, ties=Tied.BY_PREVIOUS_DECISION))
