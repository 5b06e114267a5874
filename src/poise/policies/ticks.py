"""`+ticks`: queues change at whole seconds, as in the Tiresias authors' simulator. The preset `tiresias` adds it.

That simulator counts in whole seconds (ALGORITHMS §7.3): a job that reaches a limit between two of them is demoted at the
later one. It also adds up all waiting since a job first ran after its last promotion, where Poise counts from the last run.
Orders that have no such moments stay as they are.
"""

from dataclasses import replace

from poise.model.errors import RequestError
from poise.model.plan import Order, Policy


def ticks(policy: Policy) -> Policy:
    """The same order by a clock of whole seconds."""
    if not isinstance(policy.answer, Order):
        raise RequestError(f"+ticks applies to orders of jobs; {policy.name!r} plans as a whole")
    order = policy.answer
    return replace(policy, answer=replace(order, rank=order.ticking or order.rank))
