"""What the audit measures, on outcomes whose answers are known: a check that sees nothing fails here."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_job

from poise.analysis.fairness import rho
from poise.analysis.stints import Stint
from poise.assembly import Experiment
from poise.audit import envy, lying, pareto, sharing, slices, starving
from poise.audit.bundles import Bundles
from poise.audit.dominating import WAITS, Lasting, Moment, _programmed, _tried
from poise.audit.findings import Case, Finding
from poise.audit.instances import Among, Instance
from poise.audit.lies import Hearsay, Lie
from poise.audit.playing import Played, Spell, play
from poise.core.settings import Cadence, Settings
from poise.model.cluster import parse_cluster
from poise.model.job import Job
from poise.model.speed import Locality
from poise.policies.gandiva_fair.trading import both_gain, trade
from poise.throughput.measured import Alone, JobClass, Throughputs
from poise.throughput.speeds import Speeds
from poise.traces.schema import Trace, TraceJob

G = np.array([[40.0, 10.0], [12.0, 4.0], [100.0, 50.0]])
"""Speeds of the running example of Gavel's policies: one V100, one K80."""


def an_instance(
    *jobs: TraceJob,
    policy: str = "fifo",
    cluster: str = "gpu:1",
    turn: float = 1.0,
    until: float = inf,
    among: Among = Among.JOBS,
) -> Instance:
    """Exact: decisions at every change, and no rounds."""
    settings = Settings(cadence=Cadence.EVENTS)
    experiment = Experiment(parse_cluster(cluster), policy, placement="count", settings=settings, until=until)
    return Instance(Trace("by hand", jobs), experiment, turn, among)


def by_agent(cases: list[Case]) -> dict[str, Case]:
    return {case.data["agent"]: case for case in cases}


def of(tenant: str, job: TraceJob) -> TraceJob:
    return replace(job, job=replace(job.job, tenant=tenant))


# Findings


def a_case(measured: float, bound: float = 1.0) -> Case:
    return Case(measured, bound, f"measured {measured}", {"agent": "a"})


def test_a_finding_shows_the_case_that_is_furthest_beyond_its_bound() -> None:
    finding = Finding.of([a_case(5.0, bound=6.0), a_case(3.0), a_case(0.5)])
    assert finding.holds is False
    assert finding.document() == {
        "holds": False,
        "worst": 3.0,
        "bound": 1.0,
        "cases": 3,
        "counterexample": {"agent": "a", "text": "measured 3.0"},
    }


def test_what_is_within_its_bound_is_no_counterexample_and_nothing_measured_is_no_verdict() -> None:
    assert Finding.of([a_case(1.0 + 1e-12)]).document()["counterexample"] is None
    assert Finding.of([]).holds is None
    assert Finding.of([a_case(inf)]).document()["worst"] is None


# Sharing incentive


def test_alone_on_a_slice_is_the_closed_form_where_the_number_of_agents_stands_still() -> None:
    slices_of_eight = sharing.Slices.of([(0.0, 100.0)] * 8, 4, 1)
    assert slices_of_eight.alone(0.0, 30.0) == pytest.approx(60.0)
    assert sharing.Slices.of([(0.0, 100.0)] * 8, 4, 2).alone(0.0, 20.0) == pytest.approx(80.0)
    assert sharing.Slices.of([(0.0, 100.0)] * 2, 4, 1).alone(0.0, 30.0) == pytest.approx(30.0), "no faster than a whole GPU"


def test_alone_on_a_slice_follows_the_number_of_agents() -> None:
    spans = [(0.0, 10.0)] * 6 + [(10.0, 50.0)] * 8
    assert sharing.Slices.of(spans, 4, 1).alone(0.0, 10.0) == pytest.approx(10.0 + (10.0 - 10 * 4 / 6) / 0.5)
    assert sharing.Slices.of(spans, 4, 1).alone(40.0, 15.0) == pytest.approx(10.0 + 10.0), "nobody else is left after 50 s"


def test_the_second_of_two_equal_jobs_in_a_queue_is_worse_off_than_on_half_a_gpu() -> None:
    played = play(an_instance(a_job("first", seconds=10), a_job("second", seconds=10)))
    found = by_agent(list(sharing.cases(played)))
    assert found["first"].measured == pytest.approx(10 / 15)
    assert found["second"].measured == pytest.approx(20 / 15)
    assert found["second"].bound == pytest.approx(17 / 15), "two turns of a second"
    assert not found["second"].holds


def test_sharing_incentive_is_rho_where_the_number_of_jobs_stands_still() -> None:
    played = play(an_instance(*(a_job(f"{place}", gpus=2, seconds=100) for place in range(2)), cluster="gpu:4"))
    measured = [case.measured for case in sharing.cases(played)]
    assert measured == pytest.approx(rho(played.history, played.history.ran()).tolist())
    assert measured == pytest.approx([1.0, 1.0])


def test_a_tenant_is_compared_with_itself_on_a_slice_of_whole_gpus() -> None:
    jobs = [of("long", a_job("l", seconds=100)), of("short", a_job("s", at=1, seconds=10))]
    found = by_agent(list(slices.cases(play(an_instance(*jobs, cluster="gpu:2", among=Among.TENANTS)))))
    assert found["short"].data["slice"] == "gpu:1@1"
    assert found["short"].measured == found["long"].measured == 1.0


def test_where_a_slice_would_have_no_gpu_the_whole_cluster_is_slower() -> None:
    jobs = [of("a", a_job("a", seconds=10)), of("b", a_job("b", seconds=10))]
    found = by_agent(list(slices.cases(play(an_instance(*jobs, among=Among.TENANTS)))))
    assert found["a"].data["slice"] == "gpu:1@1 at 1/2 of its speed"
    assert (found["a"].measured, found["b"].measured) == (0.5, 1.0)


def test_a_slice_has_its_part_of_every_type_or_there_is_none() -> None:
    cluster = parse_cluster("v100:8,k80:6")
    assert str(slices.slice_of(cluster, 3)) == "v100:2@2,k80:2@2"
    assert slices.slice_of(cluster, 7) is None


# Envy


def bundles(held: list[list[float]], speedups: list[float], demand: float = 100.0) -> Bundles:
    """What tenants hold of a slow and a fast type for one second."""
    rows = np.array(held)[:, :, None]
    return Bundles(
        agents=tuple("abcdef"[: len(held)]),
        seconds=np.ones(1),
        held=rows,
        demand=np.full((len(held), 1), demand),
        active=np.full(1, float(len(held))),
        worth=np.array([[1 / speedup, 1.0] for speedup in speedups]),
        mix=np.array([0.5, 0.5]),
        gpus=24,
    )


@pytest.mark.parametrize("price", [1.0, 1.2, 2.0, 5.9, 6.0, 7.0])
def test_the_worth_of_bundles_says_who_gains_by_a_trade(price: float) -> None:
    """A fast GPU of the first for `price` slow ones of the second (acceptance 28)."""
    before, after = bundles([[4, 4], [4, 4]], [1.2, 6.0]), bundles([[4 + price, 3], [4 - price, 5]], [1.2, 6.0])
    gains = [float(after.value(who, who)[0] - before.value(who, who)[0]) for who in (0, 1)]
    assert (min(gains) > 1e-9) is both_gain(price, buyer=6.0, seller=1.2)


def test_the_worth_of_bundles_is_that_of_the_worked_trades() -> None:
    """Acceptance 29: K80-equivalents 8.8 → 10.4, 28 → 36, 12 → 13.6."""
    speedups = [1.2, 6.0, 2.0]
    after, _ = trade(dict.fromkeys(range(3), (4.0, 4.0)), dict(enumerate(speedups)), slow=0, fast=1)
    held = bundles([list(after[place]) for place in range(3)], speedups)
    equivalents = [float(held.value(who, who)[0]) * speedup for who, speedup in enumerate(speedups)]
    assert equivalents == pytest.approx([10.4, 36.0, 13.6])
    assert [float(held.fair(who)[0]) * speedup for who, speedup in enumerate(speedups)] == pytest.approx([8.8, 28.0, 12.0])


def test_envy_may_remain_after_a_trade() -> None:
    """Acceptance 30: the third, who had .34 to begin with, would rather have what the second bought."""
    held = bundles([[1, 0.1908], [0, 0.4125], [0, 0.3967]], [4.0, 6.0, 8.0])
    value = [[float(held.value(to, of)[0]) for of in range(3)] for to in range(3)]
    assert value[2][1] > value[2][2]
    assert value[0][0] == max(value[0])
    assert value[1][1] == max(value[1])


def test_nobody_values_more_gpus_than_its_jobs_can_use() -> None:
    held = bundles([[0, 1], [0, 8]], [2.0, 2.0], demand=1.0)
    assert float(held.value(0, 1)[0]) == float(held.value(0, 0)[0]) == 1.0


def test_who_waits_envies_who_runs_by_what_it_would_gain() -> None:
    """Two jobs on one GPU for 100 s: an equal slice is 50 s, and the second has got nothing."""
    played = play(an_instance(a_job("first", seconds=1000), a_job("second", seconds=1000), until=100.0))
    found = by_agent(list(envy.cases(played)))
    assert found["second"].measured == pytest.approx(2.0)
    assert found["second"].bound == pytest.approx(2 * 1.0 / 50), "two turns of a second"
    assert found["first"].measured == pytest.approx(-2.0)


def test_agents_that_hardly_met_are_not_compared() -> None:
    played = play(an_instance(a_job("first", seconds=3), a_job("second", at=1, seconds=3)))
    assert list(envy.cases(played)) == []


# Pareto efficiency


def test_equal_slices_can_be_improved_upon_for_everybody_and_max_min_shares_cannot() -> None:
    """Acceptance 2: in the running example everybody can be 1/11 faster than isolated."""
    size, gpus = np.ones(3), np.ones(2)
    isolated = G.mean(axis=1) * 2 / 3
    gain, better = Lasting(G, size, gpus, isolated).better()
    assert (better >= isolated - 1e-6).all()
    assert gain == pytest.approx(float(np.sum((better - isolated) / G.max(axis=1))))
    assert gain > 0.09 * float(np.sum(isolated / G.max(axis=1)))
    shares = np.array([[5, 0], [5, 1], [1, 10]]) / 11
    assert Lasting(G, size, gpus, (G * shares).sum(axis=1)).better()[0] == pytest.approx(0.0, abs=1e-6)


def test_equal_slices_cannot_be_improved_upon_where_types_are_alike() -> None:
    """Acceptance 3 and 16: blind to types, isolated is the best there is, and everybody has 2/3 of a GPU."""
    assert Lasting(np.ones((3, 2)), np.ones(3), np.ones(2), np.full(3, 2 / 3)).better()[0] == pytest.approx(0.0, abs=1e-6)


def a_moment(speed: list[list[float]], held: list[int], gpus: list[int], gang: list[int] | None = None) -> Moment:
    return Moment(np.array(speed), np.array(gang or [1] * len(held)), np.array(gpus), np.array(held))


def test_two_jobs_on_each_others_types_are_found() -> None:
    gain, better = a_moment([[4.0, 1.0], [2.0, 2.0]], [1, 0], [1, 1]).better()
    assert (gain, better.tolist()) == (0.75, [0, 1])


def test_an_idle_gpu_is_found_only_if_a_whole_gang_can_use_it() -> None:
    assert a_moment([[1.0], [1.0]], [0, WAITS], [3], [1, 2]).better()[0] == 1.0
    assert a_moment([[1.0], [1.0]], [0, WAITS], [2], [1, 2]).better()[0] == 0.0


def test_nobody_is_slowed_down_for_a_gain_of_others() -> None:
    """The first would lose by half of what it has, and the second would gain five times that."""
    assert a_moment([[2.0, 1.0], [6.0, 1.0]], [0, 1], [1, 1]).better()[0] == 0.0


@given(st.integers(0, 10_000))
def test_an_integer_program_finds_what_trying_everything_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    jobs, types = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    speed = np.round(rng.uniform(0, 5, (jobs, types)), 1)
    gang, gpus, held = rng.integers(1, 3, jobs), rng.integers(1, 5, types), np.full(jobs, WAITS)
    left = gpus.copy()
    for job in range(jobs):
        kind = int(rng.integers(-1, types))
        if kind >= 0 and speed[job, kind] > 0 and gang[job] <= left[kind]:
            held[job], left[kind] = kind, left[kind] - gang[job]
    moment = Moment(speed, gang, gpus, held)
    options = [moment._options(job) for job in range(jobs)]
    values = [moment._value(find(moment, options)) for find in (_tried, _programmed)]
    assert values[0] == pytest.approx(values[1])
    assert moment.better()[0] >= -1e-12


def a_mixed_table(**speedups: float) -> Throughputs:
    """Models that do one step a second on a K80, and so many times as much on a V100."""
    rows = [
        Alone(JobClass(model), gpu_type, 1, Locality.PACKED, rate)
        for model, speedup in speedups.items()
        for gpu_type, rate in (("v100", speedup), ("k80", 1.0))
    ]
    return Throughputs.of("by hand", "k80", rows)


def a_mixed_instance(policy: str, steps: dict[str, float], speedups: dict[str, float], until: float = inf) -> Instance:
    jobs = tuple(TraceJob(Job(name, 0.0, 1, steps=work, tenant=name, model=name)) for name, work in steps.items())
    drawn = an_instance(*jobs, policy=policy, cluster="v100:1,k80:1", until=until)
    return replace(drawn, experiment=replace(drawn.experiment, throughputs=a_mixed_table(**speedups)))


def test_a_job_that_is_left_on_a_slow_gpu_is_seen_moment_by_moment() -> None:
    """`a` is done on the V100 after 10 s; `b` stays on the K80 for 100 s although it is 4 times as fast on the V100."""
    played = play(a_mixed_instance("fifo", {"a": 40.0, "b": 100.0}, {"a": 4.0, "b": 4.0}))
    (case,) = pareto.at_moments(played)
    assert case.measured == pytest.approx(0.75 * 90 / (10 + 100))
    assert case.bound == pytest.approx(2 / 55), "of lives of 55 s on average"
    assert "b ran on k80 and could have run on v100" in case.text
    assert not case.holds


def test_shares_that_others_would_better_are_seen_in_the_long() -> None:
    """Each has what it can use less of: 1 + 1 steps/s, where 4 + 1 are to be had."""
    played = play(a_mixed_instance("fifo", {"slow": 1e6, "fast": 1e6}, {"slow": 1.0, "fast": 4.0}, until=100.0))
    (case,) = pareto.in_the_long(played)
    assert case.measured == pytest.approx((4.0 - 1.0) / 4.0 / 2)
    assert case.data["could_have"] == pytest.approx([1.0, 4.0])


# Lies


def test_owners_are_believed_and_the_world_stays_true() -> None:
    table, cluster = a_mixed_table(m=4.0), parse_cluster("v100:1,k80:1")
    job = Job("j", 0.0, 1, steps=100.0, model="m")
    kind, estimate, steps = Hearsay(table, cluster, {"j": Lie((("v100", 2.0), ("k80", 0.0)), 0.5)}).resolve(job)
    true_kind, true_estimate, _ = Speeds(table, cluster).resolve(job)
    assert kind != true_kind
    assert ([row[0] for row in estimate.rates], steps) == ([8.0, 0.0], 50.0)
    assert [row[0] for row in true_estimate.rates] == [4.0, 1.0]
    assert Hearsay(table, cluster, {}).resolve(job) == Speeds(table, cluster).resolve(job)


def test_a_lie_about_size_moves_a_job_to_the_front_and_takes_none_of_its_work() -> None:
    """12 s and 10 s on one GPU: honest, the longer one is done after 22 s; as one of 6 s after 12."""
    honest = play(an_instance(a_job("long", seconds=12), a_job("short", seconds=10), policy="srtf"))
    liar = lying.Liar.of(honest, "long", [honest.instance.trace.jobs[0].job])
    found = {each.case.data["lie"]: each.case for each in lying.by_completion(honest, liar, liar.about_sizes())}
    half = found["says that it has 0.5 times its work"]
    assert (half.data["honest_seconds"], half.data["lying_seconds"]) == (22.0, 12.0)
    assert half.measured == pytest.approx(10 / 22)
    assert half.bound == pytest.approx(2 / 22)
    assert found["says that it has 2 times its work"].measured == 0.0


@pytest.mark.parametrize(("policy", "gains"), [("fifo", False), ("srtf", True)])
def test_a_lie_about_speed_is_measured_by_true_progress(policy: str, gains: bool) -> None:
    """Three jobs for two GPUs: the third gets none, unless it may say that it will be done soon."""
    steps = {"a": 1000.0, "b": 1100.0, "c": 1300.0}
    honest = play(a_mixed_instance(policy, steps, {"a": 2.0, "b": 2.0, "c": 2.0}, until=100.0))
    liar = lying.Liar.of(honest, "c", [honest.instance.trace.jobs[2].job])
    worst = max((each.case for each in lying.by_progress(honest, liar, liar.about_speeds())), key=lambda case: case.excess)
    assert worst.data["honest_steps"] == 0.0
    assert worst.holds is not gains
    if gains:  # with the V100 for 100 s, 200 steps; an equal slice is a GPU of the mix for 2/3 of the time
        assert worst.measured == pytest.approx(200 / (1.5 * 100 * 2 / 3))


def test_liars_are_those_with_the_largest_the_middle_and_the_smallest_speedup() -> None:
    speedups = {"a": 2.0, "b": 5.0, "c": 1.5, "d": 3.0}
    honest = play(a_mixed_instance("fifo", dict.fromkeys(speedups, 10.0), speedups))
    assert [liar.agent for liar in lying.liars(honest)] == ["b", "a", "c"]


# Starvation


def test_equal_shares_are_processor_sharing() -> None:
    instance = an_instance(a_job("first", seconds=10), a_job("second", at=5, seconds=10))
    taken = starving.equal_shares(instance, play(instance).truths)
    assert taken == pytest.approx({"first": 15.0, "second": 15.0})


def test_equal_shares_serve_a_gang_for_as_much_of_the_time_as_its_slice_allows() -> None:
    instance = an_instance(a_job("wide", gpus=2, seconds=10), a_job("narrow", seconds=10), cluster="gpu:2")
    assert starving.equal_shares(instance, play(instance).truths) == pytest.approx({"wide": 15.0, "narrow": 10.0})


def test_time_passed_over_is_what_others_who_came_later_had() -> None:
    jobs = (a_job("long", seconds=10), a_job("short", at=2, seconds=5), a_job("last", at=3, seconds=20))
    srtf = by_agent(list(starving.cases(play(an_instance(*jobs, policy="srtf")))))
    assert srtf["long"].data["passed_over_seconds"] == 5.0
    assert srtf["last"].data["passed_over_seconds"] == 0.0
    fifo = starving.cases(play(an_instance(*jobs, policy="fifo")))
    assert [case.measured for case in fifo] == [0.0, 0.0, 0.0]


def test_a_job_that_a_stream_keeps_out_is_starved() -> None:
    """A gang of two, and single jobs that leave one GPU at a time: it has none when the window closes."""
    stream = [a_job(f"s{place}", at=float(place), seconds=2) for place in range(60)]
    jobs = sorted((a_job("gang", at=0.5, gpus=2, seconds=4), *stream), key=lambda each: each.job.submitted)
    played = play(replace(an_instance(*jobs, policy="fifo-skip", cluster="gpu:2", until=60.0), marked=("gang",)))
    (case,) = starving.cases(played)
    assert case.data["finished"] is False
    assert case.data["passed_over_seconds"] == pytest.approx(59.0, abs=1.0)
    assert not case.holds


# What was held


def test_gpus_that_two_jobs_share_count_half_for_each() -> None:
    jobs = [a_job(name, seconds=100, model="ResNet18") for name in ("a", "b")]
    played = play(an_instance(*jobs, policy="fifo", cluster="v100:1", until=50.0))
    stints = played.history.stints
    beside = Stint("b", 10.0, stints[0].end, stints[0].gpus, stints[0].ended)
    together = replace(played, history=replace(played.history, stints=[*stints, beside]))
    assert [(spell.job, spell.start, spell.end, spell.gpus) for spell in together.spells] == [
        ("a", 0.0, 10.0, 1.0),
        ("a", 10.0, 50.0, 0.5),
        ("b", 10.0, 50.0, 0.5),
    ]


def test_progress_is_true_speed_times_time_less_what_starts_cost() -> None:
    drawn = a_mixed_instance("fifo", {"a": 1e6, "b": 1e6}, {"a": 4.0, "b": 2.0}, until=100.0)
    truth = replace(drawn.experiment.truth, restart_overhead=10.0)
    played = play(replace(drawn, experiment=replace(drawn.experiment, truth=truth)))
    jobs = [each.job for each in drawn.trace.jobs]
    assert [played.progress(job) for job in jobs] == [360.0, 90.0]
    assert isinstance(played, Played)
    assert played.held_by("a") == [Spell("a", 0.0, 100.0, 0, 1.0)]
