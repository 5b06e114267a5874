"""Policies from outside: found by entry points, by reference and as objects; what is wrong with one is one line."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.outside import ORDER, folder_of_modules, install, write_module

from poise.engine import outside
from poise.engine.outside import check_recorded, find, find_all, find_installed, spec_of
from poise.policies import (
    Allocation,
    Family,
    JobView,
    Listing,
    Order,
    Plan,
    Policy,
    PreemptionRule,
    Rank,
    Snapshot,
    Unfitting,
    Workload,
)
from poise.scheduler.model.errors import PolicyError, RequestError, UnknownNameError
from poise.scheduler.policies.catalogue import POLICIES, is_known, known, listing_of, policy_named


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with folder_of_modules(tmp_path, monkeypatch) as found:
        yield found


def in_order(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    """First come, first served."""
    return Rank(job.submitted)


def an_order() -> Order:
    return Order(in_order, PreemptionRule.NEVER, Unfitting.SKIPPED)


@dataclass(frozen=True)
class EarlyBird:
    """Whoever comes first.

    More about it.
    """

    most: int = 3

    def start(self) -> None:
        return None

    def plan(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        return Plan((), Unfitting.SKIPPED, PreemptionRule.NEVER), memory


class Halves:
    def start(self) -> None:
        return None

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        return Allocation(workload.speed * 0.5), memory


# By reference


@pytest.mark.parametrize(
    "spec", ["heavy:by_weight", "pack.heavy:by_weight", "heavy:by_weight:factor=2", "heavy:by_weight+stable"]
)
def test_a_policy_is_found_by_module_and_attribute(folder: Path, spec: str) -> None:
    write_module(folder, "heavy")
    write_module(folder, "pack.heavy")
    find(spec)
    assert policy_named(spec).name == spec
    assert isinstance(policy_named(spec).answer, Order)
    assert listing_of(spec).name == spec.split(":f")[0].split("+")[0]
    assert listing_of(spec).summary == "Heavier jobs first"
    assert listing_of(spec).origin.endswith("heavy.py")


def test_a_policy_is_unknown_before_it_is_asked_for(folder: Path) -> None:
    write_module(folder, "heavy")
    assert not is_known("heavy:by_weight")
    with pytest.raises(UnknownNameError, match="unknown policy 'heavy'"):
        policy_named("heavy:by_weight")
    find("heavy:by_weight")
    assert is_known("heavy:by_weight:factor=3")
    assert "heavy:by_weight" in known()
    assert "heavy:by_weight" not in POLICIES


def test_importing_a_policy_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_module(folder, "loud", "import sys\nprint('here')\nprint('there', file=sys.stderr)\n" + ORDER)
    find("loud:by_weight")
    assert capfd.readouterr() == ("", "")


def test_parameters_are_those_of_the_factory_with_its_types(folder: Path) -> None:
    write_module(
        folder,
        "many",
        """
        from __future__ import annotations
        from enum import StrEnum
        from typing import Literal
        from poise.policies import *
        seen = []
        class Mode(StrEnum):
            FAST = "fast"
            SLOW = "slow"
        def make(a: int = 1, b: float = 2.5, c: bool = False, d: str = "x", e: tuple[float, ...] = (1.0, 2.0),
                 f: list[int] = [3], g: Mode = Mode.FAST, h: float | None = None, i: Literal["u", "v"] = "u", j=7,
                 k: object = seen):
            seen.append((a, b, c, d, e, f, g, h, i, j))
            return Order(lambda job, _previous, _memory: Rank(0.0), PreemptionRule.NEVER, Unfitting.SKIPPED)
        """,
    )
    find("many:make")
    seen = sys.modules["many"].seen
    policy_named("many:make:a=-2,b=1e3,c=yes,d=w,e=4/5,f=6/7,g=slow,h=9,i=v,j=8")
    policy_named("many:make:h=none,c=off")
    assert seen[-2] == (-2, 1000.0, True, "w", (4.0, 5.0), [6, 7], "slow", 9.0, "v", 8)
    assert seen[-1] == (1, 2.5, False, "x", (1.0, 2.0), [3], "fast", None, "u", 7)
    defaults = {each.name: each.default for each in listing_of("many:make").parameters}
    assert defaults == {
        "a": "1", "b": "2.5", "c": "no", "d": "x", "e": "1/2", "f": "3", "g": "fast", "h": "none", "i": "u", "j": "7",
    }  # fmt: skip
    for parameter in listing_of("many:make").parameters:
        parameter.read(parameter.default)  # what is shown can be written


WRONG: dict[str, tuple[str, str]] = {
    "no such module": ("nowhere:POLICY", "there is no module 'nowhere'"),
    "no such package": ("no.where:POLICY", "there is no module 'no'"),
    "no such module in a package": ("poise.nowhere:POLICY", "there is no module 'poise.nowhere'"),
    "no such attribute": ("heavy:by_wait", "did you mean by_weight"),
    "no policy at all in it": ("empty:POLICY", "has no 'POLICY', nor anything else that is a policy"),
    "an attribute of a class that is not there": ("heavy:by_weight.more", "has no 'by_weight.more'"),
    "a number": ("kinds:NUMBER", "expected a Listing, an Order, a Planner, an Allocator"),
    "a planner without a beginning": ("kinds:Memoryless", "; it has no start()"),
    "a module": ("kinds:math", "expected a Listing"),
    "None": ("kinds:NOTHING", "got None"),
    "a class without a plan": ("kinds:Plain", "it is a callable that returned Plain"),
    "a function that returns a number": ("kinds:number", "it is a callable that returned int 3"),
    "a function that returns a class": ("kinds:cls", "it is a callable that returned type"),
    "a factory that raises": ("kinds:raises", "kinds.py:12: ValueError: no luck"),
    "a factory that exits": ("kinds:exits", "kinds.py:21: SystemExit: 3"),
    "a factory with a required parameter": ("kinds:needs", "parameter slack has no default; write kinds:needs:slack=VALUE"),
    "a required parameter of no readable type": ("kinds:odd", "parameter what has no default and no type that text can be"),
    "a parameter that is not there": ("heavy:by_weight:weight=2", "unknown parameter of heavy:by_weight 'weight'"),
    "a value that is no number": ("heavy:by_weight:factor=many", "factor='many': expected a number"),
    "a value that is not a number": ("heavy:by_weight:factor=nan", "factor='nan': expected a number"),
    "a value that is no whole number": ("kinds:needs:slack=1.5", "slack='1.5': expected a whole number"),
    "a value given twice": ("heavy:by_weight:factor=2,factor=3", "write each parameter once"),
    "a combinator that is not there": ("heavy:by_weight+fast", "unknown combinator 'fast'"),
    "a combinator for shares": ("heavy:by_weight+packed", "+packed applies to policies that answer with shares"),
    "a syntax error": ("syntax:POLICY", "syntax.py:1: SyntaxError"),
    "a module that imports what is not there": (
        "imports:POLICY",
        "imports.py:1: ModuleNotFoundError: No module named 'nothing",
    ),
    "a module that raises": ("raising:POLICY", "raising.py:3: RuntimeError: two lines"),
    "a module that exits": ("exiting:POLICY", "exiting.py:2: SystemExit: 3"),
    "a module that asks for itself": ("circle:POLICY", "asked for while its module circle is being imported"),
    "a file": ("heavy.py:by_weight", "write package.module:attribute"),
    "a path": ("./heavy.py", "write package.module:attribute"),
    "a dotted name alone": ("pack.heavy", "write package.module:attribute"),
    "a module alone": ("heavy", "unknown policy 'heavy'"),
    "no attribute": ("heavy:", "unknown policy 'heavy'"),
    "nothing": ("", "unknown policy ''"),
    "a blank": ("heavy:by weight", "unknown policy 'heavy'"),
    "no module": (":by_weight", "unknown policy ''"),
    "a name that begins with a digit": ("9lives:POLICY", "unknown policy '9lives'"),
    "a policy of the catalogue with an attribute": ("fifo:POLICY", "unknown parameter of fifo 'POLICY'"),
    "text in disorder": ("heavy:\x1b[31m", "unknown policy 'heavy'"),
}


@pytest.fixture
def wrong(folder: Path) -> Path:
    write_module(folder, "heavy")
    write_module(folder, "empty", "import math\n")
    write_module(folder, "syntax", "def (:\n")
    write_module(folder, "imports", "import nothing_of_this_name\n")
    write_module(folder, "raising", "def fail():\n    'why'\n    raise RuntimeError('two\\nlines')\nfail()\n")
    write_module(folder, "exiting", "import sys\nsys.exit(3)\n")
    write_module(folder, "circle", "from poise.policies import spec_of\nspec_of('circle:POLICY')\n")
    write_module(
        folder,
        "kinds",
        """\
        import math
        from poise.policies import Order
        NUMBER = 3
        NOTHING = None
        class Plain:
            pass
        def number():
            return 3
        def cls():
            return Order
        def raises():
            raise ValueError("no luck")
        def needs(slack: int):
            return 1
        def odd(what: dict):
            return 1
        class Memoryless:
            def plan(self, snapshot, memory):
                return None, memory
        def exits():
            raise SystemExit(3)
        """,
    )
    return folder


@pytest.mark.parametrize(("spec", "words"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_call_is_one_clear_line(wrong: Path, spec: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        policy_named(spec_of(spec))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_module_that_is_mended_can_be_asked_for_again(folder: Path) -> None:
    file = write_module(folder, "mended", "raise RuntimeError\n")
    with pytest.raises(RequestError):
        find("mended:by_weight")
    file.write_text(ORDER, encoding="utf-8")
    find("mended:by_weight")
    assert is_known("mended:by_weight")


# By name


def test_a_policy_of_a_distribution_is_found_by_its_name(folder: Path) -> None:
    write_module(folder, "heavy")
    install(folder, "heavies", heavy_first="heavy:by_weight")
    assert "heavy" not in sys.modules
    assert find_installed("heavy-first:factor=2+stable")
    assert policy_named("heavy-first:factor=2+stable").name == "heavy-first:factor=2+stable"
    assert listing_of("heavy-first").origin == "heavies 1.0 (heavy:by_weight)"


def test_distributions_are_looked_at_only_where_a_name_is_not_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "entry_points", lambda **_group: pytest.fail("looked at"))
    assert find_installed("fifo")
    find("tiresias:limits=3/9+stable")


def test_a_broken_plug_in_breaks_nothing_else(folder: Path) -> None:
    write_module(folder, "heavy")
    write_module(folder, "broken", "1/0\n")
    install(folder, "good", heavy_first="heavy:by_weight")
    install(folder, "bad", lame="broken:POLICY", gone="nowhere:POLICY", odd="no reference")
    find("heavy-first")
    problems = find_all()
    assert len(problems) == 3
    assert all("of bad 1.0 (entry point" in each and "\n" not in each for each in problems)
    assert any("broken.py:1: ZeroDivisionError" in each for each in problems)
    with pytest.raises(PolicyError, match=r"policy 'lame' of bad 1\.0 \(entry point broken:POLICY\): .*ZeroDivisionError"):
        find("lame")
    assert is_known("heavy-first")


def test_a_plug_in_cannot_take_a_name_of_the_catalogue(folder: Path) -> None:
    write_module(folder, "heavy")
    install(folder, "thief", fifo="heavy:by_weight")
    (problem,) = find_all()
    assert problem.startswith("policy 'fifo' of thief 1.0")
    assert "the catalogue has a policy of this name" in problem
    assert listing_of("fifo") is POLICIES["fifo"]


def test_of_two_plug_ins_of_one_name_the_first_counts_and_the_other_is_told_of(folder: Path) -> None:
    write_module(folder, "heavy")
    install(folder, "one", heavy_first="heavy:by_weight")
    write_module(folder, "other")
    install(folder, "two", heavy_first="other:by_weight")
    (problem,) = find_all()
    assert "has this name already" in problem
    assert listing_of("heavy-first").origin == "one 1.0 (heavy:by_weight)"


def test_an_unknown_name_lists_those_of_plug_ins_too(folder: Path) -> None:
    install(folder, "heavies", heavy_first="heavy:by_weight")
    with pytest.raises(UnknownNameError, match="did you mean heavy-first"):
        find("heavy-fist")


# Objects


def test_an_object_gets_a_name_of_its_own_and_keeps_it(folder: Path) -> None:
    one, other = EarlyBird(), EarlyBird(5)
    assert spec_of(one) == "early-bird"
    assert spec_of(other) == "early-bird-2"
    assert spec_of(one) == "early-bird"
    assert policy_named("early-bird").answer is one
    assert listing_of("early-bird").summary == "Whoever comes first"
    assert listing_of("early-bird").family is Family.MARKET


def test_all_forms_of_policies_can_be_named(folder: Path) -> None:
    assert spec_of(EarlyBird) == "early-bird"
    assert policy_named("early-bird:most=9").answer == EarlyBird(9)
    assert spec_of(Halves()) == "halves"
    assert listing_of("halves").family is Family.SHARE
    assert spec_of(an_order) == "an-order"
    assert spec_of(an_order()) == "in-order"
    assert listing_of("in-order").family is Family.QUEUE
    assert spec_of(Policy("seen otherwise", an_order(), lambda estimate: estimate)) == "seen-otherwise"
    listing = Listing("first-come", Family.QUEUE, "x", "y", (), an_order)
    assert spec_of(listing) == "first-come"
    assert spec_of("fifo+stable") == "fifo+stable"

    def shortest_name() -> Order:
        def rank(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
            return Rank(len(job.id))

        return Order(rank, PreemptionRule.NEVER, Unfitting.SKIPPED)

    assert spec_of(shortest_name()) == "shortest-name"
    assert policy_named("early-bird+agnostic").name == "early-bird+agnostic"


def test_what_a_policy_perceives_is_kept(folder: Path) -> None:
    halved = Policy("halved", an_order(), lambda estimate: estimate)
    assert policy_named(spec_of(halved)).perceive is halved.perceive


def test_an_object_cannot_take_a_name_of_the_catalogue(folder: Path) -> None:
    assert spec_of(Listing("fifo", Family.QUEUE, "x", "y", (), an_order)) == "fifo-2"
    assert listing_of("fifo") is POLICIES["fifo"]


def test_a_module_may_have_the_name_of_an_object(folder: Path) -> None:
    write_module(folder, "heavy")
    assert spec_of(Listing("heavy", Family.QUEUE, "x", "y", (), an_order)) == "heavy"
    assert spec_of("heavy:by_weight:factor=2") == "heavy:by_weight:factor=2"
    assert listing_of("heavy:by_weight:factor=2").name == "heavy:by_weight"
    assert listing_of("heavy").summary == "x"


@pytest.mark.parametrize("wrong", [3, None, [], sys, 3.5, b"fifo"])
def test_what_is_no_policy_is_refused_in_a_line(folder: Path, wrong: object) -> None:
    with pytest.raises(RequestError, match="expected a Listing, an Order, a Planner, an Allocator"):
        spec_of(wrong)  # type: ignore[arg-type]


# Journals


def test_a_journal_alone_imports_nothing(folder: Path) -> None:
    write_module(folder, "heavy")
    with pytest.raises(RequestError, match="say --allow-policy heavy:by_weight to have it imported"):
        check_recorded("heavy:by_weight:factor=2", "run1")
    assert "heavy" not in sys.modules
    find("heavy:by_weight")
    check_recorded("heavy:by_weight:factor=2", "run1")
