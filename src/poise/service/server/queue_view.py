"""The queue, a page at a time: jobs that hold GPUs, then those that wait, as they stand in line, then those held back."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import filterfalse, islice
from typing import NamedTuple

from poise.scheduler.policies.catalogue import promise_of
from poise.scheduler.policies.promises import Claimant
from poise.service.server.records import JobRecord, RunRecord
from poise.service.server.service_state import ServiceState, TenantTotals
from poise.service.wire.views import JobState, NodeList, NodeRow, Shares, TenantShare

IN_LINE = 2_000
"""Waiting jobs whose place in line is looked at; those behind them come in order of submission, whoever asks for so many.

To find the place of any one of 50,000 takes 10 to 20 ms under an order, during which nothing is decided.
"""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which jobs: in one of these states (none: in any), a tenant's, an app's, called so."""

    states: frozenset[JobState]
    tenant: str | None
    app: str | None
    name: str | None = None

    @property
    def is_everything(self) -> bool:
        """All of them."""
        return not self.states and self.tenant is None and self.app is None and self.name is None

    def among(self, situation: ServiceState) -> list[str]:
        """Those jobs, in order of submission."""
        records = situation.records
        names = records if self.tenant is None else situation.tally.jobs.get(self.tenant, ())
        return [name for name in names if self._has(records[name])]

    def _has(self, record: JobRecord) -> bool:
        is_called_so = self.name in (None, record.name)
        return is_called_so and (not self.states or record.state in self.states) and self.app in (None, record.job.app)


class QueueSlice(NamedTuple):
    """Some jobs, the places in line of those that are among the first, and how many there are on all pages, by state."""

    names: list[str]
    places: dict[str, int]
    counts: Counter[str]


def page_of(situation: ServiceState, wanted: PageRequest, *, limit: int, offset: int) -> QueueSlice:
    """Jobs that have not ended, or whose processes are not all gone."""
    most = min(limit + offset, IN_LINE) if wanted.is_everything else IN_LINE
    places = places_of(situation, most)
    if wanted.is_everything:
        names, counts = _everybody(situation, places), situation.tally.states.copy()
    else:
        match = wanted.among(situation)
        names, counts = _sorted(situation, match, places), situation.tally.among(match)
    return QueueSlice(list(islice(names, offset, offset + limit)), places, counts)


def places_of(situation: ServiceState, most: int = IN_LINE) -> dict[str, int]:
    """The first jobs in line: each with its place, from 1. While the core thinks it knows more than the records do."""
    waiting = (name for name in situation.scheduler.in_line(most) if name in situation.records)
    return {name: place for place, name in enumerate(filterfalse(situation.running.__contains__, waiting), 1)}


def _everybody(situation: ServiceState, places: dict[str, int]) -> Iterator[str]:
    yield from situation.running
    yield from places
    yield from (name for name in situation.records if name not in places and name not in situation.running)


def _sorted(situation: ServiceState, match: list[str], places: dict[str, int]) -> Iterator[str]:
    """A few are put in order by themselves; many are found on the way through all."""
    if len(match) > IN_LINE:
        return filter(set(match).__contains__, _everybody(situation, places))
    running = filter(set(match).__contains__, situation.running)
    waiting = situation.scheduler.lined_up(match)
    return iter(dict.fromkeys((*running, *waiting, *match)))


# Who holds what now: nodes, and tenants with what they are entitled to.

SHARING = "+"
"""Between the names of jobs that share a GPU."""


def nodes(situation: ServiceState) -> NodeList:
    """All nodes and who holds them."""
    records = situation.records
    current = ((name, records[name].current) for name in situation.running)
    holders = _by_slot((name, run) for name, run in current if run is not None)
    leaving = _by_slot((name, run) for name in situation.closing for run in left_behind(records[name]))
    alive = situation.scheduler.state.free.alive
    rows = []
    for index, each in enumerate(situation.header.cluster.nodes):
        jobs, gone = (
            tuple(SHARING.join(found.get((each.name, slot), ())) or None for slot in range(each.gpus))
            for found in (holders, leaving)
        )
        rows.append(
            NodeRow(
                name=each.name, gpu_type=each.gpu_type, gpus=each.gpus, rack=each.rack, alive=alive[index],
                free=list(zip(jobs, gone, strict=True)).count((None, None)), jobs=jobs, leaving=gone,
            )
        )  # fmt: skip
    return NodeList(nodes=tuple(rows))


def left_behind(record: JobRecord) -> list[RunRecord]:
    """Runs of a job whose processes may be on GPUs that are no longer its own."""
    return [run for run in record.open_runs() if run.released is not None]


def _by_slot(runs: Iterable[tuple[str, RunRecord]]) -> dict[tuple[str, int], list[str]]:
    """Jobs by node and slot."""
    found: dict[tuple[str, int], list[str]] = {}
    for name, run in runs:
        for node, slots in run.gpus.items():
            for slot in slots:
                found.setdefault((node, slot), []).append(name)
    return found


def shares(situation: ServiceState, now: float) -> Shares:
    """All tenants that have, or had, jobs or a weight of their own."""
    running: Counter[str] = Counter()
    waiting = situation.tally.waiting
    unpaid: dict[str, float] = {}
    for name in situation.running:
        record = situation.records[name]
        tenant, run = record.job.tenant, record.current
        if run is not None:
            running[tenant] += 1
            unpaid[tenant] = unpaid.get(tenant, 0.0) + run.count * (now - run.started)
    names = sorted({*situation.books, *running, *waiting})
    promise = promise_of(situation.header.policy)
    parts = promise.parts(_claimants(situation), situation.header.cluster.gpus)
    held = situation.tally.held
    rows = []
    for name in names:
        weight, books = situation.weight_of(name), situation.books.get(name, TenantTotals())
        rows.append(
            TenantShare(
                tenant=name, weight=weight, entitled=None if parts is None else parts.get(name, 0.0),
                held=held.share(name) or 0.0, gpus=held.by_tenant[name], running=running[name], waiting=waiting[name],
                gpu_seconds=books.gpu_seconds + unpaid.get(name, 0.0), preemptions=books.preemptions,
            )
        )  # fmt: skip
    return Shares(tenants=tuple(rows), policy=situation.header.policy, promise=promise.text)


def _claimants(situation: ServiceState) -> dict[str, Claimant]:
    """All tenants that the core knows, in the order of their first submission, with their jobs that run or may."""
    counts: Counter[str] = Counter()
    weights: dict[str, float] = {}
    for record in situation.records.values():
        if record.finished is None and not record.held:
            tenant = record.job.tenant
            counts[tenant] += 1
            weights[tenant] = weights.get(tenant, 0.0) + record.job.weight
    names = dict.fromkeys((*situation.scheduler.state.columns.tenants, *counts))
    return {name: Claimant(situation.weight_of(name), counts[name], weights.get(name, 0.0)) for name in names}
