"""`+fallback`: where a policy's program is not solved, shares by another policy, and a remark that says so."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from poise.model.errors import SolveError
from poise.model.workload import Allocation, Allocator, Workload
from poise.policies.shares import joined


@dataclass(frozen=True)
class Both:
    """The memories of a policy and of the one behind it."""

    first: Any
    second: Any

    def joined(self, others: Sequence["Both"]) -> "Both":
        """One of several."""
        all_of = [self, *others]
        return Both(joined([one.first for one in all_of]), joined([one.second for one in all_of]))


@dataclass(frozen=True)
class Fallback:
    """An allocator, and another one for when it gives up. The first keeps its memory of before."""

    allocator: Allocator
    other: Allocator

    def start(self) -> Both:
        """Both as they start."""
        return Both(self.allocator.start(), self.other.start())

    def allocate(self, workload: Workload, memory: Both) -> tuple[Allocation, Both]:
        """The first one's shares if it has any, else the other's."""
        try:
            allocation, first = self.allocator.allocate(workload, memory.first)
        except SolveError as error:
            allocation, second = self.other.allocate(workload, memory.second)
            remark = f"{_name(self.allocator)} gave up: {error}; shares by {_name(self.other)} instead"
            return replace(allocation, remarks=(*allocation.remarks, remark)), replace(memory, second=second)
        return allocation, replace(memory, first=first)


def _name(allocator: Any) -> str:  # noqa: ANN401 - combinators have an allocator of their own
    """Of the policy without its combinators, as in the catalogue: MaxMin is max-min."""
    while hasattr(allocator, "allocator"):
        allocator = allocator.allocator
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "-", type(allocator).__name__).lower()
