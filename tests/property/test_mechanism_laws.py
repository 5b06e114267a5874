"""Laws of the mechanism of rounds: shares are received in the long run, nobody starves, skipped rounds are not missed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tests.builders import Story, a_job, simulate
from tests.strategies import choices

from poise.lab.traces.schema import TraceJob
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.mechanism.rounds import Rounds
from poise.scheduler.mechanism.share_accounts import ShareAccounts
from poise.scheduler.model.action import Launch, Preempt
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.plan import Policy
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import Topology
from poise.scheduler.model.workload import Allocation, Filling, Workload
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs, Together

MODELS = {"a": 1.0, "b": 2.0, "c": 3.0}
ROUND = 10.0

PACKED = (
    "max-min+packed",
    "max-throughput+packed",
    "max-min+packed+plain",
    "finish-time+packed",
    "makespan+packed",
    "max-min:then=water-filling+packed",
)
CLUSTERS = ("v100:2", "v100:2,k80:2", "v100:4", "v100:2@1", "v100:4@2,k80:2@1", "v100:1")


def known_pairs() -> Throughputs:
    """Three models on two types, every pair of them measured: each has 0.7 of its speed beside another."""
    types = {"v100": 1.0, "k80": 0.5}
    alone = [
        Alone(JobClass(model), gpu_type, gang, Locality.PACKED, rate * gang * factor)
        for model, rate in MODELS.items()
        for gpu_type, factor in types.items()
        for gang in (1, 2)
    ]
    together = [
        Together(JobClass(one), JobClass(other), t, gang, (0.7 * MODELS[one] * gang * f, 0.7 * MODELS[other] * gang * f))
        for one in MODELS
        for other in MODELS
        if one <= other
        for t, f in types.items()
        for gang in (1, 2)
    ]
    return Throughputs.of("pairs", "v100", alone, together)


PAIRS = known_pairs()
EVEN = Throughputs.of("even", "v100", [Alone(JobClass("m"), t, 1, Locality.PACKED, 1.0) for t in ("v100", "p100", "k80")])

traces = st.lists(
    choices((0.0, 0.0, 0.0, 5.0, 30.0), (1, 1, 2), (7.0, 25.0, 40.0, 100.0), tuple(MODELS)), min_size=1, max_size=6
)
arrangements = choices(
    tuple(Cadence), (True, False), (0.0, 25.0), (0.0, 1.0), ("count", "consolidate"), CLUSTERS, tuple(Filling)
)


def a_trace(parts: list[tuple[Any, ...]]) -> list[TraceJob]:
    return [a_job(f"j{i}", at=at, gpus=gpus, seconds=secs, model=m) for i, (at, gpus, secs, m) in enumerate(parts)]


def played(trace: list[TraceJob], policy: str, arrangement: tuple[Any, ...]) -> Story:
    cadence, backfill, recompute, patience, placement, cluster, filling = arrangement
    settings = Settings(
        cadence=cadence, round=ROUND, backfill=backfill, recompute=recompute, patience=patience, filling=filling
    )
    table = PAIRS.flat() if placement == "count" else PAIRS
    fitting = [each for each in trace if cluster != "v100:1" or each.job.gpus == 1]
    return simulate(fitting, policy, cluster, settings=settings, placement=placement, believed=table)


# Pairs


def steps_done(story: Story, job: str) -> tuple[float, float]:
    """Steps that a job would have done at the least and at the most, by what it was given: 0.7 of its speed, and all."""
    runs = story.runs_of(job)
    most = sum(run.seconds * story.rate(run) for run in runs)
    return 0.7 * most, most


@given(parts=traces, policy=st.sampled_from(PACKED), arrangement=arrangements)
def test_worlds_in_which_all_pairs_are_known_run_to_their_end(
    parts: list[tuple[Any, ...]], policy: str, arrangement: tuple[Any, ...]
) -> None:
    story = played(a_trace(parts), policy, arrangement)
    assert set(story.finishes) == {each.job.id for each in story.jobs}
    shares = [
        (one.job, other.job)
        for one in story.runs
        for other in story.runs
        if one.job < other.job and one.gpus == other.gpus and one.began < other.ended and other.began < one.ended
    ]
    event("somebody shares" if shares else "nobody shares")


@given(parts=traces, policy=st.sampled_from(PACKED), arrangement=arrangements)
def test_no_gpu_has_three_jobs_and_two_share_all_of_theirs(
    parts: list[tuple[Any, ...]], policy: str, arrangement: tuple[Any, ...]
) -> None:
    story = played(a_trace(parts), policy, arrangement)
    for moment in {run.began for run in story.runs}:
        there = [run for run in story.runs if run.began <= moment < run.ended]
        for run in there:
            beside = [other for other in there if other is not run and overlap(run.gpus, other.gpus)]
            assert len(beside) <= 1
            assert all(set(other.gpus) == set(run.gpus) for other in beside)


def overlap(one: Any, other: Any) -> bool:
    return any(a.node == b.node and a.mask & b.mask for a in one for b in other)


@given(parts=traces, policy=st.sampled_from(PACKED), arrangement=arrangements)
def test_jobs_are_never_slower_than_beside_another_nor_faster_than_alone(
    parts: list[tuple[Any, ...]], policy: str, arrangement: tuple[Any, ...]
) -> None:
    story = played(a_trace(parts), policy, arrangement)
    for each in story.jobs:
        least, most = steps_done(story, each.job.id)
        _, _, asked = story.speeds.resolve(each.job)
        assert least <= asked * (1 + 1e-6)
        assert most >= asked * (1 - 1e-6)


# Skipped rounds


@contextmanager
def no_round_skipped() -> Iterator[None]:
    """The mechanism looks again at the end of each round."""

    def next_end(rounds: Rounds, standing: ShareAccounts, workload: Workload, *_: object) -> float:
        return standing.origin + (round((workload.now - standing.origin) // rounds.round) + 1) * rounds.round

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounds, "_next_due", next_end)
        yield


def told(story: Story) -> list[Any]:
    """Launches, preemptions and ends, with their moments."""
    launches = [(now, action.job, action.gpus) for now, action in story.actions(Launch)]
    preemptions = [(now, action.job) for now, action in story.actions(Preempt)]
    return [launches, preemptions, story.finishes]


UNPACKED = ("max-min", "finish-time", "makespan", "max-throughput", "isolated", "max-min+agnostic", "max-min+packed")


@given(parts=traces, policy=st.sampled_from(UNPACKED), arrangement=arrangements)
def test_skipping_rounds_changes_nothing(parts: list[tuple[Any, ...]], policy: str, arrangement: tuple[Any, ...]) -> None:
    trace = a_trace(parts)
    skipping = played(trace, policy, arrangement)
    with no_round_skipped():
        looking = played(trace, policy, arrangement)
    assert told(skipping) == told(looking)
    event("rounds were skipped" if len(skipping.entries) < len(looking.entries) else "none was")


# Shares in the long run


ALL_ALONE: Mapping[int, int] = {}


@dataclass(frozen=True)
class Fixed:
    """Shares by row that never change."""

    shares: tuple[tuple[float, ...], ...]

    def start(self) -> None:
        return None

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        return Allocation(np.array(self.shares)[workload.rows]), memory


def received(
    shares: Floats,
    cluster: str,
    rounds: int,
    patience: float,
    gangs: Mapping[int, int] = ALL_ALONE,
    filling: Filling = Filling.LAST,
) -> Floats:
    """Fractions of the time by job and type. Jobs are gangs of one GPU unless `gangs` says otherwise."""
    jobs = [a_job(str(i), gpus=gangs.get(i, 1), seconds=1e9, model="m") for i in range(len(shares))]
    settings = Settings(cadence=Cadence.ROUNDS, round=ROUND, backfill=False, patience=patience, filling=filling)
    fixed = Policy("fixed", Fixed(tuple(map(tuple, shares.tolist()))))
    until = rounds * ROUND
    story = simulate(jobs, fixed, cluster, settings=settings, believed=EVEN, until=until)
    types = Topology(story.cluster).type_of
    got = np.zeros_like(shares)
    for run in story.runs:
        got[int(run.job), types[run.gpus[0].node]] += min(run.ended, until) - run.began
    fractions: Floats = got / until
    return fractions


@given(seed=st.integers(0, 2**32 - 1), gpus=st.integers(1, 3), more=st.integers(0, 4), patience=st.sampled_from((0.0, 1.0)))
def test_received_fractions_of_one_type_come_as_near_to_shares_as_rounds_allow(
    seed: int, gpus: int, more: int, patience: float
) -> None:
    random = np.random.default_rng(seed)
    shares = np.zeros((gpus + more, 1))
    for part in random.dirichlet(np.ones(5)):
        shares[random.choice(gpus + more, gpus, replace=False), 0] += part
    for rounds in (25, 100):
        off = abs(received(shares, f"v100:{gpus}", rounds, patience) - shares).max()
        assert off <= (1.5 + patience) / rounds


@given(
    seed=st.integers(0, 2**32 - 1),
    single=st.floats(0.1, 1.0),
    gangs=st.integers(2, 5),
    patience=st.sampled_from((0.0, 1.0)),
    filling=st.sampled_from(Filling),
)
def test_what_gangs_cannot_have_of_their_shares_all_lose_alike(
    seed: int, single: float, gangs: int, patience: float, filling: Filling
) -> None:
    """One job of one GPU beside gangs of two on four GPUs: two of them fit at a time, and beside the one a GPU is left.

    Their shares come to four GPUs, but to more than two jobs at a time, so that no order of rounds can keep them.
    """
    random = np.random.default_rng(seed)
    shares = np.zeros((gangs + 1, 1))
    shares[0] = single
    for part in random.dirichlet(np.ones(5)):
        shares[1 + random.choice(gangs, 2, replace=False), 0] += part * (1 - single / 4)
    assert shares[0, 0] + 2 * shares[1:].sum() == pytest.approx(4.0)
    kept = 2 / shares.sum()
    got = received(shares, "v100:4", 100, patience, dict.fromkeys(range(1, gangs + 1), 2), filling)
    assert abs(got - kept * shares).max() <= (1.5 + patience) / 100


@given(seed=st.integers(0, 2**32 - 1), patience=st.sampled_from((0.0, 1.0)))
def test_received_fractions_of_several_types_tend_to_shares(seed: int, patience: float) -> None:
    random = np.random.default_rng(seed)
    shares = np.zeros((3, 3))
    for part in random.dirichlet(np.ones(5)):
        shares[np.arange(3), random.permutation(3)] += part
    off = abs(received(shares, "v100:1,p100:1,k80:1", 60, patience) - shares).max()
    assert off <= 4.0 / 60


# Shares before leftovers


def laid_out(seed: int, jobs: int, gpus: tuple[int, int, int]) -> Floats:
    """Feasible shares of three types for jobs of one GPU: each has some of one or two types, some have none."""
    random = np.random.default_rng(seed)
    shares = random.random((jobs, 3)) * (random.random((jobs, 3)) < 0.4)
    shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1.0)
    shares *= np.minimum(1.0, np.array(gpus) / np.maximum(shares.sum(axis=0), 1e-9))
    return shares


def on_shares(shares: Floats, gpus: tuple[int, int, int], seconds: list[float], patience: float) -> Story:
    cluster = ",".join(f"{name}:{count}" for name, count in zip(("v100", "p100", "k80"), gpus, strict=True))
    jobs = [a_job(str(i), seconds=each, model="m") for i, each in enumerate(seconds)]
    fixed = Policy("fixed", Fixed(tuple(map(tuple, shares.tolist()))))
    settings = Settings(round=ROUND, patience=patience)
    return simulate(jobs, fixed, cluster, settings=settings, believed=EVEN, until=30 * ROUND)


def places(story: Story, moment: float) -> dict[int, int]:
    """GPU type of every job that runs just after this moment."""
    types = Topology(story.cluster).type_of
    return {int(run.job): types[run.gpus[0].node] for run in story.runs if run.began <= moment < run.ended}


some_gpus = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


@given(seed=st.integers(0, 2**32 - 1), gpus=some_gpus, jobs=st.integers(2, 9), patience=st.sampled_from((0.0, 1.0)))
def test_nobody_fills_up_a_type_while_a_job_with_a_share_of_it_has_no_share_where_it_is(
    seed: int, gpus: tuple[int, int, int], jobs: int, patience: float
) -> None:
    shares = laid_out(seed, jobs, gpus)
    story = on_shares(shares, gpus, [1e9] * jobs, patience)
    for number in range(30):
        there = places(story, (number + 0.5) * ROUND)
        fillers = {place for job, place in there.items() if shares[job, place] == 0}
        passed_over = [job for job in range(jobs) if job not in there or shares[job, there[job]] == 0]
        assert not any(shares[job, place] > 0 for job in passed_over for place in fillers)
        assert len(there) == min(jobs, sum(gpus))  # and no GPU idles beside a job that waits
    event("somebody fills" if any(shares[j, p] == 0 for j, p in places(story, 5.0).items()) else "nobody fills")


@given(
    seed=st.integers(0, 2**32 - 1),
    gpus=some_gpus,
    ends=st.lists(st.sampled_from((3.0, 14.0, 17.0, 26.0, 58.0, 1e9)), min_size=4, max_size=12),
)
def test_gpus_that_come_free_inside_a_round_go_to_those_with_a_share_of_them_first(
    seed: int, gpus: tuple[int, int, int], ends: list[float]
) -> None:
    shares = laid_out(seed, len(ends), gpus)
    story = on_shares(shares, gpus, ends, 1.0)
    types = Topology(story.cluster).type_of
    gone = {int(job): moment for job, moment in story.finishes.items()}
    for now in sorted({run.began for run in story.runs if run.began % ROUND}):
        started = {int(run.job): types[run.gpus[0].node] for run in story.runs if run.began == now}
        there = places(story, now)
        waits = [job for job in range(len(ends)) if job not in there and gone.get(job, now + 1) > now]
        fills = {place for job, place in started.items() if shares[job, place] == 0}
        passed_over = waits + [job for job, place in started.items() if shares[job, place] == 0]
        assert not any(shares[job, place] > 0 for job in passed_over for place in fills)
        assert not waits or len(there) == sum(gpus)
    event("somebody starts inside a round" if any(run.began % ROUND for run in story.runs) else "nobody does")


@pytest.mark.parametrize("policy", ["sjf", "max-min", "makespan", "finish-time", "max-throughput", "strategy-proof"])
def test_a_job_with_a_share_of_a_later_type_does_not_fill_up_an_earlier_one(policy: str) -> None:
    trace = [
        a_job("r", seconds=72_000.0, model="resnet50"),
        a_job("a", seconds=36_000.0, model="recommendation"),  # which is faster on a K80
    ]
    story = simulate(trace, policy, "v100:2,k80:2", settings=Settings())
    assert story.finishes["a"] == pytest.approx(25_754.3, abs=0.1)
    assert story.finishes["r"] == 72_000.0


# Starvation


def with_arrivals(old: TraceJob, seconds: float, cluster: str, rounds: int) -> tuple[float, float]:
    """Seconds that an endless job got and was due by max-min shares, while another job arrives in every round."""
    others = [a_job(f"n{i}", at=ROUND * i + 1.0, seconds=seconds, model="m") for i in range(rounds)]
    shares: dict[float, float] = {}
    gpus = int(cluster.partition(":")[2])

    def watch(scheduler: Any, entry: Any) -> None:
        weights = len(scheduler.state.active) - 1 + old.job.weight
        shares[entry.now // ROUND] = min(1.0, gpus * old.job.weight / weights / old.job.gpus)

    settings = Settings(round=ROUND, patience=1.0)
    until = rounds * ROUND
    story = simulate([old, *others], "max-min", cluster, settings=settings, believed=EVEN, until=until, watch=watch)
    got = sum(min(run.ended, until) - run.began for run in story.runs_of("old"))
    return got, sum(shares.values()) * ROUND


@pytest.mark.parametrize("seconds", [2.0, 5.0, 8.0, 10.0, 12.0, 20.0])
def test_a_job_gets_half_of_what_it_is_due_though_another_arrives_every_round(seconds: float) -> None:
    old = a_job("old", seconds=1e9, model="m")
    got, due = with_arrivals(old, seconds, "v100:1", 100)
    assert got >= 0.5 * due


def test_a_job_of_small_weight_does_not_starve_though_another_arrives_every_round() -> None:
    got, due = with_arrivals(a_job("old", seconds=1e9, weight=0.3, model="m"), 10.0, "v100:1", 100)
    assert got >= 0.5 * due


@pytest.mark.slow
def test_a_gang_does_not_starve_though_a_small_job_arrives_every_round() -> None:
    got, due = with_arrivals(a_job("old", seconds=1e9, gpus=2, model="m"), 10.0, "v100:2", 100)
    assert got >= 0.5 * due
