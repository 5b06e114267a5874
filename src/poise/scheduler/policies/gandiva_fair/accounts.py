"""What tenants and jobs got against what they should get: tenants in GPU-seconds by type, jobs in quanta of their gang.

A tenant's lag is what its share came to less what its jobs had, in all places of the pool; a job's lag is the same in
units of its own service: (gp − pass) ÷ stride in the words of `stride.py`. Both are bounded, so that what could not be had
for long is not paid back for longer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from poise.scheduler.model.job import Status
from poise.scheduler.model.job_table import JobTable

Place = tuple[int, int]
"""A tenant and a GPU type."""

BOUND = 8.0
"""Quanta of its share that a tenant may be behind or ahead."""

LONGEST = 60.0
"""Quanta of its gang that a job may be behind or ahead of its tenant's others: so much that a gang larger than its
tenant's share gets its turn."""


@dataclass(frozen=True, slots=True)
class TenantAccounts:
    """Credits and lags.

    at         time until which shares are credited;  settled: when lags were last worked out
    attained   seconds of running of each job at `settled`;  seen: how many jobs had been submitted by then
    shares     GPUs of each type that each tenant should have from `at` on
    owed       GPU-seconds credited since `settled`
    lags       GPU-seconds that each tenant was behind at `settled`;  behind: quanta that each job was
    """

    at: float
    settled: float
    attained: Mapping[int, float]
    seen: int
    shares: Mapping[Place, float] = field(default_factory=lambda: MappingProxyType({}))
    owed: Mapping[Place, float] = field(default_factory=lambda: MappingProxyType({}))
    lags: Mapping[Place, float] = field(default_factory=lambda: MappingProxyType({}))
    behind: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))


def credited(accounts: TenantAccounts, now: float, shares: Mapping[Place, float]) -> TenantAccounts:
    """Credit the shares that held until now; from now on these hold."""
    owed = dict(accounts.owed)
    for place, share in accounts.shares.items():
        owed[place] = owed.get(place, 0.0) + share * (now - accounts.at)
    return replace(accounts, at=now, shares=MappingProxyType(dict(shares)), owed=MappingProxyType(owed))


def seconds_run(columns: JobTable, row: int, now: float) -> float:
    """Wall time that a job has had GPUs, whether it is still there or not."""
    held = columns.received[row]
    return held + now - columns.started[row] if columns.status[row] == Status.RUNNING else held


def settled(
    accounts: TenantAccounts,
    now: float,
    columns: JobTable,
    *,
    types: Mapping[int, int],
    tickets: Mapping[int, float],
    quantum: float,
) -> TenantAccounts:
    """The accounts with lags worked out as of now.

    types     GPU type of each job that is or was there since the last time
    tickets   GPUs that each active job should have
    """
    lags = {place: accounts.lags.get(place, 0.0) + owed for place, owed in accounts.owed.items()}
    attained: dict[int, float] = {}
    behind: dict[int, float] = {}
    for row in sorted({*accounts.attained, *tickets, *range(accounts.seen, len(columns.ids))}):
        total = seconds_run(columns, row, now)
        had = total - accounts.attained.get(row, 0.0)
        gang = columns.gang[row]
        if row in types and (place := (columns.tenant[row], types[row])) in lags:
            lags[place] -= gang * had
        if row in tickets:
            since = max(accounts.settled, columns.submitted[row])
            behind[row] = accounts.behind.get(row, 0.0) + (tickets[row] / gang * (now - since) - had) / quantum
            attained[row] = total
    places = {row: (columns.tenant[row], types[row]) for row in behind}
    return replace(
        accounts,
        settled=now,
        owed=MappingProxyType({}),
        lags=MappingProxyType(_of_tenants(lags, accounts.shares, quantum)),
        behind=MappingProxyType(_of_jobs(behind, places, tickets)),
        attained=MappingProxyType(attained),
        seen=len(columns.ids),
    )


def _of_tenants(lags: Mapping[Place, float], shares: Mapping[Place, float], quantum: float) -> dict[Place, float]:
    """Lags against what was there to be had: GPUs that stood idle are no tenant's debt. Bounded."""
    idle: dict[int, float] = {}
    total: dict[int, float] = {}
    for (tenant, gpu_type), lag in lags.items():
        idle[gpu_type] = idle.get(gpu_type, 0.0) + lag
        total[gpu_type] = total.get(gpu_type, 0.0) + shares.get((tenant, gpu_type), 0.0)
    bounded: dict[Place, float] = {}
    for (tenant, gpu_type), lag in lags.items():
        share = shares.get((tenant, gpu_type), 0.0)
        lost = idle[gpu_type] * share / total[gpu_type] if total[gpu_type] else 0.0
        bounded[tenant, gpu_type] = _bounded(lag - lost, BOUND * share * quantum)
    return bounded


def _of_jobs(behind: Mapping[int, float], places: Mapping[int, Place], tickets: Mapping[int, float]) -> dict[int, float]:
    """Lags against the other jobs of the same tenant and type, by tickets: what the tenant lacks is not theirs. Bounded."""
    lag: dict[Place, float] = {}
    total: dict[Place, float] = {}
    for row, place in places.items():
        lag[place] = lag.get(place, 0.0) + behind[row] * tickets[row]
        total[place] = total.get(place, 0.0) + tickets[row]
    mean = {place: lag[place] / total[place] if total[place] else 0.0 for place in lag}
    return {row: _bounded(behind[row] - mean[place], LONGEST) for row, place in places.items()}


def _bounded(lag: float, most: float) -> float:
    return min(max(lag, -most), most)
