"""Automated trading of fast GPUs for slow ones at a second price (Gandiva_fair, EuroSys'20 §3.4).

Tenant u holds slow_u and fast_u GPUs and runs s_u times as fast on a fast one. For a pair of types:

    b = argmax s among those who hold slow;  q = argmin s among those who hold fast;  stop if b = q or s_b <= s_q
    p = the next speed-up below that of b                         Vickrey's price, in slow GPUs for a fast one
    a = min(slow_b / p, fast_q);   b gets a fast GPUs of q for a·p slow ones;   repeat

Since s_q <= p <= s_b, nobody's slow + s·fast falls, and totals by type stay as they are. A buyer's price depends on what
others report and never on its own report, except that to report more may make it buy before others, at a higher price.
Each trade empties somebody's hands: at most 2n trades for n tenants.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, nan


@dataclass(frozen=True, slots=True)
class Trade:
    """So many fast GPUs of the seller for the buyer, at a price in slow GPUs each. Types are indices."""

    buyer: int
    seller: int
    fast: int
    slow: int
    gpus: float
    price: float


def both_gain(price: float, buyer: float, seller: float) -> bool:
    """Whether a fast GPU for so many slow ones leaves both better off, given their speed-ups."""
    return seller < price < buyer


def trade(
    holdings: Mapping[int, Sequence[float]], speedup: Mapping[int, float], *, slow: int, fast: int
) -> tuple[dict[int, tuple[float, ...]], list[Trade]]:
    """Holdings by type after all trades between two types, and the trades in order.

    speedup   fast ÷ slow, of the tenants that are known; the others do not trade
    Of buyers with equal speed-ups the first in `holdings` comes first.
    """
    held = {tenant: list(gpus) for tenant, gpus in holdings.items()}
    known = [tenant for tenant in held if isfinite(speedup.get(tenant, nan)) and speedup[tenant] > 0]
    dearest = sorted(known, key=lambda tenant: -speedup[tenant])
    price = {buyer: speedup[below] for buyer, below in pairwise(dearest)}
    trades: list[Trade] = []
    while True:
        buyer = next((tenant for tenant in dearest if held[tenant][slow] > 0), None)
        seller = next((tenant for tenant in reversed(dearest) if held[tenant][fast] > 0), None)
        if buyer is None or seller is None or buyer == seller or speedup[buyer] <= speedup[seller]:
            return {tenant: tuple(gpus) for tenant, gpus in held.items()}, trades
        gpus = _exchanged(held[buyer], held[seller], slow, fast, price[buyer])
        trades.append(Trade(buyer, seller, fast, slow, gpus, price[buyer]))


def _exchanged(buyer: list[float], seller: list[float], slow: int, fast: int, price: float) -> float:
    """As much as one can pay for, or the other has; returns how many fast GPUs that was.

    Hands that a trade empties are exactly empty afterwards: otherwise crumbs would be traded for ever.
    """
    affordable = buyer[slow] / price
    if affordable <= seller[fast]:
        gpus, paid = affordable, buyer[slow]
        buyer[slow], seller[fast] = 0.0, seller[fast] - gpus
    else:
        gpus = seller[fast]
        paid = gpus * price
        buyer[slow], seller[fast] = buyer[slow] - paid, 0.0
    buyer[fast] += gpus
    seller[slow] += paid
    return gpus


def trade_all(
    holdings: Mapping[int, Sequence[float]],
    speedups: Mapping[tuple[int, int], Mapping[int, float]],
    slowest_first: Sequence[int],
) -> tuple[dict[int, tuple[float, ...]], list[Trade]]:
    """All pairs of types, slow ones ascending and fast ones descending.

    speedups   fast ÷ slow, by (slow, fast) and tenant
    """
    held = {tenant: tuple(gpus) for tenant, gpus in holdings.items()}
    trades: list[Trade] = []
    for place, slow in enumerate(slowest_first):
        for fast in reversed(slowest_first[place + 1 :]):
            held, more = trade(held, speedups.get((slow, fast), {}), slow=slow, fast=fast)
            trades += more
    return held, trades
