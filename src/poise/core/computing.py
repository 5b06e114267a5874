"""Runs at the grain of tasks: a run is one round of training, and its GPUs come and go task by task (ALGORITHMS §5.1)."""

from math import inf

from poise.core.state import State
from poise.core.waiting import NO_WAIT
from poise.model.action import Waited
from poise.model.cluster import Holding, gpu_count
from poise.model.errors import InvariantError
from poise.model.job import Status
from poise.model.speed import Locality
from poise.model.tasks import Tasks
from poise.model.units import counted


def compute(state: State, row: int, holding: Holding, now: float) -> Waited:
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


def computed(state: State, row: int, holding: Holding, now: float) -> None:
    """Tasks are done, and their GPUs free again."""
    state.ledger.reduce(row, holding)
    state.free.give(holding)
    _change(state, row, -gpu_count(holding), now)


def _change(state: State, row: int, more: int, now: float) -> None:
    """The job computes on so many GPUs more; each of them does its task's part of a step."""
    tasks = _tasks(state, row)
    state.columns.gpus[row] += more
    mix = state.topology.mix(state.ledger.holding(row))
    tasks_a_second = sum(gpus / each for gpus, each in zip(mix, tasks.seconds, strict=True) if gpus)
    state.columns.change_rate(row, now, tasks_a_second / tasks.count)


def _tasks(state: State, row: int) -> Tasks:
    tasks = state.estimate(row).tasks
    if tasks is None:
        raise InvariantError(f"job in row {row} is to compute tasks, and its rounds do not divide")
    return tasks
