"""Jobs of an earlier journal: each stands where it stood, and runs where it ran."""

from math import inf

from poise.core.absence import Absence
from poise.core.answering import Answering
from poise.core.enacting import Enacting
from poise.core.state import State
from poise.model.action import Action, Preempt, Why
from poise.model.event import Carried
from poise.model.job import Yields


class Carrying:
    """Takes such jobs in. Nobody has competed yet: what they hold is free, unless two of them hold the same.

    Two that share their GPUs go on doing so if it is known how they do together, as it is where the policy lets jobs share,
    and also if neither may be preempted. Otherwise the later one has to leave, or the other one if the later one may not.
    """

    def __init__(self, state: State, answering: Answering, enacting: Enacting, absence: Absence) -> None:
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
            actions.append(Preempt(event.job.id, event.epoch, Why.UNPLANNED, None))
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
        return [self._enacting.stop(other, now, Why.UNPLANNED, None)]

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
