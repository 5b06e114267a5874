"""The job table: what the core believes of every job, as columns; and the two read-only views that policies get of it.

`JobView` looks at one row, for policies that rank one job at a time. `Snapshot` looks at all active rows at once, as numpy
columns, for policies that plan.

Columns are `array.array`: reading and writing one cell from Python is cheap, and numpy sees them without a copy. Row r is
the r-th job ever submitted and never changes, so ascending rows are the tie rule: by submission, then by place in the
trace.
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
    """Everything the core believes of jobs, one row per job ever submitted. Only the core writes to it.

    All times are seconds on the clock of the events. Lists have exactly one entry per job; arrays are longer, because they
    grow in chunks, and rows that are not in use are zero: a waiting job that has never run.

    Work done now is `steps_done + rate · max(0, now - progress_from)`. A job's time with GPUs is `held`, plus
    `now - started` while it runs. Neither is written at every step: cells change only when something happens to the job.
    """

    def __init__(self) -> None:
        # Who the job is. Written once, by `append`.
        self.jobs: dict[int, Job] = {}  # as its owner describes it, by row; only of jobs that have not ended
        self.ids: list[str] = []  # unique
        self.tenants: list[str] = []  # name of its tenant
        self.apps: list[str | None] = []  # name of its app; None if it names none
        self.submitted = array("d")  # time of submission
        self.deadline = array("d")  # time; inf if it has none
        self.weight = array("d")  # > 0, as policies that divide among jobs use it (`Job.weight`)
        self.skew = array("d")  # largest tensor ÷ model size; nan if not known
        self.kind = array("q")  # index of the estimate that holds for it
        self.tenant = array("q")  # index of its tenant, in order of first submission
        self.app = array("q")  # row of the first job of its app (apps belong to one tenant); its own row if it has no app
        self.tenant_weights: list[float] = []  # by index of tenant; the last value stated counts

        # What it needs. Written by `append`, and by `divide` for jobs whose steps divide into tasks.
        self.gang = array("q")  # GPUs that it asks for, >= 1
        self.least = array("q")  # fewest GPUs that it can run on, 1 <= least <= gang
        self.most = array("q")  # most GPUs that it can use, >= gang
        self.unit = array("q")  # its GPUs on each node come in multiples of this, >= 1; gang, least and most are such
        self.tasks = array("q")  # tasks of a step; 0 if steps do not divide
        self.steps = array("d")  # declared work, in steps; inf if unknown
        self.best = array("d")  # believed steps per second on its fastest GPU type, packed; 0 if it can run nowhere

        # Where it stands.
        self.status = array("b")  # a `Status`
        self.epoch = array("q")  # launches so far; the current run's, while it runs
        self.failures = array("q")  # runs that failed
        self.waiting_since = array("d")  # when it was submitted, or when its last run ended
        self.received = array("d")  # seconds with GPUs, in runs that have ended
        self.steps_done = array("d")  # steps done when `rate` was last changed; of a waiting job, all that it has done

        # The current run. `rate`, `gpus` and `place` are 0 while the job does not run; the others keep their last value.
        self.rate = array("d")  # believed steps per second
        self.gpus = array("q")  # GPUs that it holds
        self.place = array("q")  # 1 + the column of `Workload` that it holds GPUs of
        self.started = array("d")  # start of the run
        self.began_at = array("d")  # `steps_done` at the start of the run
        self.progress_from = array("d")  # time from which `rate` counts: start plus overhead, or the last change of `rate`
        self.counted_from = array("d")  # the same without the overhead, <= progress_from
        self.ahead = array("d")  # steps until `counted_from` beyond `steps_done`, if the run had had no overhead; >= 0
        self.repaid = array("d")  # when the run has worked for as long as it took to start
        self.ready = array("q")  # tasks of the current step that are yet to be started, 0 to `tasks`

        self._tenants: dict[str, int] = {}
        self._apps: dict[tuple[int, str], int] = {}

    def append(self, job: Job, steps: float, *, kind: int, best: float, skew: float | None, now: float) -> int:
        """Add a waiting job; returns its row."""
        row = len(self.ids)
        if row == len(self.status):
            for column in vars(self).values():
                if isinstance(column, array):
                    column.frombytes(bytes(CHUNK * column.itemsize))
        self.jobs[row] = job
        self.ids.append(job.id)
        self.tenants.append(job.tenant)
        self.apps.append(job.app)
        self.submitted[row] = job.submitted
        self.deadline[row] = math.inf if job.deadline is None else job.deadline
        self.weight[row] = job.weight
        self.skew[row] = math.nan if skew is None else skew
        self.kind[row] = kind
        self.tenant[row] = tenant = self._tenants.setdefault(job.tenant, len(self._tenants))
        self.tenant_weights[tenant : tenant + 1] = [job.tenant_weight]
        self.app[row] = row if job.app is None else self._apps.setdefault((tenant, job.app), row)
        self.gang[row] = job.gpus
        self.least[row] = job.min_gpus or job.gpus
        self.most[row] = job.max_gpus or job.gpus
        self.unit[row] = job.unit
        self.steps[row] = steps
        self.best[row] = best
        self.waiting_since[row] = now
        return row

    def divide(self, row: int, tasks: Tasks) -> None:
        """Note that the steps of a waiting job divide into tasks: it needs no gang, and runs on any GPUs."""
        self.gang[row] = tasks.gang
        self.least[row] = 1
        self.most[row] = self.tasks[row] = self.ready[row] = tasks.count

    def start(self, row: int, now: float, *, place: int, gpus: int, rate: float, overhead: float) -> None:
        """Begin a run. It makes progress only once the restart overhead is over."""
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
        """Let the run go on at another speed: book what it has done so far, and count from now."""
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
        """Steps done before the current run; if the job does not run, all steps that it has done."""
        return self.began_at[row] if self.status[row] == Status.RUNNING else self.steps_done[row]

    def report(self, row: int, steps: float) -> None:
        """Correct `done_before` to what the back end reports; what the current run has done since is kept."""
        if self.status[row] == Status.RUNNING:
            self.steps_done[row] = steps + (self.steps_done[row] - self.began_at[row])
            self.began_at[row] = steps
        else:
            self.steps_done[row] = steps

    def stop(self, row: int, now: float, status: Status) -> None:
        """End the run. The steps it is believed to have done count until the back end reports otherwise (`report`)."""
        if now > self.progress_from[row]:
            self.steps_done[row] += self.rate[row] * (now - self.progress_from[row])
        self.received[row] += now - self.started[row]
        self.rate[row] = 0.0
        self.place[row] = 0
        self.gpus[row] = 0
        self.ready[row] = self.tasks[row]
        self.status[row] = status
        self.waiting_since[row] = now


class JobView:
    """One row at one time, read-only: what a rank policy sees of a job. Amounts are as of `now`.

    Times are seconds on the clock of the events. Work is in steps, or in seconds on the job's fastest GPU type. The core
    moves one view from row to row (`row`, `now`), so a policy must not keep it. `Snapshot` has the same attributes as
    columns.
    """

    __slots__ = ("_columns", "now", "row")

    def __init__(self, columns: JobTable, row: int = 0, now: float = 0.0) -> None:
        self._columns = columns
        self.row = row
        self.now = now

    # Who it is, as its owner says

    @property
    def id(self) -> str:
        """The id of the job, unique."""
        return self._columns.ids[self.row]

    @property
    def name(self) -> str | None:
        """Its name, which need not be unique; None if it has none."""
        return self._columns.jobs[self.row].name

    @property
    def tenant(self) -> str:
        """The name of its tenant."""
        return self._columns.tenants[self.row]

    @property
    def app(self) -> str | None:
        """The name of its app, which belongs to its tenant; None if it names none."""
        return self._columns.apps[self.row]

    @property
    def model(self) -> str | None:
        """The name of the model that it trains; None if not stated."""
        return self._columns.jobs[self.row].model

    @property
    def batch_size(self) -> int | None:
        """Samples per step; None if not stated."""
        return self._columns.jobs[self.row].batch_size

    @property
    def submitted(self) -> float:
        """Time of submission."""
        return self._columns.submitted[self.row]

    @property
    def weight(self) -> float:
        """Its weight among jobs, above 0; in the live service the owner's number times the tenant's."""
        return self._columns.weight[self.row]

    @property
    def tenant_weight(self) -> float:
        """The weight of its tenant among tenants, above 0."""
        return self._columns.tenant_weights[self._columns.tenant[self.row]]

    @property
    def priority(self) -> int:
        """A whole number; 0 if not stated. No policy of the catalogue looks at it."""
        return self._columns.jobs[self.row].priority

    @property
    def deadline(self) -> float:
        """Time by which it should be done; inf if it has no deadline."""
        return self._columns.deadline[self.row]

    # What it needs

    @property
    def gang(self) -> int:
        """GPUs needed at once."""
        return self._columns.gang[self.row]

    @property
    def min_gpus(self) -> int:
        """Fewest GPUs that it can run on, 1 <= min_gpus <= gang."""
        return self._columns.least[self.row]

    @property
    def max_gpus(self) -> int:
        """Most GPUs that it can use, >= gang."""
        return self._columns.most[self.row]

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Names of the GPU types that it may run on; empty means any."""
        return self._columns.jobs[self.row].gpu_types

    @property
    def micro_batches(self) -> int:
        """Tasks that a step divides into, so that any mix of GPUs will do; 0 if steps do not divide."""
        return self._columns.tasks[self.row]

    @property
    def skew(self) -> float | None:
        """Largest tensor ÷ model size; None if not known."""
        skew = self._columns.skew[self.row]
        return None if math.isnan(skew) else skew

    # Its work

    @property
    def declared_steps(self) -> float:
        """Work as its owner declares it in steps; inf if it does not."""
        steps = self._columns.jobs[self.row].steps
        return math.inf if steps is None else steps

    @property
    def declared_seconds(self) -> float:
        """Work as its owner declares it in seconds on the reference GPU type of the table; inf if it does not."""
        seconds = self._columns.jobs[self.row].duration
        return math.inf if seconds is None else seconds

    @property
    def believed_steps(self) -> float:
        """All its work, as it is believed to be, in steps; inf if unknown."""
        return self._columns.steps[self.row]

    @property
    def believed_seconds(self) -> float:
        """All its work, as it is believed to be, in seconds of the whole gang on its fastest type; inf if unknown."""
        return self._columns.steps[self.row] / self._columns.best[self.row]

    @property
    def steps_so_far(self) -> float:
        """Believed work done, in steps."""
        columns, row = self._columns, self.row
        return columns.steps_done[row] + columns.rate[row] * max(self.now - columns.progress_from[row], 0.0)

    @property
    def steps_left(self) -> float:
        """Believed work left, in steps; inf if unknown."""
        return max(self._columns.steps[self.row] - self.steps_so_far, 0.0)

    @property
    def remaining_seconds(self) -> float:
        """Believed work left, in seconds on its fastest type, as if runs had no restart overhead.

        Without the overhead a start leaves this number unchanged, so a job that has just started does not fall behind its
        equals because of it.
        """
        columns, row = self._columns, self.row
        left = columns.steps[row] - columns.steps_done[row]
        if columns.status[row] == Status.RUNNING:
            left -= columns.rate[row] * (self.now - columns.counted_from[row]) + columns.ahead[row]
        return left / columns.best[row]

    @property
    def pace(self) -> float:
        """Believed speed ÷ speed on its fastest type; 0 while it waits. `remaining_seconds` falls at this rate."""
        return self._columns.rate[self.row] / self._columns.best[self.row]

    # Where it stands

    @property
    def running(self) -> bool:
        """Whether it holds GPUs."""
        return self._columns.status[self.row] == Status.RUNNING

    @property
    def held_gpus(self) -> int:
        """GPUs that it holds; 0 while it waits."""
        return self._columns.gpus[self.row]

    @property
    def launches(self) -> int:
        """Runs that were started so far."""
        return self._columns.epoch[self.row]

    @property
    def failures(self) -> int:
        """Runs that failed."""
        return self._columns.failures[self.row]

    @property
    def waiting_since(self) -> float:
        """When it was submitted, preempted or lost its node, whichever came last."""
        return self._columns.waiting_since[self.row]

    @property
    def attained_seconds(self) -> float:
        """Seconds with GPUs."""
        columns, row = self._columns, self.row
        held = columns.received[row]
        return held + self.now - columns.started[row] if columns.status[row] == Status.RUNNING else held

    @property
    def attained_service(self) -> float:
        """GPU-seconds received, as if it had always held its whole gang."""
        return self.attained_seconds * self._columns.gang[self.row]

    @property
    def repaid(self) -> float:
        """When the current run has worked for as long as it took to start. Stopping it earlier wastes GPU time."""
        return self._columns.repaid[self.row]


@dataclass(frozen=True)
class Snapshot:
    """All active jobs at one time, as read-only columns of equal length, by ascending row. What a planner sees.

    now            time of the decision
    origin         time of the first event ever: rounds are counted from it
    gpus           GPUs alive
    idle           free GPUs by type
    is_contended   whether any job waits
    active         the rows of the jobs, ascending: a job submitted earlier has a smaller one
    columns        the table that the columns below are taken from
    placement      which GPUs are free, and which jobs hold which; valid until the plan is returned
    survey         builds `workload` from this snapshot, on demand
    estimate       believed speeds of the job in a row
    losses         reported (steps, loss) of jobs, by row, in order of time
    pinned         rows of running jobs that keep their GPUs whatever else waits: a plan cannot stop or move them

    The columns have the names, meanings and units of the attributes of `JobView`. Numbers are numpy arrays, texts are
    tuples. Where a view has None, an array has nan (`skew`) or 0 (`batch_size`), and a tuple has None.
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

    # Who they are

    @cached_property
    def id(self) -> tuple[str, ...]:
        """Ids of the jobs, unique."""
        return tuple(self.columns.ids[row] for row in self.active)

    @cached_property
    def name(self) -> tuple[str | None, ...]:
        """Their names, which need not be unique."""
        return tuple(job.name for job in self._owned)

    @cached_property
    def tenant(self) -> tuple[str, ...]:
        """Names of their tenants."""
        return tuple(self.columns.tenants[row] for row in self.active)

    @cached_property
    def app(self) -> tuple[str | None, ...]:
        """Names of their apps; an app belongs to its tenant."""
        return tuple(self.columns.apps[row] for row in self.active)

    @cached_property
    def model(self) -> tuple[str | None, ...]:
        """Names of the models that they train."""
        return tuple(job.model for job in self._owned)

    @cached_property
    def batch_size(self) -> Ints:
        """Samples per step; 0 if not stated."""
        return _frozen(np.array([job.batch_size or 0 for job in self._owned], dtype=np.int64))

    @cached_property
    def submitted(self) -> Floats:
        """Times of submission."""
        return self.floats(self.columns.submitted)

    @cached_property
    def weight(self) -> Floats:
        """Weights of jobs, for policies that divide among jobs."""
        return self.floats(self.columns.weight)

    @cached_property
    def tenant_weight(self) -> Floats:
        """Weights of their tenants, for policies that divide among tenants."""
        weights = self.columns.tenant_weights
        return _frozen(np.array([weights[self.columns.tenant[row]] for row in self.active], dtype=np.float64))

    @cached_property
    def priority(self) -> Ints:
        """Whole numbers; 0 if not stated."""
        return _frozen(np.array([job.priority for job in self._owned], dtype=np.int64))

    @cached_property
    def deadline(self) -> Floats:
        """Times by which they should be done; inf if there is none."""
        return self.floats(self.columns.deadline)

    # What they need

    @cached_property
    def gang(self) -> Ints:
        """GPUs needed at once."""
        return _frozen(np.frombuffer(self.columns.gang, dtype=np.int64)[self.rows])

    @cached_property
    def min_gpus(self) -> Ints:
        """Fewest GPUs that they can run on."""
        return self.ints(self.columns.least)

    @cached_property
    def max_gpus(self) -> Ints:
        """Most GPUs that they can use."""
        return self.ints(self.columns.most)

    @cached_property
    def gpu_types(self) -> tuple[tuple[str, ...], ...]:
        """Names of the GPU types that each may run on; empty means any."""
        return tuple(job.gpu_types for job in self._owned)

    @cached_property
    def micro_batches(self) -> Ints:
        """Tasks that a step divides into; 0 if steps do not divide."""
        return self.ints(self.columns.tasks)

    @cached_property
    def skew(self) -> Floats:
        """Largest tensor ÷ model size; nan if not known."""
        return self.floats(self.columns.skew)

    # Their work

    @cached_property
    def declared_steps(self) -> Floats:
        """Work as owners declare it in steps; inf if they do not."""
        return _stated(job.steps for job in self._owned)

    @cached_property
    def declared_seconds(self) -> Floats:
        """Work as owners declare it in seconds on the reference GPU type of the table; inf if they do not."""
        return _stated(job.duration for job in self._owned)

    @cached_property
    def believed_steps(self) -> Floats:
        """All work, as it is believed to be, in steps; inf if unknown."""
        return self.floats(self.columns.steps)

    @cached_property
    def believed_seconds(self) -> Floats:
        """All work, as it is believed to be, in seconds of the whole gang on its fastest type; inf if unknown."""
        return _frozen(self.believed_steps / self.floats(self.columns.best))

    @cached_property
    def steps_so_far(self) -> Floats:
        """Believed work done, in steps."""
        columns = self.columns
        since = np.maximum(self.now - self.floats(columns.progress_from), 0.0)
        return _frozen(self.floats(columns.steps_done) + self.floats(columns.rate) * since)

    @cached_property
    def steps_left(self) -> Floats:
        """Believed work left, in steps; inf if unknown."""
        columns = self.columns
        since = np.maximum(self.now - self.floats(columns.progress_from), 0.0)
        left = self.floats(columns.steps) - self.floats(columns.steps_done) - self.floats(columns.rate) * since
        return _frozen(np.maximum(left, 0.0))

    @cached_property
    def remaining_seconds(self) -> Floats:
        """Believed work left, in seconds on the fastest type of each, as if runs had no restart overhead."""
        columns = self.columns
        run = self.floats(columns.rate) * (self.now - self.floats(columns.counted_from)) + self.floats(columns.ahead)
        left = self.believed_steps - self.floats(columns.steps_done) - np.where(self.running, run, 0.0)
        return _frozen(left / self.floats(columns.best))

    @cached_property
    def pace(self) -> Floats:
        """Believed speed ÷ speed on the fastest type; 0 while they wait."""
        return _frozen(self.floats(self.columns.rate) / self.floats(self.columns.best))

    # Where they stand

    @cached_property
    def running(self) -> Bools:
        """Which jobs hold GPUs."""
        status = np.frombuffer(self.columns.status, dtype=np.int8)[self.rows]
        return _frozen(status == Status.RUNNING)

    @cached_property
    def held_gpus(self) -> Ints:
        """GPUs that they hold; 0 while they wait."""
        return self.ints(self.columns.gpus)

    @cached_property
    def launches(self) -> Ints:
        """Runs that were started so far."""
        return self.ints(self.columns.epoch)

    @cached_property
    def failures(self) -> Ints:
        """Runs that failed."""
        return self.ints(self.columns.failures)

    @cached_property
    def waiting_since(self) -> Floats:
        """When they were submitted, preempted or lost their node, whichever came last."""
        return self.floats(self.columns.waiting_since)

    @cached_property
    def attained_seconds(self) -> Floats:
        """Seconds with GPUs."""
        now = np.where(self.running, self.now - self.floats(self.columns.started), 0.0)
        return _frozen(self.floats(self.columns.received) + now)

    @cached_property
    def attained_service(self) -> Floats:
        """GPU-seconds received, as if they had always held their whole gangs."""
        return _frozen(self.attained_seconds * self.gang)

    @cached_property
    def repaid(self) -> Floats:
        """When each current run has worked for as long as it took to start."""
        return self.floats(self.columns.repaid)

    # The problem as a whole, and other columns

    @cached_property
    def workload(self) -> Workload:
        """The same jobs as the input of an optimisation problem."""
        return self.survey(self)

    def floats(self, column: "array[float]") -> Floats:
        """Any column of floats, for the active rows."""
        return _frozen(np.frombuffer(column, dtype=np.float64)[self.rows]) if len(self.rows) else np.empty(0)

    def ints(self, column: "array[int]") -> Ints:
        """Any column of integers, for the active rows."""
        return _frozen(np.frombuffer(column, dtype=np.int64)[self.rows]) if len(self.rows) else np.empty(0, dtype=np.int64)

    def kept(self) -> dict[int, Holding]:
        """GPUs that pinned jobs hold, by ascending row. Two pinned jobs that share GPUs appear once, under the first."""
        partner, holdings = self.placement.partner, self.placement.holdings
        rows = (row for row in sorted(self.pinned) if partner.get(row, row) >= row or partner[row] not in self.pinned)
        return {row: holdings[row] for row in rows}

    def among(self, rows: frozenset[int]) -> Bools:
        """Which of the active jobs are in these rows."""
        return np.isin(self.rows, sorted(rows)) if rows else np.zeros(len(self.rows), dtype=bool)

    def jobs(self) -> Iterable[JobView]:
        """The active jobs one by one. Each view is valid until the next one is asked for."""
        view = JobView(self.columns, now=self.now)
        for row in self.rows.tolist():
            view.row = row
            yield view

    @property
    def _owned(self) -> Iterable[Job]:
        """The jobs as their owners describe them."""
        jobs = self.columns.jobs
        return (jobs[row] for row in self.active)


def _stated(amounts: Iterable[float | None]) -> Floats:
    """Amounts that owners state; inf where they do not."""
    return _frozen(np.array([math.inf if each is None else each for each in amounts], dtype=np.float64))


def _frozen(column: NDArray[Kind]) -> NDArray[Kind]:
    column.flags.writeable = False
    return column
