"""`+packed`: two jobs may share GPUs where they were measured to gain by it (space sharing; Gavel, OSDI'20 §3.1).

The policy's problem has a row for every pair of jobs of equal gang beside the rows of single jobs (ALGORITHMS §2.4). What is
known of pairs comes with the estimates; without this combinator it is not looked at.
"""

from dataclasses import dataclass, replace
from typing import Any

from poise.model.plan import Policy
from poise.model.workload import Allocation, Allocator, Workload
from poise.policies.combining import on_shares


def packed(policy: Policy) -> Policy:
    """The same policy, with pairs."""
    return on_shares(policy, "packed", Packed)


def shares_gpus(policy: Policy) -> bool:
    """The policy puts two jobs on the same GPUs: it says so itself, or `+packed` is somewhere among its combinators."""
    if getattr(policy.answer, "shares_gpus", False):
        return True
    allocator: object = policy.answer
    while allocator is not None and not isinstance(allocator, Packed):
        allocator = getattr(allocator, "allocator", None)
    return allocator is not None


@dataclass(frozen=True)
class Packed:
    """An allocator that may put two jobs on the same GPUs."""

    allocator: Allocator

    def start(self) -> Any:  # noqa: ANN401 - that of the allocator
        """As the allocator starts."""
        return self.allocator.start()

    def allocate(self, workload: Workload, memory: Any) -> tuple[Allocation, Any]:  # noqa: ANN401
        """Shares of jobs and of pairs."""
        return self.allocator.allocate(replace(workload, beside=workload.known_beside), memory)
