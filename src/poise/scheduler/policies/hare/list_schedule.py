"""Hare's offline list algorithm (docs/algorithms/hare.md): jobs whose rounds divide into tasks, onto GPUs of several types.

    1  relax             middles H of the rounds, by `scheduler/solve/list_relaxation.py`
    2  list              tasks by (H of their round, round, job)
    3  place             each in turn on the GPU that minimises max(free_m, ready_n) + T^c_nm, behind what is on it already

A round is ready once the round before is computed and synchronised: when its last task ends, plus the longest sync of the
types that took part. A GPU is free again when its task ends. If several GPUs would end a task at the same moment, one of a
type on which it takes less time is chosen; of one type the GPU that was the last to be free in time, so that those that are
free earlier are left for tasks that are ready earlier; then the lower type, then the lower index.
O(types + log GPUs) per task. The list is walked lazily: a job of a million rounds costs nothing until its turn comes.
"""

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import NamedTuple

from poise.scheduler.model.errors import RequestError
from poise.scheduler.solve.list_relaxation import CHUNKS, Chain, Relaxation, relax


@dataclass(frozen=True, slots=True)
class RoundWork:
    """A job as it stands. All times are seconds on one clock.

    release   no task starts before
    rounds    left, with the one that has begun
    tasks     K, in a round
    seconds   to compute a task, by GPU type; 0: it cannot be computed there
    sync      to synchronise at the end of a round, by GPU type
    left      tasks of the first round that are not yet on a GPU; None: all of them
    until     the first round is not synchronised before, because of those of its tasks that are on GPUs
    """

    name: str
    weight: float
    release: float
    rounds: int
    tasks: int
    seconds: tuple[float, ...]
    sync: tuple[float, ...]
    left: int | None = None
    until: float = 0.0

    @property
    def first(self) -> int:
        """Tasks of the first round that have no GPU yet."""
        return self.tasks if self.left is None else self.left

    def is_computable(self, kinds: Collection[int]) -> bool:
        """Some of these types can compute its tasks."""
        return any(self.seconds[kind] > 0 for kind in set(kinds))


@dataclass(frozen=True, slots=True)
class GpuPool:
    """By GPU its type, and the moment from which it is free."""

    kinds: tuple[int, ...]
    free: tuple[float, ...]


class Turn(NamedTuple):
    """A round's place in the list; rounds count from 0, the one that is under way."""

    job: int
    round: int


class Placed(NamedTuple):
    """A task on its GPU, from `start` to `end`."""

    job: int
    round: int
    gpu: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """All tasks in list order, when each job is done, Σ w C, and a bound that no schedule is below."""

    placed: tuple[Placed, ...]
    completions: tuple[float, ...]
    value: float
    bound: float


def schedule(jobs: Sequence[RoundWork], gpus: GpuPool, chunks: int = CHUNKS) -> Schedule:
    """The whole of it: every task placed. For jobs of very many tasks, walk a `Board` as far as is needed instead."""
    middles = middled(jobs, gpus, chunks)
    board = Board(jobs, gpus)
    placed = tuple(board.place(listed(jobs, middles)))
    value = sum(job.weight * end for job, end in zip(jobs, board.ready, strict=True))
    return Schedule(placed, tuple(board.ready), value, middles.bound)


def middled(jobs: Sequence[RoundWork], gpus: GpuPool, chunks: int = CHUNKS) -> Relaxation:
    """Middles of the jobs' rounds, by job. Of a job without a task to place only the completion counts."""
    if not gpus.kinds:
        raise RequestError("there are no GPUs to plan for")
    present = sorted(set(gpus.kinds))
    chains = [_chain(job, present) for job in jobs]
    busy = [chain for chain in chains if chain is not None]
    found = relax(busy, len(gpus.kinds), chunks)
    done = sum(job.weight * max(job.release, job.until) for job, chain in zip(jobs, chains, strict=True) if chain is None)
    rows = iter(zip(found.first, found.step, strict=True))
    # a first round all of whose tasks are on GPUs has no place in the relaxation: it stands one step before the next
    spread = [(0.0, 0.0) if chain is None else next(rows) for chain in chains]
    first = [begin - step if job.first == 0 else begin for job, (begin, step) in zip(jobs, spread, strict=True)]
    return Relaxation(tuple(first), tuple([step for _, step in spread]), found.bound + done, found.value + done)


def listed(jobs: Sequence[RoundWork], middles: Relaxation) -> Iterator[Turn]:
    """Rounds in order of (H, round, job), lazily; O(log jobs) each."""
    heap = [(middles.first[index], 0, index) for index in range(len(jobs))]
    heapify(heap)
    while heap:
        _, turn, index = heap[0]
        yield Turn(index, turn)
        if turn + 1 < jobs[index].rounds:
            heapreplace(heap, (middles.middle(index, turn + 1), turn + 1, index))
        else:
            heappop(heap)


class Board:
    """GPUs that fill up with tasks.

    ready   by job: when its next round may start, or, after its last round, when it is done
    """

    def __init__(self, jobs: Sequence[RoundWork], gpus: GpuPool) -> None:
        self.ready = [job.release for job in jobs]
        self._jobs = jobs
        rows: dict[int, _Row] = {kind: [] for kind in sorted(set(gpus.kinds))}
        for gpu, (kind, free) in enumerate(zip(gpus.kinds, gpus.free, strict=True)):
            insort(rows[kind], (free, -gpu))
        options = ([_Option(job.seconds[kind], job.sync[kind], rows[kind]) for kind in _able(job, rows)] for job in jobs)
        self._options = list(options)

    def place(self, turns: Iterable[Turn]) -> Iterator[Placed]:
        """Tasks onto GPUs, round after round in the order of the turns, each when it is asked for."""
        for index, turn in turns:
            job = self._jobs[index]
            done = max(self.ready[index], job.until) if turn == 0 else 0.0
            end = sync = 0.0
            ready, options = self.ready[index], self._options[index]
            for _ in range(job.first if turn == 0 else job.tasks):
                best, chosen = inf, options[0]  # the GPU that ends the task first
                for option in options:
                    free = option.row[0][0]
                    ends = (free if free > ready else ready) + option.seconds
                    if ends < best:
                        best, chosen = ends, option
                row = chosen.row
                start = max(row[0][0], ready)
                _, gpu = row.pop(bisect_right(row, (start, 1)) - 1)
                insort(row, (best, gpu))
                end, sync = max(end, best), max(sync, chosen.sync)
                yield Placed(index, turn, -gpu, start, best)
            self.ready[index] = max(done, end + sync)


_Row = list[tuple[float, int]]
"""GPUs of one type by when they are free; their numbers negative, so that of those free at once the lowest comes last."""


class _Option(NamedTuple):
    """A type that can compute a job's tasks."""

    seconds: float
    sync: float
    row: _Row


def _able(job: RoundWork, kinds: Iterable[int]) -> list[int]:
    """The types that can compute its tasks, the fastest first."""
    able = sorted((kind for kind in kinds if job.seconds[kind] > 0), key=lambda kind: (job.seconds[kind], kind))
    if not able:
        raise RequestError(f"{job.name}: no GPU of the cluster is of a type that can compute its tasks")
    return able


def _chain(job: RoundWork, kinds: Sequence[int]) -> Chain | None:
    """The job as the relaxation sees it; None if all its tasks have GPUs.

    Tasks that are on GPUs already are left out of it. To put off a first round until the second may follow at once costs
    nothing, so that `until` is met by a later release.
    """
    if job.tasks < 1:
        raise RequestError(f"{job.name}: a round of {job.tasks} tasks; at least 1 is needed")
    if job.rounds < 1:
        raise RequestError(f"{job.name}: {job.rounds} rounds left; at least 1 is needed")
    if not 0 <= job.first <= job.tasks:
        raise RequestError(f"{job.name}: {job.first} tasks left of a round of {job.tasks}")
    able = _able(job, kinds)
    seconds, sync = job.seconds[able[0]], min(job.sync[kind] for kind in able)
    if job.first > 0:
        release = max(job.release, job.until - seconds - sync)
        return Chain(job.name, job.weight, release, job.rounds, job.tasks, job.first, seconds, sync)
    if job.rounds > 1:
        release = max(job.release, job.until)
        return Chain(job.name, job.weight, release, job.rounds - 1, job.tasks, job.tasks, seconds, sync)
    return None
