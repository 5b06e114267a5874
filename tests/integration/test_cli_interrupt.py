"""Ctrl-C and closed pipes: what was done so far is shown, said to be partial, and can be replayed."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from tests.shell import COMMAND, PATIENCE, Said, as_json, ended, poise, started, unread, wait_until

from poise.cli import UNREAD
from poise.engine.journal import INTERRUPTED
from poise.lab.experiment import Experiment, FinishedSimulation
from poise.lab.experiment import simulate as run_simulation
from poise.lab.traces.schema import Trace

LONG = "synthetic:jobs=20000,rate=200"
"""Minutes of work under least attained service: it is interrupted long before its end."""

PARTIAL = "poise: interrupted; these results are partial"
NOTHING = Said(130, "", "\npoise: interrupted before anything was finished\n")
"""The line is a new one: terminals show ^C where the cursor is."""


def interrupted(condition: Callable[[subprocess.Popen[str]], bool], *words: object) -> Said:
    """Press Ctrl-C, which goes to all processes of a terminal, once the condition holds."""
    process = started(*words)
    wait_until(lambda: condition(process), process)
    os.killpg(process.pid, signal.SIGINT)
    return ended(process)


def children(process: subprocess.Popen[str]) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except OSError:
        return []


def ignores_interrupts(pid: int) -> bool:
    """True of a process of the pool that is ready for work."""
    try:
        fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    except OSError:
        return False
    return bool(int(fields["SigIgn"], 16) & 1 << (signal.SIGINT - 1))


def works_in_parallel(process: subprocess.Popen[str]) -> bool:
    return sum(map(ignores_interrupts, children(process))) >= 2


many_cores = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: policies run in the process itself")
on_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at processes in /proc")


def test_ctrl_c_ends_simulate_with_partial_results_and_a_journal_that_replays(tmp_path: Path) -> None:
    journal = tmp_path / "run" / "journal.jsonl"

    def has_begun(_: subprocess.Popen[str]) -> bool:
        return journal.exists() and journal.stat().st_size > 20_000

    said = interrupted(has_begun, "simulate", LONG, "--policy", "las", "--out", tmp_path / "run", "--json")
    assert said.code == 130
    assert said.err.strip() == PARTIAL
    summary = as_json(said.out)
    assert summary["partial"] is True
    assert summary["jobs"] == 20_000
    assert summary["unfinished"] > 0
    counts = (summary[key] for key in ("finished", "failed", "cancelled", "rejected", "unfinished"))
    assert sum(counts) == summary["jobs"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["partial"] is True
    assert journal.read_text().endswith(f'{{"end":"{INTERRUPTED}"}}\n')
    assert poise("replay", tmp_path / "run", "--json").json["exact"] is True


@many_cores
@on_linux
@pytest.mark.parametrize("words", [("--json",), ("--html", "report.html")], ids=["json", "html"])
def test_ctrl_c_ends_compare_and_all_its_processes(words: Sequence[str], tmp_path: Path) -> None:
    pids: list[int] = []

    def has_begun(process: subprocess.Popen[str]) -> bool:
        pids[:] = children(process)
        return works_in_parallel(process)

    where = [str(tmp_path / word) if word.endswith(".html") else word for word in words]
    said = interrupted(has_begun, "compare", LONG, "--policies", "las,srtf,lrtf", *where)
    assert said.code == 130
    assert said.err == "poise: interrupted; 0 of 3 policies are shown, results may be partial\n"
    assert said.out == "[]\n" if "--json" in words else "average JCT" in said.out
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@many_cores
def test_ctrl_c_shows_the_policies_that_were_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(futures: set[Any], **how: Any) -> Any:
        found = wait(futures, **how)
        if found.done:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr("poise.lab.parallel.wait", waiting)
    said = poise("compare", "synthetic:jobs=3000,rate=200", "--policies", "las,fifo", "--json")
    assert said.code == 130
    assert said.err == "poise: interrupted; 1 of 2 policies are shown, results may be partial\n"
    assert [(row["policy"], row["jobs"], row["partial"]) for row in as_json(said.out)] == [("fifo", 3000, False)]


@many_cores
@on_linux
def test_a_process_that_is_killed_ends_compare_with_one_line() -> None:
    process = started("compare", LONG, "--policies", "las,srtf")
    wait_until(lambda: works_in_parallel(process), process)
    os.kill(children(process)[0], signal.SIGKILL)
    assert ended(process).failure == "a process that simulated a policy was killed, perhaps for want of memory"


class CtrlC:
    """A simulation in which Ctrl-C is pressed after so many instants."""

    def __init__(self, after: int, times: int = 1) -> None:
        self._after = after
        self._times = times

    def __call__(
        self, trace: Trace, experiment: Experiment, *, watch: Callable[[int], bool], **more: Any
    ) -> FinishedSimulation:
        calls = 0

        def pressing(ended: int) -> bool:
            nonlocal calls
            calls += 1
            for _ in range(self._times if calls == self._after else 0):
                signal.raise_signal(signal.SIGINT)
            return watch(ended)

        return run_simulation(trace, experiment, watch=pressing, **more)


SMALL = ("synthetic:jobs=40,arrivals=at-once,durations=fixed:60,sizes=1:1", "--cluster", "gpu:10")


def test_ctrl_c_stops_between_two_instants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten jobs end every minute; the third instant is not taken in any more."""
    monkeypatch.setattr("poise.cli.simulate.run_simulation", CtrlC(after=3))
    said = poise("simulate", *SMALL, "--json")
    summary = as_json(said.out)
    assert (said.code, said.err) == (130, PARTIAL + "\n")
    assert (summary["partial"], summary["jobs"], summary["finished"], summary["unfinished"]) == (True, 40, 10, 30)
    assert (summary["avg_jct"], summary["makespan"], summary["utilisation"]) == (60, 60, 1)


def test_ctrl_c_says_so_under_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.cli.simulate.run_simulation", CtrlC(after=3))
    said = poise("simulate", *SMALL)
    assert said.code == 130
    assert "average JCT" in said.out
    assert PARTIAL in said.err.splitlines()


def test_ctrl_c_before_anything_ended_gives_a_summary_without_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.cli.simulate.run_simulation", CtrlC(after=1))
    summary = as_json(poise("simulate", *SMALL, "--json").out)
    assert (summary["partial"], summary["unfinished"], summary["avg_jct"]) == (True, 40, None)


def test_a_second_ctrl_c_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.cli.simulate.run_simulation", CtrlC(after=3, times=2))
    assert poise("simulate", *SMALL) == NOTHING


def test_ctrl_c_is_as_it_was_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("poise.cli.simulate.run_simulation", CtrlC(after=3))
    poise("simulate", *SMALL)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_one_process_leaves_out_the_policies_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("poise.lab.comparison.simulate", CtrlC(after=3))
    said = poise("compare", *SMALL, "--policies", "fifo,srtf,las", "--json")
    rows = as_json(said.out)
    assert said.code == 130
    assert said.err == "poise: interrupted; 1 of 3 policies are shown, results may be partial\n"
    assert [(row["policy"], row["partial"]) for row in rows] == [("fifo", True)]


def test_ctrl_c_in_the_demo_says_that_it_is_partial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("poise.lab.comparison.simulate", CtrlC(after=30))
    said = poise("demo", "--html", tmp_path / "report.html")
    assert said.code == 130
    assert said.err == "poise: interrupted; 1 of 8 policies are shown, results may be partial\n"


def test_ctrl_c_while_a_trace_is_read_says_that_nothing_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(*_: object, **__: object) -> Trace:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError

    monkeypatch.setattr("poise.lab.options.read_trace", reading)
    assert poise("simulate", "-") == NOTHING


PIPED = {
    "table": ("simulate", "synthetic:jobs=5"),
    "json": ("simulate", "synthetic:jobs=5", "--json"),
    "help": ("simulate", "--help"),
    "no verb": ("--help",),
    "version": ("--version",),
    "catalogue": ("policies",),
    "one of it": ("policies", "fifo"),
    "knobs": ("simulate", "synthetic:help"),
    "comparison": ("compare", "synthetic:jobs=5", "--policies", "fifo,srtf"),
    "sweep": ("compare", "synthetic:jobs=5", "--policies", "fifo,srtf", "--seeds", "2"),
    "study": ("analyze", "synthetic:jobs=50"),
    "audit": ("audit", "--policy", "fifo", "--trace", "synthetic:jobs=3", "--cluster", "gpu:2"),
}


@pytest.mark.parametrize("what", PIPED)
def test_a_reader_that_goes_away_is_no_complaint_and_has_the_code_of_a_closed_pipe(what: str, tmp_path: Path) -> None:
    assert unread(*PIPED[what], folder=tmp_path, XDG_CACHE_HOME=str(tmp_path)) == (UNREAD, "")


@pytest.mark.parametrize("words", [("policies",), ("polices",), ("simulate", "absent.jsonl")])
def test_complaints_that_none_reads_end_a_command_in_the_same_way(words: tuple[str, ...], tmp_path: Path) -> None:
    assert unread(*words, folder=tmp_path, complaints=subprocess.STDOUT) == (UNREAD, None)


def test_a_report_is_written_though_none_reads_the_table(tmp_path: Path) -> None:
    words = ("compare", "synthetic:jobs=5", "--policies", "fifo,srtf", "--quiet")
    assert unread(*words, "--html", "one.html", folder=tmp_path)[0] == UNREAD
    assert unread(*words, "--seeds", "2", "--html", "sweep.html", folder=tmp_path, XDG_CACHE_HOME=str(tmp_path))[0] == UNREAD
    assert all((tmp_path / name).read_text().endswith("</html>\n") for name in ("one.html", "sweep.html"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("what", ["table", "json", "help"])
def test_an_output_that_is_full_is_said_in_one_line(what: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([COMMAND, *PIPED[what]], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "poise: No space left on device\n")


def test_the_head_of_a_long_answer_is_all_that_is_read() -> None:
    process = started("policies")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(PATIENCE) in (0, UNREAD)  # all of it may be in the pipe by then
    process.stderr.close()
