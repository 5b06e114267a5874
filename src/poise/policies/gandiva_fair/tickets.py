"""Tickets of tenants into GPUs: water-filled over demand, type by type, and divided over a tenant's jobs.

t_u tickets, d_u demand in GPUs, N GPUs (Gandiva_fair, EuroSys'20 §3.1):

    share_u = min(d_u, t_u / Σ t_active · what is left)        repeated to a fixed point: unused share goes to the others
    t_j     = t_u · g_j / Σ g   over the tenant's jobs         in proportion to gangs; or t_u / number of jobs

8 GPUs, equal tickets, demands 4, 4 and 2: shares 3, 3 and 2.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

Tenant = TypeVar("Tenant")

LEAST = 1e-9
"""GPUs that are none."""


class Division(StrEnum):
    """How a tenant's tickets are divided over its jobs: in proportion to their gangs, or equally."""

    GANG = "gang"
    EQUAL = "equal"


def water_filled(demand: Mapping[Tenant, float], tickets: Mapping[Tenant, float], gpus: float) -> dict[Tenant, float]:
    """GPUs of each tenant in the long run: in proportion to tickets, but nobody gets more than it asks for.

    Σ shares = min(gpus, Σ demand). Tenants without tickets share what those with tickets leave, equally.
    """
    shares = dict.fromkeys(demand, 0.0)
    paying = {tenant: weight for tenant in demand if (weight := tickets.get(tenant, 0.0)) > 0}
    left = _filled(shares, demand, paying, gpus)
    if left > LEAST:
        _filled(shares, demand, {tenant: 1.0 for tenant in demand if tenant not in paying}, left)
    return shares


def _filled(
    shares: dict[Tenant, float], demand: Mapping[Tenant, float], tickets: Mapping[Tenant, float], gpus: float
) -> float:
    """Raise the level until the GPUs are gone; who asks for least a ticket is full first. Returns what is left over."""
    order = sorted(tickets, key=lambda tenant: demand[tenant] / tickets[tenant])
    weight = sum(tickets.values())
    for tenant in order:
        share = min(demand[tenant], gpus * tickets[tenant] / weight)
        shares[tenant] = share
        gpus -= share
        weight -= tickets[tenant]
    return gpus


def entitlements(
    demand: Mapping[Tenant, Sequence[float]],
    tickets: Mapping[Tenant, float],
    gpus: Sequence[float],
    fastest_first: Sequence[int],
) -> dict[Tenant, list[float]]:
    """GPUs of each type that each tenant is entitled to before any trade, in the cluster's order of types.

    demand   GPUs of the jobs that can run on each type; the last entry: of all the tenant's jobs
    A tenant's part of every type is that of its tickets. One that asks for less than all its parts is taken to mean the
    fastest types; what it leaves goes to the others.
    """
    given = {tenant: [0.0] * len(gpus) for tenant in demand}
    left = {tenant: each[-1] for tenant, each in demand.items()}
    for gpu_type in fastest_first:
        wanted = {tenant: min(left[tenant], demand[tenant][gpu_type]) for tenant in demand}
        for tenant, share in water_filled(wanted, tickets, gpus[gpu_type]).items():
            given[tenant][gpu_type] = share
            left[tenant] -= share
    return given


def divided(tickets: float, gangs: Sequence[int], division: Division) -> list[float]:
    """The tickets of each of a tenant's jobs."""
    if division is Division.EQUAL:
        return [tickets / len(gangs)] * len(gangs)
    total = sum(gangs)
    return [tickets * gang / total for gang in gangs]
