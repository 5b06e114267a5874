"""Why a job runs, waits or has ended: a stable code and one sentence with numbers, read off the current state.

`poise why` adds to it what the service knows of runs and owners (`service/server/explain.py`).
"""

from dataclasses import dataclass
from enum import StrEnum

from poise.scheduler.core.claim_shapes import WaitCause
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.job import Status
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.units import counted


class Code(StrEnum):
    """Stable codes: of a job that has ended, that runs, and that waits. The live service adds `LiveCode`."""

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


@dataclass(frozen=True, slots=True)
class Reason:
    """A stable code, and a sentence for people."""

    code: Code
    text: str


_ENDED = {Status.REJECTED: Code.REJECTED, Status.FAILED: Code.FAILED, Status.CANCELLED: Code.CANCELLED}

_TOGETHER = "puts together what the tasks of its step have computed"


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
    if shape.is_over_share:
        return Reason(Code.SHARE, f"would take tenant {state.columns.tenants[row]} beyond its share of the cluster")
    free = ", ".join(f"{state.free.idle[kind]} {state.topology.types[kind]}" for kind in shape.types)
    cause, gang = shape.classify(state.free, state.placement), counted(shape.gang, "GPU")
    if shape.tasks is not None:  # its steps divide: one GPU is enough to begin with
        if cause is WaitCause.CAPACITY:
            return Reason(Code.CAPACITY, f"needs any one GPU that it can use; free now: {free}")
        return Reason(Code.ORDER, f"GPUs that it can use are free ({free}), but jobs ahead of it come first")
    match cause:
        case WaitCause.CAPACITY:
            return Reason(Code.CAPACITY, f"needs {gang} at once; free now: {free}")
        case WaitCause.FRAGMENTATION:
            want = f"needs {gang} {'in one rack' if shape.locality is Locality.RACK else 'on as few nodes as possible'}"
            return Reason(Code.FRAGMENTATION, f"{want}; free now: {free}, but too far apart")
        case WaitCause.ORDER:
            return Reason(Code.ORDER, f"needs {gang} and would fit (free now: {free}), but jobs ahead of it come first")
