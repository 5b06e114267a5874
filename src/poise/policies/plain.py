"""`+plain`: no second aim. What the best answer does not need goes where the solver's centre puts it, as in Gavel's code.

A linear program fixes only the jobs that matter to its objective; Poise's policies put the rest to use. The preset `gavel`
adds this combinator, so that its numbers can be compared with the authors'.
"""

from dataclasses import replace
from typing import Any

from poise.model.plan import Policy
from poise.policies.combining import on_shares
from poise.policies.finish_time import FinishTime
from poise.policies.makespan import Makespan
from poise.policies.max_min import MaxMin, Then
from poise.policies.max_throughput import MaxThroughput
from poise.policies.shares import Count, Second


def plain(policy: Policy) -> Policy:
    """The same shares without a second aim; raw steps for total throughput, as the authors count them."""
    return on_shares(policy, "plain", _without_second_aim)


def _without_second_aim(allocator: Any) -> Any:  # noqa: ANN401 - any allocator; those without a second aim stay as they are
    match allocator:
        case MaxMin():
            return replace(allocator, then=Then.NOTHING)
        case FinishTime() | Makespan():
            return replace(allocator, then=Second.NOTHING)
        case MaxThroughput():
            return replace(allocator, count=Count.RAW)
        case _ if hasattr(allocator, "allocator"):
            return replace(allocator, allocator=_without_second_aim(allocator.allocator))
        case _:
            return allocator
