"""The schema of traces: what every reader and generator returns, and what the simulator and studies start from."""

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isnan
from os import PathLike
from typing import NamedTuple, overload

from poise.lab.arguments import as_number, file_of, refused, whole
from poise.lab.columns import Table
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.job import Job
from poise.scheduler.model.units import counted, format_seconds


class JobOutcome(StrEnum):
    """How a job ends once its work is done. Philly's `Killed` is its owner's cancellation."""

    PASSED = "passed"
    FAILED = "failed"
    KILLED = "killed"


class FailedAttempt(NamedTuple):
    """An attempt that dies after this many seconds of running, for this category of cause."""

    after: float
    cause: str


class RunAttempt(NamedTuple):
    """An attempt that a log tells of: times on the trace's clock, `end` None where the log does not tell it.

    nodes   GPUs on each node, in the order of the log; () where the log does not say
    """

    start: float
    end: float | None
    nodes: tuple[int, ...] = ()


class LossCurve(NamedTuple):
    """How a model gets better: the loss after k steps is 1 / (speed·k + start) + floor (Optimus, EuroSys'18 §3.1)."""

    speed: float
    start: float
    floor: float

    def loss(self, steps: float) -> float:
        """Return the loss after this many steps."""
        return 1.0 / (self.speed * steps + self.start) + self.floor


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job, and what will happen to it in a simulation: the scheduler sees only `job`.

    failures   attempts that die before the job's last one, in order; if it is broken, its last one too
    loss       how its loss falls; what it reports while it runs. None: it reports nothing
    observed   what a log says happened to it, in order: for studies of the log. The simulator does not look at it, and
               jobs that differ in nothing else are equal
    broken     it fails for good with the last of `failures`, whatever work is left; its outcome is FAILED
    """

    job: Job
    outcome: JobOutcome = JobOutcome.PASSED
    failures: tuple[FailedAttempt, ...] = ()
    loss: LossCurve | None = None
    observed: tuple[RunAttempt, ...] = field(default=(), compare=False)
    broken: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Trace:
    """Jobs by (submitted, place in the trace). Make one of rows or a data frame by `Trace.of`.

    Iterating and indexing give the jobs as their owners describe them (`Job`), slicing gives a trace.

    name    for tables and messages
    jobs    each with what will happen to it, which a scheduler does not see (`TraceJob`)
    notes   what the reader left out or assumed
    """

    name: str
    jobs: tuple[TraceJob, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.jobs, tuple) or (self.jobs and not isinstance(self.jobs[0], TraceJob)):
            raise RequestError("a Trace holds a tuple of TraceJob; Trace.of makes one of jobs, rows or a data frame")
        if not isinstance(self.name, str):
            raise refused("name", "text", self.name)
        if not isinstance(self.notes, tuple) or not all(isinstance(note, str) for note in self.notes):
            raise refused("notes", "a tuple of text", self.notes)

    @staticmethod
    def of(rows: object, name: str = "trace") -> "Trace":
        """Return a trace of jobs, in the order of their submissions.

        rows   jobs (`Job` or `TraceJob`) or mappings with the columns of Poise's own traces, mixed at will; or a pandas or
               Polars data frame, an Arrow table, or another `Table` with these columns. None, and NaN in a data frame,
               mean that a value is not given

        Raises TraceError that names the row, counted from 1, and the column.
        """
        from poise.lab.traces.rows import jobs_of_rows  # the columns are those of a reader, which returns what is above

        if isinstance(rows, Trace):
            return rows
        return Trace(name, tuple(sorted(jobs_of_rows(rows, name), key=lambda each: each.job.submitted)))

    def __len__(self) -> int:
        return len(self.jobs)

    def __iter__(self) -> Iterator[Job]:
        return (each.job for each in self.jobs)

    @overload
    def __getitem__(self, place: int) -> Job: ...
    @overload
    def __getitem__(self, place: slice) -> "Trace": ...
    def __getitem__(self, place: int | slice) -> "Job | Trace":
        if isinstance(place, slice):
            found = self.jobs[place]
            return replace(self, jobs=found if (place.step or 1) > 0 else found[::-1])
        return self.jobs[place].job

    def head(self, jobs: int) -> "Trace":
        """Return the first jobs, this many."""
        return replace(self, jobs=self.jobs[: whole(jobs, "jobs", 0)])

    def between(self, start: float, end: float) -> "Trace":
        """Return the jobs that are submitted from `start` on and before `end`, in seconds on the trace's clock."""
        for name, value in (("start", start), ("end", end)):
            if isnan(as_number(value)):
                raise refused(name, "seconds", value)
        return self.where(lambda job: start <= job.submitted < end)

    def where(self, keep: Callable[[Job], bool]) -> "Trace":
        """Return the jobs for which `keep(job)` is true."""
        if not callable(keep):
            raise refused("keep", "a function of a job", keep)
        return replace(self, jobs=tuple(each for each in self.jobs if keep(each.job)))

    def scaled(self, load: float) -> "Trace":
        """Return the same jobs, arriving `load` times as fast; inf: all at once. The first one stays where it is."""
        factor = as_number(load)
        if not factor > 0:
            raise refused("load", "a number above 0", load)
        if factor == 1.0 or not self.jobs:
            return self
        first = self.jobs[0].job.submitted

        def moved(job: Job) -> Job:
            return replace(job, submitted=first + (job.submitted - first) / factor)

        return replace(self, jobs=tuple(replace(each, job=moved(each.job)) for each in self.jobs))

    @property
    def table(self) -> Table:
        """One row per job, with the columns of Poise's own traces that some job has a value in."""
        from poise.lab.traces.rows import table_of

        return table_of(self)

    def write(self, path: str | PathLike[str]) -> None:
        """Write a trace that `read_trace` reads: .jsonl, or .csv with the same columns."""
        from poise.lab.traces.rows import write_file

        write_file(self, file_of(path))

    def __repr__(self) -> str:
        if not self.jobs:
            return f"Trace({self.name!r}: no jobs)"
        span = self.jobs[-1].job.submitted - self.jobs[0].job.submitted
        tenants = len({each.job.tenant for each in self.jobs})
        jobs = f"{counted(len(self.jobs), 'job')} of {counted(tenants, 'tenant')}"
        return f"Trace({self.name!r}: {jobs}, submitted within {format_seconds(span)})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.table._repr_html_() if self.jobs else ''}"
