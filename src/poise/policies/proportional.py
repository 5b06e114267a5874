"""Everybody spreads its time over GPU types by how many there are (`proportional`; Gavel's baseline, ALGORITHMS §2.1).

    x_mj = s N_j / N,  s = min(1, N / Σ_m g_m)

All jobs get the same wall time, whatever their gang: s is the part of it that there are GPUs for. No solver: never fails.
"""

from dataclasses import dataclass

import numpy as np

from poise.model.workload import Allocation, Sight, Workload
from poise.policies.shares import in_columns, packed


@dataclass(frozen=True)
class Proportional:
    """The same mix of GPU types for every job."""

    def start(self) -> None:
        """It remembers nothing."""

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """The shares."""
        wanted = max(float(workload.gang.sum()), float(workload.gpus.sum()), 1.0)
        share = np.where(packed(workload) > 0, workload.gpus / wanted, 0.0)
        return Allocation(in_columns(workload, share), sight=Sight.BLIND), memory
