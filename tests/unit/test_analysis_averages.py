"""A grid of runs in a few numbers."""

import json
from dataclasses import fields, replace

import pytest

from poise.lab.analysis.statistics import KEYS, Cell, Grid, averaged, mean_of
from poise.lab.analysis.summary import Summary


def a_summary(policy: str = "fifo", seed: int = 0, **numbers: float | None) -> Summary:
    kinds = {each.name: each.type for each in fields(Summary)}
    blank = {name: "x" if kind is str else 0 if kind is int else 0.0 for name, kind in kinds.items()}
    return Summary(**{**blank, "policy": policy, "seed": seed, "jobs": 9, "partial": False, **numbers})  # type: ignore[arg-type]


GRID = Grid(("fifo", "srtf"), (1.0, 2.0), (3, 4, 5))
JCTS = {"fifo": (10.0, 20.0, 60.0), "srtf": (5.0, 9.0, 31.0)}
RUNS = {
    cell: a_summary(cell.policy, cell.seed, avg_jct=JCTS[cell.policy][cell.seed - 3] * cell.load) for cell in GRID.cells()
}


def test_cells_are_all_there_once_with_early_seeds_and_heavy_loads_first() -> None:
    cells = list(GRID.cells())
    assert len(set(cells)) == len(cells) == len(GRID) == 12
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    assert [(cell.load, cell.policy) for cell in cells[:4]] == [(2, "fifo"), (2, "srtf"), (1, "fifo"), (1, "srtf")]


def test_rows_are_means_by_load_and_policy_whatever_the_order_of_the_runs() -> None:
    rows = averaged(RUNS, GRID)
    assert [(row.load, row.policy) for row in rows] == [(1, "fifo"), (1, "srtf"), (2, "fifo"), (2, "srtf")]
    assert [row.means["avg_jct"].value for row in rows] == [30, 15, 60, 30]
    turned = dict(reversed(RUNS.items()))
    assert [row.document() for row in averaged(turned, GRID)] == [row.document() for row in rows]


def test_runs_are_paired_by_seed() -> None:
    row = averaged(RUNS, GRID)[1]
    assert row.against["avg_jct"].difference == mean_of([-5, -11, -29])
    some = {cell: run for cell, run in RUNS.items() if cell not in (Cell("fifo", 1.0, 3), Cell("srtf", 1.0, 5))}
    row = averaged(some, GRID)[1]
    assert (row.partial, list(row.runs)) == (True, [3, 4])
    assert row.against["avg_jct"].difference == mean_of([-11])


def test_document_has_the_keys_of_a_summary_and_more() -> None:
    first, second, *_ = (row.document() for row in averaged(RUNS, GRID))
    assert list(first)[: len(fields(Summary))] == [each.name for each in fields(Summary)]
    assert list(first)[len(fields(Summary)) :] == ["load", "seeds", "runs", "intervals", "counts", "against"]
    assert (first["avg_jct"], first["seed"], first["seeds"], first["runs"]) == (30, 3, [3, 4, 5], 3)
    assert first["against"] is None
    assert isinstance(second["against"], dict)
    assert second["against"]["policy"] == "fifo"
    assert set(second["against"]) == {"policy", *KEYS}
    assert isinstance(first["jobs"], int)
    json.dumps([first, second], allow_nan=False)


def test_cpu_times_have_means_and_nothing_else() -> None:
    """So that equal sweeps differ in two keys only."""
    runs = {cell: replace(run, cpu_seconds=float(cell.seed)) for cell, run in RUNS.items()}
    document = averaged(runs, GRID)[1].document()
    assert document["cpu_seconds"] == 4
    assert "cpu_seconds" not in str(document["intervals"])
    assert "cpu_seconds" not in str(document["against"])


def test_runs_without_a_number_are_counted() -> None:
    runs = {**RUNS, Cell("fifo", 1.0, 4): a_summary(seed=4, avg_jct=None)}
    row = averaged(runs, GRID)[0]
    assert row.means["avg_jct"] == mean_of([10, 60])
    assert isinstance(counts := row.document()["counts"], dict)
    assert (counts["avg_jct"], counts["jobs"]) == (2, 3)


def test_policies_without_a_run_are_left_out() -> None:
    runs = {cell: run for cell, run in RUNS.items() if cell.policy == "srtf" and cell.load == 2}
    (row,) = averaged(runs, GRID)
    assert (row.policy, row.load, row.document()["against"]) == ("srtf", 2, None)
    assert averaged({}, GRID) == []


@pytest.mark.parametrize(("jcts", "want"), [((7.0, 7.0, 7.0), True), ((7.0, 7.0, 8.0), False)])
def test_runs_that_came_out_the_same_are_known(jcts: tuple[float, ...], want: bool) -> None:
    runs = {Cell("fifo", 1.0, seed): a_summary(seed=seed, avg_jct=jct) for seed, jct in zip((3, 4, 5), jcts, strict=True)}
    assert averaged(runs, GRID)[0].is_constant is want


def test_one_run_is_not_called_the_same() -> None:
    assert averaged({Cell("fifo", 1.0, 3): a_summary(seed=3)}, GRID)[0].is_constant is False
