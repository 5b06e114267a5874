"""`poise policies`, and the help of every verb."""

import pytest
from tests.shell import poise

from poise import __version__
from poise.cli.app import VERBS as REGISTERED
from poise.scheduler.policies.catalogue import COMBINATORS, POLICIES

STUDY = (
    "demo",
    "simulate",
    "compare",
    "policies",
    "check-policy",
    "new-policy",
    "replay",
    "shares",
    "analyze",
    "audit",
    "bench",
)
LIVE = (
    "serve", "submit", "queue", "show", "logs", "wait", "why", "cancel", "hold", "release", "nodes", "events", "use",
    "tokens", "agent", "ray", "drain", "return", "repair", "run", "top", "completion",
)  # fmt: skip
VERBS = (*STUDY, *LIVE)


def test_json_lists_the_whole_catalogue() -> None:
    rows = poise("policies", "--json").json
    assert [row["name"] for row in rows] == list(POLICIES)
    for row in rows:
        assert set(row) == {
            "name", "family", "summary", "paper", "url", "claims", "parameters", "traits", "capabilities", "origin",
        }  # fmt: skip
        assert row["capabilities"] == sorted(POLICIES[row["name"]].capabilities)
        assert all(isinstance(row[key], str) and row[key] for key in ("name", "family", "summary", "paper"))
        assert all(isinstance(claim, str) for claim in row["claims"])
        assert all(set(each) == {"name", "default", "meaning"} for each in row["parameters"])
        assert set(row["traits"]) == {"optimises", "fairness", "heterogeneity", "gang", "elasticity", "verified"}


@pytest.mark.parametrize("name", POLICIES)
def test_json_of_one_policy_is_its_row(name: str) -> None:
    rows = {row["name"]: row for row in poise("policies", "--json").json}
    assert poise("policies", name, "--json").json == rows[name]


@pytest.mark.parametrize("name", POLICIES)
def test_one_policy_is_shown_with_its_paper_and_parameters(name: str) -> None:
    said = poise("policies", name)
    listing = POLICIES[name]
    assert (said.code, said.err) == (0, "")
    assert listing.paper in said.out
    assert all(f"{each.name}={each.default}" in said.out for each in listing.parameters)
    assert all(str(claim) in said.out for claim in listing.claims)
    assert f"fairness: {listing.traits.fairness}\n" in said.out


def test_table_names_every_policy_and_combinator() -> None:
    said = poise("policies")
    words = said.out.split()
    assert said.code == 0
    assert all(name in words for name in POLICIES)
    assert all(f"+{name}" in words for name in COMBINATORS)


def test_every_default_of_a_parameter_is_accepted() -> None:
    for listing in POLICIES.values():
        for parameter in listing.parameters:
            spec = f"{listing.name}:{parameter.name}={parameter.default}"
            assert poise("simulate", "synthetic:jobs=1", "--policy", spec, "--json").json["policy"] == spec


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_an_example_that_begins_with_the_verb(verb: str) -> None:
    said = poise(verb, "--help")
    assert (said.code, said.err) == (0, "")
    _, examples, text = said.out.partition("Example")
    assert examples
    assert f"poise {verb}" in text
    assert poise(verb, "-h") == said


def test_these_are_all_verbs() -> None:
    assert sorted(REGISTERED) == sorted(VERBS)


def test_help_lists_every_verb_and_where_to_start() -> None:
    said = poise("--help")
    assert (said.code, said.err) == (0, "")
    assert "Start here" in said.out
    assert all(f"\n  {verb} " in said.out for verb in VERBS)


def test_poise_alone_shows_the_help_and_asks_for_a_verb() -> None:
    said = poise()
    assert (said.code, said.out) == (2, "")
    assert said.err.strip() == poise("--help").out.strip()


def test_version_is_the_packages() -> None:
    assert poise("--version").out == f"poise, version {__version__}\n"
