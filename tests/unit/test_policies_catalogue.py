"""How a policy is asked for, and what a wrong request is told: one line that names the thing, the value and the remedy."""

import pytest

from poise.scheduler.model.errors import RequestError, UnknownNameError
from poise.scheduler.model.plan import Order, PreemptionRule, Unfitting
from poise.scheduler.policies.catalogue import COMBINATORS, POLICIES, policy_named
from poise.scheduler.policies.stride import Clamp, Stride


def test_a_name_alone_takes_the_defaults() -> None:
    policy = policy_named("fifo")
    assert policy.name == "fifo"
    assert isinstance(policy.answer, Order)
    assert (policy.answer.preemption, policy.answer.unfitting) == (PreemptionRule.NEVER, Unfitting.BLOCKS)


def test_parameters_are_read_and_handed_over() -> None:
    assert policy_named("stride:quantum=5,clamp=off").answer == Stride(5.0, Clamp.OFF)


def test_lists_are_written_with_slashes() -> None:
    assert policy_named("tiresias:limits=300/900,promote=8").name == "tiresias:limits=300/900,promote=8"


def test_combinators_are_applied_in_turn_and_keep_the_specification_as_name() -> None:
    policy = policy_named("tiresias:limits=300+stable+agnostic")
    assert policy.name == "tiresias:limits=300+stable+agnostic"
    assert policy.perceive is not policy_named("tiresias").perceive


@pytest.mark.parametrize(
    ("spec", "near"),
    [
        ("fifi", "fifo"),
        ("FIFO", "fifo"),
        ("tiresia", "tiresias"),
        ("gittins", "tiresias-gittins"),
        ("smallest", "smallest-first"),
        ("tiresias:limit=300", "limits"),
        ("stride:quantums=3", "quantum"),
        ("fifo+agnotic", "agnostic"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_right_ones(spec: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean .*{near}"):
        policy_named(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("xyzzy", "unknown policy 'xyzzy'; known: allox, ffdl, fifo"),
        ("", "unknown policy ''; known: "),
        (":quantum=3", "unknown policy ''; known: "),
        ("fifo+", "unknown combinator ''; known: agnostic, fallback"),
        ("fifo+qqq", "unknown combinator 'qqq'; known: agnostic, fallback"),
        ("fifo:x=1", r"unknown parameter of fifo 'x'; known: \(it takes none\)"),
        ("stride:quantum", "policy 'stride:quantum': write each parameter once, as quantum=VALUE"),
        ("stride:quantum=1,quantum=2", "write each parameter once, as quantum=VALUE"),
        ("stride:quantum=", "policy 'stride:quantum=': quantum='': "),
        ("stride:quantum=abc", "policy 'stride:quantum=abc': quantum='abc': expected a number"),
        ("stride:quantum=0", "quantum='0': expected a number above 0"),
        ("stride:quantum=-3", "quantum='-3': expected a finite number that is not negative"),
        ("stride:quantum=inf", "quantum='inf': expected a finite number that is not negative"),
        ("stride:quantum=nan", "quantum='nan': expected a finite number that is not negative"),
        ("stride:clamp=on", "clamp='on': expected lag or off"),
        ("tiresias:limits=", "limits='': expected a number"),
        ("tiresias:limits=0", "limits='0': expected a number above 0"),
        ("tiresias:limits=900/300", "limits='900/300': expected rising limits, e.g. 3250/7200"),
        ("tiresias:limits=300/300", "expected rising limits"),
        ("tiresias:limits=300/", "expected a number"),
        ("tiresias:promote=-1", "promote='-1': expected a finite number that is not negative"),
        ("tiresias:service=gpus", "service='gpus': expected gpu-seconds or seconds"),
        ("tiresias-gittins:delta=far", "delta='far': expected limit or best"),
        ("tiresias-gittins:samples=-1", "samples='-1': expected a whole number that is not negative"),
        ("tiresias-gittins:samples=2.5", "samples='2.5': expected a whole number"),
        ("stride+stable", r"\+stable applies to orders"),
    ],
)
def test_a_wrong_request_is_told_in_one_line_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        policy_named(spec)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_rows_of_the_catalogue_stand_under_their_names() -> None:
    assert all(name == listing.name for name, listing in POLICIES.items())
    assert all(name == combinator.name for name, combinator in COMBINATORS.items())
