"""Trades at the second price: the published numbers (docs/algorithms/gandiva-fair.md)."""

import pytest

from poise.scheduler.policies.gandiva_fair.entitlements import Trade, both_gain, trade, trade_all

SLOW, FAST = 0, 1


@pytest.mark.parametrize(
    ("price", "gains"), [(1.1, False), (1.2, False), (1.3, True), (5.9, True), (6.0, False), (7.0, False)]
)
def test_both_gain_exactly_between_their_speedups(price: float, gains: bool) -> None:
    assert both_gain(price, buyer=6, seller=1.2) is gains


def test_the_price_is_the_second_highest_speedup() -> None:
    after, trades = trade({1: (4, 4), 2: (4, 4), 3: (4, 4)}, {1: 1.2, 2: 6, 3: 2}, slow=SLOW, fast=FAST)
    assert trades == [
        Trade(buyer=2, seller=1, fast=FAST, slow=SLOW, gpus=2, price=2),
        Trade(buyer=3, seller=1, fast=FAST, slow=SLOW, gpus=2, price=1.2),
    ]
    assert [after[tenant][SLOW] for tenant in (1, 2, 3)] == pytest.approx([10.4, 0, 1.6], abs=1e-6)
    assert [after[tenant][FAST] for tenant in (1, 2, 3)] == pytest.approx([0, 6, 6], abs=1e-6)
    worth = [after[tenant][SLOW] + speedup * after[tenant][FAST] for tenant, speedup in ((1, 1.2), (2, 6), (3, 2))]
    assert worth == pytest.approx([10.4, 36, 13.6])


def test_trade_of_shares() -> None:
    after, trades = trade({1: (0.33, 0.33), 2: (0.33, 0.33), 3: (0.34, 0.34)}, {1: 4, 2: 6, 3: 8}, slow=SLOW, fast=FAST)
    assert [after[tenant][SLOW] for tenant in (1, 2, 3)] == pytest.approx([1, 0, 0], abs=1e-3)
    assert [after[tenant][FAST] for tenant in (1, 2, 3)] == pytest.approx([0.1908, 0.4125, 0.3967], abs=1e-3)
    assert [each.gpus for each in trades] == pytest.approx([0.0567, 0.0825], abs=1e-4)
    assert [each.price for each in trades] == [6, 4]


def test_trade_of_24_and_24_gpus() -> None:
    speedups = {1: 1.25, 2: 4.81, 3: 6.33}
    after, trades = trade(dict.fromkeys(speedups, (8.0, 8.0)), speedups, slow=SLOW, fast=FAST)
    assert [after[tenant] for tenant in speedups] == [
        pytest.approx((23.921, 0), abs=1e-3),
        pytest.approx((0.079, 14.337), abs=1e-3),
        pytest.approx((0, 9.663), abs=1e-3),
    ]
    assert [each.gpus for each in trades] == pytest.approx([1.6632, 6.3368], abs=1e-4)
    assert [each.price for each in trades] == [4.81, 1.25]
    gains = [
        (after[tenant][SLOW] + speedup * after[tenant][FAST]) / (8 + speedup * 8) - 1 for tenant, speedup in speedups.items()
    ]
    assert gains == pytest.approx([0.329, 0.485, 0.043], abs=1e-3)


def test_nobody_trades_alone_or_with_an_equal() -> None:
    assert trade({1: (4, 4)}, {1: 3}, slow=SLOW, fast=FAST)[1] == []
    assert trade({1: (4, 4), 2: (4, 4)}, {1: 3, 2: 3}, slow=SLOW, fast=FAST)[1] == []


def test_who_is_not_known_does_not_trade() -> None:
    holdings = {1: (4.0, 4.0), 2: (4.0, 4.0), 3: (4.0, 4.0)}
    after, trades = trade(holdings, {1: 1.2, 2: 6}, slow=SLOW, fast=FAST)
    assert after[3] == (4, 4)
    assert {each.buyer for each in trades} == {2}


def test_pairs_of_types_go_from_the_slowest_and_the_fastest_inwards() -> None:
    """The published cluster: 12 V100, 24 P100, 128 K80 among four; two gain about 30 %."""
    models = {1: (1.0, 1.19, 1.25), 2: (1.0, 1.73, 1.87), 3: (1.0, 3.58, 4.81), 4: (1.0, 4.12, 6.33)}
    pairs = {(slow, fast): {u: s[fast] / s[slow] for u, s in models.items()} for slow, fast in ((0, 1), (0, 2), (1, 2))}
    before = (32.0, 6.0, 3.0)
    after, trades = trade_all(dict.fromkeys(models, before), pairs, (0, 1, 2))
    assert [(each.slow, each.fast) for each in trades] == [(0, 2)] * 3 + [(0, 1)] * 2 + [(1, 2)]
    worth = {u: sum(a * b for a, b in zip(after[u], s, strict=True)) for u, s in models.items()}
    fair = {u: sum(a * b for a, b in zip(before, s, strict=True)) for u, s in models.items()}
    assert [worth[u] / fair[u] - 1 for u in models] == pytest.approx([0.325, 0.184, 0.327, 0.158], abs=1e-3)
