"""A decision that was taken at the desk, carried into the tables and said as wishes."""

from heapq import heappop, heappush
from math import inf

from poise.scheduler.core.claim_shapes import NO_WAIT
from poise.scheduler.core.decision import DecisionDraft
from poise.scheduler.core.rank_driver import PolicyDriver
from poise.scheduler.core.settings import Settings
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.action import Action, Cancel, Compute, Launch, Preempt, PreemptionCause, Waited
from poise.scheduler.model.cluster import Holding, gpu_count
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import Carried
from poise.scheduler.model.job import Status, Yields
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.units import counted

# Jobs that a policy does not see for a while: on trial, waiting for a trial, backing off after a failure, or held.

MOST_DOUBLINGS = 10
"""Of the back-off of one job."""


class Absence:
    """Takes jobs out of the policy's sight and brings them back."""

    def __init__(self, state: SchedulerState, answering: PolicyDriver, settings: Settings) -> None:
        self._state = state
        self._answering = answering
        self._settings = settings
        self._returning: list[tuple[float, int]] = []
        self._until: dict[int, float] = {}
        """When a job that backs off comes back; whatever else stands in the list above is out of date."""

    def admit(self, row: int, now: float) -> bool:
        """A job has arrived; says whether it is to be tried out first."""
        state = self._state
        if not state.pool.suits(state.columns.gang[row], state.shape_of[row].types):
            return False
        state.end_waiting(row, now)
        state.leave(row, now)
        state.pool.add(row, state.shape_of[row].types)
        return True

    def back_off(self, row: int, now: float) -> None:
        """A run has failed; the job is tried again later, twice as late each time."""
        delay = self._settings.backoff * 2 ** min(self._state.columns.failures[row] - 1, MOST_DOUBLINGS)
        self.back_off_until(row, now + delay, now)

    def back_off_until(self, row: int, moment: float, now: float) -> None:
        """The job is not tried before that moment."""
        self._take_out(row, now)
        self._until[row] = moment
        heappush(self._returning, (moment, row))

    def until(self, row: int) -> float | None:
        """The moment before which a job that backs off is not tried again; None: it does not back off."""
        return self._until.get(row)

    def hold(self, row: int, now: float) -> list[Action]:
        """The owner wants the job not to run; it is preempted if it does."""
        state, columns = self._state, self._state.columns
        ran = state.running(row)
        if row in state.away:
            self.end(row, now)
        else:
            self._take_out(row, now)
        state.on_hold.add(row)
        if ran:
            state.leaving.add(row, columns.epoch[row])
        return [Preempt(columns.ids[row], columns.epoch[row], PreemptionCause.HELD, None)] if ran else []

    def release(self, row: int, now: float) -> None:
        """The owner wants the job to run again."""
        self._state.on_hold.discard(row)
        self._state.come_back(row, now)
        self._answering.arrived(row, now)

    def try_again(self, row: int, now: float) -> None:
        """A trial was cut short; the job is tried once more."""
        state = self._state
        state.end_trial(row, now)
        state.pool.drop(row)
        state.pool.add(row, state.shape_of[row].types)

    def end(self, row: int, now: float) -> None:
        """What a job is away for is over: it comes to its end, or is held."""
        self._until.pop(row, None)
        if self._state.pool.tries(row):
            self._state.end_trial(row, now)
        self._state.pool.drop(row)

    def settle(self, now: float) -> tuple[list[Action], bool]:
        """End trials and back-offs that are over, begin trials where the pool has room; says whether anybody came back."""
        state, actions = self._state, list[Action]()
        back = []
        while self._returning and self._returning[0][0] <= now:
            moment, row = heappop(self._returning)
            if self._until.get(row) == moment:
                del self._until[row]
                back.append(row)
        for row in state.pool.passed(now):
            state.end_trial(row, now)
            state.leaving.add(row, state.columns.epoch[row])
            actions.append(Preempt(state.columns.ids[row], state.columns.epoch[row], PreemptionCause.VALIDATED, None))
            back.append(row)
        back += state.pool.waived(state.free.alive)
        back = [row for row in back if row in state.away and row not in state.on_hold]
        for row in back:
            state.come_back(row, now)
            self._answering.arrived(row, now)
        for row, holding in state.pool.begin(now, state.free.alive):
            waited = state.try_out(row, holding, now)
            actions.append(Launch(state.columns.ids[row], state.columns.epoch[row], holding, waited))
        return actions, bool(back)

    def _take_out(self, row: int, now: float) -> None:
        """The policy does not see the job any more; what it held is free."""
        state = self._state
        self._answering.catch_up(now)
        waited = NO_WAIT
        if state.running(row):
            state.free.give(state.stop(row, now, Status.WAITING))
        else:
            waited = state.end_waiting(row, now)
        state.leave(row, now, waited)
        self._answering.ended(row, now)

    def next_change(self) -> float:
        """When somebody comes back."""
        return min(self._returning[0][0] if self._returning else inf, self._state.pool.next_change())


# Runs at the grain of tasks: a run is one round of training, and its GPUs come and go task by task (ALGORITHMS §5.1).


def compute(state: SchedulerState, row: int, holding: Holding, now: float) -> Waited:
    """Tasks of the job's current round begin on these GPUs, which `free` has given out; returns how long it waited.

    With the first of them a run begins. It is not to be stopped before the round is over, for that would be in vain.
    """
    columns, waited = state.columns, NO_WAIT
    if columns.status[row] == Status.WAITING:
        waited = state.end_waiting(row, now)
        place = state.survey.column(state.topology.main_type(holding), Locality.PACKED)
        columns.start(row, now, place=place, gpus=0, rate=0.0, overhead=0.0)
        state.protected[row] = inf
    gpus = gpu_count(holding)
    if state.protected.get(row) != inf or columns.ready[row] < gpus:
        raise InvariantError(f"job in row {row} is to compute {counted(gpus, 'task')}, and has {columns.ready[row]} ready")
    state.ledger.extend(row, holding, _tasks(state, row).types)
    columns.ready[row] -= gpus
    _change(state, row, gpus, now)
    return waited


def computed(state: SchedulerState, row: int, holding: Holding, now: float) -> None:
    """Tasks are done, and their GPUs free again."""
    state.ledger.reduce(row, holding)
    state.free.give(holding)
    _change(state, row, -gpu_count(holding), now)


def _change(state: SchedulerState, row: int, more: int, now: float) -> None:
    """The job computes on so many GPUs more; each of them does its task's part of a step."""
    tasks = _tasks(state, row)
    state.columns.gpus[row] += more
    mix = state.topology.mix(state.ledger.holding(row))
    tasks_a_second = sum(gpus / each for gpus, each in zip(mix, tasks.seconds, strict=True) if gpus)
    state.columns.change_rate(row, now, tasks_a_second / tasks.count)


def _tasks(state: SchedulerState, row: int) -> Tasks:
    tasks = state.estimate(row).tasks
    if tasks is None:
        raise InvariantError(f"job in row {row} is to compute tasks, and its rounds do not divide")
    return tasks


class Enacting:
    """Carries decisions out. `minimum_run`: seconds for which a job that has just started is not to be preempted."""

    def __init__(self, state: SchedulerState, answering: PolicyDriver, minimum_run: float) -> None:
        self._state = state
        self._answering = answering
        self._minimum_run = minimum_run

    def carry_out(self, desk: DecisionDraft, actions: list[Action]) -> None:
        """Preemptions first, the furthest back first; then launches in the order in which they were granted; then tasks."""
        actions += desk.notes
        for row, reason in desk.ends:
            actions.append(self._cancel(row, reason, desk.now))
        ended = {row for row, _ in desk.ends} if desk.ends else ()
        for row, before in desk.before.items():
            if row not in ended and before is not None and (desk.after[row] != before or row in desk.joins):
                actions.append(self._preempt(row, desk))
        for row, after in desk.after.items():
            if after is not None and (after != desk.before[row] or row in desk.joins):
                actions.append(self._launch(row, desk))
        columns = self._state.columns
        for row, gpus in desk.computes.items():
            waited = compute(self._state, row, gpus, desk.now)
            actions.append(Compute(columns.ids[row], columns.epoch[row], gpus, waited))

    def _cancel(self, row: int, reason: str, now: float) -> Cancel:
        """Its app gives the job up; the desk has given its GPUs to others already."""
        state = self._state
        state.reasons[row] = reason
        if state.running(row):
            state.stop(row, now, Status.CANCELLED)
        else:
            state.end_waiting(row, now)
        state.end(row, Status.CANCELLED)
        self._answering.ended(row, now)
        return Cancel(state.columns.ids[row], reason)

    def _preempt(self, row: int, desk: DecisionDraft) -> Preempt:
        columns, after = self._state.columns, desk.after[row]
        why = PreemptionCause.OUTRANKED if row in desk.beneficiary else PreemptionCause.UNPLANNED
        if after is not None:
            why = PreemptionCause.MOVED if gpu_count(after) == columns.gpus[row] else PreemptionCause.RESIZED
        taken_for = None if after is not None else desk.beneficiary_of(row)
        return self.stop(row, desk.now, why, None if taken_for is None else columns.ids[taken_for])

    def stop(self, row: int, now: float, why: PreemptionCause, beneficiary: str | None) -> Preempt:
        """A running job waits from now on; who calls has given its GPUs to others."""
        state, columns = self._state, self._state.columns
        state.stop(row, now, Status.WAITING)
        state.begin_waiting(row, now)
        state.leaving.add(row, columns.epoch[row])
        self._answering.preempted(row, now)
        return Preempt(columns.ids[row], columns.epoch[row], why, beneficiary)

    def protect(self, row: int, since: float) -> None:
        """A job that runs since then is not to be preempted for a while; or before it has attached; or at all."""
        if row in self._state.yields:
            self._state.protected[row] = inf
        elif self._minimum_run:
            self._state.protected[row] = since + self._minimum_run

    def attached(self, row: int, since: float) -> float:
        """The job's run is attached since then; returns the first moment at which it may be preempted."""
        state = self._state
        if state.yields.get(row) is Yields.ATTACHED:
            state.protected[row] = since + self._minimum_run
        return state.protected.get(row, since)

    def _launch(self, row: int, desk: DecisionDraft) -> Launch:
        state, columns, now = self._state, self._state.columns, desk.now
        holding, beside = desk.after[row] or (), desk.joins.get(row)
        waited = state.start(row, holding, now) if beside is None else state.join(row, beside, now)
        self.protect(row, now)
        self._answering.started(row, now)
        return Launch(columns.ids[row], columns.epoch[row], holding, waited)


# Jobs of an earlier journal: each stands where it stood, and runs where it ran.


class Carrying:
    """Takes such jobs in. Nobody has competed yet: what they hold is free, unless two of them hold the same.

    Two that share their GPUs go on doing so if it is known how they do together, as it is where the policy lets jobs share,
    and also if neither may be preempted. Otherwise the later one has to leave, or the other one if the later one may not.
    """

    def __init__(self, state: SchedulerState, answering: PolicyDriver, enacting: Enacting, absence: Absence) -> None:
        self._state = state
        self._answering = answering
        self._enacting = enacting
        self._absence = absence

    def carry(self, event: Carried, row: int, now: float) -> list[Action]:
        """The job has just been entered, as one that waits. Its run has to leave if it cannot go on where it is."""
        state, columns = self._state, self._state.columns
        columns.steps_done[row], columns.held[row], columns.failures[row] = event.done, event.received, event.failures
        other = self._other(event, row)
        beside = other if other is not None and self._may_share(event, row, other) else None
        actions = self._make_way(event, other, now) if other is not None and beside is None else []
        stays = beside is not None or self._goes_on(event, row)
        leaves = bool(event.gpus) and not stays
        if leaves:
            columns.held[row] += now - event.since
            columns.waiting_since[row] = now
            actions.append(Preempt(event.job.id, event.epoch, PreemptionCause.UNPLANNED, None))
        columns.epoch[row] = event.epoch - stays
        state.leaving.carry(row, event.epoch - stays)
        self._answering.arrived(row, now)
        if stays:
            self._go_on(event, row, beside)
        elif event.held:
            self._absence.hold(row, now)
        elif event.until is not None:
            self._absence.back_off_until(row, event.until, now)
        return actions

    def _goes_on(self, event: Carried, row: int) -> bool:
        """The job holds GPUs, nobody else does, and it can use them."""
        return self._can_use(event, row) and self._state.free.are_free(event.gpus)

    def _can_use(self, event: Carried, row: int) -> bool:
        state = self._state
        types = {state.topology.type_of[slots.node] for slots in event.gpus}
        return bool(types) and types.issubset(state.shape_of[row].types)

    def _other(self, event: Carried, row: int) -> int | None:
        """The job that was carried before, alone on the very GPUs that this one holds too; None if there is none."""
        state = self._state
        if not self._can_use(event, row) or state.free.are_free(event.gpus):
            return None
        alone = (each for each, holding in state.ledger.holdings.items() if holding == event.gpus)
        return next((each for each in alone if each not in state.ledger.partner), None)

    def _may_share(self, event: Carried, row: int, other: int) -> bool:
        """Both may go on."""
        kind, survey = self._state.columns.kind, self._state.survey
        gpu_type = self._state.type_of(other)
        rates = (survey.beside(kind[row], kind[other], gpu_type), survey.beside(kind[other], kind[row], gpu_type))
        return min(rates) > 0 or (_is_pinned(event) and self._state.protected.get(other) == inf)

    def _make_way(self, event: Carried, other: int, now: float) -> list[Action]:
        """The other one leaves if this one may not be preempted."""
        if not _is_pinned(event):
            return []
        self._answering.catch_up(now)
        self._state.free.give(event.gpus)
        return [self._enacting.stop(other, now, PreemptionCause.UNPLANNED, None)]

    def _go_on(self, event: Carried, row: int, beside: int | None) -> None:
        """The run is there since before, alone or beside another one."""
        state = self._state
        if beside is None:
            state.free.take(event.gpus)
            state.start(row, event.gpus, event.since)
        else:
            state.join(row, beside, event.since)
        self._enacting.protect(row, event.since)
        if event.attached is not None:
            self._enacting.attached(row, event.attached)
        self._answering.started(row, event.since)


def _is_pinned(event: Carried) -> bool:
    """Its run may not be preempted, or not before it has attached."""
    return event.job.yields is Yields.NEVER or (event.job.yields is Yields.ATTACHED and event.attached is None)
