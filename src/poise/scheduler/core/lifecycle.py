"""The life cycle of a job in the core: one method per transition.

    phase        meaning                                                        policy sees it   holds GPUs
    WAITING      competes for GPUs                                              yes              no
    RUNNING      holds GPUs                                                     yes              yes
    SUSPENDED    held by its owner, backing off, or waiting for a trial         no               no
    ON_TRIAL     runs for a short while on one GPU of the validation pool       no               one of the pool
    ENDED        finished, failed, cancelled or rejected                        no               no

`TRANSITIONS` lists every edge; ARCHITECTURE.md draws it, and a test compares the drawing with the table. Each transition
changes columns, ledger, free GPUs, waiting clocks and the policy's driver together, so that between two transitions

- a row is in `active` exactly if it is WAITING or RUNNING, and in `suspended` exactly if it is SUSPENDED or ON_TRIAL;
- the ledger has a holding for a row exactly if its status is RUNNING;
- a waiting clock runs for a row exactly if it is WAITING;
- the driver has been told of every change to an active job.

Who gives GPUs back? A `DecisionDraft` moves GPUs in `free` while it is made, so `free` is already right when `apply` stops
and starts jobs. All other transitions happen outside a decision and give back to `free` what the run held. Three
cases give nothing: a job that shared its GPUs, because they stay with the other job; a trial, because its GPU is the pool's;
and the job that has to leave when a carried one takes its place (`_carried_beside` gives, then preempts).

Transitions append what the back end has to do to `actions`, in order; the scheduler takes them from there.
"""

from collections.abc import Callable
from enum import StrEnum
from heapq import heappop, heappush
from math import inf

from poise.scheduler.core.claim_shapes import NO_WAIT
from poise.scheduler.core.decision import DecisionDraft
from poise.scheduler.core.policy_driver import PolicyDriver
from poise.scheduler.core.settings import Settings
from poise.scheduler.core.speed_profiles import NO_PROFILE, SpeedProfile
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.action import (
    Action,
    Cancel,
    Compute,
    Launch,
    Preempt,
    PreemptionCause,
    Reject,
    Waited,
)
from poise.scheduler.model.cluster import Holding, gpu_count, is_whole
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import Carried, Submitted
from poise.scheduler.model.job import Status, Yields
from poise.scheduler.model.job_table import JobView
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.units import counted

MOST_DOUBLINGS = 10
"""The back-off of a job doubles at most this often."""


class JobPhase(StrEnum):
    """Where a job is in its life cycle; derived from the tables, stored nowhere."""

    NEW = "NEW"
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    ON_TRIAL = "ON_TRIAL"
    ENDED = "ENDED"


NEW, WAITING, RUNNING, SUSPENDED, ON_TRIAL, ENDED = JobPhase
UNENDED = frozenset({WAITING, RUNNING, SUSPENDED, ON_TRIAL})

TRANSITIONS: dict[str, tuple[frozenset[JobPhase], frozenset[JobPhase]]] = {
    "arrive": (frozenset({NEW}), frozenset({WAITING, SUSPENDED, ENDED})),
    "carry_over": (frozenset({NEW}), frozenset({WAITING, RUNNING, SUSPENDED, ENDED})),
    "start": (frozenset({WAITING}), frozenset({RUNNING})),
    "join": (frozenset({WAITING}), frozenset({RUNNING})),
    "compute": (frozenset({WAITING, RUNNING}), frozenset({RUNNING})),
    "computed": (frozenset({RUNNING}), frozenset({RUNNING})),
    "preempt": (frozenset({RUNNING}), frozenset({WAITING})),
    "interrupt": (frozenset({RUNNING}), frozenset({WAITING})),
    "back_off": (frozenset({RUNNING}), frozenset({SUSPENDED})),
    "hold": (UNENDED, frozenset({SUSPENDED})),
    "release": (frozenset({SUSPENDED}), frozenset({WAITING})),
    "resume": (frozenset({SUSPENDED}), frozenset({WAITING})),
    "begin_trial": (frozenset({SUSPENDED}), frozenset({ON_TRIAL})),
    "repeat_trial": (frozenset({ON_TRIAL}), frozenset({SUSPENDED})),
    "pass_trial": (frozenset({ON_TRIAL}), frozenset({WAITING})),
    "end": (UNENDED, frozenset({ENDED})),
}
"""Each transition with the phases that it may begin in and end in."""

_PHASES: dict[int, tuple[JobPhase, JobPhase]] = {
    status: (ENDED, ENDED) if status.is_final else (RUNNING, ON_TRIAL) if status is Status.RUNNING else (WAITING, SUSPENDED)
    for status in Status
}
"""By status: the phase of a job that the policy sees, and of one that it does not."""


class Lifecycle:
    """Carries out transitions on the state, and tells the policy's driver of those that it can see.

    asks   the locality that the policy asks for a job, when it arrives
    """

    def __init__(
        self, state: SchedulerState, driver: PolicyDriver, settings: Settings, asks: Callable[[JobView], Locality]
    ) -> None:
        self._state = state
        self._columns = state.columns
        self._driver = driver
        self._settings = settings
        self._asks = asks
        self._view = JobView(state.columns)
        self.actions: list[Action] = []
        self._backing_off: dict[int, float] = {}
        """When a job that backs off comes back."""
        self._returns: list[tuple[float, int]] = []
        """A heap of the same. Entries that `_backing_off` does not confirm are out of date."""

    def phase(self, row: int) -> JobPhase:
        """Where the job is in its life cycle."""
        return _PHASES[self._columns.status[row]][row in self._state.suspended]

    def _require(self, transition: str, row: int) -> None:
        """Raise InvariantError if the job is in a phase that the transition does not begin in."""
        phase, allowed = _PHASES[self._columns.status[row]][row in self._state.suspended], TRANSITIONS[transition][0]
        if phase not in allowed:
            wanted = " or ".join(sorted(allowed))
            raise InvariantError(f"job {self._columns.ids[row]!r} is {phase}; {transition} is for jobs that are {wanted}")

    # Arrival

    def arrive(self, event: Submitted, now: float) -> JobPhase:
        """Take in a job: it competes, waits for a validation trial first, or is rejected if it can never run here."""
        row = self._enter(event, now, now)
        if row is None:
            return ENDED
        pool, shape = self._state.pool, self._state.shape_of[row]
        # A trial is on one GPU. A job whose GPUs come in larger units cannot run on that, and competes untried.
        if pool.slots and shape.unit == 1 and pool.suits(self._columns.gang[row], shape.types):
            self._state.clocks.end(row, now, now)
            self._suspend(row, now)
            pool.add(row, shape.types)
            return SUSPENDED
        self._driver.arrived(row, now)
        return WAITING

    def carry_over(self, event: Carried, now: float) -> JobPhase:
        """Take in a job of an earlier journal: it stands where it stood, and runs where it ran if it can.

        Carried jobs arrive before any decision, so no other job holds their GPUs, unless two of them hold the same ones. A
        run goes on where GPUs are closed, and not where a node is lost. Two that share GPUs go on sharing if it is known how
        fast they are together, which it is where the policy shares GPUs, and also if neither may be preempted. Otherwise
        the later one has to leave, or the earlier one if the later is pinned.
        """
        row = self._enter(event, event.since, now)
        if row is None:
            return ENDED
        state, columns = self._state, self._columns
        columns.steps_done[row], columns.received[row], columns.failures[row] = event.done, event.received, event.failures
        types = {state.topology.type_of[slots.node] for slots in event.gpus}
        can_use = bool(types) and types.issubset(state.shape_of[row].types) and is_whole(event.gpus, columns.unit[row])
        beside = self._carried_beside(event, row, now) if can_use and not state.free.are_unheld(event.gpus) else None
        stays = beside is not None or (can_use and state.free.are_unheld(event.gpus))
        if event.gpus and not stays:
            columns.received[row] += now - event.since
            columns.waiting_since[row] = now
            self.actions.append(Preempt(event.job.id, event.epoch, PreemptionCause.UNPLANNED, None))
        columns.epoch[row] = event.epoch - stays  # a run that stays is started below, which counts its epoch again
        state.stopping.carry(row, event.epoch - stays)
        self._driver.arrived(row, now)
        if stays:
            if beside is None:
                state.free.take_unheld(event.gpus)
                self._start(row, event.gpus, event.since, is_carried=True)
            else:
                self._join(row, beside, event.since, is_carried=True)
            self._protect(row, event.since)
            if event.attached is not None:
                self.attached(row, event.attached)
            self._driver.started(row, event.since)
        elif event.held:
            self.hold(row, now)
        elif event.until is not None:
            self._back_off_until(row, event.until, now)
        return self.phase(row)

    def _enter(self, event: Submitted | Carried, since: float, now: float) -> int | None:
        """Append a row for a job that waits since then; None if the job was rejected."""
        state, job = self._state, event.job
        if job.id in state.rows:
            raise InvariantError(f"job {job.id!r} was submitted twice")
        profile = state.profile(event.kind, job)
        if profile.impossible:
            row = self._columns.append(job, 0.0, kind=NO_PROFILE.index, best=1.0, skew=None, now=now)
            self._columns.status[row] = Status.REJECTED
            del self._columns.jobs[row]
            state.reasons[row] = profile.impossible
            self._add_row(row, job.id, NO_PROFILE, Locality.CLUSTER)
            self.actions.append(Reject(job.id, profile.impossible))
            return None
        best, skew = profile.best, profile.skew
        row = self._columns.append(job, event.steps, kind=profile.index, best=best, skew=skew, now=since)
        state.active[row] = None
        if job.yields is not Yields.ANY_TIME:
            state.yields[row] = job.yields
        if profile.tasks is not None:
            self._columns.divide(row, profile.tasks)
            state.divisible += 1
        state.in_units += job.unit > 1
        self._view.row, self._view.now = row, since
        self._add_row(row, job.id, profile, self._asks(self._view))
        self._begin_waiting(row, since)
        return row

    def _add_row(self, row: int, job: str, profile: SpeedProfile, asked: Locality) -> None:
        """Extend the tables of the state that have one item per row."""
        state = self._state
        state.rows[job] = row
        state.profile_of.append(profile)
        state.asked.append(asked)
        shape = state.shape(row, asked)
        state.default_shapes.append(shape)
        state.shape_of.append(shape)

    def _carried_beside(self, event: Carried, row: int, now: float) -> int | None:
        """The job that a carried job shares its GPUs with; None if there is none, or one of the two had to leave."""
        state, kind, workloads = self._state, self._columns.kind, self._state.workloads
        holders = (each for each, holding in state.ledger.holdings.items() if holding == event.gpus)
        other = next((each for each in holders if each not in state.ledger.partner), None)
        if other is None:
            return None
        is_pinned = event.job.yields is Yields.NEVER or (event.job.yields is Yields.ATTACHED and event.attached is None)
        gpu_type = state.type_of(other)
        rates = workloads.beside(kind[row], kind[other], gpu_type), workloads.beside(kind[other], kind[row], gpu_type)
        if min(rates) > 0 or (is_pinned and state.protected.get(other) == inf):
            return other
        if is_pinned:
            self._driver.catch_up(now)
            state.free.give(event.gpus)
            self.preempt(other, now, PreemptionCause.UNPLANNED, None)
        return None

    # Decisions

    def apply(self, draft: DecisionDraft) -> None:
        """Make a decision true. The draft has moved the GPUs in `free` already.

        Preemptions come first, of the jobs furthest back first, then launches in the order in which they were granted, then
        tasks: a back end that carries actions out one after the other never needs a GPU that it has not freed yet.
        """
        now, columns = draft.now, self._columns
        self.actions += draft.notes
        for row, reason in draft.ends:
            self._state.reasons[row] = reason
            if self._state.running(row):
                self._close_run(row, now, Status.CANCELLED)
            else:
                self._state.clocks.end(row, now, columns.waiting_since[row])
            self._forget(row, Status.CANCELLED)
            self._driver.ended(row, now)
            self.actions.append(Cancel(columns.ids[row], reason))
        ended = {row for row, _ in draft.ends} if draft.ends else ()
        for row, before in draft.before.items():
            after = draft.after[row]
            if row in ended or before is None or (after == before and row not in draft.joins):
                continue
            cause = PreemptionCause.OUTRANKED if row in draft.beneficiary else PreemptionCause.UNPLANNED
            if after is not None:
                cause = PreemptionCause.MOVED if gpu_count(after) == columns.gpus[row] else PreemptionCause.RESIZED
            taken_for = None if after is not None else draft.beneficiary_of(row)
            self.preempt(row, now, cause, None if taken_for is None else columns.ids[taken_for])
        for row, after in draft.after.items():
            if after is not None and (after != draft.before[row] or row in draft.joins):
                if row in draft.joins:
                    self.join(row, draft.joins[row], now)
                else:
                    self.start(row, after, now)
        for row, gpus in draft.computes.items():
            self.compute(row, gpus, now)

    def start(self, row: int, holding: Holding, now: float) -> None:
        """Launch a run on GPUs that the draft took from `free`."""
        self._require("start", row)
        waited = self._start(row, holding, now)
        self._protect(row, now)
        self._driver.started(row, now)
        self.actions.append(Launch(self._columns.ids[row], self._columns.epoch[row], holding, waited))

    def join(self, row: int, other: int, now: float) -> None:
        """Launch a run on the GPUs of another job, which goes on beside it."""
        self._require("join", row)
        waited = self._join(row, other, now)
        self._protect(row, now)
        self._driver.started(row, now)
        holding = self._state.ledger.holding(row)
        self.actions.append(Launch(self._columns.ids[row], self._columns.epoch[row], holding, waited))

    def preempt(self, row: int, now: float, cause: PreemptionCause, beneficiary: str | None) -> None:
        """Stop a run with a checkpoint; the job waits again. The draft, or who calls, gave its GPUs to others."""
        self._require("preempt", row)
        self._close_run(row, now, Status.WAITING)
        self._begin_waiting(row, now)
        self._state.stopping.add(row, self._columns.epoch[row])
        self._driver.preempted(row, now)
        self.actions.append(Preempt(self._columns.ids[row], self._columns.epoch[row], cause, beneficiary))

    def vacate(self, row: int, now: float) -> None:
        """Preempt a run outside a decision, because its node is drained."""
        self._driver.catch_up(now)
        if row not in self._state.ledger.partner:
            self._state.free.give(self._state.ledger.holding(row))
        self.preempt(row, now, PreemptionCause.DRAINED, None)
        self._driver.opened()

    def _start(self, row: int, holding: Holding, since: float, *, is_carried: bool = False) -> Waited:
        """Open a run alone on these GPUs; return how long the job waited."""
        state, columns = self._state, self._columns
        profile, locality = state.profile_of[row], state.topology.locality(holding)
        if profile.tasks is None:
            bounds = columns.least[row], columns.most[row]
            gpus = state.ledger.open(row, holding, *bounds, unit=columns.unit[row], is_carried=is_carried)
            gpu_type = state.topology.type_of[holding[0].node]
            rate = profile.rates_with(gpus)[gpu_type][locality]
        else:
            bounds = columns.least[row], columns.most[row]
            gpus = state.ledger.open(row, holding, *bounds, profile.types, is_carried=is_carried)
            gpu_type = state.topology.main_type(holding)
            rate = profile.rate_on(holding, state.topology)
        waited = state.clocks.end(row, since, columns.waiting_since[row])
        place = state.workloads.column(gpu_type, locality)
        columns.start(row, since, place=place, gpus=gpus, rate=rate, overhead=self._overhead(row))
        return waited

    def _join(self, row: int, other: int, since: float, *, is_carried: bool = False) -> Waited:
        """Open a run beside another; return how long the job waited.

        Of two carried runs the other one may be the younger: they share from the moment that both are there.
        """
        state, columns = self._state, self._columns
        holding = state.ledger.join(row, other, columns.unit[row], is_carried=is_carried)
        gpu_type = state.topology.type_of[holding[0].node]
        gpus, place = columns.gpus[other], columns.place[other] - 1
        waited = state.clocks.end(row, since, columns.waiting_since[row])
        rate, both = self._rate_beside(row, other, gpu_type), max(since, columns.started[other])
        first = state.profile_of[row].rate_on(holding, state.topology) if both > since else rate
        columns.start(row, since, place=place, gpus=gpus, rate=first, overhead=self._overhead(row))
        columns.change_rate(row, both, rate)
        columns.change_rate(other, both, self._rate_beside(other, row, gpu_type))
        return waited

    def _rate_beside(self, row: int, other: int, gpu_type: int) -> float:
        """Steps per second on shared GPUs; half the speed alone where nothing is known of the two jobs."""
        kind = self._columns.kind
        known = self._state.workloads.beside(kind[row], kind[other], gpu_type)
        return known or 0.5 * self._state.profile_of[row].rate_on(self._state.ledger.holding(row), self._state.topology)

    def _overhead(self, row: int) -> float:
        """Believed seconds without progress at a start.

        A job whose steps divide switches GPUs task by task; what that costs depends on where its model is, which only the
        back end knows, and is small.
        """
        return 0.0 if self._columns.tasks[row] else self._settings.restart_overhead

    def _close_run(self, row: int, now: float, status: Status) -> Holding:
        """Close the run in ledger and columns; return the GPUs that no other job holds.

        `free` is left alone: in a decision the draft has moved them already, elsewhere the caller gives them back.
        """
        state = self._state
        other = state.ledger.partner.get(row)
        holding = state.ledger.close(row)
        if other is not None:  # it goes on alone, and the GPUs stay with it
            alone = state.profile_of[other].rate_on(state.ledger.holding(other), state.topology)
            self._columns.change_rate(other, now, alone)
        state.protected.pop(row, None)
        self._columns.stop(row, now, status)
        return holding

    # Protection from preemption

    def _protect(self, row: int, since: float) -> None:
        """Keep a run that began then from being preempted: for the minimum run time, until it attaches, or for good."""
        if row in self._state.yields:
            self._state.protected[row] = inf
        elif self._settings.minimum_run:
            self._state.protected[row] = since + self._settings.minimum_run

    def attached(self, row: int, since: float) -> float:
        """Note that a run can save its work since then; return the first time at which it may be preempted."""
        if self._state.yields.get(row) is Yields.ATTACHED:
            self._state.protected[row] = since + self._settings.minimum_run
        return self._state.protected.get(row, since)

    # Runs at task grain: one run is one step, and its GPUs come and go task by task (docs/algorithms/hare.md)

    def compute(self, row: int, holding: Holding, now: float) -> None:
        """Begin tasks of the job's current step on GPUs that the draft took from `free`.

        The first of them opens a run. It must not be stopped before the step is complete: its work would be lost.
        """
        self._require("compute", row)
        state, columns, waited = self._state, self._columns, NO_WAIT
        if columns.status[row] == Status.WAITING:
            waited = state.clocks.end(row, now, columns.waiting_since[row])
            place = state.workloads.column(state.topology.main_type(holding), Locality.PACKED)
            columns.start(row, now, place=place, gpus=0, rate=0.0, overhead=0.0)
            state.protected[row] = inf
        gpus = gpu_count(holding)
        if state.protected.get(row) != inf or columns.ready[row] < gpus:
            ready = columns.ready[row]
            raise InvariantError(f"job in row {row} is to compute {counted(gpus, 'task')}, and has {ready} ready")
        state.ledger.extend(row, holding, state.profile_of[row].types)
        columns.ready[row] -= gpus
        self._change_tasks(row, gpus, now)
        self.actions.append(Compute(columns.ids[row], columns.epoch[row], holding, waited))

    def computed(self, row: int, holding: Holding, now: float) -> None:
        """Free the GPUs of tasks that are done; the run goes on."""
        self._require("computed", row)
        self._state.ledger.reduce(row, holding)
        self._state.free.give(holding)
        self._change_tasks(row, -gpu_count(holding), now)

    def _change_tasks(self, row: int, more: int, now: float) -> None:
        """Let the job compute on `more` GPUs; each of them does its task's part of a step."""
        tasks = self._state.estimate(row).tasks
        if tasks is None:
            raise InvariantError(f"job in row {row} is to compute tasks, and its steps do not divide")
        self._columns.gpus[row] += more
        mix = self._state.topology.mix(self._state.ledger.holding(row))
        tasks_per_second = sum(gpus / each for gpus, each in zip(mix, tasks.seconds, strict=True) if gpus)
        self._columns.change_rate(row, now, tasks_per_second / tasks.count)

    # What happens to runs outside decisions

    def interrupt(self, row: int, now: float) -> None:
        """Put a job back to waiting whose run died, lost its node, or completed a step at task grain."""
        self._require("interrupt", row)
        self._driver.catch_up(now)
        self._state.free.give(self._close_run(row, now, Status.WAITING))
        self._begin_waiting(row, now)
        self._driver.interrupted(row, now)

    def end(self, row: int, now: float, status: Status) -> None:
        """Bring a job to its end, whatever phase it is in."""
        self._require("end", row)
        if row in self._state.suspended:
            self._leave_suspension(row, now)
            self._state.clocks.forget(row)
            self._forget(row, status)
            del self._columns.jobs[row]
            return
        if self._state.running(row):
            self._state.free.give(self._close_run(row, now, status))
        else:
            self._state.clocks.end(row, now, self._columns.waiting_since[row])
        self._forget(row, status)
        self._driver.ended(row, now)
        del self._columns.jobs[row]

    def _forget(self, row: int, status: Status) -> None:
        """Set the final status and drop what is only kept for jobs that have not ended."""
        state = self._state
        self._columns.status[row] = status
        state.divisible -= self._columns.tasks[row] > 0
        state.in_units -= self._columns.unit[row] > 1
        state.losses.pop(row, None)
        state.stopping.forget(row)
        state.yields.pop(row, None)
        state.on_hold.discard(row)
        state.active.pop(row, None)
        state.suspended.pop(row, None)

    # Suspension: jobs that the policy does not see for a while

    def back_off(self, row: int, now: float) -> None:
        """Suspend a job whose run failed of a cause that passes; each time for twice as long."""
        self._require("back_off", row)
        doublings = min(self._columns.failures[row] - 1, MOST_DOUBLINGS)
        self._back_off_until(row, now + self._settings.backoff * 2**doublings, now)

    def _back_off_until(self, row: int, until: float, now: float) -> None:
        self._stop_competing(row, now)
        self._backing_off[row] = until
        heappush(self._returns, (until, row))

    def backs_off_until(self, row: int) -> float | None:
        """When a job that backs off competes again; None if it does not back off."""
        return self._backing_off.get(row)

    def hold(self, row: int, now: float) -> None:
        """Suspend a job until its owner releases it; its run, if it has one, is told to stop."""
        self._require("hold", row)
        state, columns = self._state, self._columns
        ran = state.running(row)
        if row in state.suspended:
            self._leave_suspension(row, now)
        else:
            self._stop_competing(row, now)
        state.on_hold.add(row)
        if ran:
            state.stopping.add(row, columns.epoch[row])
            self.actions.append(Preempt(columns.ids[row], columns.epoch[row], PreemptionCause.HELD, None))

    def release(self, row: int, now: float) -> None:
        """Let a held job compete again."""
        self._require("release", row)
        self._state.on_hold.discard(row)
        self._compete(row, now)

    def resume(self, row: int, now: float) -> None:
        """Let a job compete whose back-off is over, or whose trial cannot take place."""
        self._require("resume", row)
        self._compete(row, now)

    def begin_trial(self, row: int, holding: Holding, now: float) -> None:
        """Launch a trial on a GPU of the validation pool.

        It makes no progress that counts, unless the job can do with one GPU.
        """
        self._require("begin_trial", row)
        state, columns = self._state, self._columns
        state.ledger.lend(row, holding, columns.unit[row])
        gpu_type = state.topology.type_of[holding[0].node]
        place = state.workloads.column(gpu_type, Locality.PACKED)
        rate = state.profile_of[row].rates_with(1)[gpu_type][Locality.PACKED] if columns.least[row] == 1 else 0.0
        columns.start(row, now, place=place, gpus=1, rate=rate, overhead=self._overhead(row))
        waited = Waited(now - state.suspended[row], 0.0, 0.0)
        self.actions.append(Launch(columns.ids[row], columns.epoch[row], holding, waited))

    def repeat_trial(self, row: int, now: float) -> None:
        """Queue a job for another trial, after one that was cut short."""
        self._require("repeat_trial", row)
        self._close_trial(row, now)
        self._state.pool.drop(row)
        self._state.pool.add(row, self._state.shape_of[row].types)

    def pass_trial(self, row: int, now: float) -> None:
        """Stop a trial that lasted its time; the job competes for its gang. The pool has its GPU back already."""
        self._require("pass_trial", row)
        self._close_trial(row, now)
        self._state.stopping.add(row, self._columns.epoch[row])
        epoch = self._columns.epoch[row]
        self.actions.append(Preempt(self._columns.ids[row], epoch, PreemptionCause.VALIDATED, None))
        self._compete(row, now)

    def end_suspensions(self, now: float) -> bool:
        """Bring back the jobs whose back-off or trial is over, and begin trials; say whether any job competes again."""
        pool, is_open = self._state.pool, self._state.free.is_open
        back = []
        while self._returns and self._returns[0][0] <= now:
            until, row = heappop(self._returns)
            if self._backing_off.get(row) == until:
                del self._backing_off[row]
                back.append(row)
        passed = pool.passed(now)
        back += passed
        back += pool.waived(is_open)
        for row in back:
            if row in passed:
                self.pass_trial(row, now)
            else:
                self.resume(row, now)
        for row, holding in pool.begin(now, is_open):
            self.begin_trial(row, holding, now)
        return bool(back)

    def next_return(self) -> float:
        """When the next back-off or trial ends."""
        return min(self._returns[0][0] if self._returns else inf, self._state.pool.next_change())

    def _stop_competing(self, row: int, now: float) -> None:
        """Take a job out of the policy's sight and give back what it held."""
        self._driver.catch_up(now)
        waited = NO_WAIT
        if self._state.running(row):
            self._state.free.give(self._close_run(row, now, Status.WAITING))
        else:
            waited = self._state.clocks.end(row, now, self._columns.waiting_since[row])
        self._suspend(row, now, waited)
        self._driver.ended(row, now)

    def _suspend(self, row: int, now: float, waited: Waited = NO_WAIT) -> None:
        self._state.suspended[row] = now
        self._state.active.pop(row, None)
        if waited is not NO_WAIT:
            self._state.clocks.keep(row, waited)

    def _compete(self, row: int, now: float) -> None:
        """End a suspension: the policy sees the job again. `active` stays in ascending order of row."""
        state = self._state
        state.clocks.add_suspension(row, now - state.suspended.pop(row))
        last = next(reversed(state.active), -1)
        state.active[row] = None
        if row < last:
            rows = sorted(state.active)
            state.active.clear()
            state.active.update(dict.fromkeys(rows))
        self._begin_waiting(row, now)
        self._driver.arrived(row, now)

    def _leave_suspension(self, row: int, now: float) -> None:
        """Cancel the back-off or trial of a job that is held, or comes to its end."""
        self._backing_off.pop(row, None)
        if self._state.pool.tries(row):
            self._close_trial(row, now)
        self._state.pool.drop(row)

    def _close_trial(self, row: int, now: float) -> None:
        """Close a trial's run. The time on trial does not count as attained service."""
        held = self._columns.received[row]
        self._close_run(row, now, Status.WAITING)
        self._columns.received[row] = held
        self._state.suspended[row] = now

    def _begin_waiting(self, row: int, now: float) -> None:
        state = self._state
        state.clocks.begin(row, state.default_shape(row, now) if state.delay_scheduling else state.default_shapes[row])
