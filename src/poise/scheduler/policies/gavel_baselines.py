"""What Gavel (OSDI'20) compares its programs with. None of these solves a program, so none can fail.

`proportional` and `isolated` are its measures of a fair share. `fifo-fastest` and `sjf` (§4.2) are queues that know GPU
types; they answer with shares of 1 or 0, and so say themselves who runs now. `gandiva-emulated` (§7) draws pairs by chance.

Symbols are those of `shares.py`: T_mj is the throughput of job m on type j, N_j the GPUs of the type, g_m the gang.
"""

import heapq
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Floats, Ints, dot
from poise.scheduler.model.workload import Allocation, Awareness, Leftover, Pairs, Workload
from poise.scheduler.policies import papers
from poise.scheduler.policies.listing import Capability, Parameter, PolicyProperty, choice, share_listing, whole_number
from poise.scheduler.policies.promises import among_jobs_alike
from poise.scheduler.policies.shares import GAVEL, Memoryless, in_columns, isolated_shares, packed
from poise.scheduler.solve import pseudo_random

_FAIR = (
    PolicyProperty.NO_DURATIONS,
    PolicyProperty.WORK_CONSERVING,
    PolicyProperty.SHARING_INCENTIVE,
    PolicyProperty.NO_ENVY,
    PolicyProperty.NO_STARVATION,
)


@dataclass(frozen=True)
class Proportional(Memoryless):
    """The same mix of GPU types for every job, by how many there are of each: x_mj = s N_j / N, s = min(1, N / Σ_m g_m).

    All jobs get the same wall time, whatever their gang: s is the part of it that there are GPUs for.
    """

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Shares that do not depend on speeds, only on where a job can run."""
        wanted = max(float(workload.gang.sum()), float(workload.gpus.sum()), 1.0)
        share = np.where(packed(workload) > 0, workload.gpus / wanted, 0.0)
        return Allocation(in_columns(workload, share), awareness=Awareness.BLIND), memory


PROPORTIONAL = share_listing(
    "proportional",
    "time on every type in proportion to how many GPUs there are of it",
    f"{GAVEL}: the normaliser of its code",
    _FAIR,
    Proportional,
    promise=among_jobs_alike,
    optimises="nothing: the normaliser",
    fairness="time on every type by how many GPUs there are of it",
    heterogeneity="gives every job the same mix of types",
    verified="allocations are feasible in random worlds and do not look at speeds",
    url=papers.GAVEL,
)


@dataclass(frozen=True)
class IsolatedShares(Memoryless):
    """An n-th of the cluster for each of n jobs: x_mj = N_j / (n g_m), each row divided by max(1, its sum).

    Shares do not depend on how fast a type is, only on whether the job can run there at all.
    """

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """An equal part of every GPU type for every job."""
        return Allocation(in_columns(workload, isolated_shares(workload)), awareness=Awareness.BLIND), memory


ISOLATED = share_listing(
    "isolated",
    "an n-th of every GPU type for each of n jobs",
    f"{GAVEL}: the baseline of sharing incentive",
    _FAIR,
    IsolatedShares,
    promise=among_jobs_alike,
    optimises="nothing: the baseline of sharing incentive",
    fairness="an n-th of every type for each job",
    heterogeneity="gives every job the same mix of types",
    verified="the same least share as max-min blind to types; the numbers of Gavel's code, within 0.5 %",
    url=papers.GAVEL,
)


class Sticky(StrEnum):
    """Whether a running job keeps its GPU type."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class FifoFastest(Memoryless):
    """In order of arrival, each job on its fastest free type; no job passes the head of the queue. O(n · types).

    Gavel's problem, with rank 0 for the earliest of n jobs,

        max_x  Σ_m (n − rank_m) · θ_m(x) / max_j T_mj

    is answered greedily, as Gavel's code does: in order of arrival, x_mj = 1 for the free type with the largest T_mj that
    holds the gang; stop at the first job that fits nowhere. A running job stays where it is, unless `sticky` is off: then
    all start from scratch, and a job may move to a faster type that has become free.
    """

    sticky: Sticky = Sticky.ON

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Share 1 for jobs that run now, on packed columns; a running job that stays has it on the column that it holds."""
        share = np.zeros_like(workload.speed)
        free = workload.gpus.copy()
        running = np.flatnonzero(workload.held >= 0) if self.sticky is Sticky.ON else np.empty(0, dtype=np.int64)
        share[running, workload.held[running]] = 1.0
        np.subtract.at(free, workload.column_type[workload.held[running]], workload.gang[running])
        remarks: tuple[str, ...] = ()
        for job in np.setdiff1d(np.arange(workload.jobs), running).tolist():
            gang, speeds = workload.gang[job], workload.speed[job, : workload.types]
            speed = np.where(free >= gang, speeds, 0.0)
            best = int(speed.argmax())
            if speed[best] <= 0:
                if not np.any((workload.gpus >= gang) & (speeds > 0)):  # nor would it fit if all GPUs were free
                    words = f"no GPU type that it runs on has {gang:g} GPUs alive"
                    remarks = (f"row {workload.rows[job]} holds up the queue: {words}",)
                break
            share[job, best] = 1.0
            free[best] -= gang
        fastest = workload.speed.max(axis=1, initial=0.0)
        reached = (workload.speed * share).sum(axis=1)
        relative = np.divide(reached, fastest, out=np.zeros_like(fastest), where=fastest > 0)
        objective = dot(relative, np.arange(workload.jobs, 0.0, -1.0))
        return Allocation(share, objective=objective, leftover=Leftover.IDLE, remarks=remarks), memory


FIFO_FASTEST = share_listing(
    "fifo-fastest",
    "arrival order, each job on its fastest free type; the head blocks",
    f"{GAVEL} §4.2",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.IN_ORDER, PolicyProperty.NO_STARVATION),
    FifoFastest,
    (Parameter("sticky", "on", "a running job stays where it is (on), or moves to what comes free", choice(Sticky)),),
    optimises="speed of the first jobs",
    fairness="order of arrival",
    heterogeneity="each job on its fastest free type",
    gang="whole; the head blocks",
    verified="the worked example; starts in order in random worlds",
    url=papers.GAVEL,
)


_Offer = tuple[float, int, int]
"""Seconds to the end, the job, and the type on which it takes that long."""


@dataclass(frozen=True, slots=True)
class Sjf(Memoryless):
    """The least time to the end first, each job on its fastest free type.

    With R_m steps left, Gavel's problem min_x min_m R_m / θ_m(x) is taken lexicographically: the job with the least
    R_m / T_mj over types j that still hold its gang gets x_mj = 1 there; repeat with what is left. A gang that fits nowhere
    is passed over. Jobs of unknown length come last, by arrival; so do ties. Running jobs have no privilege.

    O(n log n): as GPUs go, a job's time can only rise, so each job waits in a heap at the best time it was last seen to
    have, and is looked at again only when it comes up.
    """

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Share 1 on a packed column for jobs that run now. The objective is the time of the first chosen, in seconds."""
        share = np.zeros_like(workload.speed)
        free = workload.gpus.copy()
        offers = _offers(workload, np.arange(workload.jobs), free)
        heapq.heapify(offers)
        soonest = offers[0][0] if offers else float("nan")
        while offers and free.max() > 0:
            _, job, kind = heapq.heappop(offers)
            if workload.gang[job] <= free[kind]:
                share[job, kind] = 1.0
                free[kind] -= workload.gang[job]
                continue
            for offer in _offers(workload, np.array([job]), free):
                heapq.heappush(offers, offer)
        return Allocation(share, objective=soonest), memory


SJF = share_listing(
    "sjf",
    "shortest job first, each on its fastest free type, preemptive",
    f"{GAVEL} §4.2",
    (PolicyProperty.WORK_CONSERVING,),
    Sjf,
    optimises="average completion time, with durations known",
    fairness="none: long jobs may starve",
    heterogeneity="each job on its fastest free type",
    gang="whole, shortest first",
    verified="no GPU idles that a gang could use, in random worlds",
    url=papers.GAVEL,
)


def _offers(workload: Workload, jobs: Ints, free: Floats) -> list[_Offer]:
    """For each of these jobs the fastest type that holds its gang, and the time there; nothing if none does."""
    speed = np.where(free >= workload.gang[jobs, None], workload.speed[jobs, : workload.types], 0.0)
    kind = speed.argmax(axis=1)
    fastest = speed[np.arange(len(jobs)), kind]
    fits = fastest > 0
    seconds = workload.steps_left[jobs[fits]] / fastest[fits]
    return list(zip(seconds.tolist(), jobs[fits].tolist(), kind[fits].tolist(), strict=True))


Partners = MappingProxyType[int, int]
"""Rows of jobs that are pairs, both ways."""


@dataclass(frozen=True, slots=True)
class GandivaEmulated:
    """Gandiva as Gavel's evaluation and its code emulate it: pairs by chance. `seed` of the pairs that are drawn.

        Σ g ≤ N      every job alone, x_mj = N_j / (n g_m): an n-th of the cluster, no pairs
        else         jobs of equal gang are paired at random; a pair stays until one of its jobs ends.
                     K combinations (pairs, and jobs that are left) have equal time, x_kj = N_j / (K g_k)

    each row divided by max(1, its sum). A pair shares a GPU type only where the two get more done there than in turns, i.e.
    where Σ throughput beside the other ÷ throughput alone > 1; elsewhere they have half of the pair's time each, and two
    that gain nowhere are no pair. (Gavel's code adds throughputs up over types before it asks.) The same pairs for the same
    seed. O(J log J).
    """

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
        # Equal time for every combination.
        combinations = workload.jobs - len(pairs)
        time = workload.gpus / (max(combinations, 1) * workload.gang[:, None])
        time /= np.maximum(time.sum(axis=1, keepdims=True), 1.0)
        share = np.where(packed(workload) > 0, time, 0.0)
        first, second = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
        together: Bools = np.array(gains, dtype=np.bool_).reshape(len(pairs), workload.types)
        for side in (first, second):
            share[side] = np.where(together, 0.0, share[side] / 2)
        pair, kind = np.nonzero(together)
        shared = Pairs(first[pair], second[pair], kind, time[first[pair], kind])
        return Allocation(in_columns(workload, share), shared, awareness=Awareness.BLIND), MappingProxyType(partners)

    def _paired(self, workload: Workload, beside: Floats, memory: Partners) -> tuple[list[tuple[int, int]], list[Bools]]:
        """Pairs of before that are still there, and new ones; and on which types they gain."""
        place = {row: index for index, row in enumerate(workload.rows.tolist())}
        old = [
            (place[row], place[other]) for row, other in memory.items() if row < other and row in place and other in place
        ]
        taken = {index for pair in old for index in pair}
        left = [index for index in place.values() if index not in taken]
        # The number drawn for a job does not depend on which other jobs are there.
        rows = workload.rows.tolist()
        drawn = {index: pseudo_random.mixed(((self.seed << 32) + rows[index] + 1) * pseudo_random.STEP) for index in left}
        left.sort(key=lambda index: (workload.gang[index], drawn[index]))
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


GANDIVA_EMULATED = share_listing(
    "gandiva-emulated",
    "pairs by chance that stay while they gain, and equal time for all: Gandiva as others compare with it",
    f"{GAVEL} §7, after Xiao et al., Gandiva, OSDI'18",
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
    url=papers.GAVEL,
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
