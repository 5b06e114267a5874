"""Why a job runs, waits or has ended: a stable code and one sentence with numbers, read off the current state.

`poise why` adds to it what the service knows of runs and owners (`service/server/explain.py`).
"""

from dataclasses import dataclass
from enum import StrEnum

from poise.scheduler.core.claim_shapes import ClaimShape, WaitCause
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.job import Status
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.units import counted, in_units


class Code(StrEnum):
    """Stable codes: of a job that has ended, that runs, and that waits. The live service adds `LiveCode` and `StartCode`."""

    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"
    FINISHED = "finished"
    RUNNING = "running"
    HELD = "held-back"
    SHARE = "tenant-share"
    ORDER = "behind-others"
    FRAGMENTATION = "fragmentation"
    CAPACITY = "capacity"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Reason:
    """A stable code, and a sentence for people."""

    code: Code
    text: str


_ENDED = {Status.REJECTED: Code.REJECTED, Status.FAILED: Code.FAILED, Status.CANCELLED: Code.CANCELLED}

_TOGETHER = "puts together what the tasks of its step have computed"
_CODES = {WaitCause.ORDER: Code.ORDER, WaitCause.FRAGMENTATION: Code.FRAGMENTATION, WaitCause.CAPACITY: Code.CAPACITY}

MOST_NODES = 3
"""Nodes that a sentence names; of others it gives the number."""


def explain(state: SchedulerState, row: int) -> Reason:
    """The one dominant reason for where the job stands."""
    status = Status(state.columns.status[row])
    match status:
        case Status.REJECTED | Status.FAILED | Status.CANCELLED:
            return Reason(_ENDED[status], state.reasons[row])
        case Status.FINISHED:
            return Reason(Code.FINISHED, "did all its work")
        case Status.RUNNING:
            if not state.of(row):
                does = "waits for a GPU for the other tasks of its step" if state.columns.ready[row] else _TOGETHER
                return Reason(Code.RUNNING, does)
            does = "is tried for a short while" if state.pool.tries(row) else "runs"
            parts = ((slots.mask.bit_count(), state.topology.cluster.nodes[slots.node].name) for slots in state.of(row))
            where = ", ".join(f"{counted(gpus, 'GPU')} of {node}" for gpus, node in parts)
            return Reason(Code.RUNNING, f"{does} on {where}")
        case Status.WAITING:
            return _waiting(state, row)


def _waiting(state: SchedulerState, row: int) -> Reason:
    if row in state.suspended:
        text = f"is tried again later, after {counted(state.columns.failures[row], 'failed run')}"
        if row in state.on_hold:
            text = "is held back by its owner"
        elif state.pool.waits(row):
            text = "waits for a short trial on one GPU before it competes for its gang"
        return Reason(Code.HELD, text)
    shape = state.shape_of[row]
    code = waiting_code(state, shape)
    if code is Code.SHARE:
        return Reason(code, f"would take tenant {state.columns.tenants[row]} beyond its share of the cluster")
    free = ", ".join(f"{state.free.idle[kind]} {state.topology.types[kind]}" for kind in shape.types)
    gang, away = counted(shape.gang, "GPU"), unavailable(state, shape.types)
    away = f"; {away}" if away else ""
    if shape.tasks is not None:  # its steps divide: one GPU is enough to begin with
        if code is Code.ORDER:
            return Reason(code, f"GPUs that it can use are free ({free}), but jobs ahead of it come first")
        return Reason(code, f"needs any one GPU that it can use; free now: {free}{away}")
    if shape.unit > 1:
        return Reason(code, _waiting_in_units(state, shape, code, free) + ("" if code is Code.ORDER else away))
    if code is Code.FRAGMENTATION:
        want = f"needs {gang} {'in one rack' if shape.locality is Locality.RACK else 'on as few nodes as possible'}"
        return Reason(code, f"{want}; free now: {free}, but too far apart{away}")
    if code is Code.ORDER:
        return Reason(code, f"needs {gang} and would fit (free now: {free}), but jobs ahead of it come first")
    return Reason(code, f"needs {gang} at once; free now: {free}{away}")


def _waiting_in_units(state: SchedulerState, shape: ClaimShape, code: Code, free: str) -> str:
    """Why a job waits whose GPUs come in units that nodes cannot divide, without the nodes that are lost or closed."""
    gang = in_units(shape.gang, shape.unit)
    if code is Code.ORDER:
        return f"needs {gang}, and would fit (free now: {free}), but jobs ahead of it come first"
    if code is not Code.FRAGMENTATION:
        return f"needs {gang}; free now: {free}"
    if shape.locality is not Locality.CLUSTER:
        near = "in one rack" if shape.locality is Locality.RACK else "on as few nodes as possible"
        return f"needs {gang}, and these {near}; free now: {free}, but too far apart"
    units = (state.free.in_units(kind, shape.unit).idle[kind] // shape.unit for kind in shape.types)
    room = f"room for {' or '.join(map(str, units))} × {shape.unit}"
    return f"needs {gang}; free now: {free}, but so spread over nodes that there is {room}"


def waiting_code(state: SchedulerState, shape: ClaimShape) -> Code:
    """Why jobs wait that wait with this shape. UNAVAILABLE: they could not run if they were alone, as things are."""
    if shape.is_over_share:
        return Code.SHARE
    cause = shape.classify(state.free, state.placement)
    may_be_away = cause is WaitCause.CAPACITY or (cause is WaitCause.FRAGMENTATION and shape.unit > 1)
    if may_be_away and (state.free.closed or not all(state.free.alive)):
        there = state.open_gpus(shape.unit)
        gang = shape.gang if shape.tasks is None else 1
        if all(there[kind] < gang for kind in shape.types):
            return Code.UNAVAILABLE
    return _CODES[cause]


def unavailable(state: SchedulerState, types: tuple[int, ...]) -> str:
    """Which nodes of these types are lost or not wholly given out, in words; empty if none is."""
    named: list[str] = []
    others = 0
    for node, alive in enumerate(state.free.alive):
        closed = state.free.closed.get(node, 0)
        if (alive and not closed) or state.topology.type_of[node] not in types:
            continue
        if len(named) == MOST_NODES:
            others += 1
            continue
        name, verb = state.topology.cluster.nodes[node].name, "drained" if node in state.draining else "closed"
        if not alive:
            named.append(f"{name} is lost")
        elif closed == state.topology.full[node]:
            named.append(f"{name} is {verb}")
        else:
            gpus = closed.bit_count()
            named.append(f"{counted(gpus, 'GPU')} of {name} {'is' if gpus == 1 else 'are'} {verb}")
    if others:
        named.append(f"and {counted(others, 'other node')} likewise")
    return ", ".join(named)
