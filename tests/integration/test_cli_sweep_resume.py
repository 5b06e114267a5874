"""Sweeps that are interrupted or killed in real processes, and go on; and the state that they keep for it."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from tests.shell import PATIENCE, Said, as_json, ended, poise, poise_apart, started, wait_until
from tests.sweeping import GRID, SMALL, STEADY, lines_in, swept, without_effort

from poise.lab.experiment import FinishedSimulation, simulate
from poise.scheduler.model.errors import SolveError

pytestmark = pytest.mark.usefixtures("cache", "one_core")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("cache"))
    return without_effort(poise_apart("compare", *STEADY, *GRID, "--json", XDG_CACHE_HOME=folder).json)


def stopped(state: Path, stop: Callable[[subprocess.Popen[str]], None], *words: object) -> Said:
    """Stop a sweep once its state has two cells."""
    process = started("compare", *STEADY, *GRID, "--json", *words)
    wait_until(lambda: lines_in(state) >= 3, process)
    stop(process)
    return ended(process)


def ctrl_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def asked_to_end(process: subprocess.Popen[str]) -> None:
    process.terminate()


def all_asked_to_end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGTERM)


@pytest.mark.parametrize("stop", [ctrl_c, asked_to_end, all_asked_to_end])
def test_an_interrupted_sweep_shows_what_is_done_and_goes_on_to_the_same_numbers(
    stop: Callable[[subprocess.Popen[str]], None], tmp_path: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    state = tmp_path / "state.jsonl"
    said = stopped(state, stop, "--state", state)
    done = lines_in(state) - 1
    assert said.code == 130
    assert said.err == f"poise: interrupted; {done} of 12 cells are done; the same command goes on from here\n"
    rows = as_json(said.out)
    assert sum(row["runs"] for row in rows) == done
    assert all(row["partial"] == (row["runs"] < 3) for row in rows)
    again = poise_apart("compare", *STEADY, *GRID, "--json", "--state", state)
    assert again.err == f"note: {done} of 12 cells were there already\n"
    assert without_effort(again.json) == uninterrupted
    assert lines_in(state) == 13


def test_a_killed_sweep_goes_on_from_the_cache_and_cleans_up(cache: Path, uninterrupted: list[dict[str, Any]]) -> None:
    process = started("compare", *STEADY, *GRID, "--json")
    wait_until(lambda: any(lines_in(path) >= 3 for path in cache.glob("*.jsonl")), process)
    os.killpg(process.pid, signal.SIGKILL)  # as a machine that crashes would
    assert ended(process).code == -signal.SIGKILL
    (state,) = cache.glob("*.jsonl")
    state.write_bytes(state.read_bytes() + b'{"load": 1.0, "policy": "srtf", "tr')
    again = poise_apart("compare", *STEADY, *GRID, "--json")
    assert again.err == f"note: {lines_before(again)} of 12 cells were there already\n"
    assert without_effort(again.json) == uninterrupted
    assert list(cache.iterdir()) == []


def lines_before(said: Said) -> int:
    """As many cells as it says, at least the two that were waited for."""
    count = int(said.err.split()[1])
    assert 2 <= count < 12
    return count


def children(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, path.read_text().split())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at processes in /proc")
def test_no_process_outlives_the_one_that_was_started(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    process = started("compare", *STEADY, *GRID, "--state", state)
    wait_until(lambda: lines_in(state) >= 2, process)
    pids = list(children(process.pid))
    assert pids
    process.kill()
    ended(process)
    deadline = monotonic() + PATIENCE
    while any(is_alive(pid) for pid in pids):
        assert monotonic() < deadline
        sleep(0.01)


def is_alive(pid: int) -> bool:
    """A zombie that nobody waits for is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_sweep_of_more_takes_over_what_is_there(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    words = ("compare", *SMALL, "--state", state, "--json", "--policies")
    assert poise(*words, "fifo", "--seeds", "2").code == 0
    more = poise(*words, "srtf,fifo", "--seeds", "3", "--loads", "1,2")
    assert more.err == "note: 2 of 12 cells were there already\n"
    assert without_effort(more.json) == swept(*SMALL, "--policies", "srtf,fifo", "--seeds", "3", "--loads", "1,2")
    assert poise(*words, "fifo", "--seeds", "2").err == "note: 2 of 2 cells were there already\n"


def test_a_state_of_another_sweep_is_refused_and_fresh_starts_anew(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    words = ("--policies", "fifo", "--seeds", "2", "--state", state)
    assert poise("compare", *SMALL, *words).code == 0
    other = ("compare", *SMALL, "--round", "60", *words)
    assert (
        poise(*other).refusal == f"{state}: holds another sweep, or one by another Poise; name another file, or add --fresh"
    )
    assert poise(*other, "--fresh").err == ""
    assert poise(*other).err == "note: 2 of 2 cells were there already\n"


def test_a_damaged_line_is_told_and_its_cell_run_again(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    words = ("compare", *SMALL, "--policies", "fifo", "--seeds", "3", "--state", state, "--json")
    want = without_effort(poise(*words).json)
    lines = state.read_bytes().splitlines(keepends=True)
    state.write_bytes(b"".join([lines[0], lines[1], b"\x00\x00 garbage\n", lines[3]]))
    again = poise(*words)
    assert again.err == (
        f"note: {state}: lines that could not be read and are left out: 1\nnote: 2 of 3 cells were there already\n"
    )
    assert without_effort(again.json) == want


def test_what_a_crash_left_in_the_cache_is_no_obstacle(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("compare", *SMALL, "--policies", "fifo", "--seeds", "2", "--json")
    with monkeypatch.context() as patched:
        patched.setattr("poise.cli.sweep.SweepState.remove", lambda _: None)
        want = without_effort(poise(*words).json)
    (state,) = cache.iterdir()
    state.write_bytes(b"\x00" * 4096)
    assert without_effort(poise(*words).json) == want
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_does_not_stop_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said = poise("compare", *SMALL, "--policies", "fifo", "--seeds", "2", "--json")
    assert len(said.json) == 1
    assert said.err == (
        f"note: {tmp_path}/file/poise/sweeps: Not a directory; finished cells are not kept, name a file by --state\n"
    )


@pytest.mark.parametrize("content", ["job,submitted,gpus,duration\na,0,1,60\n", '{"policy": "fifo"}\n'])
def test_a_file_of_another_kind_is_not_written_over(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine"
    path.write_text(content)
    words = ("compare", *SMALL, "--policies", "fifo", "--seeds", "2", "--state", path, "--fresh")
    assert "got another kind of file" in poise(*words).refusal
    assert path.read_text() == content


def test_a_cell_that_fails_ends_the_sweep_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state.jsonl"
    words = ("compare", *SMALL, "--policies", "fifo", "--seeds", "2", "--state", state)
    monkeypatch.setattr("poise.lab.sweep.cells.simulate", Failing(after=1))
    assert poise(*words).failure == "fifo at load 1, seed 1: it did not work"
    assert lines_in(state) == 2


class Failing:
    """A simulation that goes wrong from some run on."""

    def __init__(self, after: int) -> None:
        self._left = after

    def __call__(self, *words: Any, **more: Any) -> FinishedSimulation:
        self._left -= 1
        if self._left < 0:
            raise SolveError("it did not work")
        return simulate(*words, **more)


class Pressing:
    """A simulation in which Ctrl-C is pressed so many times in the middle of the second run."""

    def __init__(self, times: int) -> None:
        self._times = times
        self._runs = 0

    def __call__(self, *words: Any, watch: Callable[[int], bool]) -> FinishedSimulation:
        self._runs += 1

        def pressing(ended: int) -> bool:
            for _ in range(self._times if self._runs == 2 and ended == 9 else 0):
                signal.raise_signal(signal.SIGINT)
            return watch(ended)

        return simulate(*words, watch=pressing)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_one_process_leaves_out_the_run_that_was_cut_short(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("compare", *SMALL, "--policies", "fifo,srtf", "--seeds", "2", "--json")
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        patched.setattr("poise.lab.sweep.cells.simulate", Pressing(times))
        said = poise(*words)
    assert (said.code, said.err) == (130, "poise: interrupted; 1 of 4 cells are done; the same command goes on from here\n")
    assert [(row["policy"], row["runs"], row["partial"]) for row in as_json(said.out)] == [("fifo", 1, True)]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert poise(*words).err == "note: 1 of 4 cells were there already\n"


def test_state_lines_are_one_summary_each(tmp_path: Path) -> None:
    """The file is plain enough to be read by others."""
    state = tmp_path / "state.jsonl"
    assert poise("compare", *SMALL, "--policies", "fifo", "--seeds", "2", "--state", state).code == 0
    header, *rows = map(json.loads, state.read_text().splitlines())
    assert header["sweep"] == 1
    assert sorted((row["load"], row["policy"], row["seed"]) for row in rows) == [(1, "fifo", 0), (1, "fifo", 1)]
