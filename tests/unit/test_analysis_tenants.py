"""Entitlements, trades and GPU time of tenants, read off a journal."""

from dataclasses import replace

import pytest
from tests.builders import a_job, simulate

from poise.lab.analysis.tenant_usage import HOUR, TenantUsage, TradeRecord
from poise.scheduler.model.action import (
    Entitled,
    JournalEntry,
    Launch,
    Preempt,
    PreemptionCause,
    Traded,
    Waited,
)
from poise.scheduler.model.cluster import Slots, parse_cluster
from poise.scheduler.model.event import Finished, Submitted
from poise.scheduler.model.job import Job

CLUSTER = parse_cluster("v100:2,k80:2")
V100, K80 = (Slots(0, 0b11),), (Slots(1, 0b11),)
NO_WAIT = Waited(0.0, 0.0, 0.0)


def arrival(tenant: str, name: str) -> Submitted:
    return Submitted(Job(name, 0.0, 2, 1.0, tenant=tenant), "kind", 1.0)


def test_time_in_which_no_job_waits_counts_for_no_entitlement() -> None:
    """The first hour everybody runs; in the second Bob waits; in the third Ada does."""
    entries = [
        JournalEntry(0.0, (arrival("ada", "a"),), (Launch("a", 1, V100, NO_WAIT),)),
        JournalEntry(HOUR, (arrival("bob", "b"),), (Entitled("ada", (1.0, 0.0)), Entitled("bob", (1.0, 0.0)))),
        JournalEntry(2 * HOUR, (), (Preempt("a", 1, PreemptionCause.OUTRANKED, "b"), Launch("b", 1, V100, NO_WAIT))),
        JournalEntry(3 * HOUR, (Finished("b", 1),), (Launch("a", 2, K80, NO_WAIT),)),
        JournalEntry(4 * HOUR, (Finished("a", 2),), ()),
    ]
    usage = TenantUsage.of(entries, CLUSTER)
    ada, bob = usage.tenants["ada"], usage.tenants["bob"]
    assert (ada.contended, ada.entitled, ada.received, ada.held) == (2 * HOUR, [2, 0], [2, 0], [4, 2])
    assert (bob.contended, bob.entitled, bob.received, bob.held) == (2 * HOUR, [2, 0], [2, 0], [2, 0])
    assert usage.trades == []


def test_a_trade_lasts_until_entitlements_change_without_it() -> None:
    first, second = (Traded("bob", "ada", "v100", "k80", gpus, 2.0) for gpus in (1.0, 0.5))
    told = Entitled("ada", (1.0, 1.0))
    entries = [
        JournalEntry(0.0, (arrival("ada", "a"), arrival("bob", "b")), (first, told)),
        JournalEntry(10.0, (), (first, Entitled("ada", (1.5, 1.0)))),
        JournalEntry(20.0, (), (second, told)),
        JournalEntry(30.0, (), (told,)),
        JournalEntry(40.0, (), ()),
    ]
    assert TenantUsage.of(entries, CLUSTER).trades == [
        TradeRecord("bob", "ada", "v100", "k80", 1.0, 2.0, since=0.0, until=20.0),
        TradeRecord("bob", "ada", "v100", "k80", 0.5, 2.0, since=20.0, until=30.0),
    ]


def test_gpu_time_of_tenants_is_that_of_their_runs() -> None:
    jobs = [a_job(f"j{place}", at=7.0 * place, gpus=1 + place % 3, seconds=300) for place in range(12)]
    jobs = [replace(each, job=replace(each.job, tenant="ab"[place % 2])) for place, each in enumerate(jobs)]
    story = simulate(jobs, "gandiva-fair:quantum=30", "gpu:4")
    usage = TenantUsage.of(story.entries, story.cluster)
    owner = {each.job.id: each.job.tenant for each in jobs}
    for tenant in "ab":
        want = sum(run.gpu_seconds for run in story.runs if owner[run.job] == tenant)
        assert usage.tenants[tenant].held[0] * HOUR == pytest.approx(want)
