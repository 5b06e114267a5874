"""Gang-aware stride over the jobs' weights (`stride`; the core of Gandiva_fair, EuroSys'20 §3.2).

t_m tickets (the job's weight), g_m gang. Each quantum take jobs by increasing pass; one that does not fit is passed over
and keeps its pass, so that it becomes the least and is served at a following quantum. Then

    pass_m += g_m / t_m                               for the jobs that were served
    gp     += GPUs used / Σ t                         the pass that a perfectly served job would have
    pass_m  = max(pass_m, gp − g_m / t_m)             lag clamp: no job falls behind by more than one quantum's service

Without the clamp a job entitled to more than its gang falls behind for ever and starves large gangs
(docs/algorithms/gandiva-fair.md). A job arrives with the least pass of the others. O(J log J) per quantum.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from types import MappingProxyType

from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim, Plan, PreemptionRule, Unfitting
from poise.scheduler.policies import papers
from poise.scheduler.policies.listing import Family, Parameter, PolicyProperty, choice, listed, positive
from poise.scheduler.policies.promises import among_jobs


class Clamp(StrEnum):
    """Whether a job's lag is bounded."""

    LAG = "lag"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes by row, and the ideal one: that of a job that was served perfectly."""

    of: MappingProxyType[int, float]
    ideal: float


NO_PASSES = Passes(MappingProxyType({}), 0.0)
"""Before any job has run."""


@dataclass(frozen=True, slots=True)
class WeightedGang:
    """One contender: its row, GPUs and tickets."""

    row: int
    gpus: int
    tickets: float

    @property
    def stride(self) -> float:
        """What one quantum of service costs."""
        return self.gpus / self.tickets


def current(gangs: Sequence[WeightedGang], passes: Passes) -> dict[int, float]:
    """The pass of each gang; a new one has the least of the others."""
    least = min((passes.of[gang.row] for gang in gangs if gang.row in passes.of), default=0.0)
    return {gang.row: passes.of.get(gang.row, least) for gang in gangs}


def charge(
    gangs: Sequence[WeightedGang], passes: Passes, quanta: Mapping[int, float], clamp: Clamp, pinned: Container[int] = ()
) -> Passes:
    """The passes after service: `quanta` says how much each was served, in quanta of its whole gang.

    What pinned gangs hold is not shared, and does not count for the pass of a perfectly served job: it would run away from
    all others, and the clamp would make them all alike.
    """
    now = current(gangs, passes)
    sharing = [gang for gang in gangs if gang.row not in pinned]
    used = sum(gang.gpus * quanta.get(gang.row, 0.0) for gang in sharing)
    ideal = passes.ideal + (used / sum(gang.tickets for gang in sharing) if sharing else 0.0)
    for gang in gangs:
        now[gang.row] += gang.stride * quanta.get(gang.row, 0.0)
        if clamp is Clamp.LAG:
            now[gang.row] = max(now[gang.row], ideal - gang.stride)
    return Passes(MappingProxyType(now), ideal)


def serve(gangs: Sequence[WeightedGang], passes: Passes, gpus: int, clamp: Clamp) -> tuple[list[WeightedGang], Passes]:
    """One quantum on GPUs that are all alike: who runs, in order of choice, and the passes afterwards.

    Ties go by place in `gangs`. This is the mechanism alone; as a policy, the core does the fitting.
    """
    now = current(gangs, passes)
    chosen: list[WeightedGang] = []
    for gang in sorted(gangs, key=lambda gang: now[gang.row]):
        if gang.gpus <= gpus:
            chosen.append(gang)
            gpus -= gang.gpus
    return chosen, charge(gangs, passes, {gang.row: 1.0 for gang in chosen}, clamp)


@dataclass(frozen=True, slots=True)
class StrideMemory:
    """Memory of the policy: passes, what each job had attained when it was last charged, and when the quantum ends."""

    passes: Passes
    attained: MappingProxyType[int, float]
    ends: float


@dataclass(frozen=True, slots=True)
class Stride:
    """Time slices in proportion to weight, gangs whole. Jobs are charged for the time that they really got."""

    quantum: float = 60.0
    clamp: Clamp = Clamp.LAG

    def start(self) -> StrideMemory:
        """The memory before the first plan."""
        return StrideMemory(NO_PASSES, MappingProxyType({}), -inf)

    def plan(self, snapshot: Snapshot, memory: StrideMemory) -> tuple[Plan, StrideMemory]:
        """At the end of a quantum by pass; inside one, running jobs go on and others fill what is left."""
        rows = snapshot.rows.tolist()
        columns = (rows, snapshot.gang.tolist(), snapshot.weight.tolist())
        gangs = [WeightedGang(row, gang, weight) for row, gang, weight in zip(*columns, strict=True)]
        running = set(snapshot.rows[snapshot.running].tolist())
        if snapshot.now < memory.ends:
            now = current(gangs, memory.passes)
            order = sorted(rows, key=lambda row: (row not in running, now[row], row))
            return self._plan(order, memory.ends), memory
        attained = dict(zip(rows, snapshot.attained_seconds.tolist(), strict=True))
        quanta = {row: (attained[row] - memory.attained.get(row, 0.0)) / self.quantum for row in rows}
        passes = charge(gangs, memory.passes, quanta, self.clamp, snapshot.pinned)
        order = sorted(rows, key=lambda row: (passes.of[row], row))
        ends = snapshot.now + self.quantum
        return self._plan(order, ends), StrideMemory(passes, MappingProxyType(attained), ends)

    @staticmethod
    def _plan(order: list[int], wake: float) -> Plan:
        return Plan(tuple(map(Claim, order)), Unfitting.SKIPPED, PreemptionRule.BY_RANK, wake)


LISTING = listed(
    Family.STRIDE,
    "stride",
    "gang-aware stride: time slices in proportion to weight",
    "Chaudhary et al., Gandiva_fair, EuroSys'20 §3.2",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.NO_STARVATION),
    Stride,
    (
        Parameter("quantum", "60", "length of a time slice in seconds", positive),
        Parameter("clamp", "lag", "lag bounds how far a job may fall behind; off does not", choice(Clamp)),
    ),
    promise=among_jobs,
    optimises="GPU-time in proportion to weight",
    fairness="proportional share by weight, lag of at most one quantum",
    heterogeneity="on its fastest free type",
    gang="whole, by pass; one that does not fit keeps its pass",
    verified="the published tables of passes, exactly; shares over 2,000 quanta to 0.01",
    url=papers.GANDIVA_FAIR,
)
