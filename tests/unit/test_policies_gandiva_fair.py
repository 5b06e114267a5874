"""Gandiva_fair as a policy: tenants get their tickets' worth of every hour, whatever their gangs; and who trades gains."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from tests.builders import Story, a_job, simulate

from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.action import Entitled, Launch, Preempt, PreemptionCause, Traded, WakeAt
from poise.scheduler.model.cluster import gpu_count
from poise.scheduler.model.event import Finished, Submitted
from poise.scheduler.model.topology import Topology
from poise.scheduler.policies.gandiva_fair.entitlements import water_filled

HOUR = 3600.0
NEVER = 1e7
"""Seconds of a job that outlasts every test."""


def owned(
    tenant: str, name: str, *, at: float = 0.0, gpus: int = 1, seconds: float = NEVER, model: str | None = None
) -> TraceJob:
    each = a_job(f"{tenant}-{name}", at=at, gpus=gpus, seconds=seconds, model=model)
    return replace(each, job=replace(each.job, tenant=tenant))


def mixed(
    seed: int, tenants: Mapping[str, float], *, gpus: int, load: float, gangs: Iterable[int], end: float = 1200
) -> list[TraceJob]:
    """Jobs that ask for about `load` times what the tenants' tickets are worth; they arrive until `end`."""
    draw = random.Random(seed)
    found: list[TraceJob] = []
    for tenant, tickets in tenants.items():
        wanted = gpus * tickets / sum(tenants.values()) * load * draw.uniform(0.8, 1.3)
        while wanted > 0:
            gang = draw.choice(tuple(gangs))
            found.append(owned(tenant, str(len(found)), at=draw.uniform(0, end), gpus=gang))
            wanted -= gang
    return found


@dataclass
class Balance:
    """What tenants had and were to have, cumulated over time, and who was backlogged when."""

    moments: list[float]
    due: dict[str, list[float]]
    backlogged: list[frozenset[str]]
    had: dict[str, tuple[list[float], list[float]]]

    @staticmethod
    def of(story: Story, tickets: Mapping[str, float], end: float) -> "Balance":
        jobs = {each.job.id: each.job for each in story.jobs}
        demand: dict[str, float] = dict.fromkeys(tickets, 0.0)
        changes: dict[float, dict[str, float]] = {}
        came = [(now, fact.job, 1) for now, fact in story.events(Submitted)]
        went = [(now, jobs[fact.job], -1) for now, fact in story.events(Finished)]
        for now, job, sign in came + went:
            at_once = changes.setdefault(now, {})
            at_once[job.tenant] = at_once.get(job.tenant, 0.0) + sign * job.gpus
        moments = [*sorted(changes), end]
        due = {tenant: [0.0] for tenant in tickets}
        backlogged = []
        for now, later in pairwise(moments):
            for tenant, change in changes[now].items():
                demand[tenant] += change
            active = {tenant: asked for tenant, asked in demand.items() if asked}
            shares = water_filled(active, tickets, story.cluster.gpus)
            backlogged.append(frozenset(tenant for tenant in active if active[tenant] > shares[tenant] + 1e-9))
            for tenant, line in due.items():
                line.append(line[-1] + shares.get(tenant, 0.0) * (later - now))
        return Balance(moments, due, backlogged, {tenant: _had(story, tenant, end) for tenant in tickets})

    def worst(self, since: float, until: float, gpus: int | None = None) -> float:
        """The largest error of any tenant in any hour in which the set of backlogged tenants does not change.

        Against its share of all the GPU time that there is; if `gpus` of the cluster are given, of the time that was used.
        """
        worst = 0.0
        starts = np.arange(since, until - HOUR, 47.0)  # at all phases of a minute, and of an hour
        first = np.searchsorted(self.moments, starts, side="right") - 1
        last = np.searchsorted(self.moments, starts + HOUR, side="left") - 1
        same = np.array([len(set(self.backlogged[a : b + 1])) == 1 for a, b in zip(first, last, strict=True)])
        assert same.any(), "there is no hour to look at"
        had = {tenant: np.interp(starts + HOUR, *line) - np.interp(starts, *line) for tenant, line in self.had.items()}
        used = np.ones(len(starts)) if gpus is None else sum(had.values(), np.zeros(len(starts))) / (gpus * HOUR)
        for tenant, line in self.due.items():
            looked = same & np.array([tenant in self.backlogged[each] for each in first])
            begins = starts[looked]
            want = np.interp(begins + HOUR, self.moments, line) - np.interp(begins, self.moments, line)
            worst = max(worst, float(np.abs(had[tenant][looked] / (want * used[looked]) - 1).max(initial=0.0)))
        return worst


def _had(story: Story, tenant: str, end: float) -> tuple[list[float], list[float]]:
    """GPU-seconds of a tenant, cumulated: (moments, amounts)."""
    steps: dict[float, int] = {0.0: 0, end: 0}
    for run in story.runs:
        if run.job.startswith(f"{tenant}-"):
            for moment, gpus in ((run.began, gpu_count(run.gpus)), (min(run.ended, end), -gpu_count(run.gpus))):
                steps[moment] = steps.get(moment, 0) + gpus
    moments, amounts, held = [0.0], [0.0], 0
    for now, later in pairwise(sorted(steps)):
        held += steps[now]
        moments.append(later)
        amounts.append(amounts[-1] + held * (later - now))
    return moments, amounts


EQUAL = {"ada": 1.0, "bob": 1.0, "cy": 1.0, "dan": 1.0}
SIX = {"ada": 1.0, "bob": 2.0, "cy": 1.0, "dan": 2.0, "eve": 1.0, "fay": 1.0}
GANGS = (1, 2, 4, 8, 16)
ANY = tuple(range(1, 17))


def sized(cluster: str) -> int:
    return int(cluster.split(":")[1].split("@")[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "seed", "load", "gangs"),
    [
        ("gpu:128@8", 0, 3.0, GANGS),
        ("gpu:128@8", 1, 1.5, GANGS),
        ("gpu:128@8", 3, 1.15, GANGS),
        ("gpu:128@8", 7, 1.15, GANGS),
        ("gpu:64@8", 2, 3.0, GANGS),
        ("gpu:64@8", 5, 2.0, GANGS),
        ("gpu:64@4", 3, 2.0, GANGS),
        ("gpu:64@4", 8, 2.0, GANGS),
        ("gpu:96@8", 0, 2.0, ANY),
        ("gpu:96@8", 1, 2.0, ANY),
        ("gpu:96@8", 4, 1.5, ANY),
        ("gpu:128@8", 0, 3.0, ANY),
    ],
)
def test_every_hour_of_every_tenant_is_within_three_percent_of_its_share(
    cluster: str, seed: int, load: float, gangs: Iterable[int]
) -> None:
    end = 1200 + 2.2 * HOUR
    jobs = mixed(seed, EQUAL, gpus=sized(cluster), load=load, gangs=gangs)
    story = simulate(jobs, "gandiva-fair", cluster, placement="consolidate", until=end)
    assert Balance.of(story, EQUAL, end).worst(1260, end) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "load", "tickets"), [(4, 2.5, {"ada": 1.0, "bob": 2.0, "cy": 3.0, "dan": 2.0}), (1, 1.3, SIX), (2, 1.3, SIX)]
)
def test_hours_are_in_proportion_to_unequal_tickets(seed: int, load: float, tickets: dict[str, float]) -> None:
    end = 1200 + 2.2 * HOUR
    jobs = mixed(seed, tickets, gpus=128, load=load, gangs=GANGS)
    policy = "gandiva-fair:tickets=" + "/".join(f"{tenant}:{each}" for tenant, each in tickets.items())
    story = simulate(jobs, policy, "gpu:128@8", placement="consolidate", until=end)
    assert Balance.of(story, tickets, end).worst(1260, end) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "seed", "load", "gangs"), [("gpu:64@8", 102, 2.0, GANGS), ("gpu:64@8", 100, 2.0, ANY)])
def test_hours_are_within_three_percent_of_what_was_used_where_gangs_cannot_fill_the_gpus(
    cluster: str, seed: int, load: float, gangs: Iterable[int]
) -> None:
    """Of 64 GPUs with gangs of 8 and 16 and, in all, four GPUs of smaller ones: while these run four GPUs have nobody."""
    end = 1200 + 2.2 * HOUR
    jobs = mixed(seed, EQUAL, gpus=sized(cluster), load=load, gangs=gangs)
    story = simulate(jobs, "gandiva-fair", cluster, placement="consolidate", until=end)
    assert Balance.of(story, EQUAL, end).worst(1260, end, sized(cluster)) < 0.03


@pytest.mark.slow
def test_hardly_any_running_job_is_moved_for_that() -> None:
    story = simulate(mixed(0, EQUAL, gpus=64, load=2.0, gangs=GANGS), "gandiva-fair", "gpu:64@8", until=3 * HOUR)
    causes = [action.why for _, action in story.actions(Preempt)]
    assert len(causes) > 200
    assert causes.count(PreemptionCause.MOVED) < 0.1 * len(causes)


@pytest.mark.slow
def test_hours_are_fair_while_tenants_come_and_go() -> None:
    """Dan comes after two hours; Ada's jobs come to their end, one by one."""
    end = 6 * HOUR
    jobs = mixed(5, dict.fromkeys(("ada", "bob", "cy"), 1.0), gpus=128, load=2.0, gangs=GANGS)
    jobs = [replace(each, job=replace(each.job, duration=1.5 * HOUR)) if each.job.tenant == "ada" else each for each in jobs]
    jobs += [owned("dan", f"late{place}", at=2 * HOUR + place, gpus=GANGS[place % 5]) for place in range(16)]
    story = simulate(jobs, "gandiva-fair", "gpu:128@8", placement="consolidate", until=end)
    balance = Balance.of(story, EQUAL, end)
    assert {"ada", "dan"} <= set.union(*map(set, balance.backlogged))
    assert balance.backlogged[-1] == {"bob", "cy", "dan"}
    assert balance.worst(1260, end) < 0.03


@pytest.mark.slow
def test_jobs_of_a_tenant_share_its_time_and_large_gangs_do_not_starve() -> None:
    jobs = mixed(6, EQUAL, gpus=64, load=2.5, gangs=GANGS, end=1)
    story = simulate(jobs, "gandiva-fair", "gpu:64@8", placement="consolidate", until=6 * HOUR)
    for tenant in EQUAL:
        own = [each.job for each in jobs if each.job.tenant == tenant]
        part = 16 / sum(job.gpus for job in own)
        for job in own:
            had = sum(min(run.ended, 6 * HOUR) - run.began for run in story.runs_of(job.id)) / (6 * HOUR)
            assert had >= 0.75 * part, job


@pytest.mark.slow
def test_a_gang_larger_than_its_tenants_share_does_not_starve() -> None:
    """Ada's small jobs alone would come to her share of 16 GPUs; a fifth of the time all 64 are due to the wide one."""
    jobs = [owned("ada", "wide", gpus=64), *(owned("ada", f"slim{place}", gpus=4) for place in range(4))]
    jobs += [owned(tenant, str(place), gpus=GANGS[place % 5]) for tenant in ("bob", "cy", "dan") for place in range(6)]
    story = simulate(jobs, "gandiva-fair", "gpu:64@8", placement="consolidate", until=6 * HOUR)
    had = sum(min(run.ended, 6 * HOUR) - run.began for run in story.runs_of("ada-wide")) / (6 * HOUR)
    assert had == pytest.approx(0.2, abs=0.03)


def test_an_equal_division_gives_jobs_of_any_gang_the_same_gpu_time() -> None:
    jobs = [owned("ada", "wide", gpus=4), *(owned("ada", f"slim{place}", gpus=1) for place in range(4))]
    story = simulate(jobs, "gandiva-fair:division=equal", "gpu:4", until=5 * HOUR)
    had = {each.job.id: 0.0 for each in jobs}
    for run in story.runs:
        had[run.job] += (min(run.ended, 5 * HOUR) - run.began) * gpu_count(run.gpus) / HOUR
    assert list(had.values()) == pytest.approx([4.0] * 5, abs=0.2)


def test_nobody_is_woken_or_preempted_while_nobody_waits() -> None:
    jobs = [owned("ada", str(place), at=10.0 * place, gpus=2, seconds=500) for place in range(40)]
    story = simulate(jobs, "gandiva-fair", "gpu:128@8")
    assert story.preemptions == 0
    assert not story.actions(WakeAt)


def test_time_slicing_ends_when_nobody_waits_any_more() -> None:
    jobs = [owned("ada", "a", gpus=4, seconds=600), owned("bob", "b", gpus=4, seconds=5000)]
    story = simulate(jobs, "gandiva-fair", "gpu:4")
    ended = story.finishes["ada-a"]
    assert ended == pytest.approx(1200, abs=60)
    assert not [now for now, _ in story.actions(Preempt) if now > ended]
    assert not [action for now, action in story.actions(WakeAt) if now > ended + 60]


def test_gpus_freed_inside_a_quantum_go_to_those_who_wait() -> None:
    jobs = [owned("ada", "a", gpus=4, seconds=5), owned("bob", "b", gpus=4, seconds=100)]
    assert simulate(jobs, "gandiva-fair", "gpu:4").starts == {"ada-a": 0, "bob-b": 5}


def test_equal_jobs_spread_over_nodes_to_within_one_job() -> None:
    """Those of one node come to their end; the others move over, until no node has two jobs more than another."""
    jobs = [owned("ada", f"short{place}", gpus=1, seconds=600) for place in range(4)]
    jobs += [owned("ada", f"long{place}", at=1, gpus=1) for place in range(20)]
    story = simulate(jobs, "gandiva-fair:cost=0", "gpu:16@4", until=4 * HOUR)
    lives = {launch.job: launch.gpus[0].node for _, launch in story.actions(Launch)}
    counts = [sum(node == each for job, node in lives.items() if "long" in job) for each in range(4)]
    assert max(counts) - min(counts) <= 1, counts


def test_a_gang_gets_a_whole_node_by_moving_small_jobs_to_where_there_is_room() -> None:
    small = [owned("ada", f"s{place}", gpus=3, seconds=5000) for place in range(2)]
    one = [owned("ada", "one", at=1, gpus=1, seconds=100), owned("ada", "two", at=1, gpus=1, seconds=5000)]
    story = simulate([*small, *one, owned("bob", "wide", at=400, gpus=4, seconds=100)], "gandiva-fair", "gpu:12@4")
    assert story.starts["bob-wide"] == 400


MODELS = {"vae": "VAE", "super": "SuperResolution", "lstm": "LSTM", "resnext": "ResNeXt50"}


def four_tenants() -> list[TraceJob]:
    return [
        owned(tenant, str(place), at=place, gpus=(1, 2, 4)[place % 3], model=model)
        for place in range(30)
        for tenant, model in MODELS.items()
    ]


def gpus_by_type(story: Story, tenant: str, since: float, until: float) -> list[float]:
    topology = Topology(story.cluster)
    found = [0.0] * len(topology.types)
    for run in story.runs:
        if run.job.startswith(f"{tenant}-") and run.ended > since:
            seconds = min(run.ended, until) - max(run.began, since)
            found[topology.type_of[run.gpus[0].node]] += gpu_count(run.gpus) * seconds / (until - since)
    return found


@pytest.mark.slow
def test_without_trades_every_tenant_gets_its_part_of_every_type() -> None:
    story = simulate(four_tenants(), "gandiva-fair:trade=off", "v100:12,p100:24,k80:128", until=2 * HOUR)
    for tenant in MODELS:
        assert gpus_by_type(story, tenant, 300, 2 * HOUR) == pytest.approx([3, 6, 32], rel=0.03)
    assert not story.actions(Traded)


@pytest.mark.slow
def test_trades_are_carried_out_as_the_journal_says() -> None:
    story = simulate(four_tenants(), "gandiva-fair", "v100:12,p100:24,k80:128", until=2 * HOUR)
    last = {action.tenant: action.gpus for _, action in story.actions(Entitled)}
    want = {"vae": (0, 0, 56.81), "super": (0, 0, 56.81), "lstm": (0, 21.15, 14.38), "resnext": (12, 2.85, 0)}
    for tenant in MODELS:
        assert last[tenant] == pytest.approx(want[tenant], abs=0.01)
        assert gpus_by_type(story, tenant, 900, 2 * HOUR) == pytest.approx(want[tenant], rel=0.03, abs=0.1)
    prices = {(action.buyer, action.fast, action.slow): action.price for _, action in story.actions(Traded)}
    assert prices["resnext", "v100", "k80"] == pytest.approx(4.81, abs=1e-6)
    assert prices["lstm", "p100", "k80"] == pytest.approx(1.73, abs=1e-6)


def test_speedups_count_only_once_jobs_have_run_on_both_types() -> None:
    jobs = [owned(tenant, str(place), gpus=1, model=MODELS[tenant]) for place in range(6) for tenant in ("vae", "resnext")]
    seen = simulate(jobs, "gandiva-fair", "v100:4,k80:4", until=HOUR).actions(Traded)
    known = simulate(jobs, "gandiva-fair:profile=known", "v100:4,k80:4", until=HOUR).actions(Traded)
    assert known[0][0] == 0
    assert seen[0][0] == 60
    assert seen[-1][1] == known[-1][1]


def test_entitlements_are_told_when_they_change_and_not_otherwise() -> None:
    story = simulate([owned(tenant, "j", gpus=4) for tenant in ("ada", "bob")], "gandiva-fair", "gpu:4", until=2 * HOUR)
    assert story.actions(Entitled) == [(0, Entitled("ada", (2.0,))), (0, Entitled("bob", (2.0,)))]


def test_a_job_moves_to_a_faster_type_that_stands_idle_once_that_is_known_to_pay() -> None:
    jobs = [
        owned("rex", "first", gpus=4, seconds=400, model="ResNeXt50"),
        owned("rex", "second", at=1, gpus=4, seconds=9000, model="ResNeXt50"),
        owned("rex", "third", at=500, gpus=4, seconds=50, model="ResNeXt50"),
    ]
    story = simulate(jobs, "gandiva-fair", "v100:4,k80:8")
    topology = Topology(story.cluster)
    types = [topology.types[topology.type_of[run.gpus[0].node]] for run in story.runs_of("rex-second")]
    assert types == ["k80", "v100"]
    assert story.runs_of("rex-second")[1].began == story.finishes["rex-first"]
