"""A page on several runs has every figure, whatever came of them."""

from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from tests.builders import a_job

from poise.lab.experiment import Experiment, simulate
from poise.lab.report.comparison import MOST_CHANGES, ComparedRun, comparison_page, table
from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import Trace
from poise.scheduler.model.cluster import parse_cluster


def a_run(trace: Trace, policy: str = "fifo", cluster: str = "gpu:4", until: float = np.inf) -> ComparedRun:
    outcome = simulate(trace, Experiment(parse_cluster(cluster), policy, until=until))
    return ComparedRun.of(outcome.summary, outcome.history, outcome.measured)


def few() -> Trace:
    return Trace("few", (a_job("a", at=100, seconds=1000), a_job("b", at=150, seconds=50)))


def parsed(*runs: ComparedRun) -> ET.Element:
    return ET.fromstring(comparison_page("t", "", runs).removeprefix("<!DOCTYPE html>\n"))


def titles(root: ET.Element) -> list[str]:
    return [(each.findtext("text") or "") for each in root.iterfind(".//div[@class='figures']/figure/svg")]


FIGURES = [
    *("Completion times", "Average completion time", "Finish-time fairness", "Speed against fairness"),
    *("GPUs in use", "Queue length"),
]


def test_values_that_are_written_the_same_are_marked_together_or_not_at_all() -> None:
    base = a_run(few()).summary
    found = table(
        [
            replace(base, policy="fifo", avg_jct=300.0, makespan=100.2),
            replace(base, policy="srtf", avg_jct=60.001, makespan=100.1),
            replace(base, policy="las", avg_jct=60.002, makespan=100.3),
        ]
    )
    marked = {(found.columns[column], found.rows[row][0]) for row, column in found.best}
    assert marked == {("average JCT", "srtf"), ("average JCT", "las")}


@pytest.mark.parametrize("until", [np.inf, 120.0], ids=["to the end", "before any job ends"])
def test_one_run_has_all_figures_and_a_timeline(until: float) -> None:
    root = parsed(a_run(few(), until=until))
    assert [title for title in titles(root) if title in FIGURES] == FIGURES
    assert root.find(".//div[@class='timeline']") is not None


def test_page_of_no_run_at_all_is_a_page() -> None:
    root = parsed()
    assert titles(root) == FIGURES
    assert root.find(".//div[@class='timeline']") is None


def test_levels_count_from_the_first_submission_to_the_end_of_the_run() -> None:
    run = a_run(few(), cluster="gpu:1")
    assert (run.used[0][0], run.used[1][0]) == (0, 1)
    assert run.waiting[0][-1] == run.used[0][-1] == 1050
    assert run.used[1][-1] == 0


def test_levels_of_a_run_that_was_stopped_go_to_the_end_of_its_journal() -> None:
    run = a_run(few(), cluster="gpu:1", until=700.0)
    assert run.used[0][-1] == run.waiting[0][-1] == run.track.end.max() == 50
    assert (run.used[1][-1], run.waiting[1][-1]) == (1, 1)


def test_a_run_with_many_changes_is_drawn_as_means_and_says_so() -> None:
    trace = read_trace(f"synthetic:jobs={2 * MOST_CHANGES},seed=3,durations=fixed:600,sizes=1:1")
    assert "Each step is the mean of " in comparison_page("t", "", [a_run(trace)])
    assert "Each step is the mean of " not in comparison_page("t", "", [a_run(few())])


def test_same_runs_are_the_same_page() -> None:
    pages = {comparison_page("t", "", [a_run(few()), a_run(few(), "srtf")]) for _ in range(2)}
    assert len(pages) == 1
