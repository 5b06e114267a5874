"""Figures of results: the data that they draw, the units at their axes, and one line where matplotlib is missing."""

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

import poise
from poise.lab.columns import MissingPackageError
from poise.lab.report.style import LIGHT_SERIES

mpl.use("Agg")

TRACE = poise.synthetic(jobs=60, seed=5, rate=60, durations="lognormal:1500:1", models=["resnet50", "lstm"])
ON = "v100:4,k80:8"


@cache
def result() -> poise.SimulationResult:
    return poise.simulate(TRACE, cluster=ON, policy="srtf")


@cache
def compared() -> poise.ComparisonResult:
    return poise.compare(TRACE, cluster=ON, policies=["fifo", "srtf"], processes=1)


@cache
def swept() -> poise.SweepResult:
    return poise.sweep(TRACE, cluster=ON, policies=["fifo", "srtf"], loads=[1, 2], seeds=3, processes=1)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    pyplot.close("all")


def drawn(ax: Axes) -> Axes:
    """The axes, once the figure was drawn: ticks are found then."""
    ax.figure.canvas.draw()
    return ax


def ticks(ax: Axes, axis: str) -> list[str]:
    return [label.get_text() for label in getattr(ax, f"get_{axis}ticklabels")()]


def legend(ax: Axes) -> list[str]:
    found = ax.get_legend()
    return [] if found is None else [text.get_text() for text in found.get_texts()]


def test_the_timeline_stacks_gpu_types_over_time_with_units() -> None:
    ax = drawn(result().plot_timeline())
    assert legend(ax) == ["v100", "k80", "GPUs there are"]
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("GPUs in use", "time since the first submission")
    assert any(tick.endswith((" h", " min", " d")) for tick in ticks(ax, "x"))
    assert ax.get_ylim()[1] >= 12


def test_the_timeline_of_jobs_has_running_and_waiting_ones() -> None:
    ax = drawn(result().plot_timeline(what="jobs"))
    assert legend(ax) == ["running", "waiting"]
    assert all(np.all(np.asarray(line.get_ydata()) >= 0) for line in ax.get_lines())


def test_completion_times_are_distributions_that_end_at_all_jobs() -> None:
    ax = drawn(compared().plot_jct())
    assert legend(ax) == ["fifo", "srtf"]
    for each, line in zip(compared(), ax.get_lines(), strict=True):
        x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        jct = np.asarray(each.jobs["jct"])
        assert (y[-1], x[0]) == (1.0, jct.min())
        middle = x[np.searchsorted(y, 0.5)]
        assert np.mean(jct <= middle) >= 0.5 > np.mean(jct < middle)
    assert "50%" in ticks(ax, "y") or "60%" in ticks(ax, "y")
    assert [line.get_color() for line in ax.get_lines()] == list(LIGHT_SERIES[:2])
    assert len(drawn(result().plot_jct()).get_lines()) == 1


def test_bars_have_the_values_and_mark_the_best() -> None:
    ax = drawn(compared().plot("avg_jct"))
    widths = [bar.get_width() for bar in ax.patches]  # type: ignore[attr-defined]
    assert widths == [each.summary.avg_jct for each in compared()]
    colours = [to_hex(bar.get_facecolor()) for bar in ax.patches]
    assert colours[widths.index(min(widths))] == "#0072b2"
    assert ticks(ax, "y") == ["fifo", "srtf"]
    assert ax.get_xlabel() == "average completion time"


def test_a_sweep_draws_means_with_bands_of_their_intervals() -> None:
    ax = drawn(swept().plot("avg_jct"))
    assert legend(ax) == ["fifo", "srtf"]
    for policy, line, band in zip(swept().policies, ax.get_lines(), ax.collections, strict=True):
        rows = [row for row in swept().means if row["policy"] == policy]
        assert np.asarray(line.get_ydata()).tolist() == [row["avg_jct"] for row in rows]
        edges = np.asarray(band.get_paths()[0].vertices)[:, 1]
        assert edges.max() == max(row["avg_jct_high"] for row in rows)
        assert edges.min() == max(0, min(row["avg_jct_low"] for row in rows))
    assert ax.get_xlabel() == "load"
    assert ticks(ax, "x") == ["1", "2"]
    assert ax.get_ylabel() == "average completion time, 95 % interval"


def test_one_load_stands_side_by_side_and_shares_are_percentages() -> None:
    ax = drawn(poise.sweep(TRACE, cluster=ON, policies=["fifo", "srtf"], seeds=2, processes=1).plot("utilisation"))
    assert ticks(ax, "x") == ["fifo", "srtf"]
    assert all(tick.endswith("%") for tick in ticks(ax, "y"))
    assert legend(ax) == []


def test_figures_go_into_axes_that_are_given() -> None:
    _, axes = pyplot.subplots(2)
    assert compared().plot_jct(ax=axes[0]) is axes[0]
    assert swept().plot(ax=axes[1]) is axes[1]
    wrong: Any = axes[0].figure
    with pytest.raises(TypeError, match="ax: expected Axes of matplotlib, got Figure"):
        compared().plot(ax=wrong)


def test_runs_of_which_nothing_is_known_are_drawn_empty() -> None:
    nothing = poise.simulate([poise.Job("huge", 0, 99, duration=10)], cluster="gpu:4")
    for ax in (nothing.plot_timeline(), nothing.plot_jct(), nothing.plot_timeline(what="jobs")):
        drawn(ax)
    compared = poise.compare(
        [poise.Job("huge", 0, 99, duration=10)], cluster="gpu:4", policies=["fifo", "srtf"], processes=1
    )
    drawn(compared.plot("avg_jct"))


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"^plot_jct\(\) needs matplotlib; install it with: pip"):
        compared().plot_jct()
