"""What `simulate`, `compare` and `sweep` return: numbers as tables, figures, reports."""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from poise.engine.outside import spec_of
from poise.lab.analysis.run_tables import interval_table, job_table, timeline_table
from poise.lab.analysis.statistics import KEYS, Average, Contrast, Mean
from poise.lab.analysis.summary import Summary
from poise.lab.arguments import as_number, file_of, shown
from poise.lab.columns import Column, Table, UnknownKeyError, required
from poise.lab.comparison import joined
from poise.lab.experiment import FinishedSimulation
from poise.lab.report.comparison import COLUMNS, ComparedRun, comparison_page, table
from poise.lab.report.notes import comparison_notes, run_notes
from poise.lab.report.page import HtmlTable
from poise.lab.report.simulation import simulation_page, summary_rows
from poise.lab.report.sweep import LEGEND, sweep_page, sweep_table
from poise.lab.traces.schema import Trace
from poise.scheduler.model.errors import OptionError, RequestError
from poise.scheduler.model.units import counted

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.axes import Axes

_HIGHEST = {key for _, key, goal in COLUMNS if goal == "highest"} | {"jain"}
"""Keys of a summary of which more is better; of the others, less."""
_LABELS = ("trace", "cluster", "partial")


@dataclass(frozen=True, repr=False)
class SimulationResult:
    """What came of one run.

    summary     the numbers of `poise simulate --json`, as attributes and by key; times in seconds
    jobs        one row per job of the trace, in order of submission
    intervals   one row for each node on which a job held GPUs, from when to when, and how that ended
    timeline    one row for each moment at which the numbers of GPUs in use, or of running or waiting jobs changed
    notes       what was assumed, left out or is odd
    """

    summary: Summary
    jobs: Table
    intervals: Table
    timeline: Table
    notes: tuple[str, ...]
    _run: ComparedRun = field(compare=False)

    @staticmethod
    def of(done: FinishedSimulation, trace: Trace) -> "SimulationResult":
        """Take from a run what people look at."""
        return SimulationResult(
            done.summary,
            job_table(done.history, done.measured, trace),
            interval_table(done.history),
            timeline_table(done.history),
            tuple(run_notes(done.history, done.summary, "they are in .jobs", "they are in the journal")),
            ComparedRun.of(done.summary, done.history, done.measured),
        )

    @property
    def policy(self) -> str:
        """The policy, as it was asked for."""
        return self.summary.policy

    def plot_timeline(self, ax: "Axes | None" = None, *, what: Literal["gpus", "jobs"] = "gpus") -> "Axes":
        """Draw GPUs in use by type over time, or with `what="jobs"` running and waiting jobs; needs matplotlib."""
        if not isinstance(what, str) or what not in ("gpus", "jobs"):
            raise OptionError("what", f"expected gpus or jobs, got {shown(what)}")
        return _plots("plot_timeline()").timeline(self, what, ax)  # type: ignore[no-any-return]

    def plot_jct(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the distribution of completion times; needs matplotlib."""
        return _plots("plot_jct()").completion_times([self], ax)  # type: ignore[no-any-return]

    def html(self, path: str | PathLike[str]) -> None:
        """Write the report of `poise simulate --html`: one file, with figures and the timeline of GPUs."""
        file_of(path).write_text(simulation_page(self._run), encoding="utf-8")

    def __repr__(self) -> str:
        summary = self.summary
        rows = summary_rows(summary)
        width = max(len(heading) for heading, _ in rows)
        numbers = "\n".join(f"  {heading:{width}}  {value:>8}" for heading, value in rows)
        return f"{summary.policy} on {summary.cluster}: {summary.trace}\n{numbers}{_notes(self.notes)}"

    def _repr_html_(self) -> str:
        title = f"{self.summary.policy} on {self.summary.cluster}: {self.summary.trace}"
        return _html(title, HtmlTable(("", "value"), tuple(summary_rows(self.summary)), words=("",)), self.notes)


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """Several policies over one trace. Iterating gives their results, `comparison[policy]` that of one.

    results   by policy, in the order in which they were asked for
    notes     what was assumed, left out or is odd
    """

    results: Mapping[str, SimulationResult]
    notes: tuple[str, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies, as they were asked for."""
        return tuple(self.results)

    @property
    def summaries(self) -> Table:
        """One row per policy, with the keys of a summary; times in seconds."""
        return summaries_table([each.summary for each in self])

    @property
    def jobs(self) -> Table:
        """The jobs of all runs, with the policy in the first column."""
        return joined([(policy, each.jobs) for policy, each in self.results.items()])

    def best(self, key: str) -> str:
        """Return the policy with the best value: the least, but of utilisation, finished and jain the greatest."""
        check_key(key)
        known = {each.policy: value for each in self if (value := each.summary[key]) is not None}
        if not known:
            raise RequestError(f"no run has {key}")
        return (max if key in _HIGHEST else min)(known, key=lambda policy: known[policy])

    def plot_jct(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the distributions of completion times; needs matplotlib."""
        return _plots("plot_jct()").completion_times(list(self), ax)  # type: ignore[no-any-return]

    def plot(self, key: str = "avg_jct", ax: "Axes | None" = None) -> "Axes":
        """Draw a number of the summary, one bar per policy; needs matplotlib."""
        check_key(key)
        best = self.best(key) if any(each.summary[key] is not None for each in self) else None
        return _plots("plot()").bars([each.summary for each in self], key, best, ax)  # type: ignore[no-any-return]

    def html(self, path: str | PathLike[str]) -> None:
        """Write the report of `poise compare --html`."""
        first = next(iter(self)).summary
        title = f"{first.trace} on {first.cluster}"
        page = comparison_page(title, f"{counted(first.jobs, 'job')} of {title}.", [each._run for each in self])
        file_of(path).write_text(page, encoding="utf-8")

    def __getitem__(self, policy: object) -> SimulationResult:
        name = policy if isinstance(policy, str) else spec_of(policy)  # type: ignore[arg-type]  # it says what it takes
        if name not in self.results:
            raise UnknownKeyError("policy of this comparison", name, self.results)
        return self.results[name]

    def __iter__(self) -> Iterator[SimulationResult]:
        return iter(self.results.values())

    def __len__(self) -> int:
        return len(self.results)

    def __repr__(self) -> str:
        return f"{self._title}\n{_text(table([each.summary for each in self]))}{_notes(self.notes)}"

    def _repr_html_(self) -> str:
        return _html(self._title, table([each.summary for each in self]), self.notes)

    @property
    def _title(self) -> str:
        first = next(iter(self)).summary
        return f"{first.trace} on {first.cluster}"


@dataclass(frozen=True, repr=False)
class SweepResult:
    """Policies at several loads with several seeds.

    averages   one per load and policy, with everything that is known of it
    notes      what was assumed, left out or is odd
    """

    averages: Sequence[Average]
    notes: tuple[str, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies, as they were asked for."""
        return tuple(dict.fromkeys(each.policy for each in self.averages))

    @property
    def loads(self) -> tuple[float, ...]:
        """The loads, in the order in which they were asked for."""
        return tuple(dict.fromkeys(each.load for each in self.averages))

    @property
    def runs(self) -> Table:
        """One row per run: policy, load, seed, and the keys of its summary; times in seconds."""
        runs = [(each.load, run) for each in self.averages for run in each.runs.values()]
        found = summaries_table([run for _, run in runs])
        rest = {name: found[name] for name in found.columns if name not in ("policy", "seed")}
        loads = np.array([load for load, _ in runs], dtype=np.float64)
        return Table({"policy": found["policy"], "load": loads, "seed": found["seed"], **rest})

    @property
    def means(self) -> Table:
        """One row per load and policy, with the mean of each key of a summary over the seeds, and its interval.

        `KEY_low` and `KEY_high` are the bounds of the 95 % confidence interval. One run, or runs that agree, have none.
        """
        columns: dict[str, Column] = self._labels()
        for key in KEYS:
            columns |= _with_bounds(key, [each.means[key] for each in self.averages])
        return Table(columns)

    def against(self, baseline: object = None, key: str = "avg_jct") -> Table:
        """Compare each policy with another one, run by run on the same traces; by default with the first.

        Columns: `difference`, the mean of the differences, and `ratio`, the geometric mean of the ratios, each with the
        bounds of its 95 % confidence interval as `_low` and `_high`.
        """
        check_key(key)
        name = self.policies[0] if baseline is None else baseline if isinstance(baseline, str) else spec_of(baseline)  # type: ignore[arg-type]
        if name not in self.policies:
            raise UnknownKeyError("policy of this sweep", name, self.policies)
        theirs = {each.load: each for each in self.averages if each.policy == name}
        contrasts = [each.than(theirs[each.load], key) for each in self.averages]
        columns = self._labels() | _with_bounds("difference", [each.difference for each in contrasts])
        columns |= _with_bounds("ratio", [_ratio(each) for each in contrasts])
        return Table(columns).where(lambda row: row["policy"] != name)

    def best(self, key: str = "avg_jct", load: float | None = None) -> str:
        """Return the policy with the best mean at a load, which may be left out where there is one only."""
        check_key(key)
        if load is None and len(self.loads) == 1:
            load = self.loads[0]
        if as_number(load) not in self.loads:
            raise OptionError("load", f"expected one of {', '.join(f'{each:g}' for each in self.loads)}, got {shown(load)}")
        here = [each for each in self.averages if each.load == load]
        known = {each.policy: value for each in here if (value := each.means[key].value) is not None}
        if not known:
            raise RequestError(f"no run at load {load:g} has {key}")
        return (max if key in _HIGHEST else min)(known, key=lambda policy: known[policy])

    def plot(self, key: str = "avg_jct", ax: "Axes | None" = None) -> "Axes":
        """Draw the means of a number over load, one line per policy, with bands for the intervals; needs matplotlib."""
        check_key(key)
        return _plots("plot()").over_load(self.averages, key, ax)  # type: ignore[no-any-return]

    def html(self, path: str | PathLike[str]) -> None:
        """Write the report of `poise compare --loads … --seeds … --html`."""
        first = self.averages[0]
        seeds = counted(max(len(each.runs) for each in self.averages), "seed")
        intro = f"{counted(first.labels.jobs, 'job')} of {self._title}: means over {seeds}."
        file_of(path).write_text(sweep_page(self._title, intro, self.averages), encoding="utf-8")

    def __repr__(self) -> str:
        has_intervals = any(each.means["avg_jct"].interval for each in self.averages)
        legend = "\n" + LEGEND.format(rival=self.policies[0]) if has_intervals else ""
        return f"{self._title}\n{_text(sweep_table(self.averages))}{legend}{_notes(self.notes)}"

    def _repr_html_(self) -> str:
        return _html(self._title, sweep_table(self.averages), self.notes)

    @property
    def _title(self) -> str:
        first = self.averages[0].labels
        return f"{first.trace} on {first.cluster}"

    def _labels(self) -> dict[str, Column]:
        return {
            "policy": [each.policy for each in self.averages],
            "load": np.array([each.load for each in self.averages], dtype=np.float64),
            "runs": np.array([len(each.runs) for each in self.averages], dtype=np.int64),
        }


def summaries_table(summaries: Sequence[Summary]) -> Table:
    """Return one row per summary, with all of its keys."""
    return Table({key: _column([each.document()[key] for each in summaries]) for key in Summary.__dataclass_fields__})


def check_key(key: str) -> str:
    """Return a key of a summary that is a number; UnknownKeyError names the nearest ones if there is none."""
    if not isinstance(key, str) or key not in KEYS:
        raise UnknownKeyError("number of a summary", str(key), KEYS)
    return key


def _column(values: list[Any]) -> Column:
    if all(isinstance(value, bool) for value in values):
        return np.array(values, dtype=np.bool_)
    if all(isinstance(value, str) for value in values):
        return values
    if all(isinstance(value, int) for value in values):
        return np.array(values, dtype=np.int64)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _with_bounds(name: str, means: Sequence[Mean]) -> dict[str, Column]:
    """A column of means, and those of the bounds of their intervals."""
    bounds = [each.interval or (np.nan, np.nan) for each in means]
    return {
        name: np.array([np.nan if each.value is None else each.value for each in means], dtype=np.float64),
        f"{name}_low": np.array([low for low, _ in bounds], dtype=np.float64),
        f"{name}_high": np.array([high for _, high in bounds], dtype=np.float64),
    }


def _ratio(each: Contrast) -> Mean:
    return Mean(each.ratio, each.ratio_interval, each.difference.runs)


def _plots(what: str) -> "ModuleType":
    """The module that draws; it is imported where matplotlib is there."""
    required("matplotlib", "matplotlib", what)
    from poise.lab.library import plots

    return plots


def _text(shown: HtmlTable) -> str:
    """A table as lines of text: words are aligned left, numbers right."""
    widths = [max(map(len, column)) for column in zip(shown.columns, *shown.rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if shown.holds_words(column) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in (shown.columns, *shown.rows)
    )


def _html(title: str, shown: HtmlTable, notes: Sequence[str]) -> str:
    """A table with its title and notes, for notebooks; the best of a column are bold."""

    def cell(text: str, row: int, column: int) -> str:
        side = "left" if shown.holds_words(column) else "right"
        inner = html.escape(text)
        return f'<td style="text-align:{side}">{f"<b>{inner}</b>" if (row, column) in shown.best else inner}</td>'

    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in shown.columns)
    body = "".join(
        f"<tr>{''.join(cell(text, row, column) for column, text in enumerate(cells))}</tr>"
        for row, cells in enumerate(shown.rows)
    )
    below = "".join(f"<p>note: {html.escape(note)}</p>" for note in notes)
    return f"<p>{html.escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def _notes(notes: Sequence[str]) -> str:
    return "".join(f"\nnote: {note}" for note in notes)


def notes_of(results: Sequence[SimulationResult], before: Sequence[str]) -> tuple[str, ...]:
    """Return the notes of a comparison."""
    return (*before, *comparison_notes([each.summary for each in results]))
