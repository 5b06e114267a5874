"""Virtual clusters: tenants with a quota of GPUs, and who uses how much of it (Philly §2.3; ALGORITHMS §6.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

import numpy as np

from poise.model.arrays import Bools, Ints
from poise.model.columns import JobColumns, Snapshot

SLACK = 1e-9
"""Of a GPU: quotas are quotients."""


@dataclass(frozen=True, slots=True)
class Roll:
    """Tenants met so far, by index: the quota that each was given, nan for those that were given none.

    rows   jobs that have been looked at for it
    """

    given: tuple[float, ...] = ()
    rows: int = 0

    def called(self, columns: JobColumns, quotas: Sequence[tuple[str, float]]) -> "Roll":
        """The roll with the tenants of jobs that have come since."""
        if self.rows == len(columns.ids):
            return self
        given, known = list(self.given), dict(quotas)
        for row in range(self.rows, len(columns.ids)):
            if columns.tenant[row] == len(given):  # indices go by first submission
                given.append(known.get(columns.tenants[row], nan))
        return Roll(tuple(given), len(columns.ids))

    def quotas(self, gpus: int, listed: float, weights: Sequence[float]) -> list[float]:
        """Everybody's quota: those without one share by weight what the listed ones, added up, leave of the GPUs."""
        sharing = sum(weight for weight, each in zip(weights, self.given, strict=True) if isnan(each))
        rest = max(gpus - listed, 0.0) / (sharing or 1.0)
        return [rest * weight if isnan(each) else each for weight, each in zip(weights, self.given, strict=True)]


class VirtualClusters:
    """Who uses what at one moment, in the making: `used` follows the jobs that a plan starts and stops."""

    def __init__(self, snapshot: Snapshot, quotas: Sequence[float]) -> None:
        self._snapshot = snapshot
        self.quotas = quotas
        running = snapshot.running
        self._running = snapshot.rows[running]
        self._tenants = snapshot.ints(snapshot.columns.tenant)[running]
        gpus = snapshot.ints(snapshot.columns.gpus)[running]
        self.used: list[float] = np.bincount(self._tenants, gpus, len(quotas)).tolist()

    def within(self, tenant: int, gang: int) -> bool:
        """One more such gang leaves the tenant within its quota."""
        return gang <= self.quotas[tenant] - self.used[tenant] + SLACK

    def all_within(self, tenants: Ints, gangs: Ints) -> Bools:
        """`within` for each of many gangs, alone."""
        room = np.array(self.quotas) - np.array(self.used) + SLACK
        fits: Bools = gangs <= room[tenants]
        return fits

    def over(self) -> list[int]:
        """Running jobs that took their tenant over its quota, the latest first.

        Of each tenant the jobs that started last, until the rest is within the quota; but none that may not be stopped.
        """
        over: list[int] = []
        for tenant, (used, quota) in enumerate(zip(self.used, self.quotas, strict=True)):
            if used > quota + SLACK:
                over += self._latest(tenant, used - quota)
        started = self._snapshot.columns.started
        return sorted(over, key=lambda row: (started[row], row), reverse=True)

    def _latest(self, tenant: int, excess: float) -> list[int]:
        started, gpus = self._snapshot.columns.started, self._snapshot.columns.gpus
        own = set(self._running[self._tenants == tenant].tolist()) - self._snapshot.pinned
        rows = sorted(own, key=lambda row: (started[row], row))
        found: list[int] = []
        while excess > SLACK and rows:
            found.append(rows.pop())
            excess -= gpus[found[-1]]
        return found
