"""What every entry of the catalogue owes: defaults that are as documented, any world survived, a page of its own."""

import inspect
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.builders import a_job, simulate

from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.job import Status
from poise.scheduler.model.plan import Order, Planner, Policy
from poise.scheduler.model.workload import Allocator
from poise.scheduler.placement.strategies import PLACEMENTS
from poise.scheduler.policies.catalogue import COMBINATORS, POLICIES, Capability, capabilities_of, policy_named
from poise.scheduler.policies.listing import UNSTATED

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "policies"

TRACE = [
    a_job("wide", gpus=4, seconds=50),
    a_job("narrow", gpus=1, seconds=400, weight=2),
    a_job("vgg", at=5, gpus=2, seconds=30, model="VGG16"),
    a_job("resnet", at=5, gpus=2, seconds=100, model="ResNet50"),
    a_job("again", at=20, gpus=1, seconds=10, dies=(3, 4)),
    a_job("short", at=60, gpus=3, seconds=1),
    a_job("none", at=60, gpus=1, seconds=0),
    a_job("late", at=2000, gpus=4, seconds=20),
]

every_cadence = pytest.mark.parametrize("cadence", Cadence)
every_placement = pytest.mark.parametrize("placement", PLACEMENTS)
every_cluster = pytest.mark.parametrize("cluster", ["gpu:8", "v100:4,k80:4,p100:2@2"])


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_can_be_asked_for_by_its_name_alone(name: str) -> None:
    policy = policy_named(name)
    assert isinstance(policy, Policy)
    assert isinstance(policy.answer, Order | Planner | Allocator)


@pytest.mark.parametrize("name", POLICIES)
def test_documented_defaults_are_those_of_the_factory(name: str) -> None:
    listing = POLICIES[name]
    taken = inspect.signature(listing.make).parameters
    assert {parameter.name: parameter.read(parameter.default) for parameter in listing.parameters} == {
        each.name: each.default
        for each in taken.values()
        if not callable(each.default)  # an agent is for Python alone
    }


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_says_what_it_is(name: str) -> None:
    listing = POLICIES[name]
    assert listing.summary
    assert listing.paper
    assert len(set(listing.claims)) == len(listing.claims)
    assert all(parameter.meaning for parameter in listing.parameters)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_says_where_it_stands_among_the_systems_of_the_field(name: str) -> None:
    assert POLICIES[name].traits is not UNSTATED
    for field, words in asdict(POLICIES[name].traits).items():
        assert words, field
        assert not words.endswith("."), field


@every_cluster
@every_placement
@every_cadence
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_brings_every_job_to_its_end(name: str, cadence: Cadence, placement: str, cluster: str) -> None:
    how = Settings(cadence=cadence, round=40)
    story = simulate(TRACE, name, cluster, placement=placement, settings=how)
    assert {story.status(each.job.id) for each in TRACE} == {Status.FINISHED}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_blind_to_types(name: str) -> None:
    story = simulate(TRACE, f"{name}+agnostic", "v100:4,k80:4")
    assert len(story.finishes) == len(TRACE)


@pytest.mark.parametrize("name", [name for name in POLICIES if isinstance(policy_named(name).answer, Order)])
def test_every_order_can_have_stable_ties(name: str) -> None:
    assert len(simulate(TRACE, f"{name}+stable", "gpu:8").finishes) == len(TRACE)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_has_a_page(name: str) -> None:
    page = PAGES / f"{name}.md"
    assert page.is_file(), f"write {page.relative_to(PAGES.parents[1])}: idea, problem, example, claims, when not to use"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    for parameter in POLICIES[name].parameters:
        assert f"`{parameter.name}`" in text, f"{page.name} does not mention the parameter {parameter.name}"


@pytest.mark.parametrize("name", COMBINATORS)
def test_a_combinator_says_what_it_does(name: str) -> None:
    assert COMBINATORS[name].summary


@pytest.mark.parametrize("name", POLICIES)
def test_only_policies_that_say_so_look_at_deadlines(name: str) -> None:
    latest = max(each.job.submitted for each in TRACE) + 1.0  # the later a job comes, the sooner it is due
    due = [replace(each, job=replace(each.job, deadline=2 * latest - each.job.submitted)) for each in TRACE]
    with_deadlines, without = ([entry.actions for entry in simulate(jobs, name).entries] for jobs in (due, TRACE))
    assert (with_deadlines != without) == (Capability.DEADLINES in POLICIES[name].can)


def test_a_combinator_adds_its_capabilities_to_those_of_the_policy() -> None:
    assert capabilities_of("max-min") == frozenset()
    assert capabilities_of("allox+packed+agnostic") == {Capability.PAIRS, Capability.SINGLE_GPUS, Capability.SIZES}


@pytest.mark.parametrize("name", POLICIES)
def test_only_policies_that_say_so_look_at_tenants(name: str) -> None:
    """Five jobs of one tenant against one of another, on fewer GPUs than they want: whose they are changes what happens."""
    jobs = [a_job(f"j{place}", gpus=2, seconds=4000) for place in range(6)]
    mixed = [*jobs[:-1], replace(jobs[-1], job=replace(jobs[-1].job, tenant="two"))]
    of_two, of_one = ([entry.actions for entry in simulate(each, name, "gpu:4").entries] for each in (mixed, jobs))
    assert (of_two != of_one) == (Capability.TENANTS in POLICIES[name].capabilities)


@pytest.mark.parametrize("name", POLICIES)
def test_values_that_a_listing_fixes_are_those_of_its_parameters(name: str) -> None:
    listing = POLICIES[name]
    assert {*listing.plain, *listing.live} <= {parameter.name for parameter in listing.parameters}
    policy_named(name, live=True)


def test_the_rest_of_the_package_knows_policies_only_by_their_listings() -> None:
    """Other packages ask for capabilities. The benchmark is the exception: it times single parts of policies."""
    package = ROOT / "src" / "poise"
    others = [path for path in package.rglob("*.py") if "policies" not in path.parts and path.name != "bench.py"]
    found = {name for path in others for name in re.findall(r"poise\.scheduler\.policies\.(\w+)", path.read_text())}
    assert found <= {"catalogue", "listing", "promises"}
