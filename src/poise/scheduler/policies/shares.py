"""What all share policies have in common: the market that a workload is, the normalisers, and the answer.

    T_mj     believed steps per second of m's whole gang on GPU type j, packed, alone;  N_j GPUs of type j, N = Σ N_j
    g_m      gang;  n active jobs;  θ_m = Σ_j T_mj x_mj
    prop_m   Σ_j T_mj N_j / N                                                  proportional
    iso_mj   N_j / (n g_m), each row divided by max(1, its sum);  iso_m = Σ_j T_mj iso_mj     isolated
    fast_m   max_j T_mj                                                        fastest

Normalisers come from packed columns alone, so that what a split gang costs changes θ but not what is fair
(docs/algorithms/gavel.md).
"""

from collections.abc import Sequence
from enum import StrEnum
from math import nan
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Floats, times
from poise.scheduler.model.workload import Allocation, Workload
from poise.scheduler.policies.listing import Parameter, choice
from poise.scheduler.solve.program import GpuMarket, PairThroughputs, Solution


class Norm(StrEnum):
    """What a throughput is measured against."""

    PROPORTIONAL = "proportional"
    ISOLATED = "isolated"
    FASTEST = "fastest"


class SecondAim(StrEnum):
    """What becomes of what the objective does not need: the most throughput is made of it, or nothing in particular."""

    THROUGHPUT = "throughput"
    NOTHING = "nothing"


class Count(StrEnum):
    """How throughputs of different jobs are added up."""

    NORMALISED = "normalised"
    RAW = "raw"


GAVEL = "Narayanan et al., Gavel, OSDI'20"

SECOND_AIM = Parameter("then", "throughput", "what becomes of the rest: throughput, or nothing", choice(SecondAim))


class Memoryless:
    """A share policy that remembers nothing from one allocation to the next."""

    def start(self) -> None:
        """There is nothing to remember."""


def usable(workload: Workload) -> Floats:
    """(n, columns): believed speed where as many GPUs are alive as the gang needs, 0 elsewhere.

    Otherwise half a gang would count as half a job, which no round can carry out.
    """
    fits = workload.gang[:, None] <= workload.gpus[workload.column_type]
    return np.where(fits, workload.speed, 0.0)


def market_of(workload: Workload) -> GpuMarket:
    """The workload as what there is to choose from: rows are jobs, resources are GPU types."""
    beside = None if workload.beside is None else PairThroughputs(workload.kind, workload.beside)
    return GpuMarket(usable(workload), workload.gang, workload.gpus, workload.column_type, beside)


def packed(workload: Workload) -> Floats:
    """T: (n, types). A job that can run on a type only with its gang spread has that speed there."""
    speed = usable(workload)
    packed = speed[:, : workload.types].copy()
    for column in range(workload.types, speed.shape[1]):
        of = packed[:, workload.column_type[column]]
        of[of == 0] = speed[of == 0, column]
    return packed


def proportional(workload: Workload) -> Floats:
    """prop: throughput on a GPU type drawn by how many there are."""
    return times(packed(workload), workload.gpus / max(float(workload.gpus.sum()), 1.0))


def isolated_shares(workload: Workload) -> Floats:
    """iso_mj: (n, types), an n-th of every GPU type for each job; nothing where it would be of no use. Feasible."""
    share = workload.gpus / (max(workload.jobs, 1) * workload.gang[:, None])
    share /= np.maximum(share.sum(axis=1, keepdims=True), 1.0)
    return np.where(packed(workload) > 0, share, 0.0)


def isolated_throughput(workload: Workload) -> Floats:
    """iso: throughput of an n-th of the cluster."""
    throughput: Floats = (packed(workload) * isolated_shares(workload)).sum(axis=1)
    return throughput


def fastest(workload: Workload) -> Floats:
    """fast: throughput of the whole time on the fastest type."""
    best: Floats = packed(workload).max(axis=1, initial=0.0)
    return best


def normaliser(workload: Workload, norm: Norm) -> Floats:
    """The normaliser of this name; 0 for a job that can run nowhere."""
    return {Norm.PROPORTIONAL: proportional, Norm.ISOLATED: isolated_throughput, Norm.FASTEST: fastest}[norm](workload)


def inverse(amounts: Floats) -> Floats:
    """1 ÷ each; 0 for 0, so that a job that can run nowhere is worth nothing and asks for nothing."""
    return np.divide(1.0, amounts, out=np.zeros_like(amounts), where=amounts > 0)


def worth(workload: Workload, count: Count) -> Floats:
    """c: what a step per second of each job counts. Normalised, w g / prop; raw, 1."""
    if count is Count.RAW:
        return np.ones(workload.jobs)
    return workload.weight * workload.gang * inverse(proportional(workload))


def in_columns(workload: Workload, by_type: Floats) -> Floats:
    """Shares of types as shares of columns: packed where the job can, else spread."""
    speed = usable(workload)
    share = np.zeros_like(speed)
    left = by_type.copy()
    for column, of in enumerate(workload.column_type.tolist()):
        here = speed[:, column] > 0
        share[here, column] = left[here, of]
        left[here, of] = 0.0
    return share


def allocation_of(workload: Workload, solution: Solution, objective: float, remarks: tuple[str, ...] = ()) -> Allocation:
    """What the solver answered, for the mechanism: aware of GPU types, and leftovers are filled."""
    share = solution.x if workload.jobs else np.zeros(workload.speed.shape)
    return Allocation(share, solution.shared, objective, remarks=remarks)


def nothing_for(workload: Workload) -> Allocation:
    """The answer where no job can use anything."""
    return Allocation(np.zeros(workload.speed.shape), objective=nan)


def rows_of(workload: Workload, chosen: NDArray[Any]) -> str:
    """Jobs by their row, for a remark; the first few of many."""
    rows = workload.rows[chosen].tolist()
    named = ", ".join(map(str, rows[:8]))
    return f"row{'s' if len(rows) > 1 else ''} {named}{', …' if len(rows) > 8 else ''}"


@runtime_checkable
class Joinable(Protocol):
    """Memory of allocators that each looked after some of the jobs."""

    def joined(self, others: Sequence[Self]) -> Self:
        """One memory of them all."""


def joined(memories: Sequence[Any]) -> Any:  # noqa: ANN401 - each allocator has its own memory
    """The memories of parts as one; of those that cannot be put together, which are but hints, the first."""
    first = memories[0]
    return first.joined(memories[1:]) if isinstance(first, Joinable) and len(memories) > 1 else first


def second_aim(workload: Workload, then: SecondAim) -> Floats | None:
    """Worth of a job's throughput to the second aim: every job counts by how near it is to its best speed."""
    return inverse(fastest(workload)) if then is SecondAim.THROUGHPUT else None
