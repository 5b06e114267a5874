"""What the files of a run say, as events and values. The job can write all of them, so nothing in them is trusted.

Readers return None, or something harmless, for what makes no sense: a number may be missing, infinite, or a list.
"""

import errno
from math import isfinite
from typing import NamedTuple

from poise.service.backends.api import DesiredState, RunEnded, RunEnding, RunProgressed
from poise.service.backends.local.lease_files import EXIT, PROGRESS, STORAGE, Fields, now, one_line
from poise.service.backends.local.state_dir import StateDir
from poise.service.wire.request import MOST_STEPS

UNREADABLE = "no-signature"
EXHAUSTED = "node-exhausted"
"""Cause of a run that could not start on a machine without free processes or files; that may pass."""
MOST_PID = 1 << 22  # the largest pid there is (proc(5))
_NONSENSE = (KeyError, TypeError, ValueError, OverflowError)  # what reading a value of the wrong shape raises
CANNOT_START = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EROFS), STORAGE),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "permission-error"),
    **dict.fromkeys((errno.EAGAIN, errno.EMFILE, errno.ENFILE), EXHAUSTED),
    errno.ENOMEM: "cpu-out-of-memory",
}
"""Causes of a run that could not be started, by the error; `UNREADABLE` for any other."""


class Runner(NamedTuple):
    """The runner of a run: pid, start time, boot, and pid and start time of each replica."""

    pid: int
    start: int
    boot: str
    replicas: tuple[tuple[int, int], ...]


def runner_in(fields: Fields | None) -> Runner | None:
    """Read runner.json."""
    try:
        given = fields or {}
        replicas = tuple((int(each["pid"]), int(each["start"])) for each in given["replicas"])
        found = Runner(int(given["pid"]), int(given["start"]), str(given["boot"]), replicas)
    except _NONSENSE:
        return None
    # Pids 0 and 1, and negative ones, would mean a group or init to the kernel.
    return found if all(1 < pid <= MOST_PID for pid in (found.pid, *(pid for pid, _ in replicas))) else None


def gpus_in(order: Fields | None) -> frozenset[tuple[str, int]]:
    """Read the GPUs of order.json; empty if they make no sense."""
    try:
        return frozenset((str(node), int(slot)) for node, _, slots in (order or {})["gpus"] for slot in slots)
    except _NONSENSE:
        return frozenset()


def port_in(order: Fields | None) -> int:
    """Read the MASTER_PORT of order.json; 0 if it makes no sense."""
    try:
        port = int((order or {})["environment"]["MASTER_PORT"])
    except _NONSENSE:
        return 0
    return port if 0 < port < 1 << 16 else 0


def number(value: object) -> float | None:
    """Read a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if isfinite(value) else None
    except OverflowError:
        return None


def amount(value: object) -> float | None:
    """Read a number of steps that a job can have."""
    found = number(value)
    return found if found is not None and 0 <= found <= MOST_STEPS else None


def cause_line(value: object) -> str | None:
    """Read a cause, as one printable line."""
    return one_line(value) if isinstance(value, str) else None


def read_progress(job: str, epoch: int, fields: Fields | None) -> RunProgressed | None:
    """Read progress.json."""
    steps = amount((fields or {}).get("steps"))
    if fields is None or steps is None:
        return None
    at, loss = number(fields.get("at")), number(fields.get("loss"))
    total, kept, speed = (amount(fields.get(name)) for name in ("total", "checkpoint", "throughput"))
    return RunProgressed(job, epoch, now() if at is None else at, steps, total or None, kept, speed, loss)


def read_end(state: StateDir, job: str, epoch: int, fields: Fields, desired: DesiredState) -> RunEnded:
    """Read exit.json. A run whose job is not wanted any more has yielded, however it went."""
    try:
        how = RunEnding(fields["how"])
        given = [each["code"] for each in sorted(fields["replicas"], key=lambda each: int(each["rank"]))]
        codes = tuple(code if isinstance(code, int) and abs(code) < 256 else None for code in given)
    except _NONSENSE:
        how, codes, fields = RunEnding.FAILED, (), {"at": fields.get("at"), "cause": UNREADABLE}
    at, cause, made_to = number(fields.get("at")), fields.get("cause"), fields.get("made_to")
    if desired is DesiredState.GONE:
        how = RunEnding.YIELDED
    text = {RunEnding.FAILED: cause, RunEnding.YIELDED: made_to if made_to in ("TERM", "KILL") else None}.get(how)
    # Steps that the job would continue from: those of its newest complete checkpoint; of a finished job, all that it did.
    complete = state.checkpoints(job)
    steps = float(complete[0]) if complete else None
    report = read_progress(job, epoch, state.get(job, epoch, PROGRESS))
    if report is not None:
        steps = max(report.steps, steps or 0.0) if how is RunEnding.FINISHED else steps or 0.0
    return RunEnded(job, epoch, now() if at is None else at, how, steps, cause_line(text), codes)


def has_finished(state: StateDir, job: str, epoch: int) -> bool:
    """Whether the job's run before this one completed all work on its way out, so that nothing is left to do."""
    before = [each for each in state.epochs(job) if each < epoch]
    fields = state.get(job, before[-1], EXIT) if before else None
    return fields is not None and fields.get("how") == RunEnding.FINISHED.value


def unbegun_fields() -> Fields:
    """Return exit.json for a run that was not wanted any more before it began. A runner that comes late obeys it."""
    return {"at": now(), "began": None, "how": "yielded", "replicas": [], "made_to": None, "cause": None}
