"""Jobs of an earlier journal: each stands where it stood, and runs where it ran."""

from poise.core.absence import Absence
from poise.core.answering import Answering
from poise.core.enacting import Enacting
from poise.core.state import State
from poise.model.action import Action, Preempt, Why
from poise.model.event import Carried


class Carrying:
    """Takes such jobs in. Nobody has competed yet: what they hold is free, unless two of them hold the same."""

    def __init__(self, state: State, answering: Answering, enacting: Enacting, absence: Absence) -> None:
        self._state = state
        self._answering = answering
        self._enacting = enacting
        self._absence = absence

    def carry(self, event: Carried, row: int, now: float) -> list[Action]:
        """The job has just been entered, as one that waits. Its run has to leave if it cannot go on where it is."""
        state, columns = self._state, self._state.columns
        columns.steps_done[row], columns.held[row], columns.failures[row] = event.done, event.received, event.failures
        stays = self._goes_on(event, row)
        leaves = bool(event.gpus) and not stays
        if leaves:
            columns.held[row] += now - event.since
            columns.waiting_since[row] = now
        columns.epoch[row] = event.epoch - stays
        state.leaving.carry(row, event.epoch - stays)
        self._answering.arrived(row, now)
        if stays:
            state.free.take(event.gpus)
            state.start(row, event.gpus, event.since)
            self._enacting.protect(row, event.since)
            if event.attached is not None:
                self._enacting.attached(row, event.attached)
            self._answering.started(row, event.since)
        elif event.held:
            self._absence.hold(row, now)
        elif event.until is not None:
            self._absence.back_off_until(row, event.until, now)
        return [Preempt(event.job.id, event.epoch, Why.UNPLANNED, None)] if leaves else []

    def _goes_on(self, event: Carried, row: int) -> bool:
        """The job holds GPUs, nobody else does, and it can use them. Of two that share, the later one has to leave."""
        state = self._state
        types = {state.topology.type_of[slots.node] for slots in event.gpus}
        return bool(types) and types.issubset(state.shape_of[row].types) and state.free.are_free(event.gpus)
