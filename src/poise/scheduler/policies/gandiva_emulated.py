"""Gandiva as Gavel's evaluation emulates it (`gandiva-emulated`; Gavel, OSDI'20 §7, and its code): pairs by chance.

    Σ g ≤ N      every job alone, x_mj = N_j / (n g_m): an n-th of the cluster, no pairs
    else         jobs of equal gang are paired at random; a pair stays until one of its jobs ends.
                 K combinations (pairs, and jobs that are left) have equal time, x_kj = N_j / (K g_k)

each row divided by max(1, its sum). A pair shares a GPU type only where the two get more done there than in turns, i.e.
where Σ throughput beside the other ÷ throughput alone > 1; elsewhere they have half of the pair's time each, and two that
gain nowhere are no pair. (Gavel's code adds throughputs up over types before it asks.) The same pairs for the same seed.
O(J log J).
"""

from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Floats, Ints
from poise.scheduler.model.workload import Allocation, Awareness, Pairs, Workload
from poise.scheduler.policies.listing import Capability, Parameter, PolicyProperty, share_listing, whole_number
from poise.scheduler.policies.promises import among_jobs_alike
from poise.scheduler.policies.shares import in_columns, isolated_shares, packed
from poise.scheduler.solve import pseudo_random

Partners = MappingProxyType[int, int]
"""Rows of jobs that are pairs, both ways."""


@dataclass(frozen=True, slots=True)
class GandivaEmulated:
    """Equal time for all combinations; `seed` of the pairs that are drawn."""

    seed: int = 0

    def start(self) -> Partners:
        """No pairs yet."""
        return MappingProxyType({})

    def allocate(self, workload: Workload, memory: Partners) -> tuple[Allocation, Partners]:
        """Shares of jobs and of pairs."""
        beside = workload.known_beside
        if beside is None or workload.gang.sum() <= workload.gpus.sum():
            return Allocation(in_columns(workload, isolated_shares(workload)), awareness=Awareness.BLIND), self.start()
        pairs, gains = self._paired(workload, beside, memory)
        rows = workload.rows
        partners = {int(rows[one]): int(rows[other]) for each in pairs for one, other in (each, each[::-1])}
        return _shared(workload, pairs, gains), MappingProxyType(partners)

    def _paired(self, workload: Workload, beside: Floats, memory: Partners) -> tuple[list[tuple[int, int]], list[Bools]]:
        """Pairs of before that are still there, and new ones; and on which types they gain."""
        place = {row: index for index, row in enumerate(workload.rows.tolist())}
        old = [
            (place[row], place[other]) for row, other in memory.items() if row < other and row in place and other in place
        ]
        taken = {index for pair in old for index in pair}
        left = [index for index in place.values() if index not in taken]
        left.sort(key=lambda index: (workload.gang[index], _drawn(self.seed, int(workload.rows[index]))))
        pairs, gains = [], []
        for one, other in (*sorted(old), *pairwise(left)):
            is_new = one not in taken or other not in taken
            if is_new and (one in taken or other in taken or workload.gang[one] != workload.gang[other]):
                continue
            gain = _gains(workload, beside, one, other)
            if gain.any():
                taken.update((one, other))
                pairs.append((one, other))
                gains.append(gain)
        return pairs, gains


LISTING = share_listing(
    "gandiva-emulated",
    "pairs by chance that stay while they gain, and equal time for all: Gandiva as others compare with it",
    "Narayanan et al., Gavel, OSDI'20 §7, after Xiao et al., Gandiva, OSDI'18",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.WORK_CONSERVING),
    GandivaEmulated,
    (Parameter("seed", "0", "of the pairs that are drawn", whole_number),),
    can=frozenset({Capability.PAIRS}),
    promise=among_jobs_alike,
    optimises="nothing; pairs raise throughput",
    fairness="equal time for every pair and every job without one",
    heterogeneity="blind, but pairs share a type only where they gain there",
    gang="whole gangs; pairs of equal gang",
    verified="no pair while demand fits; no pair that loses; feasible in random workloads",
)


def _gains(workload: Workload, beside: Floats, one: int, other: int) -> Bools:
    """(types,): where two jobs do more together than in turns."""
    alone = packed(workload.only(np.array([one, other])))
    kinds = workload.kind[[one, other]]
    types = workload.types
    together: Floats = np.array([beside[kinds[0], kinds[1], :types], beside[kinds[1], kinds[0], :types]])
    normal = np.divide(together, alone, out=np.zeros_like(together), where=alone > 0)
    gains: Bools = (normal > 0).all(axis=0) & (normal.sum(axis=0) > 1.0)
    return gains


def _shared(workload: Workload, pairs: list[tuple[int, int]], gains: list[Bools]) -> Allocation:
    """Equal time for every combination."""
    combinations = workload.jobs - len(pairs)
    time = workload.gpus / (max(combinations, 1) * workload.gang[:, None])
    time /= np.maximum(time.sum(axis=1, keepdims=True), 1.0)
    share = np.where(packed(workload) > 0, time, 0.0)
    first, second = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    together: Bools = np.array(gains, dtype=np.bool_).reshape(len(pairs), workload.types)
    for side in (first, second):
        share[side] = np.where(together, 0.0, share[side] / 2)
    where: tuple[Ints, ...] = np.nonzero(together)
    shared = Pairs(first[where[0]], second[where[0]], where[1], time[first[where[0]], where[1]])
    return Allocation(in_columns(workload, share), shared, awareness=Awareness.BLIND)


def _drawn(seed: int, row: int) -> int:
    """A number for a job; it does not depend on who else is there."""
    return pseudo_random.mixed(((seed << 32) + row + 1) * pseudo_random.STEP)
