"""A sweep as a table and as a page."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest
from tests.unit.test_analysis_averages import GRID, RUNS, a_summary

from poise.lab.analysis.statistics import Average, Cell, Grid, averaged
from poise.lab.report.sweep import over_load, sweep_page, sweep_table


def rows(**jcts: Sequence[float | None]) -> list[Average]:
    """Rows of policies with these average completion times, a seed each."""
    grid = Grid(tuple(jcts), (1.0,), tuple(range(max(map(len, jcts.values())))))
    runs = {
        Cell(name, 1.0, seed): a_summary(name, seed, avg_jct=jct)
        for name, row in jcts.items()
        for seed, jct in enumerate(row)
    }
    return averaged(runs, grid)


def column(found: list[Average], heading: str) -> list[str]:
    table = sweep_table(found)
    return [row[table.columns.index(heading)] for row in table.rows]


def marked(found: list[Average], heading: str) -> set[str]:
    table = sweep_table(found)
    place = table.columns.index(heading)
    return {table.rows[row][0] for row, at in table.best if at == place}


def test_table_has_a_row_a_load_and_policy() -> None:
    table = sweep_table(averaged(RUNS, GRID))
    assert [row[:2] for row in table.rows] == [("fifo", "1"), ("srtf", "1"), ("fifo", "2"), ("srtf", "2")]
    assert table.columns[:4] == ("policy", "load", "average JCT", "÷ fifo")


def test_means_carry_their_intervals_and_single_runs_none() -> None:
    assert column(rows(fifo=[60, 120, 180]), "average JCT") == ["2m00s ±2m29s"]
    assert column(rows(fifo=[60]), "average JCT") == ["1m00s"]
    assert column(rows(fifo=[60, 60]), "average JCT") == ["1m00s"]
    assert column(rows(fifo=[None, None]), "average JCT") == ["–"]


def test_ratios_are_to_the_first_policy_and_say_what_is_left_open() -> None:
    found = rows(fifo=[10, 100, 1000], srtf=[5, 51, 495], las=[11, 80, 1200])
    first, srtf, las = column(found, "÷ fifo")
    assert first == "1"
    assert srtf == "0.50 (0.48–0.52)"
    assert las.startswith("≈ 1.02 (0.6")


def test_a_ratio_without_runs_in_common_is_a_dash() -> None:
    found = rows(fifo=[None, None], srtf=[1, 2])
    assert column(found, "÷ fifo") == ["1", "–"]


def test_the_best_is_marked_and_what_is_not_told_apart_from_it() -> None:
    found = rows(fifo=[10, 100, 1000], srtf=[5, 51, 495], las=[4, 60, 460])
    assert marked(found, "average JCT") == {"srtf", "las"}
    assert marked(rows(fifo=[10], srtf=[5], las=[4]), "average JCT") == {"las"}
    assert marked(rows(fifo=[10], srtf=[10]), "average JCT") == set()
    assert marked(rows(fifo=[10]), "average JCT") == set()


def test_means_that_are_written_the_same_are_marked_together_or_not_at_all() -> None:
    found = rows(fifo=[300.0], srtf=[60.001], las=[60.002])
    assert column(found, "average JCT") == ["5m00s", "1m00s", "1m00s"]
    assert marked(found, "average JCT") == {"srtf", "las"}
    assert marked(rows(srtf=[60.001], las=[60.002]), "average JCT") == set()


def test_a_long_name_is_no_heading() -> None:
    found = rows(**{"tiresias:limits=300/900": [1.0], "fifo": [2.0]})
    assert "÷ first" in sweep_table(found).columns


@pytest.mark.parametrize(
    "found",
    [averaged(RUNS, GRID), rows(fifo=[10], srtf=[5]), rows(**{"<&>": [None, 3, 9]}), []],
    ids=["a grid", "one run", "a strange name", "nothing"],
)
def test_page_is_one_well_formed_document(found: list[Average]) -> None:
    text = sweep_page("title", "intro", found)
    root = ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    assert len(list(root.iter("figure"))) == 4


def test_figure_has_a_whisker_an_interval_and_a_dot_a_mean() -> None:
    svg = ET.fromstring(over_load(averaged(RUNS, GRID), "avg_jct", title="t", y_label="y"))
    assert len(list(svg.iter("circle"))) == 4
    assert len(list(svg.iter("rect"))) == 4 * 3
    lone = ET.fromstring(over_load(rows(fifo=[10], srtf=[5]), "avg_jct", title="t", y_label="y"))
    assert (len(list(lone.iter("circle"))), len(list(lone.iter("rect")))) == (2, 0)


@pytest.mark.parametrize("loads", [(1.0,), (1.0, 2.0)])
def test_many_policies_stay_inside_the_figure(loads: tuple[float, ...]) -> None:
    grid = Grid(tuple(f"p{number}" for number in range(60)), loads, (0, 1))
    runs = {cell: a_summary(cell.policy, cell.seed, avg_jct=10.0 + cell.seed) for cell in grid.cells()}
    svg = ET.fromstring(over_load(averaged(runs, grid), "avg_jct", title="t", y_label="y"))
    width = float(svg.attrib["viewBox"].split()[2])
    assert all(0 < float(circle.attrib["cx"]) < width for circle in svg.iter("circle"))


def test_below_policies_at_one_load_stands_that_load_alone() -> None:
    svg = ET.fromstring(over_load(rows(fifo=[10], srtf=[5]), "avg_jct", title="t", y_label="y"))
    assert [each.text for each in svg.iter("text") if each.get("class") == "soft middle"] == ["1", "load"]


def test_whiskers_stay_inside_the_figure() -> None:
    """An interval of two runs reaches far below zero: it is cut off at the axis."""
    svg = ET.fromstring(over_load(rows(fifo=[1, 9]), "avg_jct", title="t", y_label="y"))
    height = float(svg.attrib["viewBox"].split()[3])
    for rect in svg.iter("rect"):
        assert 0 <= float(rect.attrib["y"]) <= float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height


def words_in(svg: str) -> list[str | None]:
    return [each.text for each in ET.fromstring(svg).iter("text")]


def test_shares_do_not_reach_beyond_all_of_it() -> None:
    """Neither do the intervals of two runs, which are ten times as wide as the runs are apart."""
    runs = {Cell("fifo", 1.0, seed): a_summary("fifo", seed, utilisation=0.4 + 0.3 * seed) for seed in (0, 1)}
    words = words_in(over_load(averaged(runs, Grid(("fifo",), (1.0,), (0, 1))), "utilisation", title="t", y_label="y"))
    assert "100%" in words
    assert not {"120%", "150%", "200%"} & set(words)


@pytest.mark.parametrize(("loads", "want"), [((0.5, 1.0, 2.0), "load"), ((0.1, 1.0, 10.0), "load (log scale)")])
def test_loads_far_apart_stand_on_a_logarithmic_axis_that_says_so(loads: tuple[float, ...], want: str) -> None:
    runs = {Cell("fifo", load, 0): a_summary(avg_jct=load) for load in loads}
    assert want in words_in(over_load(averaged(runs, Grid(("fifo",), loads, (0,))), "avg_jct", title="t", y_label="y"))
