"""All runs of a back end that are not over, and which of them a new run has to wait for."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Generic, Protocol, TypeVar

from poise.service.backends.api import RunOrder

Key = tuple[str, int]  # job and epoch
Gpu = tuple[str, int]  # node and slot


class TrackedRun(Protocol):
    """What the table needs of a run."""

    sequence: int  # order in which runs were taken up

    @property
    def key(self) -> Key:
        """Job and epoch."""
        ...

    @property
    def gpus(self) -> frozenset[Gpu]:
        """All its GPUs."""
        ...

    @property
    def order(self) -> RunOrder | None:
        """What was ordered; None: not known any more."""
        ...

    @property
    def must_end(self) -> bool:
        """Whether it was asked or told to end."""
        ...


R = TypeVar("R", bound=TrackedRun)
Name = TypeVar("Name", str, Gpu)


class RunTable(Generic[R]):
    """All runs that are not over, by job and by GPU."""

    def __init__(self) -> None:
        self._runs: dict[Key, R] = {}
        self._by_job: defaultdict[str, set[Key]] = defaultdict(set)
        self._on: defaultdict[Gpu, set[Key]] = defaultdict(set)
        self._at: defaultdict[str, set[Key]] = defaultdict(set)  # by node
        self._sequence = count()

    def __iter__(self) -> Iterator[R]:
        """Iterate over a copy: callbacks remove runs."""
        return iter([*self._runs.values()])

    def get(self, key: Key) -> R | None:
        """Return the run; None if it is over or unknown."""
        return self._runs.get(key)

    def of(self, job: str) -> list[R]:
        """Return the runs of a job."""
        return [self._runs[key] for key in self._by_job.get(job, ())]

    def at(self, node: str) -> list[R]:
        """Return the runs that have GPUs of a node, in the order in which they were entered."""
        return sorted((self._runs[key] for key in self._at.get(node, ())), key=lambda run: run.sequence)

    def enter(self, run: R) -> None:
        """Add a run; it comes after all others."""
        run.sequence = next(self._sequence)
        self._runs[run.key] = run
        self._by_job[run.key[0]].add(run.key)
        for gpu in run.gpus:
            self._on[gpu].add(run.key)
            self._at[gpu[0]].add(run.key)

    def remove(self, run: R) -> None:
        """Remove a run that is over: its GPUs are free."""
        del self._runs[run.key]
        job = run.key[0]
        self._by_job[job].discard(run.key)
        if not self._by_job[job]:
            del self._by_job[job]  # a service sees jobs without end
        for gpu in run.gpus:
            _drop(self._on, gpu, run.key)
            _drop(self._at, gpu[0], run.key)

    def blockers(self, run: R) -> list[R]:
        """Return the runs that have to be gone first: earlier runs of its job, and other jobs' runs on its GPUs.

        Not the run of the job that it shares GPUs with. Not runs that came later and are to stay: they wait for this one,
        and waiting only for earlier or ending runs is what keeps two runs from waiting for each other.
        """
        job, epoch = run.key
        earlier = {key for key in self._by_job.get(job, ()) if key[1] < epoch}
        beside = None if run.order is None else run.order.beside
        there = (self._runs[key] for gpu in run.gpus for key in self._on.get(gpu, ()) if key[0] not in (job, beside))
        before = {each.key for each in there if each.must_end or each.sequence < run.sequence}
        return [self._runs[key] for key in sorted(earlier | before)]


def _drop(index: "defaultdict[Name, set[Key]]", name: Name, key: Key) -> None:
    """Remove a key from an index. Nothing is kept of names without any: pods come and go without end."""
    held = index.get(name)
    if held is not None:
        held.discard(key)
        if not held:
            del index[name]
