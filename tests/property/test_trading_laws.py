"""Laws of trade: nobody loses, nothing is lost, and to over-report buys nothing cheaper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.scheduler.policies.gandiva_fair.entitlements import trade, trade_all

SLOW, FAST = 0, 1
Market = tuple[dict[int, tuple[float, float]], dict[int, float]]

speedup = st.one_of(st.sampled_from((1.0, 1.25, 2.0, 4.81, 6.0)), st.floats(0.5, 10))
held = st.one_of(st.sampled_from((0.0, 1.0, 4.0, 8.0)), st.floats(0, 100, allow_subnormal=False))


@st.composite
def markets(draw: st.DrawFn) -> Market:
    """Up to six tenants with some slow and some fast GPUs each."""
    parts = draw(st.lists(st.tuples(held, held, speedup), min_size=1, max_size=6))
    holdings = {place: (slow, fast) for place, (slow, fast, _) in enumerate(parts)}
    return holdings, {place: each for place, (_, _, each) in enumerate(parts)}


@given(markets())
def test_no_tenant_loses_by_trading_and_the_whole_does_not_either(market: Market) -> None:
    holdings, speedups = market
    after, _ = trade(holdings, speedups, slow=SLOW, fast=FAST)
    gains = [
        after[u][SLOW] + speedups[u] * after[u][FAST] - holdings[u][SLOW] - speedups[u] * holdings[u][FAST] for u in holdings
    ]
    assert min(gains) >= -1e-9
    assert sum(gains) >= -1e-9


@given(markets())
def test_trading_conserves_gpus_of_every_type_and_leaves_nobody_in_debt(market: Market) -> None:
    holdings, speedups = market
    after, _ = trade(holdings, speedups, slow=SLOW, fast=FAST)
    for gpu_type in (SLOW, FAST):
        want = sum(each[gpu_type] for each in holdings.values())
        assert sum(each[gpu_type] for each in after.values()) == pytest.approx(want)
    assert all(gpus >= 0 for each in after.values() for gpus in each)


@given(markets())
def test_trading_ends_with_no_two_tenants_that_would_gain(market: Market) -> None:
    """Whoever still has fast GPUs runs at least as much faster on them as anybody who still has slow ones."""
    holdings, speedups = market
    after, trades = trade(holdings, speedups, slow=SLOW, fast=FAST)
    assert len(trades) <= 2 * len(holdings)
    buyers = [speedups[u] for u in after if after[u][SLOW] > 0]
    sellers = [speedups[u] for u in after if after[u][FAST] > 0]
    if buyers and sellers:
        assert max(buyers) <= min(sellers)


@given(markets(), st.data())
def test_a_buyer_that_over_reports_never_pays_less(market: Market, data: st.DataObject) -> None:
    holdings, speedups = market
    buyer = data.draw(st.sampled_from(sorted(holdings)))
    _, honest = trade(holdings, speedups, slow=SLOW, fast=FAST)
    lie = speedups | {buyer: speedups[buyer] * data.draw(st.floats(1, 5))}
    _, lying = trade(holdings, lie, slow=SLOW, fast=FAST)
    before = [each.price for each in honest if each.buyer == buyer]
    after = [each.price for each in lying if each.buyer == buyer]
    if before and after:
        assert min(after) >= max(before) - 1e-9


@given(st.lists(st.tuples(held, held, held, speedup, speedup), min_size=1, max_size=5))
def test_trading_over_three_types_leaves_nobody_worse_off(parts: list[tuple[float, ...]]) -> None:
    holdings = {place: each[:3] for place, each in enumerate(parts)}
    speeds = {place: (1.0, middle, middle * fast) for place, (_, _, _, middle, fast) in enumerate(parts)}
    pairs = {(slow, fast): {u: s[fast] / s[slow] for u, s in speeds.items()} for slow, fast in ((0, 1), (0, 2), (1, 2))}
    after, _ = trade_all(holdings, pairs, (0, 1, 2))
    for u, speed in speeds.items():
        had, has = (sum(a * b for a, b in zip(each[u], speed, strict=True)) for each in (holdings, after))
        assert has >= had * (1 - 1e-9) - 1e-9
