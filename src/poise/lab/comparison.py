"""Several experiments over one trace, one after another or on the cores there are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from poise.engine.journal import NAME
from poise.lab.analysis.run_tables import per_job_table
from poise.lab.columns import Column, Table
from poise.lab.experiment import Experiment, FinishedSimulation, simulate
from poise.lab.output_files import write_run
from poise.lab.traces.schema import Trace
from poise.scheduler.model.errors import OptionError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PolicyRuns(Generic[Result]):
    """Runs experiments that differ in their policies; `finish` takes from each run what is wanted of it.

    folders   by policy: where to write journal, summary and jobs
    """

    trace: Trace
    finish: Callable[[FinishedSimulation], Result]
    folders: Mapping[str, Path]

    def run(self, experiment: Experiment, watch: Callable[[int], bool] = lambda _ended: True) -> Result:
        """Run one experiment; `watch` as for `simulate`."""
        folder = self.folders.get(experiment.policy)
        if folder is not None:
            folder.mkdir(exist_ok=True)
        done = simulate(self.trace, experiment, journal=None if folder is None else folder / NAME, watch=watch)
        if folder is not None:
            write_run(folder, done.summary, per_job_table(done.history, done.measured))
        return self.finish(done)


def joined(tables: Sequence[tuple[str, Table]]) -> Table:
    """Return the rows of several tables with the same columns below one another, each with its name as `policy`."""
    names = tables[0][1].columns if tables else ()
    columns: dict[str, Column] = {"policy": [policy for policy, each in tables for _ in range(len(each))]}
    for name in names:
        parts = [each[name] for _, each in tables]
        if all(isinstance(part, np.ndarray) for part in parts):
            columns[name] = np.concatenate(parts)
        else:
            columns[name] = [value for part in parts for value in part]
    return Table(columns)


def split_policies(text: str) -> list[str]:
    """`fifo,tiresias:limits=300/900,promote=8,srtf`: a part with `=` but no `:` continues the policy before it."""
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if "=" in part and ":" not in part and names:
            names[-1] += f",{part}"
        else:
            names.append(part)
    if not names:
        raise OptionError("policies", "expected at least one name, e.g. fifo,srtf,tiresias")
    return names
