"""What happened to jobs, in columns, whether a journal or a cluster's log tells it: the input of a study.

Jobs are in order of submission. A run is a stretch of time in which a job held GPUs without a break. An attempt is what
lies between a job's submission, or a failure of it, and its next failure or its end: one run, or several where it was
preempted in between (Philly, ATC'19; docs/algorithms/philly.md). `sources.py` makes records of traces and journals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from poise.lab.analysis.history import RunEnd, floats, ints
from poise.lab.analysis.overtaking import Harm
from poise.lab.analysis.tables import HOUR, ChartCurve, totals
from poise.scheduler.model.arithmetic import Bools, Floats, Ints

ENDS = tuple(RunEnd)
FAILURES = (RunEnd.FAILED, RunEnd.LOST)
"""Ends that are failures: of the job, or of a node under it."""


class Final(StrEnum):
    """What became of a job."""

    PASSED = "passed"
    FAILED = "failed"
    KILLED = "killed"
    REJECTED = "rejected"
    UNFINISHED = "unfinished"


FINALS = tuple(Final)

NO_TENANT = "default"
"""The tenant of jobs that name none."""


class Covers(StrEnum):
    """What an input may tell."""

    RUN_TIMES = "run times"
    TENANTS = "tenants"
    OUTCOMES = "how jobs ended"
    STARTS = "when jobs started"
    ATTEMPTS = "attempts"
    NODES = "numbers of nodes"
    CAUSES = "causes of failures"
    WAITING = "causes of waiting"
    CLUSTER = "the cluster and its speed"


class RunRow(NamedTuple):
    """One row of `RunColumns`; the cause in words, empty for none."""

    job: int
    attempt: int
    start: float
    end: float
    seconds: float
    gpus: int
    nodes: int
    ended: int
    cause: str
    ideal: float


@dataclass(frozen=True, eq=False)
class RunColumns:
    """One row per run, by job and then by start.

    job       its index;  attempt: counted from 0 in the job
    start     NaN where it is not known, and so is `end`
    nodes     how many it was spread over; 0 where that is not known, and of trials
    ended     index into `ENDS`;  cause: index into `causes`, -1 for none
    ideal     seconds in which a packed gang alone does the steps that the run added; NaN where that is not known
    """

    job: Ints
    attempt: Ints
    start: Floats
    end: Floats
    seconds: Floats
    gpus: Ints
    nodes: Ints
    ended: Ints
    cause: Ints
    ideal: Floats
    causes: tuple[str, ...]

    @staticmethod
    def of(rows: Sequence[RunRow]) -> "RunColumns":
        """Return the columns of rows that are in order."""
        columns = zip(*rows, strict=True) if rows else ((),) * len(RunRow._fields)
        job, attempt, start, end, seconds, gpus, nodes, ended, cause, ideal = columns
        names = dict.fromkeys(filter(None, cause))
        codes = {name: code for code, name in enumerate(names)} | {"": -1}
        return RunColumns(
            ints(job), ints(attempt), floats(start), floats(end), floats(seconds), ints(gpus), ints(nodes), ints(ended),
            ints(codes[name] for name in cause), floats(ideal), tuple(names),
        )  # fmt: skip

    @property
    def gpu_seconds(self) -> Floats:
        """Return GPUs × seconds."""
        return self.seconds * self.gpus

    @cached_property
    def gaps(self) -> Floats:
        """Return seconds from the end of what the job held before to this start; NaN at its first run, or if not known.

        Tasks of one job overlap: then what it held before ends with the last of them, and the gap is below 0.
        """
        end = np.nan_to_num(self.end, nan=-np.inf)
        order = np.lexsort((end, self.job))
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        # The latest known end so far, by job: ranks of a later job are all higher, so the running maximum starts anew.
        latest = end[order][np.maximum.accumulate(rank)]
        covered = np.concatenate(([-np.inf], latest[:-1]))[: len(self.job)]
        last_end = np.concatenate(([np.nan], self.end[:-1]))[: len(self.job)]
        return np.where(self.firsts | np.isnan(last_end), np.nan, self.start - covered)

    @property
    def firsts(self) -> Bools:
        """Return which runs are the first of their jobs."""
        return np.append(True, self.job[1:] != self.job[:-1])[: len(self.job)]

    @property
    def new(self) -> Floats:
        """Return seconds of each run that no earlier run of the same job overlaps."""
        overlap = np.where(np.nan_to_num(self.gaps, nan=0.0) < 0, -self.gaps, 0.0)
        return np.maximum(self.seconds - overlap, 0.0)

    @property
    def failing(self) -> Bools:
        """Return which runs ended with a failure."""
        return np.isin(self.ended, [ENDS.index(each) for each in FAILURES])

    @property
    def _begins(self) -> Bools:
        """Return which runs are the first of an attempt."""
        begins = self.firsts
        begins[1:] |= self.attempt[1:] != self.attempt[:-1]
        return begins

    @cached_property
    def attempt_row(self) -> Ints:
        """Return the row of each run's attempt in `attempts`."""
        return np.cumsum(self._begins) - 1

    @cached_property
    def attempts(self) -> "Attempts":
        """Return the attempts that these runs make up."""
        rows, begins = self.attempt_row, np.flatnonzero(self._begins)
        failing = np.flatnonzero(self.failing)
        failed, cause = np.zeros(len(begins), dtype=bool), np.full(len(begins), -1)
        failed[rows[failing]] = True
        cause[rows[failing]] = self.cause[failing]
        return Attempts(
            self.job[begins], totals(rows, self.new, len(begins)), totals(rows, self.gpu_seconds, len(begins)), failed, cause
        )


@dataclass(frozen=True, eq=False)
class Attempts:
    """One row per attempt, by job and then in order; `seconds` it ran, NaN where that is not known."""

    job: Ints
    seconds: Floats
    gpu_seconds: Floats
    failed: Bools
    cause: Ints

    @property
    def retried(self) -> Bools:
        """Return which attempts were followed by another one of the same job."""
        return np.append(self.job[1:] == self.job[:-1], False) if len(self.job) else self.failed


@dataclass(frozen=True, eq=False)
class ClusterRecord:
    """The cluster on which jobs ran, over time, and what overtaking did there."""

    gpus: int
    utilisation: float
    used: ChartCurve
    waiting: ChartCurve
    harm: Harm


@dataclass(frozen=True, eq=False)
class Records:
    """Jobs in columns of equal length, in order of submission. NaN where something is not known or never came about.

    tenant        index into `tenants`;  final: index into `FINALS`
    started       its first start; a trial is none
    left          when it left the queue for the first time: by that start, or by its end without one
    run_seconds   time with GPUs, of jobs that came to an end
    waited        (jobs, causes): seconds it waited by cause, added up at each start
    wait_causes   names of those causes
    cluster       None where the input does not describe it
    """

    covers: frozenset[Covers]
    tenants: tuple[str, ...]
    tenant: Ints
    gpus: Ints
    submitted: Floats
    started: Floats
    left: Floats
    run_seconds: Floats
    gpu_seconds: Floats
    final: Ints
    runs: RunColumns
    waited: Floats
    wait_causes: tuple[str, ...] = ()
    cluster: ClusterRecord | None = None

    @property
    def delays(self) -> Floats:
        """Return seconds from submission to the first start."""
        return self.started - self.submitted

    @cached_property
    def gpu_hours(self) -> float:
        """Return the GPU-hours of all jobs."""
        return float(np.nansum(self.gpu_seconds)) / HOUR

    @cached_property
    def attempts(self) -> Ints:
        """Return the number of attempts of each job; 0 where it had none, or they are not known."""
        return np.bincount(self.runs.attempts.job, minlength=len(self.gpus))

    @cached_property
    def first_nodes(self) -> Ints:
        """Return the number of nodes of each job's first run, trials aside; 0 where that is not known."""
        told = self.runs.nodes > 0
        job, first = np.unique(self.runs.job[told], return_index=True)
        nodes = np.zeros(len(self.gpus), dtype=np.int64)
        nodes[job] = self.runs.nodes[told][first]
        return nodes
