"""What the files of a run say, as news. They were written by the job's own user: nothing in them is taken on trust."""

import errno
from math import isfinite
from typing import NamedTuple

from poise.service.backends.api import DesiredState, RunEnded, RunEnding, RunProgressed
from poise.service.backends.local.lease_files import EXIT, PROGRESS, STORAGE, Fields, now, one_line
from poise.service.backends.local.state_dir import StateDir
from poise.service.wire.request import MOST_STEPS

UNREADABLE = "no-signature"
EXHAUSTED = "node-exhausted"
"""Why a run could not be begun on a machine that has no processes or files left: what it has too many of may end."""
MOST_PID = 1 << 22
"""No pid is above (proc(5))."""
_REFUSALS = {
    errno.ENOSPC: STORAGE,
    errno.EDQUOT: STORAGE,
    errno.EROFS: STORAGE,
    errno.EACCES: "permission-error",
    errno.EPERM: "permission-error",
    errno.ENOMEM: "cpu-out-of-memory",
    errno.EAGAIN: EXHAUSTED,
    errno.EMFILE: EXHAUSTED,
    errno.ENFILE: EXHAUSTED,
}


def refusal(error: OSError) -> str:
    """Why a run could not be begun."""
    return _REFUSALS.get(error.errno or 0, UNREADABLE)


class Runner(NamedTuple):
    """Who keeps a run: its pid, its start, the boot, and the start of each replica's process by its pid."""

    pid: int
    start: int
    boot: str
    replicas: tuple[tuple[int, int], ...]


def runner_in(fields: Fields | None) -> Runner | None:
    """What runner.json says; None: nothing that makes sense."""
    try:
        given = fields or {}
        replicas = tuple((int(each["pid"]), int(each["start"])) for each in given["replicas"])
        found = Runner(int(given["pid"]), int(given["start"]), str(given["boot"]), replicas)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return found if all(1 < pid <= MOST_PID for pid in (found.pid, *(pid for pid, _ in replicas))) else None


def gpus_in(order: Fields | None) -> frozenset[tuple[str, int]]:
    """The GPUs that order.json names; none if it makes no sense."""
    try:
        return frozenset((str(node), int(slot)) for node, _, slots in (order or {})["gpus"] for slot in slots)
    except (KeyError, TypeError, ValueError, OverflowError):
        return frozenset()


def port_in(order: Fields | None) -> int:
    """The port that order.json gives a run; 0 if it makes no sense."""
    try:
        port = int((order or {})["environment"]["MASTER_PORT"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0
    return port if 0 < port < 1 << 16 else 0


def number(value: object) -> float | None:
    """A finite number; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if isfinite(value) else None
    except OverflowError:
        return None


def amount(value: object) -> float | None:
    """A number of steps that a job can have; None: it is none."""
    found = number(value)
    return found if found is not None and 0 <= found <= MOST_STEPS else None


def progressed(job: str, epoch: int, fields: Fields | None) -> RunProgressed | None:
    """What a run reports of itself; None: nothing that makes sense."""
    steps = amount((fields or {}).get("steps"))
    if fields is None or steps is None:
        return None
    at, loss = number(fields.get("at")), number(fields.get("loss"))
    total, kept, speed = (amount(fields.get(name)) for name in ("total", "checkpoint", "throughput"))
    return RunProgressed(job, epoch, now() if at is None else at, steps, total or None, kept, speed, loss)


def ended(folders: StateDir, job: str, epoch: int, fields: Fields, grip: DesiredState) -> RunEnded:
    """The end of a run as exit.json has it. A run whose job is no longer wanted has yielded, however it went."""
    try:
        how = RunEnding(fields["how"])
        codes = tuple(_code(each["code"]) for each in sorted(fields["replicas"], key=lambda each: int(each["rank"])))
    except (KeyError, TypeError, ValueError, OverflowError):
        how, codes, fields = RunEnding.FAILED, (), {"at": fields.get("at"), "cause": UNREADABLE}
    at, cause, made_to = number(fields.get("at")), fields.get("cause"), fields.get("made_to")
    if grip is DesiredState.GONE:
        how = RunEnding.YIELDED
    text = {RunEnding.FAILED: cause, RunEnding.YIELDED: made_to if made_to in ("TERM", "KILL") else None}.get(how)
    steps = _steps(folders, job, epoch, how)
    return RunEnded(job, epoch, now() if at is None else at, how, steps, line(text), codes)


def has_finished(folders: StateDir, job: str, epoch: int) -> bool:
    """The job's run before this one did all its work on its way out: nothing is left to be done."""
    before = [each for each in folders.epochs(job) if each < epoch]
    fields = folders.get(job, before[-1], EXIT) if before else None
    return fields is not None and fields.get("how") == RunEnding.FINISHED.value


def _code(value: object) -> int | None:
    return value if isinstance(value, int) and abs(value) < 256 else None


def line(value: object) -> str | None:
    """A cause, as one line that can be told to anybody; None: it is no text."""
    return one_line(value) if isinstance(value, str) else None


def _steps(folders: StateDir, job: str, epoch: int, how: RunEnding) -> float | None:
    """Steps that the job would go on from; of one that has finished, all that it did."""
    complete = folders.checkpoints(job)
    kept = float(complete[0]) if complete else None
    report = progressed(job, epoch, folders.get(job, epoch, PROGRESS))
    if report is None:
        return kept
    return max(report.steps, kept or 0.0) if how is RunEnding.FINISHED else kept or 0.0


def lost_fields(began: float | None, died: float, replicas: int, grip: DesiredState, cause: str) -> Fields:
    """What exit.json would have said of a run whose runner did not write it."""
    return {
        "at": died if began is None else max(began, died),
        "began": began,
        "how": "failed" if grip is DesiredState.RUN else "yielded",
        "replicas": [{"rank": rank, "code": None} for rank in range(replicas)],
        "made_to": None if grip is DesiredState.RUN else "KILL",
        "cause": cause if grip is DesiredState.RUN else None,
    }


def unbegun_fields() -> Fields:
    """What exit.json says of a run that was not wanted any more before it began: its runner, if one comes, finds it over."""
    return {"at": now(), "began": None, "how": "yielded", "replicas": [], "made_to": None, "cause": None}
