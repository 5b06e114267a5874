"""Results replace what an earlier run wrote, and say so; nothing else is written over unless that is asked for."""

from pathlib import Path

import pytest
from tests.shell import a_row, a_trace, poise

FORCED = "; name another one, or add --force"


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a_trace(tmp_path, a_row("a"), a_row("b", at=1), name="good.jsonl")


SIMULATE = ("simulate", "good.jsonl", "--cluster", "gpu:1")
COMPARE = ("compare", "good.jsonl", "--cluster", "gpu:1", "--policies", "fifo,srtf")
WRITING = {
    "--out": (*SIMULATE, "--out", "results"),
    "--per-job rows.csv": (*SIMULATE, "--per-job", "results.csv"),
    "--per-job rows.json": (*SIMULATE, "--per-job", "results.json"),
    "compare --html": (*COMPARE, "--html", "results.html"),
    "sweep --html": (*COMPARE, "--seeds", "2", "--html", "results.html"),
    "analyze --html": ("analyze", "good.jsonl", "--html", "results.html"),
    "demo --html": ("demo", "--html", "results.html"),
}


@pytest.fixture(params=WRITING)
def words(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A command that writes results, the last of its words."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chosen: str = request.param
    return WRITING[chosen]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_same_command_again_replaces_its_results_and_says_so(words: tuple[str, ...], tmp_path: Path) -> None:
    first = poise(*words)
    assert first.code == 0
    assert "replaces" not in first.err
    written = contents(tmp_path)
    again = poise(*words)
    assert (again.code, contents(tmp_path)) == (0, written)
    assert f"note: {' '.join(words[-2:])}: replaces what an earlier run wrote\n" in again.err
    assert "replaces" not in poise(*words, "--quiet").err


def test_something_else_is_left_as_it_is_unless_force_is_given(words: tuple[str, ...], tmp_path: Path) -> None:
    target = tmp_path / words[-1]
    if target.suffix:
        precious = target
    else:
        target.mkdir()
        precious = target / "thesis.txt"
    precious.write_text("years of work\n")
    said = poise(*words).refusal
    assert said.startswith(" ".join(words[-2:]))
    assert said.endswith("or add --force")
    assert contents(tmp_path).keys() == {"good.jsonl", str(precious.relative_to(tmp_path))}
    assert precious.read_text() == "years of work\n"
    forced = poise(*words, "--force")
    assert forced.code == 0
    assert "note: " in forced.err
    assert precious.read_text() != "years of work\n" or precious != target


def test_a_trace_is_not_written_over_by_its_own_results(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("job,submitted,gpus,duration\na,0,1,5\n")
    assert poise("simulate", "trace.csv", "--per-job", "trace.csv").refusal.endswith(FORCED)
    assert trace.read_text().startswith("job,submitted")


def test_results_of_one_kind_do_not_replace_those_of_another(tmp_path: Path) -> None:
    assert poise(*COMPARE, "--html", "a.html").code == 0
    (tmp_path / "a.html").rename(tmp_path / "a.csv")
    assert poise(*SIMULATE, "--per-job", "a.csv").refusal.endswith(FORCED)


def test_a_folder_with_a_journal_of_another_program_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "journal.jsonl").write_text('{"entry": 1}\n')
    said = poise(*SIMULATE, "--out", "results").refusal
    assert said == "--out results: holds journal.jsonl and no run; name a new folder, or add --force"


def test_what_a_run_was_given_by_hand_stays_beside_the_new_results(tmp_path: Path) -> None:
    assert poise(*SIMULATE, "--out", "results").code == 0
    (tmp_path / "results" / "notes.txt").write_text("mine")
    assert poise(*SIMULATE, "--out", "results", "--policy", "srtf").code == 0
    assert (tmp_path / "results" / "notes.txt").read_text() == "mine"


def test_empty_files_and_folders_and_devices_are_free_to_use(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "rows.csv").touch()
    said = poise(*SIMULATE, "--out", "results", "--per-job", "rows.csv")
    assert (said.code, said.err) == (0, "")
    said = poise(*COMPARE, "--html", "/dev/null")
    assert (said.code, said.err) == (0, "")


def test_a_file_that_is_no_state_of_a_sweep_is_left_as_it_is_even_by_fresh(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("years of work\n")
    for more in ((), ("--fresh",)):
        assert "got another kind of file" in poise(*COMPARE, "--seeds", "2", "--state", "state", *more).refusal
    assert (tmp_path / "state").read_text() == "years of work\n"
