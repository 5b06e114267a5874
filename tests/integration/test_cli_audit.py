"""`poise audit`: what a policy does to those who share a cluster, from the outside."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.shell import a_row, a_trace, poise

from poise.lab.audit.findings import Property
from poise.scheduler.policies import catalogue
from poise.scheduler.policies.catalogue import POLICIES, PolicyProperty
from poise.scheduler.policies.listing import Listing


@pytest.fixture(scope="module")
def of_srtf() -> dict[str, Any]:
    document = poise("audit", "--policy", "srtf", "--json").json
    assert isinstance(document, dict)
    return document


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Two tenants on two types: one with a long job, one with many short ones."""
    long = a_row("long", seconds=40_000, tenant="vera", model="VAE")
    short = (a_row(f"s{place}", at=place * 1000, seconds=4000, tenant="rex", model="ResNeXt50") for place in range(12))
    return a_trace(tmp_path, long, *short)


def test_json_has_every_property_with_its_verdict_and_a_counterexample_where_it_does_not_hold(
    of_srtf: dict[str, Any],
) -> None:
    assert {key: of_srtf[key] for key in ("policy", "trace", "seed", "instances", "turn", "claims")} == {
        "policy": "srtf",
        "trace": None,
        "seed": 0,
        "instances": 1,
        "turn": 720.0,
        "claims": [],
    }
    assert set(of_srtf["properties"]) == set(Property)
    for finding in of_srtf["properties"].values():
        assert {"holds", "worst", "bound", "cases", "counterexample"} <= set(finding)
        assert finding["cases"] > 0
        assert (finding["counterexample"] is None) is finding["holds"]
        assert finding["holds"] is (finding["worst"] <= finding["bound"])


def test_a_counterexample_says_who_got_what_and_what_they_would_have_had(of_srtf: dict[str, Any]) -> None:
    case = of_srtf["properties"]["sharing_incentive"]["counterexample"]
    assert case["seconds"] > case["alone_seconds"] > 0
    assert case["agent"] in case["text"]
    lies = of_srtf["properties"]["strategy_proofness"]
    assert {kind: lies[kind]["holds"] for kind in ("speed_ups", "sizes", "bids")} == dict.fromkeys(
        ("speed_ups", "sizes", "bids"), False
    )


def test_a_table_and_a_sentence_for_each_counterexample() -> None:
    said = poise("audit", "--policy", "fifo")
    assert (said.code, said.err) == (0, "")
    rows = {line[:28].strip(): line.split() for line in said.out.splitlines()}
    assert "no" in rows["envy freeness"]
    assert "yes" in rows["starvation freedom"]
    assert "envy freeness: " in said.out
    assert "\nstarvation freedom: " not in said.out
    assert "claimed and measured: nobody is passed over for ever in a crowded stream" in said.out


def test_tenants_of_a_trace_are_compared_with_their_own_part_of_the_cluster(shared: Path) -> None:
    said = poise("audit", "--policy", "srtf", "--trace", shared, "--cluster", "v100:2@2,k80:2@2", "--json").json
    sharing = said["properties"]["sharing_incentive"]
    assert (said["trace"], said["cluster"], sharing["cases"]) == ("trace.jsonl", "v100:2@2,k80:2@2", 2)
    assert "sharing_incentive_of_gangs" not in said["properties"]
    assert said["claims"] == []


def test_jobs_of_a_trace_with_one_tenant_are_the_agents(tmp_path: Path) -> None:
    jobs = [a_row("long", seconds=3000), *(a_row(f"s{place}", at=1 + place * 990, seconds=1000) for place in range(80))]
    trace = a_trace(tmp_path, *jobs)
    said = poise("audit", "--policy", "srtf", "--trace", trace, "--cluster", "gpu:1", "--json").json
    assert said["properties"]["sharing_incentive"]["cases"] == 81
    assert said["properties"]["starvation_freedom"]["counterexample"]["agent"] == "long"


def test_two_runs_are_equal_and_another_seed_is_another_instance(of_srtf: dict[str, Any]) -> None:
    again = poise("audit", "--policy", "srtf", "--json").json
    assert again == of_srtf
    assert poise("audit", "--policy", "srtf", "--json", "--seed", "7").json["properties"] != of_srtf["properties"]


def test_more_instances_are_more_cases_and_begin_with_the_same(of_srtf: dict[str, Any]) -> None:
    more = poise("audit", "--policy", "srtf", "--instances", "2", "--json").json
    assert more["instances"] == 2
    for name, finding in more["properties"].items():
        assert finding["cases"] == 2 * of_srtf["properties"][name]["cases"]


def test_a_claim_that_is_contradicted_is_an_error_and_the_findings_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = POLICIES["fifo"]
    boastful = Listing(
        "fifo", fifo.family, fifo.summary, fifo.paper, (*fifo.claims, PolicyProperty.NO_ENVY), fifo.make, traits=fifo.traits
    )
    monkeypatch.setitem(catalogue.POLICIES, "fifo", boastful)
    said = poise("audit", "--policy", "fifo", "--json")
    assert said.code == 1
    assert said.err.startswith("poise: the catalogue claims that nobody would rather have what another has; measured: ")
    claims = {claim["claim"]: claim["holds"] for claim in json.loads(said.out)["claims"]}
    assert claims == {str(PolicyProperty.NO_STARVATION): True, str(PolicyProperty.NO_ENVY): False}


def test_claims_are_not_looked_at_with_turns_that_are_not_those_of_the_policy() -> None:
    """Where turns are said to be shorter than they are, what a policy deals out is too coarse for any bound."""
    said = poise("audit", "--policy", "proportional", "--turn", "60", "--json")
    assert (said.code, said.err, said.json["claims"]) == (0, "", [])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--policy", "max-mni"], "unknown policy 'max-mni'; did you mean max-min?"),
        (["--policy", "fifo", "--trace", "nowhere.csv"], "nowhere.csv"),
        (["--policy", "fifo", "--cluster", "gpu:4"], "--cluster is about a trace; give one with --trace"),
        (["--policy", "fifo", "--format", "philly"], "--format is about a trace"),
        (["--policy", "fifo", "--failures", "philly"], "--failures is about a trace"),
        (["--policy", "fifo", "--fairness", "app"], "--fairness: an audit is about tenants, or about jobs"),
        (["--policy", "fifo", "--turn", "0"], "--turn: expected more than 0 seconds"),
        (["--policy", "fifo", "--faults", "mtbf=1d,repair=1h"], "--faults: an audit is about the policy"),
        (["--policy", "fifo", "--drain", "gpu-0@1h..2h"], "--drain: an audit is about the policy"),
        (["--policy", "fifo", "--instances", "0"], "--instances"),
        (["--policy", "fifo", "--instances", "2", "--trace", "synthetic:jobs=2"], "--instances is about built-in instances"),
        ([], "--policy"),
    ],
)
def test_a_wrong_request_gets_one_line(words: list[str], complaint: str) -> None:
    assert complaint in poise("audit", *words).refusal


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.csv").write_text("job,submitted,gpus,duration\n")
    assert "job" in poise("audit", "--policy", "fifo", "--trace", tmp_path / "none.csv").refusal


def test_help_has_an_example() -> None:
    said = poise("audit", "--help")
    assert said.code == 0
    assert "poise audit --policy max-min" in said.out
