"""Figures of results with matplotlib: the palette, the ticks and the units of Poise's reports.

This module is imported where a figure is asked for; nothing else here needs matplotlib.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import Formatter, Locator, NullFormatter, NullLocator

from poise.lab.analysis.statistics import Average
from poise.lab.analysis.summary import Summary
from poise.lab.library.results import SimulationResult
from poise.lab.report.axes import Tick, Unit, linear_ticks, log_axis, nice_step
from poise.lab.report.comparison import MOST_CHANGES, UNITS, cell
from poise.lab.report.figures import Series, averaged, distribution
from poise.lab.report.simulation import ROWS
from poise.lab.report.style import DASHES, LIGHT, LIGHT_SERIES
from poise.scheduler.model.arithmetic import Floats

_MOST_TICKS = 6
_ROOM = 0.12
"""How near two ticks of a logarithmic axis may be, as a fraction of it."""
_PALE = 0.15
"""Opacity of the band of an interval."""
LABELS = {key: heading for heading, key in ROWS} | {
    "avg_jct": "average completion time",
    "median_jct": "median completion time",
    "p99_jct": "99th percentile of completion times",
    "weighted_jct": "sum of weighted completion times",
    "utilisation": "share of GPUs in use",
    "unfair_fraction": "share of unfair jobs",
}
"""What stands at an axis for a key of the summary."""
_SECONDS = {key for key, unit in UNITS.items() if unit == "seconds"} | {"weighted_jct"}


def timeline(result: SimulationResult, what: Literal["gpus", "jobs"], ax: Axes | None) -> Axes:
    """GPUs in use by type, stacked, with those that there are; or running and waiting jobs."""
    ax = _axes(ax)
    table = result.timeline
    times = np.asarray(table["time"])
    start = times[0] if len(times) else 0.0
    if what == "gpus":
        _stacked(ax, result, times - start)
        ax.set_ylabel("GPUs in use")
    else:
        for place, name in enumerate(("running", "waiting")):
            line = _thinned(name, times - start, np.asarray(table[name]))
            ax.step(line.x, line.y, where="post", label=name, **_style(place))
        ax.set_ylabel("jobs")
    ax.set_ylim(bottom=0)
    ax.margins(x=0)
    _scaled(ax.xaxis, "seconds")
    ax.set_xlabel("time since the first submission")
    ax.set_title(f"{result.policy} on {result.summary.cluster}", loc="left", fontsize="medium")
    return _finished(ax, legend={"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 4})


def _stacked(ax: Axes, result: SimulationResult, times: Floats) -> None:
    table = result.timeline
    below = None
    for place, name in enumerate(name for name in table.columns if name.startswith("in_use_")):
        line = _thinned(name, times, np.asarray(table[name]))
        below = np.zeros(len(line.y)) if below is None else below
        colour = LIGHT_SERIES[place % len(LIGHT_SERIES)]
        label = name.removeprefix("in_use_")
        ax.fill_between(line.x, below, below + line.y, step="post", label=label, color=colour, alpha=0.75, linewidth=0)
        below = below + line.y
    ax.step(
        times,
        np.asarray(table["gpus"]),
        where="post",
        color=LIGHT["muted"],
        linestyle="--",
        linewidth=1,
        label="GPUs there are",
    )


def _thinned(name: str, times: Floats, levels: Any) -> Series:  # noqa: ANN401 - an array
    """Steps, as means over stretches of time where they change too often to be told apart."""
    series = Series(name, times, levels.astype(np.float64))
    if len(times) <= MOST_CHANGES:
        return series
    return averaged(series, nice_step(float(times[-1]), "seconds", MOST_CHANGES))


def completion_times(results: Sequence[SimulationResult], ax: Axes | None) -> Axes:
    """The share of jobs that took at most so long, one line per policy."""
    ax = _axes(ax)
    last = max((float(np.nanmax(each.jobs["jct"], initial=0.0)) for each in results), default=0.0)
    for place, result in enumerate(results):
        values, shares = distribution(np.asarray(result.jobs["jct"]))
        kept = values > 0  # on a logarithmic axis there is no 0
        if kept.any():  # from where no job has ended up to where all have
            x = np.concatenate((values[kept][:1], values[kept], [last]))
            y = np.concatenate(([shares[~kept][-1] if not kept.all() else 0.0], shares[kept], [1.0]))
            ax.step(x, y, where="post", label=result.policy, **_style(place))
    ax.set_xscale("log")
    _scaled(ax.xaxis, "seconds", scale="log")
    _scaled(ax.yaxis, "percent")
    ax.set_ylim(0, 1.02)
    ax.set_xlabel("completion time (log scale)")
    ax.set_ylabel("share of jobs at or below")
    return _finished(ax)


def bars(summaries: Sequence[Summary], key: str, best: str | None, ax: Axes | None) -> Axes:
    """One bar per policy with its value; the best one is marked."""
    ax = _axes(ax)
    values = [float(each[key]) if each[key] is not None and isfinite(each[key]) else 0.0 for each in summaries]
    names = [each.policy for each in summaries]
    colours = [LIGHT["accent"] if name == best else LIGHT["quiet"] for name in names]
    drawn = ax.barh(range(len(names)), values, color=colours)
    ax.bar_label(drawn, [cell(each, key) for each in summaries], padding=3, color=LIGHT["ink"])
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.set_xlim(left=0)
    _scaled(ax.xaxis, _unit(key))
    ax.set_xlabel(label_of(key))
    return _finished(ax, grid="x")


def over_load(rows: Sequence[Average], key: str, ax: Axes | None) -> Axes:
    """Means over load, one line per policy, with a band for the interval of each."""
    ax = _axes(ax)
    loads = sorted({row.load for row in rows})
    for place, policy in enumerate(dict.fromkeys(row.policy for row in rows)):
        own = sorted(
            (row for row in rows if row.policy == policy and row.means[key].value is not None), key=lambda row: row.load
        )
        x = [row.load for row in own]
        y = np.array([row.means[key].value for row in own], dtype=np.float64)
        bounds = [row.means[key].interval or (value, value) for row, value in zip(own, y, strict=True)]
        low, high = np.array(bounds, dtype=np.float64).reshape(-1, 2).T
        style = _style(place)
        if len(loads) > 1:
            ax.plot(x, y, marker="o", markersize=4, label=policy, **style)
            ax.fill_between(x, np.maximum(low, 0), high, color=style["color"], alpha=_PALE, linewidth=0)
        else:  # side by side, with whiskers, and named below
            ax.errorbar([place], y, yerr=[y - np.maximum(low, 0), high - y], fmt="o", capsize=4, color=style["color"])
    if len(loads) > 1:
        ax.set_xticks(loads, [f"{load:g}" for load in loads])
    else:
        policies = list(dict.fromkeys(row.policy for row in rows))
        ax.set_xticks(range(len(policies)), policies)
        ax.set_xlim(-0.6, len(policies) - 0.4)
    ax.set_ylim(bottom=0)
    _scaled(ax.yaxis, _unit(key))
    ax.set_xlabel("load" if len(loads) > 1 else f"at load {loads[0]:g}")
    ax.set_ylabel(f"{label_of(key)}, 95 % interval" if any(row.means[key].interval for row in rows) else label_of(key))
    return _finished(ax)


def label_of(key: str) -> str:
    """Return what stands at an axis for a key of the summary; times carry their units at the ticks."""
    return LABELS.get(key, key.replace("_", " "))


def _unit(key: str) -> Unit:
    return "seconds" if key in _SECONDS else UNITS.get(key, "plain")


def _axes(ax: object) -> Axes:
    """The axes that are given, or new ones in a figure of their own."""
    if ax is None:
        return pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")[1]
    if not isinstance(ax, Axes):
        raise TypeError(f"ax: expected Axes of matplotlib, got {type(ax).__name__}")
    return ax


def _style(place: int) -> dict[str, Any]:
    """Colour and dashes of the series at a place in the order."""
    dashes = DASHES[place % len(DASHES)]
    pattern: Any = "-" if dashes == "none" else (0, tuple(map(float, dashes.split())))
    return {"color": LIGHT_SERIES[place % len(LIGHT_SERIES)], "linestyle": pattern, "linewidth": 1.7}


def _finished(ax: Axes, grid: Literal["x", "y"] = "y", legend: Mapping[str, Any] = MappingProxyType({})) -> Axes:
    """A quiet grid behind the data, no frame, and a legend where there is something to tell apart."""
    ax.grid(axis=grid, color=LIGHT["grid"])
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if len(ax.get_legend_handles_labels()[1]) > 1:
        ax.legend(frameon=False, fontsize="small", **legend)
    return ax


# Ticks as in the reports: round numbers of the clock, with their units


class _Ticks(Locator):
    """Ticks of a range, wherever the axis is zoomed to."""

    def __init__(self, unit: Unit, scale: Literal["linear", "log"]) -> None:
        self._unit, self._scale = unit, scale

    def __call__(self) -> list[float]:
        return [tick.value for tick in self.ticks()]

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        """The ticks between two values."""
        return [tick.value for tick in self._between(vmin, vmax)]

    def ticks(self) -> Sequence[Tick]:
        """The ticks of the range that is shown, with their labels."""
        assert isinstance(self.axis, Axis)
        low, high = sorted(self.axis.get_view_interval())
        return self._between(low, high)

    def _between(self, low: float, high: float) -> Sequence[Tick]:
        if not high > low:
            return ()
        if self._scale == "linear":
            return linear_ticks(low, high, self._unit, _MOST_TICKS)
        return [tick for tick in log_axis(np.array([low, high]), self._unit, _ROOM).ticks if low <= tick.value <= high]


class _Labels(Formatter):
    """The labels of these ticks."""

    def __init__(self, ticks: _Ticks) -> None:
        self._ticks = ticks

    def __call__(self, x: float, pos: int | None = None) -> str:
        return next((tick.label for tick in self._ticks.ticks() if tick.value == x), "")


def _scaled(axis: Axis, unit: Unit, *, scale: Literal["linear", "log"] = "linear") -> None:
    ticks = _Ticks(unit, scale)
    axis.set_major_locator(ticks)
    axis.set_major_formatter(_Labels(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
