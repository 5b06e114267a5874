"""What happened to jobs, in columns, whether a journal or somebody's log tells it: the input of a study.

Jobs are in order of submission. A spell is a stretch of time in which a job held GPUs without a break. An attempt is what
lies between a job's submission, or a failure of it, and its next failure or its end: one spell, or several where it was
preempted in between (Philly, ATC'19; ALGORITHMS §6.3).
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from poise.lab.analysis.exhibits import HOUR, ChartCurve, totals
from poise.lab.analysis.history import RunEnd
from poise.lab.analysis.overtaking import Harm
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


NOBODY = "default"
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


@dataclass(frozen=True, eq=False)
class Spells:
    """One row a spell, by job and then by start.

    job       its index;  attempt: counted from 0 in the job
    start     NaN where it is not known, and so is `end`
    nodes     how many it was spread over; 0 where that is not known, and of trials
    ended     index into `ENDS`;  cause: index into `causes`, -1 for none
    ideal     seconds that the steps it left would take at the speed of a packed gang alone; NaN where that is not known
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

    @property
    def gpu_seconds(self) -> Floats:
        """GPUs × seconds."""
        return self.seconds * self.gpus

    @cached_property
    def gaps(self) -> Floats:
        """Seconds between the end of what the job held before and this start; NaN at its first spell, or if not known.

        Tasks of one job overlap: then what it held before ends with the last of them, and the gap is below 0.
        """
        covered = np.concatenate(([-np.inf], self._covered()[:-1]))[: len(self.job)]
        last_end = np.concatenate(([np.nan], self.end[:-1]))[: len(self.job)]
        return np.where(self.firsts | np.isnan(last_end), np.nan, self.start - covered)

    @property
    def firsts(self) -> Bools:
        """Spells that are the first of their jobs."""
        return np.append(True, self.job[1:] != self.job[:-1])[: len(self.job)]

    @property
    def new(self) -> Floats:
        """Seconds of each spell that no earlier spell of the same job overlaps."""
        overlap = np.where(np.nan_to_num(self.gaps, nan=0.0) < 0, -self.gaps, 0.0)
        return np.maximum(self.seconds - overlap, 0.0)

    def _covered(self) -> Floats:
        """The latest known end of a spell and of those before it of the same job."""
        end = np.nan_to_num(self.end, nan=-np.inf)
        order = np.lexsort((end, self.job))
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        # Ranks of a later job are all higher, so that a running maximum starts anew with every job.
        return end[order][np.maximum.accumulate(rank)]

    @property
    def failing(self) -> Bools:
        """Spells that ended with a failure."""
        return np.isin(self.ended, [ENDS.index(each) for each in FAILURES])

    @property
    def _begins(self) -> Bools:
        """Spells that are the first of an attempt."""
        begins = self.firsts
        begins[1:] |= self.attempt[1:] != self.attempt[:-1]
        return begins

    @cached_property
    def attempt_row(self) -> Ints:
        """The row of each spell's attempt in `attempts`."""
        return np.cumsum(self._begins) - 1

    @cached_property
    def attempts(self) -> "Attempts":
        """The attempts that these spells make up."""
        rows, begins = self.attempt_row, np.flatnonzero(self._begins)
        failing = np.flatnonzero(self.failing)
        failed, cause = np.zeros(len(begins), dtype=bool), np.full(len(begins), -1)
        failed[rows[failing]] = True
        cause[rows[failing]] = self.cause[failing]
        return Attempts(
            self.job[begins],
            totals(rows, self.new, len(begins)),
            totals(rows, self.gpu_seconds, len(begins)),
            failed,
            cause,
        )


@dataclass(frozen=True, eq=False)
class Attempts:
    """One row an attempt, by job and then in order; `seconds` it ran, NaN where that is not known."""

    job: Ints
    seconds: Floats
    gpu_seconds: Floats
    failed: Bools
    cause: Ints

    @property
    def retried(self) -> Bools:
        """Attempts after which their job had another one."""
        return np.append(self.job[1:] == self.job[:-1], False) if len(self.job) else self.failed


@dataclass(frozen=True, eq=False)
class ClusterCapacity:
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
    started       its first start in earnest, which a trial is not
    left          when it left the queue for the first time: by that start, or by its end without one
    run_seconds   time with GPUs, of jobs that came to an end
    waited        (jobs, causes): seconds it waited by cause, at each start since it last had GPUs
    kinds         names of those causes
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
    spells: Spells
    waited: Floats
    kinds: tuple[str, ...] = ()
    room: ClusterCapacity | None = None

    @property
    def delays(self) -> Floats:
        """Seconds from submission to the first start."""
        return self.started - self.submitted

    @cached_property
    def gpu_hours(self) -> float:
        """Of all jobs."""
        return float(np.nansum(self.gpu_seconds)) / HOUR

    @cached_property
    def attempts(self) -> Ints:
        """How many attempts each job had; 0 where it had none, or they are not known."""
        return np.bincount(self.spells.attempts.job, minlength=len(self.gpus))

    @cached_property
    def first_nodes(self) -> Ints:
        """Over how many nodes each job was spread when it first ran in earnest; 0 where that is not known."""
        told = self.spells.nodes > 0
        job, first = np.unique(self.spells.job[told], return_index=True)
        nodes = np.zeros(len(self.gpus), dtype=np.int64)
        nodes[job] = self.spells.nodes[told][first]
        return nodes
