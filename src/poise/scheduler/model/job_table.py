"""Jobs as columns with stable rows, and the two ways to look at them: one row, or all active rows at once.

Columns are `array.array`: cheap to read and write one cell at a time from Python, and numpy sees them without a copy.
Row r is the r-th job ever submitted, so ascending rows are the tie rule (submission, then place in the trace).
"""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Bools, Floats, Ints
from poise.scheduler.model.cluster import Holding
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Estimate
from poise.scheduler.model.topology import PlacementView
from poise.scheduler.model.workload import Workload

Kind = TypeVar("Kind", bound=np.generic)


CHUNK = 1024
"""Rows that the columns grow by at a time."""


class JobTable:
    """What the core believes of every job. Only the core writes to it.

    steps           total declared work; inf if nobody knows
    steps_done      work done when `rate` last changed (or was last reported);  began_at: when the current run began
    rate, best      believed steps/s now (0 while waiting) and on the fastest GPU type
    progress_from   moment from which `rate` counts: start of the run plus the restart overhead, or the last change of `rate`
    counted_from    the same as if runs had no overhead;  ahead: steps that the run is then counted to have done until that
                    moment, beyond those in `steps_done`
    held            seconds with GPUs before the current run;  started: start of the current run
    repaid          when the current run has worked for as long as it took to start
    kind            index of the estimate that holds for the job;  tenant: index of its tenant, by first submission
    tenant_weights  by index of the tenant, as last heard of
    app             row of the first job of its app, which is its tenant's own; a job that names none is an app of its own
    least, most     GPUs that it can do with, and that it can use;  gpus: how many it holds now, 0 while it waits
    tasks           that a round of it divides into, 0 if it does not;  ready: those of the current round yet to be started
    place           what the current run holds, as a column of `Workload`, plus 1; 0 while it waits
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.tenants: list[str] = []
        self.tenant_weights: list[float] = []
        self.apps: list[str | None] = []
        self.submitted = array("d")
        self.gang = array("q")
        self.weight = array("d")
        self.skew = array("d")
        self.status = array("b")
        self.epoch = array("q")
        self.failures = array("q")
        self.steps = array("d")
        self.steps_done = array("d")
        self.began_at = array("d")
        self.rate = array("d")
        self.best = array("d")
        self.progress_from = array("d")
        self.counted_from = array("d")
        self.ahead = array("d")
        self.held = array("d")
        self.started = array("d")
        self.repaid = array("d")
        self.waiting_since = array("d")
        self.deadline = array("d")
        self.kind = array("q")
        self.tenant = array("q")
        self.app = array("q")
        self.least = array("q")
        self.most = array("q")
        self.gpus = array("q")
        self.tasks = array("q")
        self.ready = array("q")
        self.place = array("q")
        self._tenants: dict[str, int] = {}
        self._apps: dict[tuple[int, str], int] = {}

    def append(self, job: Job, steps: float, *, kind: int, best: float, skew: float | None, now: float) -> int:
        """Add a waiting job; returns its row."""
        row = len(self.ids)
        if row == len(self.status):
            self._grow()
        self.ids.append(job.id)
        self.tenants.append(job.tenant)
        self.submitted[row] = job.submitted
        self.gang[row] = job.gpus
        self.weight[row] = job.weight
        self.skew[row] = math.nan if skew is None else skew
        self.steps[row] = steps
        self.best[row] = best
        self.waiting_since[row] = now
        self.deadline[row] = math.inf if job.deadline is None else job.deadline
        self.kind[row] = kind
        self.tenant[row] = tenant = self._tenants.setdefault(job.tenant, len(self._tenants))
        self.tenant_weights[tenant : tenant + 1] = [job.tenant_weight]
        self.app[row] = row if job.app is None else self._apps.setdefault((tenant, job.app), row)
        self.apps.append(job.app)
        self.least[row] = job.min_gpus or job.gpus
        self.most[row] = job.max_gpus or job.gpus
        return row

    def divide(self, row: int, tasks: Tasks) -> None:
        """The job in this row needs no gang: its rounds divide, and any GPUs will do."""
        self.gang[row] = tasks.gang
        self.least[row] = 1
        self.most[row] = self.tasks[row] = self.ready[row] = tasks.count

    def _grow(self) -> None:
        """More rows, all zero: a waiting job that has never run."""
        for column in vars(self).values():
            if isinstance(column, array):
                column.frombytes(bytes(CHUNK * column.itemsize))

    def start(self, row: int, now: float, *, place: int, gpus: int, rate: float, overhead: float) -> None:
        """A run begins; work is done only once the overhead is over."""
        self.status[row] = Status.RUNNING
        self.epoch[row] += 1
        self.place[row] = place + 1
        self.gpus[row] = gpus
        self.rate[row] = rate
        self.began_at[row] = self.steps_done[row]
        self.started[row] = self.counted_from[row] = now
        self.progress_from[row] = now + overhead
        self.ahead[row] = 0.0
        self.repaid[row] = now + 2 * overhead

    def change_rate(self, row: int, now: float, rate: float) -> None:
        """The run goes on at another speed."""
        if now > self.counted_from[row]:
            self.ahead[row] += self.rate[row] * (now - self.counted_from[row])
            self.counted_from[row] = now
        if now > self.progress_from[row]:
            done = self.rate[row] * (now - self.progress_from[row])
            self.steps_done[row] += done
            self.ahead[row] -= done
            self.progress_from[row] = now
        self.rate[row] = rate

    def done_before(self, row: int) -> float:
        """Work done when the current run began; of a job that does not run, all that it has done."""
        return self.began_at[row] if self.status[row] == Status.RUNNING else self.steps_done[row]

    def report(self, row: int, steps: float) -> None:
        """The world says what a job had done before its current run, or in all if it does not run."""
        if self.status[row] == Status.RUNNING:
            self.steps_done[row] = steps + (self.steps_done[row] - self.began_at[row])
            self.began_at[row] = steps
        else:
            self.steps_done[row] = steps

    def stop(self, row: int, now: float, status: Status) -> None:
        """The run ends; what was done is believed until somebody reports otherwise."""
        if now > self.progress_from[row]:
            self.steps_done[row] += self.rate[row] * (now - self.progress_from[row])
        self.held[row] += now - self.started[row]
        self.rate[row] = 0.0
        self.place[row] = 0
        self.gpus[row] = 0
        self.ready[row] = self.tasks[row]
        self.status[row] = status
        self.waiting_since[row] = now


class JobView:
    """One row at one moment, read-only: what an order policy sees of a job. Times and amounts are as of `now`."""

    __slots__ = ("_columns", "now", "row")

    def __init__(self, columns: JobTable, row: int = 0, now: float = 0.0) -> None:
        self._columns = columns
        self.row = row
        self.now = now

    @property
    def submitted(self) -> float:
        """Moment of submission."""
        return self._columns.submitted[self.row]

    @property
    def gang(self) -> int:
        """GPUs needed at once."""
        return self._columns.gang[self.row]

    @property
    def running(self) -> bool:
        """It holds GPUs."""
        return self._columns.status[self.row] == Status.RUNNING

    @property
    def skew(self) -> float | None:
        """Largest tensor ÷ model size; None if not known."""
        skew = self._columns.skew[self.row]
        return None if math.isnan(skew) else skew

    @property
    def waiting_since(self) -> float:
        """When it was submitted, preempted or lost its node, whichever came last."""
        return self._columns.waiting_since[self.row]

    @property
    def attained_seconds(self) -> float:
        """Wall time with GPUs."""
        columns, row = self._columns, self.row
        held = columns.held[row]
        return held + self.now - columns.started[row] if columns.status[row] == Status.RUNNING else held

    @property
    def repaid(self) -> float:
        """When a running job has worked for as long as it took to start; to stop it before then is a waste of GPUs."""
        return self._columns.repaid[self.row]

    @property
    def attained_service(self) -> float:
        """GPU-seconds received."""
        return self.attained_seconds * self._columns.gang[self.row]

    @property
    def remaining_seconds(self) -> float:
        """Believed work left, in seconds on the fastest type, as if a run made progress from its very start.

        A start changes nothing about it, so a job that has just started does not fall behind its equals for its overhead.
        """
        columns, row = self._columns, self.row
        left = columns.steps[row] - columns.steps_done[row]
        if columns.status[row] == Status.RUNNING:
            left -= columns.rate[row] * (self.now - columns.counted_from[row]) + columns.ahead[row]
        return left / columns.best[row]

    @property
    def pace(self) -> float:
        """Believed speed now ÷ speed on the fastest type; 0 while it waits. `remaining_seconds` falls at this rate."""
        return self._columns.rate[self.row] / self._columns.best[self.row]


@dataclass(frozen=True)
class Snapshot:
    """All active jobs at one moment, as read-only columns of equal length by ascending row.

    origin   first moment there was: rounds are counted from it
    gpus     how many GPUs are alive;  idle: how many are free, by type;  is_contended: whether anybody waits
    placement   where free GPUs are and who holds which;  estimate: what is believed of the speed of the job in a row
    losses   what has been reported of the jobs in these rows: (steps, loss), in order of time
    pinned   rows of running jobs that keep what they hold whoever waits; to stop or to move one of them is no use
    """

    now: float
    origin: float
    gpus: int
    idle: tuple[int, ...]
    is_contended: bool
    active: tuple[int, ...]
    columns: JobTable
    placement: PlacementView
    survey: Callable[["Snapshot"], Workload]
    estimate: Callable[[int], Estimate]
    losses: Mapping[int, Sequence[tuple[float, float]]]
    pinned: frozenset[int] = frozenset()

    @cached_property
    def rows(self) -> Ints:
        """The active rows."""
        return _frozen(np.array(self.active, dtype=np.int64))

    @cached_property
    def gang(self) -> Ints:
        """GPUs needed at once."""
        return _frozen(np.frombuffer(self.columns.gang, dtype=np.int64)[self.rows])

    @cached_property
    def running(self) -> Bools:
        """Who holds GPUs."""
        status = np.frombuffer(self.columns.status, dtype=np.int8)[self.rows]
        return _frozen(status == Status.RUNNING)

    @cached_property
    def submitted(self) -> Floats:
        """Moments of submission."""
        return self.floats(self.columns.submitted)

    @cached_property
    def weight(self) -> Floats:
        """Weights."""
        return self.floats(self.columns.weight)

    @cached_property
    def attained_seconds(self) -> Floats:
        """Wall time with GPUs."""
        now = np.where(self.running, self.now - self.floats(self.columns.started), 0.0)
        return _frozen(self.floats(self.columns.held) + now)

    @cached_property
    def steps_left(self) -> Floats:
        """Believed work left."""
        columns = self.columns
        since = np.maximum(self.now - self.floats(columns.progress_from), 0.0)
        left = self.floats(columns.steps) - self.floats(columns.steps_done) - self.floats(columns.rate) * since
        return _frozen(np.maximum(left, 0.0))

    @cached_property
    def steps_so_far(self) -> Floats:
        """Believed work done."""
        columns = self.columns
        since = np.maximum(self.now - self.floats(columns.progress_from), 0.0)
        return _frozen(self.floats(columns.steps_done) + self.floats(columns.rate) * since)

    @cached_property
    def workload(self) -> Workload:
        """The same jobs as an optimisation problem sees them."""
        return self.survey(self)

    def floats(self, column: "array[float]") -> Floats:
        """Some column of these jobs."""
        return _frozen(np.frombuffer(column, dtype=np.float64)[self.rows]) if len(self.rows) else np.empty(0)

    def ints(self, column: "array[int]") -> Ints:
        """Some column of these jobs."""
        return _frozen(np.frombuffer(column, dtype=np.int64)[self.rows]) if len(self.rows) else np.empty(0, dtype=np.int64)

    def kept(self) -> dict[int, Holding]:
        """What pinned jobs hold, by ascending row; of two that share, once."""
        partner, holdings = self.placement.partner, self.placement.holdings
        return {
            row: holdings[row]
            for row in sorted(self.pinned)
            if partner.get(row, row) >= row or partner[row] not in self.pinned
        }

    def among(self, rows: frozenset[int]) -> Bools:
        """Which of these jobs are in some rows."""
        return np.isin(self.rows, sorted(rows)) if rows else np.zeros(len(self.rows), dtype=bool)

    def jobs(self) -> Iterable[JobView]:
        """The same jobs one by one; each view is valid until the next is asked for."""
        view = JobView(self.columns, now=self.now)
        for row in self.rows.tolist():
            view.row = row
            yield view


def _frozen(column: NDArray[Kind]) -> NDArray[Kind]:
    column.flags.writeable = False
    return column
