"""Gang-aware stride over the jobs' weights (`stride`; the core of Gandiva_fair, EuroSys'20 §3.2).

t_m tickets (the job's weight), g_m gang. Each quantum take jobs by increasing pass; one that does not fit is passed over
and keeps its pass, so that it becomes the least and is served at a following quantum. Then

    pass_m += g_m / t_m                               for the jobs that were served
    gp     += GPUs used / Σ t                         the pass that a perfectly served job would have
    pass_m  = max(pass_m, gp − g_m / t_m)             lag clamp: no job falls behind by more than one quantum's service

Without the clamp a job entitled to more than its gang falls behind for ever and starves large gangs (ALGORITHMS §4.2).
A job arrives with the least pass of the others. O(J log J) a quantum.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from types import MappingProxyType

from poise.model.columns import Snapshot
from poise.model.plan import Claim, Plan, Preemption, Unfitting


class Clamp(StrEnum):
    """Whether a job's lag is bounded."""

    LAG = "lag"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes by row, the global pass, and when the quantum that they were charged for ends."""

    of: MappingProxyType[int, float]
    everybody: float
    ends: float


@dataclass(frozen=True, slots=True)
class Gang:
    """One contender: its row, GPUs and tickets."""

    row: int
    gpus: int
    tickets: float

    @property
    def stride(self) -> float:
        """What one quantum of service costs."""
        return self.gpus / self.tickets


def serve(gangs: list[Gang], passes: Passes, gpus: int, clamp: Clamp) -> tuple[list[Gang], Passes]:
    """One quantum: who runs on `gpus` GPUs, in order of choice, and the passes afterwards. Ties go by place in `gangs`."""
    least = min((passes.of[gang.row] for gang in gangs if gang.row in passes.of), default=0.0)
    current = {gang.row: passes.of.get(gang.row, least) for gang in gangs}
    chosen: list[Gang] = []
    free = gpus
    for gang in sorted(gangs, key=lambda gang: current[gang.row]):
        if gang.gpus <= free:
            chosen.append(gang)
            free -= gang.gpus
    tickets = sum(gang.tickets for gang in gangs)
    everybody = passes.everybody + (gpus - free) / tickets if tickets else passes.everybody
    for gang in chosen:
        current[gang.row] += gang.stride
    if clamp is Clamp.LAG:
        for gang in gangs:
            current[gang.row] = max(current[gang.row], everybody - gang.stride)
    return chosen, Passes(MappingProxyType(current), everybody, passes.ends)


@dataclass(frozen=True, slots=True)
class Stride:
    """Time slices in proportion to weight, gangs whole."""

    quantum: float = 60.0
    clamp: Clamp = Clamp.LAG

    def start(self) -> Passes:
        """Nobody has run."""
        return Passes(MappingProxyType({}), 0.0, -inf)

    def plan(self, snapshot: Snapshot, memory: Passes) -> tuple[Plan, Passes]:
        """The jobs of this quantum; the others only fill what is left. Inside a quantum nobody is charged again."""
        gangs = [
            Gang(row, gang, weight)
            for row, gang, weight in zip(
                snapshot.rows.tolist(), snapshot.gang.tolist(), snapshot.weight.tolist(), strict=True
            )
        ]
        if snapshot.now < memory.ends:
            running = dict.fromkeys(snapshot.rows[snapshot.running].tolist())
            rest = sorted((g for g in gangs if g.row not in running), key=lambda g: memory.of.get(g.row, memory.everybody))
            order = [*running, *(gang.row for gang in rest)]
            return self._plan(order, memory.ends), memory
        chosen, passes = serve(gangs, memory, snapshot.gpus, self.clamp)
        first = {gang.row for gang in chosen}
        order = [*(gang.row for gang in chosen), *(gang.row for gang in gangs if gang.row not in first)]
        ends = snapshot.now + self.quantum
        return self._plan(order, ends if gangs else inf), Passes(passes.of, passes.everybody, ends)

    @staticmethod
    def _plan(order: list[int], wake: float) -> Plan:
        return Plan(tuple(map(Claim, order)), Unfitting.SKIPPED, Preemption.BY_RANK, wake)
