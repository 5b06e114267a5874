"""The audit as a whole: known truths, a policy that is unfair in every way, and what a tolerance may not hide."""

from dataclasses import replace

import pytest

from poise.lab.audit import pareto
from poise.lab.audit.audit import AUDITED, Task, audit, built_in_tasks, check_claims, clusters, trace_tasks
from poise.lab.audit.findings import Finding, Property
from poise.lab.audit.instance_run import run_instance
from poise.lab.audit.instances import CROWDED, STANDING, STREAMS, InstanceGenerator, turn_of
from poise.lab.audit.misreporting import LieKind
from poise.lab.audit.starvation import LASTS, cut, equal_shares
from poise.lab.experiment import Experiment, speeds_of
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim as Wish
from poise.scheduler.model.plan import Plan, PreemptionRule, Unfitting
from poise.scheduler.policies.catalogue import POLICIES, PolicyProperty
from poise.scheduler.policies.listing import Family, Listing

ANYWHERE = parse_cluster("gpu:1")
HONEST = (Property.SHARING_INCENTIVE, Property.ENVY_FREENESS, Property.PARETO_EFFICIENCY, Property.STARVATION_FREEDOM)


class Favourite:
    """Deliberately unfair: whoever says that it will be done soonest is served, and nobody else, though GPUs are idle."""

    def start(self) -> None:
        """It remembers nothing."""

    def plan(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """One claim, and everybody else is stopped."""
        soonest = [
            left / snapshot.estimate(row).best() for row, left in zip(snapshot.active, snapshot.steps_left, strict=True)
        ]
        first = min(range(len(soonest)), key=soonest.__getitem__, default=None)
        claims = () if first is None else (Wish(snapshot.active[first]),)
        return Plan(claims, Unfitting.SKIPPED, PreemptionRule.BY_RANK), memory


@pytest.fixture
def favourite(monkeypatch: pytest.MonkeyPatch) -> str:
    claims = tuple(AUDITED)
    listing = Listing("favourite", Family.MARKET, "", "", claims, Favourite, traits=POLICIES["fifo"].traits)
    monkeypatch.setitem(POLICIES, "favourite", listing)
    return "favourite"


def tasks(policy: str, seed: int = 0) -> list[Task]:
    return built_in_tasks(Experiment(ANYWHERE, policy), seed=seed)


def found(policy: str, *about: Property, seed: int = 0) -> dict[Property, Finding]:
    return audit(tasks(policy, seed), about)


def holds(policy: str, about: Property) -> bool | None:
    return found(policy, about)[about].holds


@pytest.mark.slow
def test_an_unfair_policy_is_caught_on_every_property(favourite: str) -> None:
    findings = audit(tasks(favourite))
    assert set(findings) == set(Property)
    for about, finding in findings.items():
        assert finding.holds is False, about
        assert finding.counterexample is not None
        assert finding.counterexample.text
        assert finding.counterexample.data["instance"]
    parts = {kind: part.holds for finding in findings.values() for kind, part in finding.parts.items()}
    assert parts == dict.fromkeys((*pareto.ParetoKind, *LieKind), False) | {
        LieKind.BUYERS_INFLATION: parts[LieKind.BUYERS_INFLATION]
    }


def test_a_claim_that_does_not_hold_is_contradicted(favourite: str) -> None:
    experiment = Experiment(ANYWHERE, favourite)
    answers = check_claims(experiment, found(favourite, Property.ENVY_FREENESS))
    assert [(answer.claim, answer.holds) for answer in answers] == [(PolicyProperty.NO_ENVY, False)]
    assert "agent-" in answers[0].text
    assert answers[0].document()["measured"] > 1


@pytest.mark.slow
def test_max_min_gives_sharing_incentive_to_single_gpu_jobs_and_srtf_does_not() -> None:
    assert holds("max-min", Property.SHARING_INCENTIVE) is True
    assert holds("srtf", Property.SHARING_INCENTIVE) is False


def test_fifo_is_not_free_of_envy_and_equal_slices_are() -> None:
    assert holds("fifo", Property.ENVY_FREENESS) is False
    assert holds("isolated", Property.ENVY_FREENESS) is True


@pytest.mark.slow
def test_max_min_is_efficient_and_equal_slices_are_not() -> None:
    assert holds("max-min", Property.PARETO_EFFICIENCY) is True
    assert holds("isolated", Property.PARETO_EFFICIENCY) is False


@pytest.mark.slow
def test_lies_about_sizes_help_where_sizes_are_looked_at() -> None:
    for policy, helps in (("srtf", True), ("las", False)):
        lies = audit(tasks(policy), [Property.STRATEGY_PROOFNESS], [LieKind.SIZES])[Property.STRATEGY_PROOFNESS]
        assert lies.parts[LieKind.SIZES].holds is not helps
        assert lies.parts[LieKind.BIDS].holds is None, "only what was asked for is measured"


@pytest.mark.slow
def test_a_queue_starves_nobody_and_the_shortest_first_do() -> None:
    assert holds("fifo", Property.STARVATION_FREEDOM) is True
    assert holds("srtf", Property.STARVATION_FREEDOM) is False


def test_inflated_speed_ups_help_where_the_shortest_go_first() -> None:
    """So that they do not help where GPUs are traded at a second price (a claim of the catalogue) is no blindness."""
    about = Property.STRATEGY_PROOFNESS
    lies = audit(tasks("sjf"), [about], [LieKind.INFLATION])[about].parts
    assert lies[LieKind.INFLATION].holds is False
    assert lies[LieKind.BUYERS_INFLATION].holds is False


@pytest.mark.slow
def test_the_same_seed_gives_the_same_findings_and_another_one_others() -> None:
    first, again, other = (found("srtf", *HONEST, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_agents_of_built_in_instances_are_tenants_with_models_of_their_own_and_ask_for_more_than_there_is() -> None:
    draw = InstanceGenerator(Experiment(ANYWHERE), 720.0, 0)
    for shape in STANDING:
        instance = draw.standing(shape)
        crowd = run_instance(instance).agents
        assert len(crowd) == shape.agents
        assert all({job.model for job in jobs} == {agent} for agent, jobs in crowd.items())
        assert sum(job.gpus for jobs in crowd.values() for job in jobs) > instance.experiment.cluster.gpus
    assert clusters()


def test_a_crowded_stream_outlasts_what_its_victims_would_need_three_times() -> None:
    instance = cut(InstanceGenerator(Experiment(ANYWHERE), 720.0, 1).crowded(CROWDED))
    taken = equal_shares(instance, speeds_of(instance.experiment)[1])
    victims = [each.job for each in instance.trace.jobs if each.job.id in instance.marked]
    assert len(victims) == 3
    assert max(job.submitted + LASTS * taken[job.id] for job in victims) == pytest.approx(instance.experiment.until, rel=0.2)


def test_turns_are_the_longest_of_leases_and_rounds() -> None:
    assert turn_of(Settings()) == 720.0
    assert turn_of(Settings(round=60.0)) == 600.0
    assert turn_of(replace(Settings(round=1800.0), patience=0.0)) == 1800.0


@pytest.mark.slow
def test_longer_turns_make_longer_instances_and_the_same_verdicts() -> None:
    experiment = Experiment(ANYWHERE, "srtf")
    usual, longer = (audit(built_in_tasks(experiment, turn=turn), HONEST) for turn in (720.0, 7200.0))
    assert {about: finding.holds for about, finding in usual.items()} == {
        about: each.holds for about, each in longer.items()
    }


def test_one_tenant_is_audited_job_by_job_and_several_as_tenants() -> None:
    instance = InstanceGenerator(Experiment(ANYWHERE, "srtf"), 720.0, 0).stream(STREAMS[0])
    one = replace(
        instance.trace,
        jobs=tuple(replace(each, job=replace(each.job, tenant="all")) for each in instance.trace.jobs),
    )
    several = audit(trace_tasks(instance.trace, instance.experiment), (Property.SHARING_INCENTIVE,))
    alone = audit(trace_tasks(one, instance.experiment), (Property.SHARING_INCENTIVE,))
    assert several[Property.SHARING_INCENTIVE].cases == alone[Property.SHARING_INCENTIVE].cases == len(one.jobs)
    assert alone[Property.SHARING_INCENTIVE].holds is False
    worst = several[Property.SHARING_INCENTIVE].worst
    assert worst is not None
    assert "slice" in worst.data


def test_claims_are_about_a_policy_by_its_name_alone_in_the_usual_settings() -> None:
    findings = found("isolated", Property.ENVY_FREENESS)
    usual = Experiment(ANYWHERE, "isolated")
    assert [(answer.claim, answer.holds, answer.text) for answer in check_claims(usual, findings)] == [
        (PolicyProperty.NO_ENVY, True, "")
    ]
    assert check_claims(replace(usual, settings=Settings(round=60.0)), findings) == []
    assert check_claims(replace(usual, policy="isolated+agnostic"), findings) == []
