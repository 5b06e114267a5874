"""Everybody has an n-th of the cluster (`isolated`; Gavel's baseline, ALGORITHMS §2.1).

    x_mj = N_j / (n g_m),  each row divided by max(1, its sum)

Shares do not depend on how fast a type is, only on whether the job can run there at all. No solver: never fails.
"""

from dataclasses import dataclass

from poise.model.workload import Allocation, Sight, Workload
from poise.policies.shares import in_columns, isolated_shares


@dataclass(frozen=True)
class Isolated:
    """An equal part of every GPU type for every job."""

    def start(self) -> None:
        """It remembers nothing."""

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """The shares."""
        return Allocation(in_columns(workload, isolated_shares(workload)), sight=Sight.BLIND), memory
