"""Which gangs run in a quantum, so that tenants get what they are to have and few GPUs are left over: exact, by tables.

For a tenant u with budget b_u (its share and what it is behind) and jobs j with gang g_j, r_j = tickets ÷ gang, and lag l_j
in quanta against the other jobs of the tenant:

    gain of a set S   Σ g_j · (2 (l_j + r_j) − 1) over S: by how much it lowers Σ g_j · l_j² of the tenant's jobs
    f_u(a)            the largest gain of a set with a GPUs in all, less EVENNESS · (b_u − a)² ÷ share_u
    choice            max Σ f_u(a_u) − IDLENESS · idle, where idle = GPUs − Σ a_u

Two knapsacks, one over the jobs of each tenant and one over tenants: O((J + U) · N) for J jobs, U tenants and N GPUs. Where
the gangs can live is not looked at here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from poise.model.arrays import Bools, Floats, Ints

EVENNESS = 10.0
"""How much more it counts that a tenant is off its budget than that one of its jobs is."""

IDLENESS = 12.0
"""What an idle GPU costs, in gains of a GPU-quantum."""

AMOUNTS = 48
"""Amounts of GPUs that are considered for a tenant, the best ones by themselves."""


@dataclass(frozen=True, slots=True)
class Gang:
    """A job that may run: its GPUs, and what is gained if it does."""

    row: int
    gpus: int
    gain: float


def imbalance(left: Mapping[int, float], shares: Mapping[int, float], idle: int) -> float:
    """What it costs that tenants are off their budgets by `left` GPUs and that GPUs are idle."""
    off = sum(left[tenant] ** 2 / share for tenant, share in shares.items() if share > 0)
    return EVENNESS * off + IDLENESS * idle


def best_gangs(
    gangs: Mapping[int, Sequence[Gang]], gpus: int, *, shares: Mapping[int, float], budgets: Mapping[int, float]
) -> set[int]:
    """Rows of those who are to run, of at most so many GPUs in all; gangs by tenant."""
    tables = [
        _Table(own, shares[tenant], budgets[tenant], gpus) for tenant, own in sorted(gangs.items()) if shares[tenant] > 0
    ]
    best: Floats = np.full(gpus + 1, -np.inf)
    best[0] = 0.0
    amounts = []
    for table in tables:
        best, amount = _with(table, best)
        amounts.append(amount)
    total = int(np.argmax(best + IDLENESS * np.arange(gpus + 1)))
    rows: set[int] = set()
    for table, amount in zip(reversed(tables), reversed(amounts), strict=True):
        spent = int(amount[total])
        rows |= table.rows(spent)
        total -= spent
    return rows


class _Table:
    """The best sets of one tenant's jobs by their GPUs in all."""

    def __init__(self, gangs: Sequence[Gang], share: float, budget: float, gpus: int) -> None:
        self._gangs = gangs
        most = min(gpus, sum(each.gpus for each in gangs))
        gain: Floats = np.full(most + 1, -np.inf)
        gain[0] = 0.0
        self._taken: list[Bools] = []
        for each in gangs:
            size = min(each.gpus, most + 1)
            with_it = gain[: most + 1 - size] + each.gain
            taken: Bools = np.zeros(most + 1, dtype=bool)
            taken[size:] = with_it > gain[size:]
            gain[size:] = np.maximum(with_it, gain[size:])
            self._taken.append(taken)
        self.value: Floats = gain - EVENNESS * (budget - np.arange(most + 1)) ** 2 / share

    def rows(self, gpus: int) -> set[int]:
        """Who is in the best set of so many GPUs."""
        found = set()
        for each, taken in zip(reversed(self._gangs), reversed(self._taken), strict=True):
            if taken[gpus]:
                found.add(each.row)
                gpus -= each.gpus
        return found

    def amounts(self) -> list[int]:
        """Numbers of GPUs to look at."""
        able = np.flatnonzero(self.value > -np.inf)
        chosen: list[int] = able[np.argsort(-self.value[able], kind="stable")[:AMOUNTS]].tolist()
        return sorted(chosen)


def _with(table: _Table, best: Floats) -> tuple[Floats, Ints]:
    """One more tenant: the best value by GPUs of all so far, and the GPUs that this one has of them."""
    size = len(best)
    after: Floats = np.full(size, -np.inf)
    amount: Ints = np.zeros(size, dtype=np.int64)
    for gpus in table.amounts():
        value = best[: size - gpus] + table.value[gpus]
        better = value > after[gpus:]
        after[gpus:][better] = value[better]
        amount[gpus:][better] = gpus
    return after, amount
