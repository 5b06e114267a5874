"""Policies from outside on the command line: by name in every study, checked, written anew, and refused in a line."""

import importlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from shlex import split
from shutil import copy

import pytest
from tests.outside import folder_of_modules, install, write_module
from tests.shell import a_row, as_json, poise, poise_apart

import poise as poise_library

ROOT = Path(__file__).resolve().parents[2]
EDF = ROOT / "examples" / "policies" / "edf.py"
DUE = (
    a_row("a", 0, 1, 100, deadline=500),
    a_row("b", 1, 1, 100, deadline=150),
    a_row("c", 2, 1, 100, deadline=90),  # cannot make it
    a_row("d", 3, 1, 50),  # has none
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with `edf.py` and a trace in it. It is not on the path: the command line puts it there."""
    here = tmp_path / "here"
    here.mkdir()
    copy(EDF, here)
    (here / "due.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DUE), encoding="utf-8")
    elsewhere = tmp_path / "installed"
    elsewhere.mkdir()
    with folder_of_modules(elsewhere, monkeypatch):
        monkeypatch.chdir(here)
        yield here
    for name in ("edf", "lame", "my_order", "my_planner", "my_allocator"):
        sys.modules.pop(name, None)


def finished(folder: Path, policy: str) -> dict[str, float]:
    said = poise("simulate", "due.jsonl", "--cluster", "gpu:1", "--policy", policy, "--per-job", "jobs.json", "--force")
    assert said.code == 0, said.err
    return {row["job"]: row["finished"] for row in json.loads((folder / "jobs.json").read_text())}


def test_the_example_is_short() -> None:
    assert len(EDF.read_text(encoding="utf-8").splitlines()) < 40


def test_the_earliest_deadline_that_can_be_kept_comes_first(folder: Path) -> None:
    """b is due before a and takes its GPU; c cannot make it and comes last, after d, which has no deadline."""
    assert finished(folder, "edf:POLICY") == {"b": 101, "a": 200, "d": 250, "c": 350}


def test_a_parameter_of_the_policy_is_set_from_the_command_line(folder: Path) -> None:
    """With a minute to spare, b cannot make it either; late ones come last, the earliest deadline first."""
    assert finished(folder, "edf:POLICY:margin=60") == {"a": 100, "d": 150, "c": 250, "b": 350}
    assert finished(folder, "edf:edf:margin=60") == finished(folder, "edf:POLICY:margin=60")


def test_a_job_that_falls_behind_is_given_up_when_it_is_late(folder: Path) -> None:
    """b waits behind a job of more urgency until it cannot make it any more; then c, submitted later, comes before it."""
    rows = (
        a_row("urgent", 0, 1, 100, deadline=100),
        a_row("b", 1, 1, 50, deadline=149),
        a_row("c", 2, 1, 50, deadline=160),
    )
    (folder / "due.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert finished(folder, "edf:POLICY") == {"urgent": 100, "c": 150, "b": 200}


def test_policies_from_outside_are_compared_and_swept(folder: Path, cache: Path) -> None:
    policies = "fifo,edf:POLICY:margin=0,edf:edf"
    rows = poise("compare", "due.jsonl", "--cluster", "gpu:1", "--policies", policies, "--json").json
    assert [row["policy"] for row in rows] == ["fifo", "edf:POLICY:margin=0", "edf:edf"]
    assert rows[1]["avg_jct"] == rows[2]["avg_jct"] != rows[0]["avg_jct"]
    swept = poise(
        "compare",
        "synthetic:jobs=20",
        "--cluster",
        "gpu:4",
        "--policies",
        "fifo,edf:POLICY",
        "--seeds",
        2,
        "--json",
        "--fresh",
    )
    assert swept.code == 0, swept.err
    assert {row["policy"] for row in swept.json} == {"fifo", "edf:POLICY"}


def test_policies_from_outside_are_objects_in_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    edf = importlib.import_module("edf")
    result = poise_library.simulate("due.jsonl", cluster="gpu:1", policy=edf.POLICY)
    assert {row["job"]: row["finished"] for row in result.jobs} == {"b": 101, "a": 200, "d": 250, "c": 350}
    policies = ["fifo", edf.POLICY, edf.edf(margin=60.0), "edf:POLICY:margin=60"]
    compared = poise_library.compare("due.jsonl", cluster="gpu:1", policies=policies)
    _fifo, strict, spared, named = compared.summaries["avg_jct"]
    assert strict != spared == named


def test_a_sweep_does_not_take_over_cells_of_an_earlier_text_of_the_policy(folder: Path, cache: Path) -> None:
    words = ("compare", "synthetic:jobs=20", "--cluster", "gpu:4", "--policies", "edf:POLICY", "--seeds", 2, "--state", "s")
    first = poise_apart(*words, folder=folder)
    assert first.code == 0, first.err
    text = (folder / "edf.py").read_text(encoding="utf-8")
    (folder / "edf.py").write_text(text.replace("section=2", "section=3"), encoding="utf-8")
    second = poise_apart(*words, folder=folder)
    assert second.code == 2
    assert "edf:POLICY" in second.err or "another" in second.err


def test_a_policy_that_raises_ends_a_simulation_with_its_file_and_line(folder: Path) -> None:
    write_module(
        folder,
        "lame",
        """
        from poise.policies import *
        POLICY = Order(lambda job, _previous, _memory: Rank(1 / (job.gang - 1)), PreemptionRule.NEVER, Unfitting.SKIPPED)
        """,
    )
    said = poise("simulate", "due.jsonl", "--cluster", "gpu:1", "--policy", "lame:POLICY", "--quiet")
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("poise: policy 'lame:POLICY': ")
    assert "lame.py:3: ZeroDivisionError" in said.err
    assert said.err.count("\n") == 1
    compared = poise("compare", "due.jsonl", "--cluster", "gpu:1", "--policies", "fifo,lame:POLICY", "--quiet")
    assert compared.code == 1
    assert "lame.py:3: ZeroDivisionError" in compared.err


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "due.jsonl", "--policy", "nowhere:POLICY"),
        ("compare", "due.jsonl", "--policies", "fifo,nowhere:POLICY"),
        ("compare", "due.jsonl", "--policies", "fifo,nowhere:POLICY", "--seeds", "2"),
        ("audit", "--policy", "nowhere:POLICY"),
        ("bench", "solve", "--policy", "nowhere:POLICY", "--jobs", "2"),
        ("check-policy", "nowhere:POLICY"),
        ("policies", "nowhere:POLICY"),
        ("serve", "--policy", "nowhere:POLICY"),
        ("serve", "--allow-policy", "nowhere:POLICY"),
        ("replay", "due.jsonl", "--allow-policy", "nowhere:POLICY"),
    ],
    ids=lambda words: words[0],
)
def test_every_verb_refuses_a_policy_that_is_not_there_in_one_line(folder: Path, words: tuple[str, ...]) -> None:
    said = poise(*words)
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        "poise: policy 'nowhere:POLICY': there is no module 'nowhere': no nowhere.py here, and none that is installed\n"
    )


def test_a_replay_imports_what_the_user_names_and_nothing_else(folder: Path) -> None:
    assert (
        poise("simulate", "due.jsonl", "--cluster", "gpu:1", "--policy", "edf:POLICY", "--out", "run1", "--quiet").code == 0
    )
    apart = poise_apart("replay", "run1", folder=folder)
    assert apart.code == 2
    assert "say --allow-policy edf:POLICY to have it imported" in apart.err
    allowed = poise_apart("replay", "run1", "--allow-policy", "edf:POLICY", folder=folder)
    assert allowed.code == 0, allowed.err
    assert "came out the same" in allowed.out


# The catalogue


def test_the_catalogue_lists_plug_ins_and_tells_of_broken_ones(folder: Path) -> None:
    installed = folder.parent / "installed"
    write_module(installed, "heavy")
    install(installed, "heavies", heavy_first="heavy:by_weight", lame="heavy:nothing")
    said = poise("policies", "--json")
    row = next(row for row in said.json if row["name"] == "heavy-first")
    assert row["origin"] == "heavies 1.0 (heavy:by_weight)"
    assert row["parameters"] == [{"name": "factor", "default": "1", "meaning": "a number"}]
    assert said.err.count("\n") == 1
    assert "policy 'lame' of heavies 1.0" in said.err
    assert "heavy-first" in poise("policies").out
    shown = poise("policies", "edf:POLICY").out
    assert "edf:POLICY (queue): earliest deadline first" in shown
    assert f"origin: {folder / 'edf.py'}" in shown


# The check


@pytest.mark.slow
def test_the_example_passes_the_check(folder: Path) -> None:
    said = poise("check-policy", "edf:POLICY")
    assert (said.code, said.err) == (0, ""), said.out
    assert "BROKEN" not in said.out
    found = poise("check-policy", "edf:POLICY", "--seeds", 2, "--json").json
    assert found["holds"] is True
    assert {row["law"] for row in found["laws"]} >= {"raises nothing", "repeatable", "handover", "claims work-conserving"}


def test_a_broken_law_comes_with_a_trace_and_a_command_that_shows_it_again(folder: Path) -> None:
    text = EDF.read_text(encoding="utf-8").replace("p.PolicyProperty.WORK_CONSERVING", "p.PolicyProperty.NO_PREEMPTION")
    (folder / "lame.py").write_text(text, encoding="utf-8")
    found = poise("check-policy", "lame:POLICY", "--out", "kept", "--json")
    assert found.code == 1
    (broken,) = (row for row in as_json(found.out)["laws"] if row["holds"] is False)
    assert broken["law"] == "claims no-preemption"
    command = split(broken["again"])
    assert command[:3] == ["poise", "check-policy", "lame:POLICY"]
    again = poise(*command[1:], "--json")
    assert again.code == 1
    assert next(row["problem"] for row in as_json(again.out)["laws"] if row["holds"] is False) == broken["problem"]
    assert (folder / "kept" / "counterexample-claims-no-preemption.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("edf:POLICY", "--cluster", "gpu:4"), "--cluster is about a trace; give one with --trace, or leave it out"),
        (("edf:POLICY", "--trace", "nothing.jsonl"), "nothing.jsonl"),
        (("edf:POLICY", "--seeds", "-1"), "-1 is not in the range"),
        (("edf:POLICY", "--trace", "synthetic:jobs=300"), "expected at most 200 jobs; choose some with --jobs"),
        (("fifo+nothing",), "unknown combinator 'nothing'"),
        ((), "Missing argument 'POLICY'"),
    ],
)
def test_a_wrong_check_is_refused_in_one_line(folder: Path, words: tuple[str, ...], problem: str) -> None:
    said = poise("check-policy", *words)
    assert said.code == 2
    assert problem in said.err
    assert said.err.count("\n") == 1


# New policies


@pytest.mark.slow
def test_new_policies_work_at_once(folder: Path) -> None:
    (folder / "edf.py").unlink()
    for kind in ("order", "planner", "allocator"):
        written = poise("new-policy", f"my-{kind}", "--kind", kind, "--json").json
        assert written["files"] == [f"my_{kind}.py", f"test_my_{kind}.py", f"my_{kind}.md"]
        assert written["next"][0] == f"poise check-policy my_{kind}:POLICY"
        assert "{" not in (folder / f"my_{kind}.md").read_text(encoding="utf-8")
    checked = poise("check-policy", "my_order:POLICY", "--seeds", 4)
    assert checked.code == 0, checked.out
    for program in (
        ("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir", "."),
        ("ruff", "check", "--isolated", "--no-cache", "."),
        ("ruff", "format", "--isolated", "--no-cache", "--check", "."),
        ("mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), "."),
    ):
        ran = subprocess.run([sys.executable, "-m", *program], cwd=folder, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_package_gives_the_policy_a_name(folder: Path) -> None:
    """What an installer makes of its entry points is read as that of any distribution."""
    written = poise("new-policy", "my-order", "--package", "--json").json
    assert written["files"][-1] == "pyproject.toml"
    points = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert points == {"poise.policies": {"my-order": "my_order:POLICY"}}
    install(folder.parent / "installed", "my-order", my_order=points["poise.policies"]["my-order"])
    copy(folder / "my_order.py", folder.parent / "installed")
    assert poise("policies", "my-order", "--json").json["origin"] == "my-order 1.0 (my_order:POLICY)"


def test_a_new_policy_says_what_to_type_next(folder: Path) -> None:
    said = poise("new-policy", "heavy-first", "--dir", "own")
    assert said.out == (
        "wrote own/heavy_first.py, own/test_heavy_first.py, own/heavy_first.md\n"
        "next:\n"
        "  cd own\n"
        "  poise check-policy heavy_first:POLICY\n"
        "  python -m pytest test_heavy_first.py\n"
        "  poise compare synthetic:jobs=200 --policies fifo,heavy_first:POLICY --cluster gpu:16\n"
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("edf",), "edf.py is there already; choose another name, or another folder with --dir"),
        (("fifo",), "'fifo' is a policy of the catalogue; choose another name, e.g. my-fifo"),
        (("import",), "'import' is the name of something in Python; choose another, e.g. import-first"),
        (("json",), "'json' is the name of something in Python"),
        (("poise",), "'poise' is the name of something in Python"),
        (("Edf",), "'Edf': expected small letters, digits and single hyphens"),
        (("9lives",), "'9lives': expected small letters"),
        (("../edf",), "'../edf': expected small letters"),
        (("a b",), "'a b': expected small letters"),
        (("",), "'': expected small letters"),
        (("edf-",), "'edf-': expected small letters"),
        (("x", "--kind", "planer"), "planner"),
        (("x", "--dir", "edf.py"), "edf.py"),
        ((), "Missing argument 'NAME'"),
    ],
)
def test_a_wrong_new_policy_is_refused_in_one_line_and_nothing_is_written(
    folder: Path, words: tuple[str, ...], problem: str
) -> None:
    before = sorted(folder.rglob("*"))
    said = poise("new-policy", *words)
    assert (said.code, said.out) == (2, "")
    assert problem in said.err
    assert said.err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
