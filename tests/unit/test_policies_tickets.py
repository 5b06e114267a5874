"""Tickets into GPUs: unused share goes to those who can use it, and a tenant's tickets are divided over its jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.scheduler.policies.gandiva_fair.entitlements import (
    TicketDivision,
    divided,
    entitlements,
    water_filled,
)


def test_shares_of_the_published_example() -> None:
    """8 GPUs, A and B ask for 4 each, C for 2: 8/3 is more than C can use."""
    assert water_filled({"A": 4, "B": 4, "C": 2}, {"A": 1, "B": 1, "C": 1}, 8) == {"A": 3, "B": 3, "C": 2}


def test_shares_are_in_proportion_to_tickets_where_everybody_asks_for_more() -> None:
    assert water_filled({"A": 90, "B": 90}, {"A": 2, "B": 1}, 12) == {"A": 8, "B": 4}


def test_nobody_gets_more_than_it_asks_for() -> None:
    assert water_filled({"A": 1, "B": 2}, {"A": 1, "B": 1}, 8) == {"A": 1, "B": 2}


def test_tenants_without_tickets_share_what_is_left() -> None:
    assert water_filled({"A": 3, "B": 9, "C": 9}, {"A": 1}, 11) == {"A": 3, "B": 4, "C": 4}


amounts = st.floats(0, 100, allow_subnormal=False)
weights = st.sampled_from((0.5, 1.0, 2.0, 3.0))


@given(st.lists(st.tuples(amounts, weights), min_size=1, max_size=6), st.floats(0.5, 100))
def test_water_filling_gives_all_away_and_nobody_below_its_part_wants_more(
    pairs: list[tuple[float, float]], gpus: float
) -> None:
    demand = {place: asked for place, (asked, _) in enumerate(pairs)}
    tickets = {place: weight for place, (_, weight) in enumerate(pairs)}
    shares = water_filled(demand, tickets, gpus)
    assert sum(shares.values()) == pytest.approx(min(gpus, sum(demand.values())))
    level = max(share / tickets[place] for place, share in shares.items())
    for place, share in shares.items():
        assert share <= demand[place] + 1e-9
        assert share == pytest.approx(demand[place]) or share / tickets[place] == pytest.approx(level)


def test_every_type_is_divided_by_tickets() -> None:
    demand = {tenant: [90.0, 90.0, 90.0] for tenant in "AB"}
    assert entitlements(demand, {"A": 3, "B": 1}, (4, 8), (0, 1)) == {"A": [3, 6], "B": [1, 2]}


def test_a_tenant_that_asks_for_little_is_entitled_to_fast_gpus_first() -> None:
    demand = {"A": [3.0, 3.0, 3.0], "B": [90.0, 90.0, 90.0]}
    assert entitlements(demand, {"A": 1, "B": 1}, (6, 6), (1, 0)) == {"A": [0, 3], "B": [6, 3]}


def test_nobody_is_entitled_to_a_type_that_its_jobs_cannot_run_on() -> None:
    demand = {"A": [0.0, 90.0, 90.0], "B": [90.0, 90.0, 90.0]}
    assert entitlements(demand, {"A": 1, "B": 1}, (6, 6), (0, 1)) == {"A": [0, 3], "B": [6, 3]}


def test_tickets_are_divided_by_gang_or_equally() -> None:
    assert divided(8, [1, 1, 2], TicketDivision.GANG) == [2, 2, 4]
    assert divided(6, [1, 1, 2], TicketDivision.EQUAL) == [2, 2, 2]
