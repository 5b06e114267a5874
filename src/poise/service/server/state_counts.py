"""How many jobs are in which state, and who holds how many GPUs: kept up to date, so that nobody has to count all jobs."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from poise.service.server.records import JobRecord

Slot = tuple[str, int]
"""A GPU: its node, and its number there."""

Key = TypeVar("Key")


class _Standing(NamedTuple):
    """What is counted of a job."""

    state: str
    tenant: str
    gpus: tuple[Slot, ...]
    """That it holds."""
    waits: bool

    @staticmethod
    def of(record: JobRecord) -> "_Standing":
        run = record.current
        waits = run is None and record.finished is None
        gpus = () if run is None else tuple((node, slot) for node, slots in run.gpus.items() for slot in slots)
        return _Standing(record.state.value, record.job.tenant, gpus, waits)


class Contention(NamedTuple):
    """Who holds GPUs of some types: `gpus` are held by so many `jobs`; of the largest holders, what each holds by type."""

    gpus: int
    jobs: int
    largest: tuple[tuple[JobRecord, dict[str, int]], ...]


@dataclass(frozen=True, slots=True)
class HeldGpus:
    """GPUs that are held now. One that two jobs share is one GPU, of each of their tenants."""

    total: int
    by_tenant: Counter[str]

    def share(self, tenant: str) -> float | None:
        """A tenant's part of all that are held; None if none are."""
        return self.by_tenant[tenant] / self.total if self.total else None


class StateCounts:
    """Counts jobs that have not ended, or whose processes are not all gone."""

    def __init__(self) -> None:
        self.states: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        """Jobs that wait, by tenant."""
        self.holders: Counter[Slot] = Counter()
        """Jobs on each GPU that is held; policies that pair jobs put two of them there."""
        self.jobs: dict[str, dict[str, None]] = {}
        """Jobs of each tenant that has any, in the order in which they came."""
        self.contention: dict[tuple[str, ...], Contention] = {}
        """By GPU types, as far as asked since anybody got or lost GPUs: many ask, and all jobs are looked at."""
        self._held: Counter[str] = Counter()
        self._holders_of: Counter[tuple[str, Slot]] = Counter()
        self._known: dict[str, _Standing] = {}

    @property
    def held(self) -> HeldGpus:
        """GPUs that are held now."""
        return HeldGpus(len(self.holders), self._held)

    def among(self, jobs: Iterable[str]) -> Counter[str]:
        """How many of these jobs are in which state."""
        known = self._known
        return Counter([known[job].state for job in jobs])

    def count(self, record: JobRecord) -> None:
        """Count a job as it stands now, and no more as it stood before."""
        job, now = record.job.id, _Standing.of(record)
        before = self._known.get(job)
        if before == now:
            return
        if before is None:
            self.jobs.setdefault(now.tenant, {})[job] = None
        else:
            self._add(before, -1)
        self._known[job] = now
        self._add(now, 1)

    def forget(self, job: str) -> None:
        """A job is gone."""
        before = self._known.pop(job, None)
        if before is None:
            return
        self._add(before, -1)
        mine = self.jobs[before.tenant]
        del mine[job]
        if not mine:
            del self.jobs[before.tenant]

    def _add(self, standing: _Standing, sign: int) -> None:
        _change(self.states, standing.state, sign)
        if standing.waits:
            _change(self.waiting, standing.tenant, sign)
        if standing.gpus:
            self.contention.clear()
        for gpu in standing.gpus:
            _change(self.holders, gpu, sign)
            mine = (standing.tenant, gpu)
            had = mine in self._holders_of
            _change(self._holders_of, mine, sign)
            _change(self._held, standing.tenant, (mine in self._holders_of) - had)


def _change(counter: Counter[Key], key: Key, by: int) -> None:
    """What there is none of is not kept."""
    counter[key] += by
    if not counter[key]:
        del counter[key]
