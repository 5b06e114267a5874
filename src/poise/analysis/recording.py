"""A history as records: what a journal says of jobs, spells and the cluster."""

from collections.abc import Iterable, Sequence
from math import inf, isfinite, nan

import numpy as np

from poise.analysis.history import History, Life, cumulated, floats
from poise.analysis.overtaking import Harm, Supply, harm
from poise.analysis.parts import Curve, totals
from poise.analysis.records import ENDS, FAILURES, FINALS, NOBODY, Covers, Final, Records, Room, Spells
from poise.analysis.stints import End, Stint
from poise.analysis.summary import utilisation
from poise.model.arrays import Floats, Ints
from poise.model.cluster import Slots, gpu_count
from poise.model.job import Status
from poise.model.topology import Topology

WAITING = ("fair share", "fragmentation", "capacity")
"""Causes of waiting, in the order of `Waited`."""

_FINAL = {
    Status.WAITING: Final.UNFINISHED,
    Status.RUNNING: Final.UNFINISHED,
    Status.FINISHED: Final.PASSED,
    Status.FAILED: Final.FAILED,
    Status.CANCELLED: Final.KILLED,
    Status.REJECTED: Final.REJECTED,
}
_CODE = {end: code for code, end in enumerate(ENDS)}
_KEPT = {End.FINISHED, End.PREEMPTED, End.TRIED, *FAILURES}
"""Ends after which the journal says how far the job has come."""
NODE_LOST = "node lost"


def records_of(history: History, supply: Supply | None = None) -> Records:
    """Everything that a journal tells; `supply` is what its history leaves out of the GPUs that jobs could have."""
    supply = supply or Supply()
    lives = sorted(history.jobs.values(), key=lambda life: life.submitted)
    place = {life.id: index for index, life in enumerate(lives)}
    started = _starts(history, lives, place, supply.reserved)
    ended = floats(life.ended for life in lives)
    left = np.where(np.isnan(started), np.nan_to_num(ended, nan=inf), started)
    spells = _spells(history, lives, place, supply.reserved)
    tenants = tuple(dict.fromkeys(life.tenant for life in lives))
    codes = {name: code for code, name in enumerate(tenants)}
    final = _ints(FINALS.index(_FINAL[life.status]) for life in lives)
    return Records(
        covers=frozenset(Covers) - ({Covers.TENANTS} if tenants == (NOBODY,) else set()),
        tenants=tenants,
        tenant=_ints(codes[life.tenant] for life in lives),
        gpus=_ints(life.gpus for life in lives),
        submitted=floats(life.submitted for life in lives),
        started=started,
        left=left,
        run_seconds=_run_seconds(spells, final),
        gpu_seconds=floats(life.gpu_seconds for life in lives),
        final=final,
        spells=spells,
        waited=np.array([life.waited for life in lives], dtype=np.float64).reshape(-1, len(WAITING)),
        kinds=WAITING,
        room=_room(history, lives, harm(history, lives, left.tolist(), supply)),
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _starts(history: History, lives: Sequence[Life], place: dict[str, int], pool: frozenset[Slots]) -> Floats:
    """When jobs first started in earnest: a trial is none."""
    if not pool:
        return floats(life.started for life in lives)
    started = np.full(len(lives), inf)
    for stint in history.stints:
        if stint.gpus[0] not in pool:
            started[place[stint.job]] = min(started[place[stint.job]], stint.start)
    return np.where(np.isinf(started), nan, started)


def _run_seconds(spells: Spells, final: Ints) -> Floats:
    """Time with GPUs of jobs that ran and came to an end; what they held at once counts once."""
    total = totals(spells.job, spells.new, len(final))
    ran = np.bincount(spells.job, minlength=len(final)) > 0
    return np.where(ran & (final != FINALS.index(Final.UNFINISHED)), total, np.nan)


class _Attempts:
    """Counts the attempts of each job: a new one begins with what starts at its failure or after."""

    def __init__(self, jobs: int) -> None:
        self._number = [0] * jobs
        self._failed = [inf] * jobs

    def of(self, job: int, stint: Stint) -> int:
        """The attempt that a stint belongs to. To be asked in the order in which stints ended."""
        if stint.start >= self._failed[job]:
            self._number[job] += 1
            self._failed[job] = inf
        if stint.ended in FAILURES:
            self._failed[job] = stint.end
        return self._number[job]


def _spells(history: History, lives: Sequence[Life], place: dict[str, int], pool: frozenset[Slots]) -> Spells:
    stints = history.stints
    job = _ints(place[stint.job] for stint in stints)
    attempts = _Attempts(len(lives))
    numbers = _ints(attempts.of(index, stint) for index, stint in zip(job.tolist(), stints, strict=True))
    start, end = floats(stint.start for stint in stints), floats(stint.end for stint in stints)
    order = np.lexsort((start, job))  # of equal starts the one that ended first comes first
    causes: dict[str, int] = {}
    return Spells(
        job[order],
        numbers[order],
        start[order],
        end[order],
        (end - start)[order],
        _ints(gpu_count(stint.gpus) for stint in stints)[order],
        _ints(0 if stint.gpus[0] in pool else len(stint.gpus) for stint in stints)[order],
        _ints(_CODE[stint.ended] for stint in stints)[order],
        _ints(_cause(stint, causes) for stint in stints)[order],
        _ideals(history, stints)[order],
        tuple(causes),
    )


def _cause(stint: Stint, causes: dict[str, int]) -> int:
    """The index of a cause, new ones included; a lost node is one too."""
    cause = NODE_LOST if stint.ended is End.LOST else stint.cause
    return causes.setdefault(cause, len(causes)) if cause else -1


def _ideals(history: History, stints: Sequence[Stint]) -> Floats:
    """Seconds that the steps which stints left would take at the speed of the whole gang, packed and alone.

    Of jobs that ever computed tasks one by one, stints do not tell steps.
    """
    type_of = Topology(history.cluster).type_of
    divided = {stint.job for stint in stints if stint.ended is End.COMPUTED}
    return floats(
        nan if stint.job in divided else _ideal(history, stint, history.jobs[stint.job], type_of) for stint in stints
    )


def _ideal(history: History, stint: Stint, life: Life, type_of: Sequence[int]) -> float:
    if stint.ended not in _KEPT:
        return nan
    steps = stint.kept - stint.begun
    if steps <= 0:  # whatever it ran on: most trials are such runs
        return 0.0
    kind = type_of[stint.gpus[0].node]
    rate = history.rates_of(life)[kind]
    if gpu_count(stint.gpus) != life.gpus:  # of other sizes the history knows no speed
        return nan
    if rate <= 0 or not isfinite(steps) or any(type_of[slots.node] != kind for slots in stint.gpus):
        return nan
    return steps / rate


def _room(history: History, lives: Sequence[Life], hurt: Harm) -> Room:
    first = min((life.submitted for life in lives), default=0.0)
    last = max((life.ended for life in history.ran()), default=history.end)
    return Room(
        history.cluster.gpus,
        utilisation(history, first, last),
        _level("in use", history.held, first, 1 / history.cluster.gpus),
        _level("waiting", history.waiting, first, 1.0),
        hurt,
    )


def _level(label: str, changes: list[tuple[float, int]], first: float, scale: float) -> Curve:
    moments, levels = cumulated(changes)
    return Curve(label, levels.astype(np.float64) * scale, moments - first)
