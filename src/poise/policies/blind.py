"""`+agnostic` for share policies: all GPU types are taken for equally fast (Gavel's heterogeneity-agnostic world).

    T_mj := T_m0  on every type j on which m can run, 0 being the first type of the cluster (packed, and likewise spread);
            its highest, if it does not run there

Throughputs of pairs keep their relation to those alone (ALGORITHMS §2.1; a constant factor in a job's row changes nothing in
policies that normalise, so that this is also the authors' T := 1).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from poise.model.arrays import Floats
from poise.model.workload import Allocation, Allocator, Sight, Workload
from poise.policies.shares import inverse


@dataclass(frozen=True)
class Blind:
    """An allocator that cannot tell GPU types apart."""

    allocator: Allocator

    def start(self) -> Any:  # noqa: ANN401 - that of the allocator
        """As the allocator starts."""
        return self.allocator.start()

    def allocate(self, workload: Workload, memory: Any) -> tuple[Allocation, Any]:  # noqa: ANN401
        """What the allocator would do if all types were as fast as the first."""
        allocation, memory = self.allocator.allocate(levelled(workload), memory)
        return replace(allocation, sight=Sight.BLIND), memory


def levelled(workload: Workload) -> Workload:
    """The workload with one speed for all packed columns of a job, and one for all spread ones."""
    speed = _levelled(workload.speed, workload.types)
    if workload.beside is None:
        return replace(workload, speed=speed)
    factor = np.ones((workload.beside.shape[0], speed.shape[1]))
    factor[workload.kind] = speed * inverse(workload.speed)
    return replace(workload, speed=speed, beside=workload.beside * factor[:, None, :])


def _levelled(speed: Floats, types: int) -> Floats:
    parts = (speed[:, :types], speed[:, types:])
    return np.hstack([np.where(part > 0, _reference(part), 0.0) for part in parts if part.shape[1]])


def _reference(speed: Floats) -> Floats:
    """The speed on the first type of the cluster; of a job that does not run there, its highest."""
    first = speed[:, :1]
    return np.where(first > 0, first, speed.max(axis=1, initial=0.0, keepdims=True))
