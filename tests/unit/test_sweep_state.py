"""The file in which a sweep keeps its finished cells."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from poise.lab.analysis.statistics import Cell
from poise.lab.analysis.summary import Summary
from poise.lab.experiment import Experiment, simulate
from poise.lab.sweep.state import CellStart, NotASweepError, SweepState, default_place, digest_of, opened
from poise.lab.traces.reader import read_trace
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.errors import RequestError
from poise.scheduler.throughput.table import read_throughputs

DIGEST = "d" * 64
TRACE = read_trace("synthetic:jobs=20")
EXPERIMENT = Experiment(parse_cluster("gpu:8"))
SUMMARY = simulate(TRACE, EXPERIMENT).summary


def kept(path: Path, *loads: float, start: CellStart = CellStart.RESUME) -> SweepState:
    """A state to which cells of these loads were added, closed again."""
    state = opened(path, DIGEST, start)
    for load in loads:
        state.keep(a_cell(load), SUMMARY)
    state.close()
    return state


def a_cell(load: float) -> Cell:
    return Cell(SUMMARY.policy, load, SUMMARY.seed)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.jsonl"


def test_what_was_kept_is_there_again_to_the_last_digit(path: Path) -> None:
    kept(path, 1.0, 0.1)
    assert kept(path).done == {a_cell(1.0): SUMMARY, a_cell(0.1): SUMMARY}


def test_numbers_that_json_cannot_write_are_none_when_they_come_back(path: Path) -> None:
    state = opened(path, DIGEST, CellStart.RESUME)
    state.keep(a_cell(1.0), replace(SUMMARY, weighted_jct=float("inf")))
    state.close()
    found = kept(path).done[a_cell(1.0)]
    assert found == replace(SUMMARY, weighted_jct=None)  # type: ignore[arg-type]


def test_a_file_cut_off_anywhere_keeps_its_whole_lines(path: Path) -> None:
    kept(path, 1.0, 2.0)
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:cut])
        state = kept(path, 3.0)
        before = [a_cell(load) for load, end in zip((1.0, 2.0), ends[1:], strict=True) if end <= cut]
        assert list(state.done) == [*before, a_cell(3.0)], cut
        assert state.unreadable == 0
        assert list(kept(path).done) == [*before, a_cell(3.0)], cut


DAMAGE = {
    "no JSON": b"\x00\x00\x00",
    "no cell": b"[1, 2]",
    "a number": b"7",
    "a key too few": b'{"load": 1.0, "policy": "fifo"}',
    "a load that is none": None,
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_lines_that_cannot_be_read_are_left_out_and_counted(path: Path, what: str) -> None:
    kept(path, 1.0, 2.0)
    header, first, second = path.read_bytes().splitlines()
    damaged = DAMAGE[what] or first.replace(b'"load": 1.0', b'"load": "1"')
    path.write_bytes(b"\n".join([header, damaged, second, b""]))
    state = kept(path)
    assert list(state.done) == [a_cell(2.0)]
    assert state.unreadable == 1


@pytest.mark.parametrize("key", ["avg_jct", "jobs", "policy", "partial"])
def test_a_value_of_another_kind_is_damage(path: Path, key: str) -> None:
    kept(path)
    row = {"load": 1.0, **SUMMARY.document(), key: [1]}
    with path.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    assert (kept(path).done, kept(path).unreadable) == ({}, 1)


@pytest.mark.parametrize("start", CellStart)
@pytest.mark.parametrize("content", [b"job,submitted\n1,2\n", b"[]\n", b"{}\n", b"<html>", b"\x00\x01", b"x" * 100_000])
def test_a_file_of_another_kind_is_refused_and_left_as_it_is(path: Path, content: bytes, start: CellStart) -> None:
    path.write_bytes(content)
    with pytest.raises(NotASweepError, match="another kind of file"):
        opened(path, DIGEST, start)
    assert path.read_bytes() == content


def test_another_sweep_is_refused_unless_it_is_to_be_forgotten(path: Path) -> None:
    kept(path, 1.0)
    with pytest.raises(RequestError, match="holds another sweep"):
        opened(path, "e" * 64, CellStart.RESUME)
    opened(path, "e" * 64, CellStart.FRESH).close()
    assert path.read_bytes().count(b"\n") == 1


def test_fresh_forgets_what_was_there(path: Path) -> None:
    kept(path, 1.0)
    assert kept(path, start=CellStart.FRESH).done == {}
    assert kept(path).done == {}


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="expected a file"):
        opened(tmp_path, DIGEST, CellStart.RESUME)


HOLDER = """
import sys
from pathlib import Path
from poise.lab.sweep.state import CellStart, opened
state = opened(Path(sys.argv[1]), sys.argv[2], CellStart.RESUME)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_two_sweeps_do_not_share_a_file(path: Path) -> None:
    words = [sys.executable, "-c", HOLDER, str(path), DIGEST]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RequestError, match="another sweep is at work on it"):
            opened(path, DIGEST, CellStart.RESUME)
        other.communicate()
    kept(path, 1.0)


class Full:
    """A disk on which nothing is left."""

    def write(self, _: bytes) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_once_and_the_sweep_goes_on(path: Path) -> None:
    state = opened(path, DIGEST, CellStart.RESUME)
    state.close()
    state._stream = Full()  # type: ignore[assignment]
    for load in (1.0, 2.0):
        state.keep(a_cell(load), SUMMARY)
    assert len(state.done) == 2
    assert state.path is None
    assert state.take_troubles() == [f"{path}: No space left on device; cells that finish from now on are not kept"]
    assert state.take_troubles() == []


@pytest.mark.parametrize(
    ("cache", "want"),
    [("/c", "/c/poise/sweeps/d"), ("relative", "/h/.cache/poise/sweeps/d"), ("", "/h/.cache/poise/sweeps/d")],
)
def test_default_place_is_in_the_cache_of_the_user(monkeypatch: pytest.MonkeyPatch, cache: str, want: str) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert str(default_place(DIGEST)) == want + "d" * 31 + ".jsonl"


def digest(options: dict[str, Any] | None = None, spec: str = "synthetic:jobs=20", **changed: Any) -> str:
    return digest_of(read_trace(spec), replace(EXPERIMENT, **changed), options or {})


def test_digest_is_the_same_for_the_same_and_differs_for_what_decides_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, table = tmp_path / "faults.jsonl", tmp_path / "table.csv"
    faults.write_text("one")
    table.write_text("# reference: v100\nmodel,batch_size,gpu_type,gpus,locality,steps_per_second\na,,v100,1,packed,10\n")
    options = {"faults": str(faults)}
    found = [digest(), digest({"round_": 60.0}), digest(options), digest(spec="synthetic:jobs=20,seed=1")]
    faults.write_text("two")
    found += [digest(options), digest(cluster=parse_cluster("gpu:8@8")), digest(throughputs=read_throughputs(table))]
    table.write_text(table.read_text().replace("10", "11"))
    found += [digest(throughputs=read_throughputs(table)), digest(truths=read_throughputs(table))]
    monkeypatch.setattr("poise.__version__", "9")
    found.append(digest())
    assert len(set(found)) == len(found)
    assert digest() == found[-1]


@pytest.mark.slow
def test_digest_is_that_of_another_process() -> None:
    """Sets and hashes of strings differ between processes: none of them is in it."""
    program = "from tests.unit.test_sweep_state import digest; print(digest())"
    root = Path(__file__).resolve().parents[2]
    said = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == digest()


def test_summary_is_what_the_lines_hold() -> None:
    assert Summary(**{**SUMMARY.document()}) == SUMMARY  # type: ignore[arg-type]
